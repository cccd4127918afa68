"""How many bytes each rank of the Megatron backend will need: arithmetic alone, for models that are not here.

Every rank of a pipeline stage needs the same but for rounding, so there is one estimate for each stage. Its parts, in
bytes, for a model of b bytes to a number over T tensor, E expert and X expert-tensor ranks:

- weights: b for each number of the matrices that the rank holds a part of: attention and dense MLP over T, experts over
  E · X, the vocabulary over T (at the first stage the embedding, at the last the head), routers and norms whole;
- adapters: 4 (float32) for each number. Of a matrix split by rows (q, k, v, gate, up) A is whole and B split as the
  matrix is, of one split by columns (o, down) the reverse (trainer/megatron/slices.py);
- learning: of each of these numbers 4 for its gradient and 8 for AdamW's two moments;
- activations: what the backward pass needs of each micro-batch whose forward pass is done: with recomputation every
  layer's input, else all that `layer_memory` counts. As a forward pass is followed by a backward one
  (arXiv 2104.04473), stage s of S has at most S - s of them;
- at work: what is there besides at the fullest moment, of the widest layer (with recomputation all that one keeps,
  too) or of the head.

It assumes that every expert gets as many tokens as the others. It leaves out what depends on the batch: with router
replay 2 bytes for each choice of each token that a copy of the model computes, in all layers (`trainer.logprobs.Rows`),
and 2 for each that the routers of the stage made (`trainer.megatron.replay.Served`). `measure_memory` compares it with
what a process takes.
"""

from __future__ import annotations

from typing import NamedTuple

from async_rl.parallel_config import ParallelConfig
from async_rl.trainer_config import TrainerConfig
from trainer.megatron.layer_memory import WIDE, Ranks, Work, at_work, head, kept, micro_batch
from trainer.megatron.layout import adapted, check_layout, check_targets, stage_layers
from trainer.megatron.shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEARNING = 3  # numbers beside each of an adapter's: its gradient and two moments
CHUNK_BYTES = 64 << 20  # trainer.head has the same; that module needs torch


class Stage(NamedTuple):
    """A rank of one pipeline stage: its layers (first, and one after the last), the micro-batches that it has at once,
    and bytes of each part."""

    first: int
    end: int
    in_flight: int
    weights: int
    adapters: int
    learning: int
    activations: int
    at_work: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.learning + self.activations + self.at_work


class Estimate(NamedTuple):
    """Of a run's trainer: its stages in order; how many numbers the model and the whole adapter have."""

    stages: tuple[Stage, ...]
    parameters: int
    adapter_parameters: int

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)


def estimate(
    shape: ModelShape, trainer: TrainerConfig, dtype: str, *, longest: int = 0, replays: bool = False
) -> Estimate:
    """For [trainer] of backend "megatron" and [model] dtype; `longest`: tokens that one sequence may have, which is
    computed alone where it exceeds micro_batch_tokens; `replays`: with router replay. Raises ConfigError for a layout
    that does not divide the model, and for targets that it does not have."""
    parallel = trainer.parallel
    check_layout(shape, parallel)
    check_targets(shape, trainer)
    ranks = adapter_ranks(trainer)
    work = micro_batch(shape, parallel, ranks, max(trainer.micro_batch_tokens, longest), BYTES[dtype], replays=replays)
    outer = trainer.expert_adapters == "shared_outer"
    stages = []
    for number in range(parallel.pipeline):
        layers = stage_layers(shape.num_hidden_layers, parallel.pipeline, number)
        numbers = sum(adapter_numbers(shape, ranks, layer, parallel, shared_outer=outer) for layer in layers)
        in_flight = parallel.pipeline - number
        stages.append(
            Stage(
                first=layers.start,
                end=layers.stop,
                in_flight=in_flight,
                weights=BYTES[dtype] * weight_numbers(shape, layers, parallel),
                adapters=WIDE * numbers,
                learning=WIDE * LEARNING * numbers,
                activations=in_flight * _activations(work, layers, recompute=trainer.activation_checkpointing),
                at_work=_at_work(work, layers, recompute=trainer.activation_checkpointing),
            )
        )
    whole = sum(
        adapter_numbers(shape, ranks, layer, ParallelConfig(), shared_outer=outer)
        for layer in range(shape.num_hidden_layers)
    )
    return Estimate(tuple(stages), shape.parameters, whole)


def adapter_ranks(trainer: TrainerConfig) -> Ranks:
    """[trainer] rank for each kind of matrix that is adapted: all of them where `targets` is empty."""
    names = adapted(trainer)
    return Ranks(*(trainer.rank * (name in names) for name in Ranks._fields))


def weight_numbers(shape: ModelShape, layers: range, parallel: ParallelConfig) -> int:
    """Of the model, on one rank of the stage with these layers."""
    width, tensor = shape.hidden_size, parallel.tensor
    first, last = layers.start == 0, layers.stop == shape.num_hidden_layers
    tables = first + last - (first and last and shape.tie_word_embeddings)
    return (
        tables * -(-shape.vocab_size // tensor) * width + last * width
        + sum(_layer_numbers(shape, layer, parallel) for layer in layers)
    )  # fmt: skip


def _layer_numbers(shape: ModelShape, layer: int, parallel: ParallelConfig) -> int:
    width, tensor = shape.hidden_size, parallel.tensor
    attention = 2 * width * (shape.query_width + shape.key_width) // tensor + 2 * shape.head_dim
    if shape.has_experts(layer):
        inner = shape.moe_intermediate_size // parallel.expert_tensor
        mlp = shape.experts * width + shape.experts // parallel.expert * 3 * width * inner
    else:
        mlp = 3 * width * shape.intermediate_size // tensor
    return attention + mlp + 2 * width


def adapter_numbers(
    shape: ModelShape, ranks: Ranks, layer: int, parallel: ParallelConfig, *, shared_outer: bool
) -> int:
    """Of the adapters of one layer, on one rank. With `shared_outer` the experts of a layer have one A for gate, one
    for up, and one B for down between them."""
    width, q, k = shape.hidden_size, shape.query_width, shape.key_width
    attention = sum(
        rank * (inputs + outputs // parallel.tensor)
        for rank, inputs, outputs in (
            (ranks.q_proj, width, q), (ranks.k_proj, width, k), (ranks.v_proj, width, k), (ranks.o_proj, width, q),
        )
    )  # fmt: skip
    mlp = ranks.up + ranks.down_proj
    if not shape.has_experts(layer):
        return attention + mlp * (width + shape.intermediate_size // parallel.tensor)
    experts = shape.experts // parallel.expert
    inner = shape.moe_intermediate_size // parallel.expert_tensor
    return attention + mlp * ((1 if shared_outer else experts) * width + experts * inner)


def _activations(work: Work, layers: range, *, recompute: bool) -> int:
    """Of one micro-batch between its passes: what its layers keep, and what the stage was sent and has sent on. What it
    was sent is what its first layer keeps, unless that keeps a float32 copy instead."""
    last = layers.stop == work.shape.num_hidden_layers
    sent = work.stream * (not last)
    if recompute:
        return len(layers) * work.stream + sent
    given = work.stream * (layers.start > 0 and work.dtype != WIDE)
    return sum(kept(work, layer, first=layer == 0) for layer in layers) + given + sent


def _at_work(work: Work, layers: range, *, recompute: bool) -> int:
    moments = [at_work(work, layer) + _again(work, layer) * recompute for layer in layers]
    if layers.stop == work.shape.num_hidden_layers:
        after = head(work, CHUNK_BYTES)
        moments.append(after.kept + after.at_work)
    return max(moments)


def _again(work: Work, layer: int) -> int:
    """What a layer keeps that is computed again; its input is there already, and so is the first norm's if that needs
    no copy."""
    return kept(work, layer) - (work.stream if work.dtype == WIDE else 0)

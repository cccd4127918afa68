"""Which layouts a model can be divided by, and which targets it has: plain arithmetic on its shape, so that `--dry-run`
refuses what the ranks would refuse. It needs no torch."""

from __future__ import annotations

from async_rl.parallel_config import ParallelConfig
from async_rl.schema import ConfigError
from async_rl.trainer_config import TrainerConfig
from trainer.megatron.shape import ModelShape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = "gate_up_proj"  # what transformers keeps an expert's gate and up as; it means both


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a pipeline stage: neighbours, as many as in any other stage or one more, which the first have."""
    short, longer = divmod(layers, stages)
    first = stage * short + min(stage, longer)
    return range(first, first + short + (stage < longer))


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Rows of the embedding and the head when each tensor rank has as many; those beyond the vocabulary count for
    nothing."""
    return -(-vocabulary // tensor) * tensor


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raises ConfigError where the model cannot be divided so."""
    tensor, layers, mixture = parallel.tensor, shape.num_hidden_layers, shape.experts > 0
    experts = max(shape.experts, 1)
    dense = not all(shape.has_experts(layer) for layer in range(layers))
    wrong = {
        f"tensor = {tensor} does not divide the model's {shape.num_key_value_heads} key and value heads": (
            shape.num_key_value_heads % tensor
        ),
        f"tensor = {tensor} does not divide the MLP's {shape.intermediate_size} columns": (
            dense and shape.intermediate_size % tensor
        ),
        f"tensor = {tensor} ranks, but the model has {shape.vocab_size} tokens": (
            padded_vocabulary(shape.vocab_size, tensor) // tensor * (tensor - 1) >= shape.vocab_size
        ),
        f"pipeline = {parallel.pipeline} stages, but the model has {layers} layers": parallel.pipeline > layers,
        f"tensor = {tensor} of a mixture of experts needs sequence = true: else each tensor rank would send the same "
        "tokens to the experts": mixture and tensor > 1 and not parallel.sequence,
        f"expert = {parallel.expert} does not divide the model's {experts} experts": experts % parallel.expert,
        f"expert_tensor = {parallel.expert_tensor}, but the model has no experts": (
            not mixture and parallel.expert_tensor > 1
        ),
        f"expert_tensor = {parallel.expert_tensor} does not divide an expert's {shape.moe_intermediate_size} columns": (
            mixture and shape.moe_intermediate_size % parallel.expert_tensor
        ),
    }
    for why, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"[trainer.parallel] {why}: change it")


def check_targets(shape: ModelShape, trainer: TrainerConfig) -> None:
    """Raises ConfigError for one of [trainer] targets that matches nothing, and where a pipeline stage has none."""
    paths = {layer: _paths(shape, layer) for layer in range(shape.num_hidden_layers)}
    for name in trainer.targets:
        if not any(_matches(path, name) for each in paths.values() for path in each):
            raise ConfigError(
                f'[trainer] targets: {name!r} matches nothing that backend = "megatron" adapts in this model; that is '
                f"{', '.join((*ATTENTION, *MLP))}"
            )
    for stage in range(trainer.parallel.pipeline) if trainer.targets else ():
        layers = stage_layers(shape.num_hidden_layers, trainer.parallel.pipeline, stage)
        if not any(_matches(path, name) for layer in layers for path in paths[layer] for name in trainer.targets):
            raise ConfigError(
                f"[trainer] targets: none is in layers {layers.start} to {layers.stop - 1}, pipeline stage {stage}, "
                "where then nothing learns: adapt more, or lower [trainer.parallel] pipeline"
            )


def adapted(trainer: TrainerConfig) -> frozenset[str]:
    """The kinds of matrices, by their last names, that [trainer] targets mean: all where it is empty."""
    last = {name.rpartition(".")[2] for name in trainer.targets} or {*ATTENTION, *MLP}
    return frozenset(last | ({"gate_proj", "up_proj"} if FUSED in last else set()))


def _paths(shape: ModelShape, layer: int) -> list[str]:
    """Of what can be adapted in a layer; an expert's number is in none."""
    block = f"model.layers.{layer}"
    attention = [f"{block}.self_attn.{name}" for name in ATTENTION]
    if shape.has_experts(layer):
        return attention + [f"{block}.mlp.experts.{name}" for name in (*MLP, FUSED)]
    return attention + [f"{block}.mlp.{name}" for name in MLP]


def _matches(path: str, name: str) -> bool:
    """As trainer.targets has it, which needs torch."""
    return path == name or path.endswith(f".{name}")

"""Micro-batches through the pipeline: log-probabilities of wanted tokens, a loss of them, and gradients.

The schedule is one forward pass, one backward pass in turn: a stage works ahead by as many micro-batches as there are
stages behind it, and no more, which bounds the activations that it keeps. Shapes are known on every rank, because every
stage is given the same micro-batches; only hidden states and their gradients cross.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from trainer.head import Mixture
from trainer.logprobs import Rows
from trainer.megatron.logprobs import HeadShard, vocabulary_logprobs
from trainer.megatron.model import ShardedModel
from trainer.megatron.replay import Trace

LossOf = Callable[..., torch.Tensor | None]


class Computed(NamedTuple):
    """A micro-batch that waits for its backward pass: what the stage was given, what it made, and in the last stage the
    gradient of what it made."""

    rows: Rows
    hidden: torch.Tensor | None
    out: torch.Tensor
    gradient: torch.Tensor | None


class Scored(NamedTuple):
    """What is computed of a micro-batch: the log-probabilities of the wanted tokens of `rows`, and where there is a
    `mixture` of tokens at each of their places, its mean log-probability."""

    rows: Rows
    mixture: Mixture | None


def run(
    model: ShardedModel,
    micro_batches: Sequence[Rows],
    loss_of: LossOf,
    *,
    temperature: float,
    learns: bool,
    mixtures: Sequence[Mixture] | None = None,
    trace: Trace | None = None,
) -> None:
    """For each micro-batch (packed rows) compute the log-probabilities [n] of its wanted tokens at `temperature`, in
    float32 (or wider if the model is), and in the last stage call `loss_of(index, logprobs)` on each rank. With
    `mixtures`, one for each micro-batch, also their means Σ_j w_j log π(j) [n]: `loss_of(index, logprobs, means)`. With
    `learns` it returns a scalar, and the gradients of its sum over the micro-batches are added to `.grad` of every
    parameter that requires one, as the parts that this rank has of them; else what it returns is not looked at, and
    nothing is kept. Where tokens go in a mixture of experts is what `routes` of a micro-batch says, and a `trace` is
    told where they went.

    Called on all ranks at once, with the same micro-batches on the ranks of a data rank, and as many on every data
    rank: experts take tokens from all of them. Each takes part in every backward pass, whatever its loss is."""
    each: Sequence[Mixture | None] = [None] * len(micro_batches) if mixtures is None else mixtures
    batches = [Scored(rows, mixture) for rows, mixture in zip(micro_batches, each, strict=True)]
    if learns:
        _learn(model, batches, loss_of, temperature, trace)
        return
    with torch.no_grad():
        for index, batch in enumerate(batches):
            hidden = _exchange(model, receive_before=batch.rows)[0]
            out = model.stage(hidden, model.stage.inputs(batch.rows, trace))
            if model.stage.last:
                loss_of(index, *_logprobs(model, out, batch, temperature))
            else:
                _exchange(model, send_next=out)


def _learn(
    model: ShardedModel, batches: Sequence[Scored], loss_of: LossOf, temperature: float, trace: Trace | None
) -> None:
    stage, pipeline = model.stage, model.groups.pp
    rows = [batch.rows for batch in batches]
    count, ahead = len(rows), min(pipeline.size() - pipeline.rank() - 1, len(rows))
    waiting: deque[Computed] = deque()

    def forward(index: int, hidden: torch.Tensor | None) -> torch.Tensor:
        hidden = None if hidden is None else hidden.requires_grad_()
        out, gradient = stage(hidden, stage.inputs(rows[index], trace)), None
        if stage.last:
            out = _logprobs(model, out, batches[index], temperature)
            gradient = _gradient(loss_of, index, out)
        waiting.append(Computed(rows[index], hidden, out, gradient))
        return out

    def backward(given: torch.Tensor | None) -> torch.Tensor | None:
        _, hidden, out, gradient = waiting.popleft()
        if out.requires_grad:  # not in a first stage where nothing learns
            torch.autograd.backward(out, given if gradient is None else gradient)
        return None if hidden is None else hidden.grad

    for index in range(ahead):
        hidden, _ = _exchange(model, receive_before=rows[index])
        _exchange(model, send_next=forward(index, hidden))
    hidden, _ = _exchange(model, receive_before=rows[ahead]) if ahead < count else (None, None)
    for index in range(ahead, count):
        out = forward(index, hidden)
        _, given = _exchange(model, send_next=out, receive_after=waiting[0].rows)
        following = rows[index + 1] if index + 1 < count else None
        hidden, _ = _exchange(model, send_before=backward(given), receive_before=following)
    while waiting:
        _, given = _exchange(model, receive_after=waiting[0].rows)
        _exchange(model, send_before=backward(given))


def _gradient(loss_of: LossOf, index: int, logprobs: torch.Tensor) -> torch.Tensor:
    """Of the loss in the log-probabilities [rows, n]: zeros where it does not depend on them."""
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss = loss_of(index, *leaf)
    if loss is None or not loss.requires_grad:
        return torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return torch.zeros_like(logprobs) if gradient is None else gradient


def _logprobs(model: ShardedModel, hidden: torch.Tensor, batch: Scored, temperature: float) -> torch.Tensor:
    """[1, n], or with a mixture [2, n], the same on every tensor rank, from the last stage's hidden states."""
    tensor, (rows, mixture) = model.groups.tp, batch
    # Backwards either one sums the parts of the gradient that the ranks' rows of the head make.
    if model.parallel.sequence:
        hidden = gather_from_sequence_parallel_region(hidden, group=tensor)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor)
    weight = model.stage.head_weight
    first = tensor.rank() * len(weight)
    head = HeadShard(weight[: model.config.vocab_size - first], first, tensor, room=len(weight))
    return vocabulary_logprobs(hidden[rows.position, 0], head, rows.target, temperature, mixture)


def _exchange(
    model: ShardedModel,
    *,
    send_before: torch.Tensor | None = None,
    send_next: torch.Tensor | None = None,
    receive_before: Rows | None = None,
    receive_after: Rows | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Send to the stages before and after this one, and receive from them (what belongs to the given micro-batch), all
    at once. The ends of the pipeline send and receive nothing there: None."""
    stage, group = model.stage, model.groups.pp
    before, after = (None if end else group.rank() + step for end, step in ((stage.first, -1), (stage.last, 1)))
    operations = []
    received: list[torch.Tensor | None] = [None, None]
    for place, (other, sent, rows) in enumerate(
        ((before, send_before, receive_before), (after, send_next, receive_after))
    ):
        if other is None:
            continue
        peer = dist.get_global_rank(group, other)
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.detach().contiguous(), peer, group))
        if rows is not None:
            received[place] = _room(model, rows)
            operations.append(dist.P2POp(dist.irecv, received[place], peer, group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received[0], received[1]


def _room(model: ShardedModel, rows: Rows) -> torch.Tensor:
    """For the hidden states of a micro-batch, or their gradient."""
    ranks = model.parallel.tensor if model.parallel.sequence else 1
    settings: Any = model.stage.config
    shape = (-(-rows.ids.shape[1] // ranks), 1, settings.hidden_size)
    return torch.empty(shape, dtype=settings.params_dtype, device=model.device)

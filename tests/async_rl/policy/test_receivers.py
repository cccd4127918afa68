"""Two hundred updates through files: whoever applies them, in whichever parts, has the trainer's weights at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_updates import bits

from async_rl.policy.factors import Factors, apply_, apply_numpy, encode
from async_rl.policy.projection import ProjectionKey, projection_key
from async_rl.policy.rounding import RoundingKey, rounding_key
from async_rl.policy.update_file import (
    Storage,
    Update,
    apply_update,
    read_snapshot,
    read_update,
    weights_digest,
    write_snapshot,
    write_update,
)

UPDATES = 200
RESTARTS = (60, 140)
LATE = 150
SEED = 7
SHAPES = {"model.layers.0.self_attn.q_proj": (17, 65), "model.layers.1.mlp.experts.gate_proj": (2, 5, 31)}
Weights = dict[str, torch.Tensor]
Apply = Callable[[torch.Tensor, Factors, ProjectionKey, RoundingKey | None], None]


def whole(weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey | None) -> None:
    apply_(weight, factors, key, rounding=rounding)


def with_threads() -> Apply:
    """Two of them at every tenth call: on a busy machine they wait for one another."""
    calls = itertools.count()

    def apply(weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey | None) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if next(calls) % 10 else 2)
        try:
            whole(weight, factors, key, rounding)
        finally:
            torch.set_num_threads(threads)

    return apply


def by_numpy(weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey | None) -> None:
    patterns = bits(weight)
    changed = patterns.view(np.uint16 if rounding else np.float32)
    apply_numpy(changed, factors.q.numpy(), factors.s.numpy(), key, rounding=rounding)
    weight.copy_(torch.from_numpy(patterns).view(weight.dtype))


def by_rows(shards: int) -> Apply:
    def apply(weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey | None) -> None:
        first = 0
        matrices = zip(weight.reshape(-1, *weight.shape[-2:]), *map(flat, factors, (2, 1)), strict=True)
        for matrix, q, s in matrices:
            for part in zip(matrix.chunk(shards), q.chunk(shards), s.chunk(shards), strict=True):
                apply_(part[0], Factors(*part[1:]), key, first_row=first, rounding=rounding)
                first += len(part[0])

    return apply


def flat(tensor: torch.Tensor, kept: int) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[-kept:])


def by_columns(shards: int) -> Apply:
    def apply(weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey | None) -> None:
        start, total = 0, weight.shape[-1]
        for part in weight.chunk(shards, dim=-1):
            apply_(part, factors, key, start=start, total_columns=total, rounding=rounding)
            start += part.shape[-1]

    return apply


RECEIVERS: dict[str, Apply] = {
    "one thread and two": with_threads(),
    "numpy": by_numpy,
    "2 shards of rows": by_rows(2),
    "4 shards of rows": by_rows(4),
    "2 shards of columns": by_columns(2),
    "4 shards of columns": by_columns(4),
}


def receive(weights: Weights, update: Update, apply: Apply) -> None:
    for step in update.steps:
        for name, factors in step.factors.items():
            rounding = rounding_key(update.base_seed, step.update, name) if update.storage == "bfloat16" else None
            apply(weights[name], factors, projection_key(update.base_seed, step.drawn, name), rounding)


def clone(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_receivers_have_the_trainers_weights_bit_for_bit(storage: Storage, tmp_path: Path) -> None:
    """Besides those of RECEIVERS: one that is started again twice, from a snapshot, and one that joins late."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[storage]
    trainer = {name: (normal(shape) * 0.05).to(dtype) for name, shape in SHAPES.items()}
    start, first = clone(trainer), weights_digest(trainer)
    receivers = {name: clone(trainer) for name in RECEIVERS}
    restarted, late = clone(trainer), {}
    digest = first
    for number in range(UPDATES):
        factors = {name: encode(normal((*shape[:-1], 8)) * 1e-3) for name, shape in SHAPES.items()}
        path = tmp_path / "update"
        parent, digest = (
            digest,
            write_update(path, base_seed=SEED, update=number, parent=digest, factors=factors, storage=storage),
        )
        update = read_update(path, digest)
        assert update.parent == parent
        for weights in (trainer, restarted, late):
            if weights:
                apply_update(update, weights)
        for name, apply in RECEIVERS.items():
            receive(receivers[name], update, apply)
        if number in (*RESTARTS, LATE):
            snapshot = tmp_path / "snapshot"
            write_snapshot(snapshot, trainer, digest, update=number + 1)
            read = clone(read_snapshot(snapshot, digest).tensors)
            restarted, late = (restarted, read) if number == LATE else (read, late)
    expected = weights_digest(trainer)
    assert expected != first
    assert all((bits(trainer[name]) != bits(start[name])).mean() > 0.5 for name in SHAPES)
    assert {name: weights_digest(weights) for name, weights in receivers.items()} == dict.fromkeys(receivers, expected)
    assert weights_digest(restarted) == weights_digest(late) == expected

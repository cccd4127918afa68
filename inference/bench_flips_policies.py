"""What the benchmark of flips pushes: policies of the sort and the size that the config's trainer makes.

They change the model so little that its answers stay answers. What a push costs depends on their bytes, not on what is
in them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from async_rl.config import Config
from async_rl.policy.adapter import TENSOR_PREFIX, write_adapter
from async_rl.policy.factors import encode
from async_rl.policy.update_file import Storage, weights_digest, write_base, write_snapshot, write_update
from async_rl.trainer_config import publishes_factors
from async_rl.version import PolicyId
from async_rl.wire.messages import FACTORS, Upload
from inference.adapter_match import A_SUFFIX, B_SUFFIX
from inference.model_loading import load_model
from inference.model_weights import ModelWeights, model_weights
from inference.served_policies import linear_shapes

SMALL = 1e-6  # what a weight is changed by, at most about this
HEAD = "lm_head"
NAME = "main"


class NextPolicy(NamedTuple):
    """A policy that the trainer has just made: `write` writes its file and returns its digest, which is where the clock
    of a push begins."""

    write: Callable[[Path], str]
    upload: Callable[[str, int], Upload]
    """Of its digest and its file's size; the SHA-256 is not yet in it."""


class AdapterMaker:
    """LoRA of [trainer] rank on every linear module but the head."""

    def __init__(self, model: Path, rank: int, alpha: float) -> None:
        shapes = {name: shape for name, shape in linear_shapes(model).items() if not name.endswith(HEAD)}
        targets = sorted({name.rpartition(".")[2] for name in shapes})
        self._config: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": targets}
        self._shapes, self._rank = shapes, rank

    def make(self, version: int) -> NextPolicy:
        generator = torch.Generator().manual_seed(version)
        tensors = {}
        for name, (out_features, in_features) in self._shapes.items():
            for suffix, shape in ((A_SUFFIX, (self._rank, in_features)), (B_SUFFIX, (out_features, self._rank))):
                tensors[f"{TENSOR_PREFIX}{name}{suffix}"] = torch.randn(shape, generator=generator) * SMALL**0.5
        return NextPolicy(
            lambda path: write_adapter(path, tensors, self._config),
            lambda digest, size: Upload(PolicyId(NAME, version, digest), "lora", size, ""),
        )


class WeightsMaker:
    """The base, and then factor updates of [trainer] rank of every projection but the head, or all of the weights."""

    def __init__(self, model: Path, storage: Storage, rank: int, *, factors: bool) -> None:
        self._weights: ModelWeights = model_weights(load_model(model, torch.device("cpu"), storage))
        self._storage, self._rank, self._factors = storage, rank, factors
        self._digest = ""

    def make(self, version: int) -> NextPolicy:
        if not version:
            digest = weights_digest(self._weights.parameters)
            return self._next(version, "base", lambda path: write_base(path, digest))
        generator = torch.Generator().manual_seed(version)
        if not self._factors:
            for tensor in self._weights.parameters.values():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * SMALL)
            tensors = self._weights.parameters
            return self._next(version, "snapshot", lambda path: write_snapshot(path, tensors, None, version))
        factors = {
            name: encode(torch.randn(*weight.shape[:-1], self._rank, generator=generator) * SMALL)
            for name, weight in self._weights.projections.items()
            if not name.endswith(HEAD)
        }
        parent = self._digest
        return self._next(
            version, FACTORS,
            lambda path: write_update(
                path, base_seed=0, update=version, parent=parent, factors=factors, storage=self._storage
            ),
        )  # fmt: skip

    def _next(self, version: int, kind: str, write: Callable[[Path], str]) -> NextPolicy:
        parent = PolicyId(NAME, version - 1, self._digest) if kind == FACTORS else None

        def written(path: Path) -> str:
            self._digest = write(path)
            return self._digest

        return NextPolicy(written, lambda digest, size: Upload(PolicyId(NAME, version, digest), kind, size, "", parent))


def policy_maker(config: Config, model: Path) -> AdapterMaker | WeightsMaker:
    """Of [trainer] kind."""
    trainer = config.trainer
    if trainer.kind == "lora":
        return AdapterMaker(model, trainer.rank, trainer.alpha)
    storage: Storage = "bfloat16" if config.model.dtype == "bfloat16" else "float32"
    return WeightsMaker(model, storage, trainer.rank, factors=publishes_factors(trainer))

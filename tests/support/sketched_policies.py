"""A trainer's side of policies that change the weights in place: random updates of a model, each as the file that a
node gets, and what all weights are afterwards, applied in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from async_rl.policy.factors import apply_numpy, encode
from async_rl.policy.projection import projection_key
from async_rl.policy.rounding import rounding_key
from async_rl.policy.update_file import STORAGE, Storage, weights_digest, write_base, write_snapshot, write_update
from async_rl.version import PolicyId
from async_rl.wire.messages import BASE, FACTORS, SNAPSHOT

RANK, SEED = 4, 17


class File(NamedTuple):
    """As it is uploaded."""

    policy: PolicyId
    kind: str
    path: Path
    parent: PolicyId | None = None


class SketchedPolicies:
    """`main` has each version's file; `weights` all parameters of the last version, as the checkpoint names them:
    float32, or the bit patterns of bfloat16 as uint16."""

    def __init__(self, model: Path, folder: Path, storage: Storage = "float32", size: float = 0.02) -> None:
        self._folder, self._storage, self._size = folder, storage, size
        self._rng = torch.Generator().manual_seed(3)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=STORAGE[storage])
        parameters = {name: parameter.detach() for name, parameter in loaded.named_parameters()}
        self.weights = {name: self._bits(parameter).copy() for name, parameter in parameters.items()}
        self.targets = self._projections()
        path = folder / "base.safetensors"
        digest = write_base(path, weights_digest(parameters))
        self.main = [File(PolicyId("main", 0, digest), BASE, path)]
        self.version = 0

    def _bits(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy().view(np.uint16)

    def _projections(self) -> dict[str, np.ndarray]:
        """By projection name, as views of `weights`; those of fused experts are blocks of rows."""
        views = {}
        for name, weight in self.weights.items():
            if weight.ndim == 3 and name.endswith("gate_up_proj"):
                half = weight.shape[1] // 2
                stem = name.removesuffix("gate_up_proj")
                views |= {f"{stem}gate_proj": weight[:, :half], f"{stem}up_proj": weight[:, half:]}
            elif weight.ndim == 3:
                views[name] = weight
            elif name.endswith("_proj.weight"):
                views[name.removesuffix(".weight")] = weight
        return views

    def step(self, *, dense: bool = False, still: bool = False) -> File:
        """One more version: every projection moves (or nothing does, `still`), and with `dense` a norm as well."""
        parent, self.version = self.main[-1].policy, self.version + 1
        changes = {} if still else {name: self._change(weight) for name, weight in self.targets.items()}
        norm = next(name for name in self.weights if name.endswith("input_layernorm.weight"))
        sent = (
            {norm: torch.rand(self.weights[norm].shape, generator=self._rng).to(STORAGE[self._storage])}
            if dense
            else {}
        )
        path = self._folder / f"update-{self.version}-{parent.digest[:8]}.safetensors"
        digest = write_update(
            path, base_seed=SEED, update=self.version, parent=parent.digest, factors=changes, dense=sent,
            storage=self._storage,
        )  # fmt: skip
        for name, factors in changes.items():
            rounding = rounding_key(SEED, self.version, name) if self._storage == "bfloat16" else None
            key = projection_key(SEED, self.version, name)
            apply_numpy(self.targets[name], factors.q.numpy(), factors.s.numpy(), key, rounding=rounding)
        for name, tensor in sent.items():
            self.weights[name][:] = self._bits(tensor)
        self.main.append(File(PolicyId("main", self.version, digest), FACTORS, path, parent))
        return self.main[-1]

    def snapshot(self) -> File:
        """All weights as they are now, beside the last version."""
        _, version, digest = self.main[-1].policy.name, self.main[-1].policy.version, self.main[-1].policy.digest
        path = self._folder / f"snapshot-{version}-{digest[:8]}.safetensors"
        write_snapshot(path, self.tensors(), digest, version)
        return File(PolicyId(SNAPSHOT, version, digest), SNAPSHOT, path)

    def back(self, version: int, weights: dict[str, np.ndarray]) -> None:
        """Begin again at an earlier version, whose weights were these."""
        del self.main[version + 1 :]
        self.version = version
        for name, weight in weights.items():
            self.weights[name][:] = weight

    def copy(self) -> dict[str, np.ndarray]:
        return {name: weight.copy() for name, weight in self.weights.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """`weights` as torch has them."""
        return {
            name: torch.from_numpy(weight.copy() if weight.dtype == np.float32 else weight.view(np.int16).copy()).view(
                STORAGE[self._storage]
            )
            for name, weight in self.weights.items()
        }

    def _change(self, weight: np.ndarray) -> object:
        return encode(torch.randn((*weight.shape[:-1], RANK), generator=self._rng) * self._size)

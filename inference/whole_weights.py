"""Policies that are weights of the whole model: one copy on the engine, changed in place (trainer.kind sketch, full).

    read      reads the files of a way to a policy, and checks that each is whole; in whichever thread
    install   checks all of it against the model, and changes nothing
    flip      between two steps: what was checked is applied, and the policy that served is gone

The weights are kept in the trainer's own dtype, so that every update gives its bits. Where the engine computes in that
dtype its weights are these; else they lie in host memory, and the engine has them cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.factors import Factors
from async_rl.policy.update_file import (
    STORAGE,
    Base,
    Snapshot,
    Storage,
    Update,
    apply_update,
    read_base,
    read_kind,
    read_snapshot,
    read_update,
    weights_digest,
)
from async_rl.version import PolicyId
from inference.engine import BaseMoved, EngineError, InFlight, PolicyContent
from inference.model_loading import load_model
from inference.model_weights import ModelWeights, model_weights

READERS = {"base": read_base, "snapshot": read_snapshot, "factors": read_update}
ONLY_SLOT = 0


class WeightHolder(Protocol):
    """Whose weights these are: `model` computes in `dtype` with them, or is the master of those that do."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def changed(self) -> None:
        """The weights are another policy's now."""


@dataclass(frozen=True)
class Way(PolicyContent):
    """The files that lead to a policy, in order; tensors of snapshots are views of the mapped file."""

    files: Sequence[Base | Snapshot | Update]


class Staged(NamedTuple):
    """What `flip` will do: copy all of `start`, or be at the weights of that digest, then apply the updates."""

    start: Mapping[str, torch.Tensor] | str
    updates: tuple[Update, ...]


class WholeWeights:
    """The weights of `holder`'s model, loaded from `path`, which the trainer keeps in `storage`. Implements
    inference.policy_weights.PolicyWeights."""

    in_flight: frozenset[InFlight] = frozenset({"continue", "recompute"})
    in_place = True

    def __init__(self, holder: WeightHolder, path: Path, storage: Storage) -> None:
        self._holder, self._path, self._storage = holder, path, storage
        self._engines = model_weights(holder.model)
        self._kept = self._engines if holder.dtype == STORAGE[storage] else self._load()
        self._base_digest = ""
        self._digest = ""  # of what the weights are; empty while they are the checkpoint's
        self._serving: PolicyId | None = None
        self._staged: dict[PolicyId, Staged] = {}
        self._broken = ""

    def read(self, policy: PolicyId, path: Path) -> Way:
        """See Engine.read."""
        try:
            files = read_files(path)
        except AsyncRLError as error:
            raise EngineError(f"policy {policy.short()}: {error}") from error
        if not files or files[-1].digest != policy.digest:
            leads = files[-1].digest[:8] if files else "nothing"
            raise EngineError(f"policy {policy.short()}: its files lead to {leads}, not to it")
        return Way(files)

    def install(self, policy: PolicyId, content: PolicyContent) -> tuple[str, ...]:
        """See Engine.install; the names are those of all parameters."""
        assert isinstance(content, Way)
        staged = self._beginning(policy, content.files)
        self._check_updates(policy, staged.updates)
        self._staged[policy] = staged
        return self._engines.names

    def slot(self, policy: PolicyId) -> int:
        """Of a policy with which the model may compute. Raises EngineError for any but the serving one."""
        if self._broken:
            raise EngineError(self._broken)
        if policy != self._serving:
            serving = self._serving.short() if self._serving else "none"
            raise EngineError(f"policy {policy.short()} is not what the weights are now ({serving}): flip to it first")
        return ONLY_SLOT

    @torch.no_grad()
    def flip(self, policy: PolicyId) -> None:
        """Make the weights those of an installed policy. Raises EngineError, and changes nothing, when its updates
        begin where the engine is not any more; when anything else raises, the engine computes nothing any more."""
        if policy == self._serving:
            return
        staged = self._staged[policy]
        if isinstance(staged.start, str) and staged.start != self._at:
            raise BaseMoved(
                f"policy {policy.short()}: it was checked against weights {staged.start[:8]}, and by now they are "
                f"{self._at[:8]}: evict it, and install it again by a way from there"
            )
        del self._staged[policy]
        self._broken = f"policy {policy.short()} was applied in part: the weights are no policy's; start the node again"
        if not isinstance(staged.start, str):
            _copy(staged.start, self._kept.parameters)
        for update in staged.updates:
            apply_update(on_device(update, self._device), self._names(update))
        if self._kept is not self._engines:  # [inference] dtype is another than [model] dtype
            _copy(self._kept.parameters, self._engines.parameters)
        self._holder.changed()
        self._digest, self._serving, self._broken = policy.digest, policy, ""

    @property
    def broken(self) -> str:
        """Why nothing can be computed any more; empty while something can."""
        return self._broken

    def evict(self, policy: PolicyId) -> None:
        self._staged.pop(policy, None)

    # --- before the flip ---------------------------------------------------------------------------------------------

    def _beginning(self, policy: PolicyId, files: Sequence[Base | Snapshot | Update]) -> Staged:
        """All weights with which the last part of the files begins, if any, and the updates from there on, or from
        where the engine is by now."""
        alone = max((i for i, file in enumerate(files) if not isinstance(file, Update)), default=None)
        updates = tuple(file for file in files if isinstance(file, Update))
        start: Mapping[str, torch.Tensor] | str
        if alone is not None:
            first = files[alone]
            start = self._base(policy, first) if isinstance(first, Base) else self._whole(policy, first)
            at, updates = first.digest, tuple(file for file in files[alone + 1 :] if isinstance(file, Update))
        else:
            start = at = self._at
            updates = updates[_applied(updates, at) :]
        for update in updates:
            if update.parent != at:
                moved = at == start  # else the files do not fit together
                raise (BaseMoved if moved else EngineError)(
                    f"policy {policy.short()}: an update changes {update.parent[:8]}, and what it would be applied to "
                    f"is {at[:8] or 'the checkpoint'}"
                )
            at = update.digest
        if at != policy.digest:
            raise EngineError(f"policy {policy.short()}: its updates lead to {at[:8]}")
        return Staged(start, updates)

    @property
    def _device(self) -> torch.device:
        """Where weights are changed: the host's memory where the engine on a GPU computes in another dtype."""
        return next(iter(self._kept.parameters.values())).device

    @property
    def _at(self) -> str:
        """The digest of what the weights are; empty while nobody has taken that of the checkpoint's."""
        return self._digest or self._base_digest

    def _base(self, policy: PolicyId, base: Base) -> Mapping[str, torch.Tensor] | str:
        """Its digest, while the weights are still the checkpoint's."""
        own = self._kept.parameters if not self._digest else self._load().parameters
        if not self._base_digest:
            self._base_digest = weights_digest(own)
        if base.digest != self._base_digest:
            raise EngineError(
                f"policy {policy.short()}: the trainer began with weights {base.digest}, and those of the model at "
                f"{self._path} are {self._base_digest}: give this node the trainer's checkpoint"
            )
        return own if self._digest else base.digest

    def _whole(self, policy: PolicyId, snapshot: object) -> Mapping[str, torch.Tensor]:
        assert isinstance(snapshot, Snapshot)
        own = self._kept.parameters
        if other := sorted(own.keys() ^ snapshot.tensors.keys()):
            where = "the snapshot" if other[0] in own else "the model"
            raise EngineError(f"policy {policy.short()}: {where} has no parameter {other[0]} ({len(other)} differ)")
        for name, tensor in snapshot.tensors.items():
            _check(policy, name, tensor, own[name])
        return snapshot.tensors

    def _check_updates(self, policy: PolicyId, updates: Sequence[Update]) -> None:
        for update in updates:
            if update.storage != self._storage:
                raise EngineError(
                    f"policy {policy.short()}: the trainer keeps weights in {update.storage}, this node in "
                    f"{self._storage}: give both the same [model] dtype"
                )
            for step in update.steps:
                for name, factors in step.factors.items():
                    weight = self._kept.projections.get(name)
                    if weight is None or factors.q.shape[:-1] != weight.shape[:-1]:
                        has = "no such projection" if weight is None else f"a weight {tuple(weight.shape)}"
                        raise EngineError(
                            f"policy {policy.short()}: factors {tuple(factors.q.shape)} of {name}, of which the model "
                            f"has {has}"
                        )
            for name, tensor in update.dense.items():
                if name not in self._kept.parameters:
                    raise EngineError(f"policy {policy.short()}: the model has no parameter {name}")
                _check(policy, name, tensor, self._kept.parameters[name])

    def _names(self, update: Update) -> dict[str, torch.Tensor]:
        kept = self._kept
        names = {name for step in update.steps for name in step.factors}
        return {name: kept.projections[name] for name in names} | {n: kept.parameters[n] for n in update.dense}

    def _load(self) -> ModelWeights:
        """The checkpoint's, in host memory."""
        return model_weights(load_model(self._path, torch.device("cpu"), self._storage))


def read_files(path: Path) -> list[Base | Snapshot | Update]:
    """The files of a way to a policy, in order: one, or a folder of them. Raises PolicyFileError."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [READERS[read_kind(file)](file) for file in files]


def on_device(update: Update, device: torch.device) -> Update:
    """Its factors where the weights are; parameters that are sent whole are copied there in any case."""

    def moved(factors: Mapping[str, Factors]) -> dict[str, Factors]:
        return {name: Factors(each.q.to(device), each.s.to(device)) for name, each in factors.items()}

    before = tuple(step._replace(factors=moved(step.factors)) for step in update.before)
    return update._replace(factors=moved(update.factors), before=before)


def _applied(updates: Sequence[Update], digest: str) -> int:
    """How many of these have been applied, if that has led to `digest`."""
    done = [number + 1 for number, update in enumerate(updates) if update.digest == digest]
    return done[-1] if done else 0


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _check(policy: PolicyId, name: str, tensor: torch.Tensor, own: torch.Tensor) -> None:
    if tensor.shape != own.shape or tensor.dtype != own.dtype:
        raise EngineError(
            f"policy {policy.short()}: parameter {name} is {tensor.dtype} {tuple(tensor.shape)}, the model's is "
            f"{own.dtype} {tuple(own.shape)}"
        )

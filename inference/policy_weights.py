"""How policies get onto the embedded engine: the contract of the two kinds there are."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from async_rl.policy.update_file import Storage
from async_rl.version import PolicyId
from inference.adapter_slots import AdapterSlots
from inference.engine import InFlight, PolicyContent
from inference.resident import ResidentPolicies
from inference.runner import ModelRunner
from inference.whole_weights import WholeWeights


class PolicyWeights(Protocol):
    """How one kind of policy gets onto the embedded engine; `in_place`: a flip changes what served until then."""

    @property
    def in_flight(self) -> frozenset[InFlight]: ...

    @property
    def in_place(self) -> bool: ...

    def read(self, policy: PolicyId, path: Path) -> PolicyContent:
        """See Engine.read: any thread may call it."""

    def install(self, policy: PolicyId, content: PolicyContent) -> tuple[str, ...]:
        """See Engine.install, of a policy that is not resident while a slot is free; the sorted names of what it
        matched."""

    def slot(self, policy: PolicyId) -> int:
        """The runner's slot with the weights of a resident policy. Raises EngineError where none has them."""

    def flip(self, policy: PolicyId) -> None:
        """An installed policy is to serve."""

    def evict(self, policy: PolicyId) -> None:
        """A policy is no longer resident."""


def policy_weights(
    runner: ModelRunner, resident: ResidentPolicies, path: Path, storage: Storage | None
) -> PolicyWeights:
    """Adapters, or with `storage` weights of the whole model, which is loaded from `path`."""
    return AdapterSlots(runner, resident) if storage is None else WholeWeights(runner, path, storage)

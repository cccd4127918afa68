"""Policies that are adapters: each in a slot of its own, side by side on the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from async_rl.policy.adapter import AdapterError, read_adapter
from async_rl.version import PolicyId
from inference.adapter_match import match_adapter, matched_modules
from inference.engine import EngineError, InFlight, PolicyContent
from inference.resident import ResidentPolicies
from inference.runner import ModelRunner


@dataclass(frozen=True)
class Adapter(PolicyContent):
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def read_content(policy: PolicyId, path: Path) -> Adapter:
    """See inference.engine.Engine.read. Raises EngineError."""
    try:
        return Adapter(*read_adapter(path, expected_digest=policy.digest))
    except AdapterError as error:
        raise EngineError(f"policy {policy.short()}: {error}") from error


class AdapterSlots:
    """Implements inference.policy_weights.PolicyWeights."""

    in_flight: frozenset[InFlight] = frozenset(get_args(InFlight))
    in_place = False

    def __init__(self, runner: ModelRunner, resident: ResidentPolicies) -> None:
        self._runner, self._resident = runner, resident

    def read(self, policy: PolicyId, path: Path) -> Adapter:
        return read_content(policy, path)

    def install(self, policy: PolicyId, content: PolicyContent) -> tuple[str, ...]:
        assert isinstance(content, Adapter)
        shapes = {name: (m.out_features, m.in_features) for name, m in self._runner.linears.items()}
        experts = [each.target for each in self._runner.experts.values()]
        adapters = match_adapter(content.tensors, content.config, shapes, experts)
        self._runner.load(self._resident.free_slot(), adapters)
        return matched_modules(content.tensors, adapters, experts)

    def slot(self, policy: PolicyId) -> int:
        return self._resident.slot(policy)

    def flip(self, policy: PolicyId) -> None:
        """Nothing to do: every slot computes at any time."""

    def evict(self, policy: PolicyId) -> None:
        """Nothing to do: the slot is written over."""

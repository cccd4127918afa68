"""An inference node whose engine gets another adapter than the node was sent: started instead of inference.node.

    WRONG_ADAPTER="fault from_version" python wrong_adapter_node.py --config … --dir … --name …

Everything else is the real node. The damage is done where it is hardest to see: for most faults behind the engine's
own check of the digest, so that it reports what it was told to load.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inference.adapter_slots as adapter_slots
from async_rl.policy.adapter import read_adapter, write_adapter
from async_rl.proof import CANARY
from async_rl.run.process import pool_main
from async_rl.version import PolicyId
from inference.engine import PolicyContent
from inference.node import body
from inference.slot_linear import LowRank
from inference.torch_engine import TorchEngine

Adapters = dict[str, LowRank]

FAULT, FROM = os.environ["WRONG_ADAPTER"].split()
kept: list[Adapters] = []  # the first adapter after the canary


def wrong(adapters: Adapters) -> Adapters:
    """Another version's tensors."""
    return kept[0]


def empty(adapters: Adapters) -> Adapters:
    """The base model, under a report that all is matched."""
    return {name: LowRank(each.a, each.b * 0, each.scale) for name, each in adapters.items()}


def partial(adapters: Adapters) -> Adapters:
    """Every second module."""
    return dict(list(adapters.items())[::2])


def scaled(adapters: Adapters) -> Adapters:
    """alpha / r forgotten."""
    return {name: LowRank(each.a, each.b, 1.0) for name, each in adapters.items()}


BEHIND_THE_DIGEST: dict[str, Callable[[Adapters], Adapters]] = {
    "wrong": wrong, "empty": empty, "partial": partial, "scaled": scaled
}  # fmt: skip

match_adapter = adapter_slots.match_adapter
read, install = TorchEngine.read, TorchEngine.install
is_due = False


def is_meant(policy: PolicyId) -> bool:
    is_canary = policy.name == CANARY
    return is_canary if FROM == "canary" else not is_canary and policy.version >= int(FROM)


def read_wrongly(engine: TorchEngine, policy: PolicyId, path: Path) -> PolicyContent:
    if is_meant(policy) and FAULT == "misnamed":
        tensors, config = read_adapter(path)
        write_adapter(path, {name.replace(".layers.", ".layer."): each for name, each in tensors.items()}, config)
    return read(engine, policy, path)


def install_wrongly(engine: TorchEngine, policy: PolicyId, files: Path | PolicyContent) -> Any:
    global is_due
    is_due = is_meant(policy)
    return install(engine, policy, files)


def match_wrongly(*arguments: Any) -> Adapters:
    adapters = match_adapter(*arguments)
    kept.append(adapters)
    return BEHIND_THE_DIGEST[FAULT](adapters) if is_due and FAULT in BEHIND_THE_DIGEST else adapters


if __name__ == "__main__":
    adapter_slots.match_adapter = match_wrongly
    TorchEngine.read, TorchEngine.install = read_wrongly, install_wrongly  # type: ignore[method-assign]
    pool_main(__file__, body)

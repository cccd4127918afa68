"""How far each node's log-probabilities were from the trainer's on the same tokens, as a run recorded it.

Every node shows this before its first token: under the canary, an adapter of noise, and under the first policy that it
serves, which in a new run is the base model exactly: version 0 is a fresh adapter, or the checkpoint's own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from async_rl.run.metrics import Record


def parity_of(records: Iterable[Record]) -> dict[str, dict[str, Any]] | None:
    """By node, those that are gone included: its engine, the `bound`, and the largest difference under its `canary`,
    under the `first` policy (of version `first_version`), and under the `last` one; all in nats. What was not measured
    is None, as is all of it where nothing was."""
    found = {
        node["name"]: {
            "engine": node.get("engine"),
            "bound": node.get("bound"),
            "canary": node.get("canary"),
            "first": node.get("first"),
            "first_version": node.get("first_version"),
            "last": node.get("max_dlogp"),
        }
        for record in records
        for node in record.get("pools", {}).get("nodes", ())
        if node.get("max_dlogp") is not None
    }
    return found or None


def parity_text(parity: Mapping[str, Mapping[str, Any]] | None) -> str | None:
    """The worst of each engine's nodes, in one line; None where nothing was measured."""
    if not parity:
        return None
    parts = []
    for engine in sorted({str(each["engine"]) for each in parity.values()}):
        nodes = [each for each in parity.values() if str(each["engine"]) == engine]
        versions = sorted({each["first_version"] for each in nodes if each["first_version"] is not None})
        first = "base" if versions == [0] else "first policy"
        worst = [
            f"{label} {max(values):.1e}"
            for key, label in (("canary", "canary"), ("first", first), ("last", "last"))
            if (values := [each[key] for each in nodes if each[key] is not None])
        ]
        bounds = [each["bound"] for each in nodes if each["bound"] is not None]
        within = f" (bound {max(bounds):g})" if bounds else ""
        parts.append(f"{engine} {', '.join(worst)}{within}")
    return "; ".join(parts)

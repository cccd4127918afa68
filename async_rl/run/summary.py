"""`summary.json`: what a finished run comes down to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_rl.config import Config
from async_rl.run.lengths import added, length_bias, waste
from async_rl.run.metrics import Record, eval_numbers, eval_sets_of, steps_of
from async_rl.run.parity import parity_of
from async_rl.wire.messages import NodeStatus, Status

REWARD_STEPS = 15  # one step's reward is noisy; this many at each end make a stable comparison

# Every attempt is in exactly one of these; `issued` is their sum (design: ledger).
OPEN_STATES = ("leased", "ready", "batched", "trained")


def build_summary(
    metrics: Iterable[Record],
    status: Status | None,
    config: Config,
    wall_seconds: float,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of summary.json from a run's records, the buffer's final status and the run's duration.

    Rates are over wall-clock time, so that both pools compare: the trainer's over the whole run, rollout's from the
    first look at the pools to the last (nodes count anew when they join again). `idle_fraction.trainer` is the share of
    its steps that the trainer waited for a batch, `idle_fraction.inference` the nodes' mean share of time without work,
    weighted by slots. `extra` adds keys (`push_bytes` among them) or replaces them. What was never measured is None,
    as is all that only the buffer knows when there is no status.
    """
    records = list(metrics)
    steps = steps_of(records)
    sets = eval_sets_of(records)
    evals = next(iter(sets.values()), [])
    rewards = [float(step["reward"]) for step in steps if step["reward"] is not None]
    ledger = nested_ledger(status.ledger) if status else None
    nodes = status.nodes if status else ()
    pushes = status.push_ms if status else ()
    summary: dict[str, Any] = {
        "name": config.run.name,
        "seed": config.run.seed,
        "steps": len(steps),
        "reward": {"first": _mean(rewards[:REWARD_STEPS]), "last": _mean(rewards[-REWARD_STEPS:])},
        "eval": {
            "first": evals[0]["reward"] if evals else None,
            "last": evals[-1]["reward"] if evals else None,
            "last_version": evals[-1]["version"] if evals else None,
            "samples": evals[-1]["n"] if evals else None,
            "sets": {name: _set_summary(items) for name, items in sets.items()},
        },
        "best": None,
        "staleness": {
            "max": max((int(step["staleness_max"]) for step in steps), default=0),
            "mean": _weighted_mean(steps, "staleness_mean", "tokens"),
            "bound": config.buffer.max_staleness,
        },
        "ledger": ledger,
        "ledger_balances": ledger_balances(ledger) if ledger else None,
        **_what_stale_data_cost(steps, status),
        "reused": dict(status.reused) if status else None,
        "handovers": dict(status.handovers) if status else None,
        "eval_ledger": dict(status.eval_ledger) if status else None,
        "outside": dict(status.outside) if status else None,
        "tokens_per_second": {
            "rollout": _rollout_rate(records),
            "train": _ratio(sum(float(step.get("tokens") or 0) for step in steps), wall_seconds),
        },
        "idle_fraction": {"inference": _inference_idle(nodes), "trainer": _trainer_idle(steps)},
        "push_ms": {"p50": percentile(pushes, 50), "p99": percentile(pushes, 99)},
        "parity": parity_of(records),
        "push_bytes": None,
        "push_bytes_full": None,
        "push_bytes_adapter": None,
        "nodes": len(nodes),
        "wall_seconds": round(wall_seconds, 3),
    }
    summary.update(extra or {})
    return summary


def _set_summary(evals: Sequence[Record]) -> Record:
    """Of one set: its first mean, and all that is known of the last."""
    last = evals[-1]
    return {"first": evals[0]["reward"], "last": last["reward"], "last_version": last["version"], **eval_numbers(last)}


def _what_stale_data_cost(steps: Sequence[Record], status: Status | None) -> dict[str, Any]:
    """`waste` of the tokens that arrived, and `length_bias`: None where a buffer, which counts what arrives since it
    was started last, or a trainer has seen nothing."""
    sampled = status.sampled_lengths if status else {}
    trained = added({int(length): count for length, count in step.get("trained_lengths", {}).items()} for step in steps)
    return {"waste": waste(sampled, trained), "length_bias": length_bias(sampled, trained)}


def nested_ledger(flat: Mapping[str, int]) -> dict[str, Any]:
    """The buffer's flat ledger with its reasons for dropping (`dropped.stale` or `stale`) under "dropped"."""
    states = ("issued", *OPEN_STATES)
    dropped = {key.removeprefix("dropped."): count for key, count in flat.items() if key not in states}
    return {**{key: int(flat.get(key, 0)) for key in states}, "dropped": dropped}


def ledger_balances(ledger: Mapping[str, Any]) -> bool:
    """issued = leased + ready + batched + trained + dropped[…], over the nested form."""
    held = sum(int(ledger[key]) for key in OPEN_STATES)
    return int(ledger["issued"]) == held + sum(int(count) for count in ledger["dropped"].values())


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By nearest rank; None of nothing."""
    if not values:
        return None
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return float(sorted(values)[rank - 1])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(amount: float, over: float) -> float:
    return amount / over if over > 0 else 0.0


def _rollout_rate(records: Sequence[Record]) -> float | None:
    """Tokens a second that all nodes sampled, those that are gone included; None before there were two looks."""
    looks = [record for record in records if "pools" in record]
    tokens, seen = 0, dict[str, int]()
    for index, look in enumerate(looks):
        for node in look["pools"]["nodes"]:
            now = int(node["sampled_tokens"])
            before = seen.get(node["name"], 0)
            if index:
                tokens += now - before if now >= before else now
            seen[node["name"]] = now
    return _ratio(tokens, looks[-1]["time_s"] - looks[0]["time_s"]) if len(looks) > 1 else None


def _weighted_mean(steps: Sequence[Record], key: str, weight: str) -> float:
    pairs = [(float(step[key]), float(step.get(weight) or 1)) for step in steps if step.get(key) is not None]
    return _ratio(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))


def _inference_idle(nodes: Sequence[NodeStatus]) -> float | None:
    slots = sum(node.slots for node in nodes)
    if not slots:
        return None
    return 1.0 - sum(node.busy_fraction * node.slots for node in nodes) / slots


def _trainer_idle(steps: Sequence[Record]) -> float | None:
    total = sum(float(step.get("step_s") or 0) for step in steps)
    if total <= 0:
        return None
    return min(1.0, sum(float(step.get("draw_wait_s") or 0) for step in steps) / total)

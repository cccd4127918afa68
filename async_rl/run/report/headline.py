"""A run at a glance: its key figures, and the one sentence about what limited it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from async_rl.eval_stats import Interval, wilson
from async_rl.run.metrics import Record, set_of
from async_rl.run.report.run_data import RunData

CLEARLY = 0.1  # shares of idle time that differ by less are called equal
BUSY = 0.15  # a pool that is idle for less is busy all the time, for a person
NONE = "–"


class Tile(NamedTuple):
    """One key figure. `mark` colours it: a pool's name, or "bad" for what must not be."""

    label: str
    value: str
    note: str = ""
    mark: str = ""


def are_rates(run: RunData) -> bool:
    """Whether every reward that is known is in [0, 1], so that an interval of a rate fits."""
    known = [record.get("reward") for record in (*run.steps, *run.evals, *run.samples)]
    return all(0 <= float(value) <= 1 for value in known if value is not None)


def eval_interval(item: Record, rates: bool) -> Interval | None:
    """As it was recorded; of runs from before it was, that of a rate."""
    if found := item.get("interval"):
        return Interval(*found)
    n = int(item.get("n") or 0)
    return wilson(float(item["reward"]), n) if rates and n else None


def tiles(run: RunData) -> list[Tile]:
    summary = run.summary
    rates, idle, push = (summary.get(key) or {} for key in ("tokens_per_second", "idle_fraction", "push_ms"))
    return [
        _reward_tile(run),
        _eval_tile(run),
        _staleness_tile(run),
        _ledger_tile(summary),
        Tile("Inference", _per_second(rates.get("rollout")), _idle(idle.get("inference")), "inference"),
        Tile("Trainer", _per_second(rates.get("train")), _idle(idle.get("trainer")), "trainer"),
        Tile("Push, trainer to node", f"p50 {_ms(push.get('p50'))}", f"p99 {_ms(push.get('p99'))}"),
        _ess_tile(run),
        _parity_tile(summary),
        _waste_tile(summary),
    ]


class Limit(NamedTuple):
    """What limited a run: a verdict, the figures behind it, and the slower pool when one was."""

    verdict: str
    figures: str
    pool: str = ""


def what_limited(run: RunData) -> Limit:
    """Which pool the other waited for, and what would make the run shorter."""
    idle = run.summary.get("idle_fraction") or {}
    inference, trainer = idle.get("inference"), idle.get("trainer")
    if not run.steps:
        return Limit("Nothing was trained yet", "so nothing can be said of what limits the run.")
    if inference is None or trainer is None:
        waited = NONE if trainer is None else f"{trainer:.0%}"
        return Limit("What inference did was not recorded", f"the trainer waited for batches {waited} of the time.")
    both = f"inference was idle {inference:.0%} of the time, the trainer waited for batches {trainer:.0%} of it."
    if inference - trainer > CLEARLY:
        advice = "A faster trainer shortens the run; more inference does not."
        return Limit("The trainer was the slower pool", f"{both} {advice}", "trainer")
    if trainer - inference > CLEARLY:
        advice = "More inference shortens the run; a faster trainer does not."
        return Limit("Inference was the slower pool", f"{both} {advice}", "inference")
    if max(inference, trainer) <= BUSY:
        return Limit("The pools were balanced", both)
    if run.bound == 0:
        return Limit("The pools took turns, as a staleness bound of 0 makes them", f"{both} A bound above 0 ends that.")
    return Limit("Neither pool was the slower one, yet both waited", f"{both} The timeline shows when.")


def number(value: float | None, form: str = ".3f") -> str:
    return NONE if value is None else format(value, form)


def _reward_tile(run: RunData) -> Tile:
    reward = run.summary.get("reward") or {}
    return Tile("Sampled reward", _from_to(reward.get("first"), reward.get("last")), "first and last 15 steps")


def _eval_tile(run: RunData) -> Tile:
    if not run.evals:
        return Tile("Evaluation", NONE, "none yet" if run.config["run"]["eval_every"] else "run.eval_every = 0")
    first, last = run.evals[0], run.evals[-1]
    rates = are_rates(run)
    interval = eval_interval(last, rates)
    several = f"{set_of(last)}, of {len(run.eval_sets)} sets; " if len(run.eval_sets) > 1 else ""
    note = f"{several}n = {last.get('n', NONE)}"
    note += f", 95 %: {interval.low:.3f} to {interval.high:.3f}" if interval else ""
    if len(run.evals) == 1:
        return Tile("Evaluation", number(last["reward"]), f"version {last['version']}, {note}")
    return Tile("Evaluation", _from_to(first["reward"], last["reward"]), note)


def _staleness_tile(run: RunData) -> Tile:
    found = run.summary.get("staleness") or {}
    oldest = int(found.get("max") or 0)
    mark = "bad" if oldest > run.bound else ""
    return Tile("Staleness", f"max {oldest}, bound {run.bound}", f"mean {number(found.get('mean'), '.2f')}", mark)


def _ess_tile(run: RunData) -> Tile:
    found = [float(step["ess"]) for step in run.steps if step.get("ess") is not None]
    if not found:
        return Tile("Effective sample size", NONE)
    return Tile("Effective sample size", f"mean {sum(found) / len(found):.1%}", f"lowest {min(found):.1%}")


def _parity_tile(summary: Mapping[str, Any]) -> Tile:
    """How far the nodes were from the trainer on the same tokens when they began: the worst."""
    nodes = (summary.get("parity") or {}).values()
    began = [(each[key], each["bound"]) for each in nodes for key in ("canary", "first") if each[key] is not None]
    if not began:
        return Tile("Served against trained", NONE, "not measured")
    far, bound = max(began)
    mark = "bad" if any(each > limit for each, limit in began) else ""
    note = f"largest |Δ log p| when a node began, of {len(nodes)}; bound {bound:g}"
    return Tile("Served against trained", f"{far:.1e} nats", note, mark)


def _waste_tile(summary: Mapping[str, Any]) -> Tile:
    """What came back and did not train, and whether that was the long answers."""
    waste, bias = summary.get("waste"), summary.get("length_bias")
    value = NONE if waste is None else f"{waste:.1%} of sampled tokens"
    if not bias:
        return Tile("Waste", value)
    lengths = bias["mean_tokens"]
    note = f"{lengths['trained']:.4g} tokens trained of a mean answer of {lengths['sampled']:.4g}"
    return Tile("Waste", value, f"{note}; length bias {bias['ks']:.1%} (95 %: {bias['interval'][0]:.1%} or more)")


def _ledger_tile(summary: Mapping[str, Any]) -> Tile:
    ledger = summary.get("ledger")
    if not ledger:
        return Tile("Ledger", NONE, "not recorded yet")
    dropped = _total(ledger["dropped"].values())
    note = f"{ledger['issued']:,} issued, {ledger['trained']:,} trained, {dropped:,} dropped"
    if again := (summary.get("reused") or {}).get("trained"):
        note += f"; {again:,} trained again"
    if not summary.get("ledger_balances"):
        return Tile("Ledger", "does not balance", note, "bad")
    return Tile("Ledger", "balances", note)


def _total(counts: Iterable[int]) -> int:
    return sum(int(count) for count in counts)


def _from_to(first: float | None, last: float | None) -> str:
    return f"{number(first)} → {number(last)}"


def _per_second(rate: float | None) -> str:
    return f"{number(rate, ',.0f')} tokens/s"


def _ms(latency: float | None) -> str:
    return f"{number(latency, ',.0f')} ms"


def _idle(share: float | None) -> str:
    return "idle: not recorded" if share is None else f"idle {share:.0%}"

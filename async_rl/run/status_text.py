"""The text of `async-rl status`: a line a subject, and a table of the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from async_rl.run.closing import summary_text
from async_rl.run.display import duration, ledger_text
from async_rl.run.parity import parity_text
from async_rl.run.status import NodeState, RunState

WIDTH = 10  # of the labels; summary_text has the same
NONE = "–"
RIGHT = ("behind", "leased", "slots", "busy", "tokens/s")  # columns of numbers


def state_text(state: RunState) -> str:
    """Everything that is known, most important first."""
    nodes = [("nodes" if index == 0 else "", row) for index, row in enumerate(node_rows(state.nodes))]
    saved = ("saved", None if state.checkpoint is None else f"version {state.checkpoint}, the newest checkpoint")
    if state.summary:
        return "\n".join([_lines(_heading(state)), summary_text(state.summary), _lines([*nodes, saved])])
    return _lines(
        [
            *_heading(state),
            ("steps", _steps(state)),
            ("trainer", None if state.trainer is None else state.trainer or "none has joined"),
            ("newest", None if state.phase != "running" else f"policy {state.newest}" if state.newest else "none yet"),
            ("store", state.store),
            *nodes,
            *_set_aside(state.nodes),
            ("parity", _parity(state.nodes)),
            ("ready", _ready(state.ready)),
            ("ledger", _ledger(state)),
            ("reused", _counts(state.reused)),
            ("eval", _counts(state.eval_ledger)),
            ("outside", _counts(state.outside)),
            ("staleness", _staleness(state.staleness)),
            ("push", _push(state.push_ms)),
            ("waiting", _waiting(state)),
            saved,
            ("to go on", state.go_on),
        ]
    )


def _lines(lines: Iterable[tuple[str, str | None]]) -> str:
    return "\n".join(f"{label:<{WIDTH}}{words}" for label, words in lines if words)


def node_rows(nodes: Sequence[NodeState]) -> list[str]:
    """A table, its columns as wide as they have to be."""
    if not nodes:
        return []
    # Of how far each is from the trainer's log-probabilities, where that was measured.
    shows = any(node.mismatch is not None for node in nodes)
    right = (*RIGHT, "mismatch") if shows else RIGHT
    rows: list[tuple[str, ...]] = [("name", "state", "engine", "policy", *right)]
    for node in nodes:
        behind = NONE if node.behind is None else str(node.behind)
        rate = f"{node.tokens_per_second:,.0f}"
        slots = str(node.slots) if node.limit in (None, node.slots) else f"{node.limit}/{node.slots}"
        counts = (behind, str(node.leased), slots, f"{node.busy:.0%}", rate)
        mismatch = (NONE if node.mismatch is None else f"{node.mismatch:.1e}",) if shows else ()
        rows.append((node.name, node.state, node.engine or NONE, node.policy or NONE, *counts, *mismatch))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_number = len(widths) - len(right)
    return [
        "  ".join(
            cell.ljust(width) if index < first_number else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _set_aside(nodes: Sequence[NodeState]) -> list[tuple[str, str]]:
    """Why each quarantined node is."""
    reasons = [f"{node.name}, {node.reason}" for node in nodes if node.reason]
    return [("set aside" if index == 0 else "", reason) for index, reason in enumerate(reasons)]


def _parity(nodes: Sequence[NodeState]) -> str | None:
    measured = [node for node in nodes if node.mismatch is not None]
    words = parity_text({node.name: {**msgspec.structs.asdict(node), "last": node.mismatch} for node in measured})
    return words and f"{words}: largest |Δ log p| from the trainer"


def _heading(state: RunState) -> list[tuple[str, str | None]]:
    place = state.directory or state.endpoint
    if state.phase == "running":
        return [("running", f"{place}, run {state.run}, up {duration(state.uptime_s or 0)}")]
    if state.phase == "starting or ending":
        return [("held", f"{place}: a process has it, and no buffer listens: the run is starting or ending")]
    when = "nothing was recorded" if state.recorded_s is None else f"last recorded {duration(state.recorded_s)} ago"
    return [(state.phase, f"{place}, run {state.run}, {when}"), *(("", words) for words in state.last_words)]


def _steps(state: RunState) -> str:
    reward = "" if state.reward is None else f", reward {state.reward:.3f} in the last one"
    return f"{state.confirmed:,}/{state.steps:,}{reward}"


def _ready(ready: Mapping[str, int]) -> str | None:
    if not ready:
        return None
    reserved = f"; reserved {ready['reserved_bytes']:,}" if "reserved_bytes" in ready else ""
    return f"{ready['groups']:,} groups, {ready['bytes']:,} bytes{reserved}"


def _ledger(state: RunState) -> str | None:
    if state.ledger is None:
        return None
    flat = {key: count for key, count in state.ledger.items() if key != "dropped"} | state.ledger["dropped"]
    return f"{'balances' if state.ledger_balances else 'DOES NOT BALANCE'}: {ledger_text(flat)}"


def _staleness(staleness: Mapping[str, float | None]) -> str:
    bound = f"bound {_number(staleness.get('bound'))}"
    if staleness.get("adaptive_bound") is not None:
        bound += f" (nodes work by {staleness['adaptive_bound']})"
    if staleness.get("max") is None:
        return bound
    return f"max {_number(staleness['max'])}, mean {_number(staleness['mean'], '.2f')} in the last step, {bound}"


def _push(push: Mapping[str, float | None]) -> str | None:
    if push.get("p50") is None:
        return None
    return f"p50 {_number(push['p50'])} ms, p99 {_number(push['p99'])} ms, of {_number(push['count'])}"


def _waiting(state: RunState) -> str:
    if state.phase == "running":
        return state.waiting or "nobody"
    return state.waiting and f"when it was last recorded: {state.waiting}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _number(value: float | None, form: str = ",.0f") -> str:
    return NONE if value is None else format(value, form)

"""The tables of the report: the ledger and the configuration."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from async_rl.config import Config, TinyModelConfig
from async_rl.run.report.run_data import RunData
from async_rl.run.summary import OPEN_STATES

MEANINGS = {
    "issued": "right to sample given to a node",
    "leased": "with a node",
    "ready": "accepted, in the buffer",
    "batched": "lent to the trainer",
    "trained": "in a confirmed batch",
    "cancelled": "taken back: of no more use, or the run ended",
    "env_failed": "could not be scored",
    "node_lost": "their node went away; leased again",
    "refused": "not believed: unknown policy, broken, or too old on arrival",
    "short_group": "their group did not become whole",
    "stale": "too old for the bound when drawn",
    "zero_variance": "all rewards of their group were equal",
}


def ledger_html(run: RunData) -> str:
    """Every attempt in exactly one row."""
    ledger = run.summary.get("ledger")
    if not ledger:
        return '<p class="empty">The buffer has not said yet.</p>'
    issued = int(ledger["issued"])
    dropped = {name: int(count) for name, count in ledger["dropped"].items() if count}
    counts = {state: int(ledger[state]) for state in OPEN_STATES}
    parts = {**counts, "dropped": sum(dropped.values())}
    identity = " + ".join(f"{count:,} {state}" for state, count in parts.items())
    verdict = "It balances" if run.summary.get("ledger_balances") else "It does not balance"
    rows = [
        _ledger_row(name, count, issued) for name, count in (("issued", issued), *counts.items())
    ] + [_ledger_row(name, count, issued, "dropped: ") for name, count in dropped.items()]  # fmt: skip
    others = {"evaluation": run.summary.get("eval_ledger"), "outside the ledger": run.summary.get("outside")}
    notes = "".join(
        f'<p class="note">{html.escape(label)}: {html.escape(_counts(found))}</p>'
        for label, found in others.items()
        if found and any(found.values())
    )
    return (
        f'<h3>Ledger</h3><p><b>{verdict}:</b> {issued:,} issued = {identity}.</p>'
        f"{table(('attempts', 'number', 'share', 'meaning'), rows, numeric=(1, 2))}{notes}"
    )  # fmt: skip


def config_html(run: RunData) -> str:
    """What differs from the defaults, then the rest, folded."""
    changed: list[tuple[str, str, str]] = []
    same: list[tuple[str, str, str]] = []
    defaults = dict(_flat(_defaults(run.config)))
    for key, value in _flat(run.config):
        row = (key, _value(value), _value(defaults[key]) if key in defaults else "–")
        (same if key in defaults and defaults[key] == value else changed).append(row)
    rest = table(("key", "value"), [row[:2] for row in same])
    return (
        f"{table(('key', 'value', 'default'), changed)}"
        f"<details><summary>{len(same)} keys with their default</summary>{rest}</details>"
    )


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """[model.tiny] has none unless it is there."""
    defaults: dict[str, Any] = msgspec.to_builtins(Config())
    defaults["model"]["tiny"] = msgspec.to_builtins(TinyModelConfig()) if config["model"]["tiny"] else None
    return defaults


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` and value of all that is set."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", list(value) if isinstance(value, list | tuple) else value


def _value(value: Any) -> str:
    """As TOML has it, more or less."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _ledger_row(name: str, count: int, issued: int, prefix: str = "") -> tuple[str, str, str, str]:
    return (f"{prefix}{name}", f"{count:,}", f"{count / issued:.1%}" if issued else "–", MEANINGS.get(name, ""))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _breakable(cell: str) -> str:
    """Escaped, and with places to break the line at in keys and paths: a phone has little room."""
    # Not in numbers.
    return re.sub(r"([./_])(?=[A-Za-z])", r"\1<wbr>", html.escape(cell))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """In a box of its own that scrolls, so that a phone's page does not."""

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = [' class="number"' if index in numeric else "" for index in range(len(row))]
        return "".join(f"<{tag}{mark}>{_breakable(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'

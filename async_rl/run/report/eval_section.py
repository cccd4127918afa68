"""The report's section about several sets of evaluation, or several samples of an instance: pass@k and what each set
came to."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from async_rl.run.metrics import Record
from async_rl.run.report.headline import number
from async_rl.run.report.plot import EVAL, INK, TEAL, Plot, Trace, axis, layout, line, rounded, text, version_axis
from async_rl.run.report.run_data import RunData
from async_rl.run.report.tables import table

COLOURS = (EVAL, "#7a4fb5", "#b5651d", "#a83a6b", TEAL, INK)
WORDS = (
    "pass@k: how likely one of k answers to an instance passes, estimated without bias from all its samples; "
    "the bars are 95 % intervals, with instances as the units."
)


def is_worth_it(run: RunData) -> bool:
    """One set with one sample of each instance is in the plot of rewards already."""
    items = [item for items in run.eval_sets.values() for item in items]
    return len(run.eval_sets) > 1 or any(int(item.get("samples", 1)) > 1 for item in items)


def colours(run: RunData) -> dict[str, str]:
    """By set, the first in the colour of evaluation."""
    return dict(zip(run.eval_sets, cycle(COLOURS), strict=False))


def pass_plot(run: RunData) -> Plot:
    data: list[Trace] = []
    for name, colour in colours(run).items():
        items = run.eval_sets[name]
        for index, k in enumerate(dict.fromkeys(k for item in items for k in item.get("pass", {}))):
            found = [item for item in items if item.get("pass", {}).get(k, {}).get("value") is not None]
            data += [_trace(f"{name}, pass@{k}", found, k, colour, dashed=index > 0)] if found else []
    y = axis("pass rate", range=[0, 1.02])
    return Plot("passes", "pass@k", WORDS, data, layout(xaxis=version_axis(), yaxis=y), 340, wide=True)


def _trace(name: str, items: list[Record], k: str, colour: str, dashed: bool) -> Trace:
    values = [float(item["pass"][k]["value"]) for item in items]
    notes = [f"{item['pass'][k]['n']} instances" for item in items]
    style = {"width": 2, **({"dash": "dot"} if dashed else {})}
    trace = line([int(item["version"]) for item in items], rounded(values), text(name), colour, line=style)
    trace |= {"mode": "lines+markers", "marker": {"size": 7, "color": colour}, "cliponaxis": False, "text": notes,
              "hovertemplate": "%{y:.3f} (%{text})"}  # fmt: skip
    return trace | error_bars(values, [item["pass"][k].get("interval") for item in items], colour)


def error_bars(values: list[float], intervals: list[Any], colour: str) -> Trace:
    """Of a trace; none unless every value has an interval (low, high)."""
    if not all(intervals):
        return {}
    pairs = list(zip(values, intervals, strict=True))
    bars = {"type": "data", "symmetric": False, "color": colour, "thickness": 1.5, "width": 5}
    bars |= {
        "array": rounded([high - value for value, (_, high) in pairs]),
        "arrayminus": rounded([value - low for value, (low, _) in pairs]),
    }
    return {"error_y": bars}


def sets_html(run: RunData) -> str:
    """A row for each set: its first, best and last mean."""
    rows = []
    for name, items in run.eval_sets.items():
        first, last, best = items[0], items[-1], max(items, key=lambda item: float(item["reward"]))
        passes = ", ".join(f"@{k}: {number(each['value'])}" for k, each in last.get("pass", {}).items())
        rows.append((
            name, number(first["reward"]), f"{number(best['reward'])} at version {best['version']}",
            _with_interval(last), passes or "–", f"{last.get('n', '–')}", f"{last.get('cancelled', 0)}",
        ))  # fmt: skip
    heads = ("set", "first mean", "best mean", "last mean (95 %)", "last pass", "samples", "cancelled")
    kept = run.summary.get("best")
    note = (
        f"<p class=\"note\">Kept in adapters/best: version {int(kept['version'])}, {float(kept['reward']):.3f}.</p>"
        if kept
        else ""
    )
    return f"<h3>Sets</h3>{table(heads, rows, numeric=(1, 2, 3, 5, 6))}{note}"


def _with_interval(item: Record) -> str:
    interval = item.get("interval")
    return number(item["reward"]) + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")

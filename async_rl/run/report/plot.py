"""What every plot of the report shares: its parts, its colours, and how long runs are thinned for a screen.

A figure is the plain JSON that plotly.js draws, so making one needs nothing installed.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from async_rl.run.metrics import Record

Trace = dict[str, Any]
Layout = dict[str, Any]
Chunks = list[list[Record]]

# Inference and trainer have the same colour wherever they appear.
INFERENCE, TRAINER, BUFFER = "#2f6fb3", "#d9791a", "#9ba8b5"
INK, MUTED, GRID, TEAL, EVAL, BOUND = "#1f2933", "#66727f", "#e6eaee", "#15828a", "#23875a", "#c0392b"
# From fresh to old; each is light enough to be read on, for tokens in trajectories.
AGES = ((0.0, (252, 241, 197)), (0.35, (249, 203, 145)), (0.65, (240, 160, 150)), (1.0, (203, 174, 231)))

MOST_POINTS = 400  # of one line: more cannot be told apart on a screen
FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif'


class Plot(NamedTuple):
    """One plot with its line of explanation. Without data the page says so in its place."""

    key: str
    title: str
    words: str
    data: list[Trace]
    layout: Layout
    height: int = 300
    wide: bool = False


def chunks_of(steps: Sequence[Record], most: int = MOST_POINTS) -> Chunks:
    """Neighbouring steps together, as evenly as can be, so that at most `most` groups are left."""
    count = min(len(steps), most)
    edges = [round(index * len(steps) / count) for index in range(count + 1)] if count else [0]
    return [list(steps[low:high]) for low, high in pairwise(edges)]


def places(chunks: Chunks) -> list[int]:
    """The version that the last step of each chunk made."""
    return [int(chunk[-1]["version"]) for chunk in chunks]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def values(
    chunks: Chunks, key: str | Callable[[Record], float | None], of: Callable[[Sequence[float]], float] = mean
) -> list[float | None]:
    """One value a chunk: `of` the values that its steps have; None where none has one."""
    get = key if callable(key) else lambda step: step.get(key)
    found = [[float(value) for step in chunk if (value := get(step)) is not None] for chunk in chunks]
    return rounded([of(chunk) if chunk else None for chunk in found])


def rounded(numbers: Sequence[float | None]) -> list[float | None]:
    """To five digits: the rest would only make the page larger."""
    return [None if value is None else float(f"{value:.5g}") for value in numbers]


def has_values(*series: Sequence[float | None]) -> bool:
    return any(value is not None for numbers in series for value in numbers)


def text(words: str) -> str:
    """For a place where plotly.js reads markup."""
    return html.escape(words, quote=False)


def line(x: Sequence[float], y: Sequence[float | None], name: str, colour: str, **more: Any) -> Trace:
    style = {"color": colour, "width": 2, **more.pop("line", {})}
    # A single point has no line to be seen by.
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name, "line": style,
            "marker": {"color": colour}, **more}  # fmt: skip


def share_of(x: Sequence[float], y: Sequence[float | None], name: str, colour: str, group: str, **more: Any) -> Trace:
    """One layer of a stack; of one or two places, a bar, as an area would have no width to be seen by."""
    filled = [0.0 if value is None else value for value in y]
    if len(x) < 3:
        return {"type": "bar", "x": list(x), "y": filled, "name": name, "marker": {"color": colour}, **more}
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": filled,
            "name": name, "stackgroup": group, "line": {"width": 0, "color": colour},
            "fillcolor": colour, **more}  # fmt: skip


def age_colour(age: int, bound: int) -> str:
    """`#rrggbb` of a token's age, between fresh and the bound."""
    place = min(1.0, age / bound) if bound > 0 else 0.0
    low = max(stop for stop in AGES if stop[0] <= place)
    high = min(stop for stop in AGES if stop[0] >= place)
    part = (place - low[0]) / (high[0] - low[0]) if high > low else 0.0
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low[1], high[1], strict=True))


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "gridcolor": GRID, "zerolinecolor": GRID, "linecolor": "#c6cdd4",
            "automargin": True, **more}  # fmt: skip


def version_axis(**more: Any) -> dict[str, Any]:
    return axis("training steps done", showgrid=False, rangemode="tozero", **more)


def time_axis(unit: str, end: float) -> dict[str, Any]:
    """The whole run, so that such plots can be compared by eye."""
    return axis(f"{unit} since the trainer began", showgrid=False, range=[0, end])


def layout(**more: Any) -> Layout:
    return {
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "barmode": "stack",
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#c6cdd4", "font": {"color": INK}},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        **more,
    }

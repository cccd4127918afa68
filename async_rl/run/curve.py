"""The learning curve as a picture: sampled reward and evaluations above, staleness below, over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.run.metrics import Record, evals_of, read_metrics, steps_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 15  # steps; the same span as the summary's first and last rewards
BLUE, ORANGE, GREY, RED, INK = "#1f6fb4", "#e07b16", "#8a929b", "#c0392b", "#2b2f36"


def smooth(values: Sequence[float], span: int = SMOOTHING) -> list[float]:
    """Mean over the `span` values around each, of those that there are: near the ends only one side is whole."""
    half = span // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw_learning_curve(metrics_path: Path, path: Path, config: Config) -> None:
    """The curve of a run's metrics file, as a PNG at `path`. Raises AsyncRLError."""
    title = f"{config.run.name}: {config.task['kind']}, seed {config.run.seed}"
    write_curve(read_metrics(metrics_path), path, title, config.buffer.max_staleness)


def write_curve(records: Sequence[Record], path: Path, title: str, bound: int) -> None:
    """Draw the records of a run (see `metrics`) as a PNG. Raises AsyncRLError when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AsyncRLError(
            "no learning curve: matplotlib is not installed (pip install '.[trainer]' in the checkout)"
        ) from error
    # Agg by hand, without pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(9, 5.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    steps = [step for step in steps_of(records) if step["reward"] is not None]
    _draw_reward(top, steps, evals_of(records))
    _draw_staleness(below, steps, bound)
    top.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    figure.savefig(path)


def _draw_reward(axes: Axes, steps: Sequence[Record], evals: Sequence[Record]) -> None:
    places = [int(step["version"]) for step in steps]
    rewards = [float(step["reward"]) for step in steps]
    axes.plot(places, rewards, color=BLUE, alpha=0.25, linewidth=1)
    axes.plot(places, smooth(rewards), color=BLUE, linewidth=2.2, label=f"sampled reward (mean of {SMOOTHING} steps)")
    if evals:
        where = [int(item["version"]) for item in evals]
        values = [float(item["reward"]) for item in evals]
        axes.plot(where, values, color=ORANGE, linewidth=1.2, alpha=0.6, zorder=3)
        axes.plot(
            where, values, "o", color=ORANGE, markersize=6.5, markeredgecolor="white", label="evaluation", zorder=4
        )
        for index in {0, len(evals) - 1}:
            axes.annotate(
                f"{values[index]:.2f}",
                (where[index], values[index]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=ORANGE,
                fontweight="bold",
            )
    everything = [*rewards, *(float(item["reward"]) for item in evals)]
    if everything and min(everything) >= 0 and max(everything) <= 1:
        # Rewards that are rates read best against the whole of 0 to 1.
        axes.set_ylim(0, 1.0 if max(everything) < 0.92 else 1.08)
    axes.set_ylabel("reward", color=INK)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    _style(axes)


def _draw_staleness(axes: Axes, steps: Sequence[Record], bound: int) -> None:
    places = [int(step["version"]) for step in steps]
    highest = [int(step["staleness_max"]) for step in steps]
    axes.fill_between(places, highest, step="mid", color=GREY, alpha=0.3, linewidth=0, label="oldest token")
    axes.plot(places, [float(step["staleness_mean"]) for step in steps], color=INK, linewidth=1.4, label="mean")
    axes.axhline(bound, color=RED, linewidth=1.2, linestyle=(0, (5, 3)), label=f"bound ({bound})")
    axes.set_ylim(0, max(bound, *highest, 1) * 1.25 if highest else max(bound, 1) * 1.25)
    axes.set_yticks(_whole_ticks(max([bound, *highest])))
    axes.set_ylabel("staleness\n(versions)", color=INK)
    axes.set_xlabel("training step", color=INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), frameon=False, fontsize=8.5, ncols=3)
    _style(axes)
    axes.margins(x=0.02)


def _whole_ticks(highest: int) -> list[int]:
    """At most five whole numbers from 0 to at least the highest: versions are counted."""
    pace = max(1, math.ceil(highest / 4))
    return list(range(0, highest + pace, pace))


def _style(axes: Any) -> None:
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c4cad0")
    axes.tick_params(colors=INK, labelsize=9, length=3, color="#c4cad0")

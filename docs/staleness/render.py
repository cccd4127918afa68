"""docs/staleness/README.md and staleness.png from the file of `async-rl bench staleness`:

    async-rl bench staleness --json docs/staleness/staleness.json
    python docs/staleness/render.py

A test checks that the page is what this makes of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_rl.run.bench_staleness import is_run
from async_rl.run.bench_staleness_plan import Grid, plan
from async_rl.run.bench_staleness_results import (
    ON_POLICY,
    Place,
    Row,
    Run,
    by_correction,
    final,
    is_on_policy,
    mean_and_error,
    on_policy,
    over_training,
    place_of,
    places,
    rows,
    start,
)

HERE = Path(__file__).parent
NEAR = 0.06  # of on-policy learning
OURS = ("age_clip", "age_clip_wide", "age_topr")

T_AT_5_PERCENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}
"""Two-sided critical values of Student's t, by degrees of freedom."""

INTRODUCTION = """\
# Learning from old data

What happens to learning when every token is `lag` policy versions old, by correction and learning rate, and when each
batch is used several times. `staleness.json` was written by `async-rl bench staleness --json
docs/staleness/staleness.json`; this page and the picture are made of it by `docs/staleness/render.py`.

Every run starts from the quickstart's base model and takes {updates} updates of {groups} prompts × {group_size} answers
at a constant learning rate: the torch backend's steps on the torch engine's samples. A queue in between makes the data
exactly as old as the lag (and younger only in the first updates, when there are no such versions yet). The seed decides
the adapter's start, prompts and sampling. Advantage and aggregation are the same for all (`grpo`, `token_mean`),
whatever a preset says of them.

A run's result is the mean of its last three evaluations, each of {eval_samples} held-out instances answered greedily.
± is the standard error over seeds; *gap* is to on-policy learning with the same seeds; *along* is the mean over all
versions of a run; *lowest* is any seed's lowest evaluation; *below* counts the seeds that end lower than they began
({start:.3f}), *alarm* those that `algorithm.alarms` would have ended as real runs ("of": not all were watched, –: none
was); here they go on. On-policy, the engine's and the trainer's log-probabilities of a token are {mismatch:.0e} apart,
so the rest is age.

![what each correction reaches](staleness.png)
"""


def render(document: dict[str, Any]) -> str:
    """The page's text."""
    runs, settings = document["runs"], document["settings"]
    found = places(runs)
    lines = [INTRODUCTION.format(**settings, start=start(runs[0]), mismatch=_mismatch(runs)), *_verdict(runs, found)]
    for place in found:
        title = place.name[0].upper() + place.name[1:]
        lines += [f"## {title}", "", *_sampled(runs, place), *_table(rows(runs, place)), ""]
    lines += _ours(runs, found)
    return "\n".join([*lines, *_settings(runs), "", *_footnote(document), ""])


def _mismatch(runs: Sequence[Run]) -> float:
    """Mean |Δ log p| in nats, trainer against engine, where both have the same policy."""
    return max((run["metrics"]["mismatch_mean"] for run in runs if is_on_policy(run)), default=math.nan)


def _verdict(runs: Sequence[Run], found: Sequence[Place]) -> list[str]:
    """What the largest lag at the first learning rate says."""
    first = max((place for place in found if place.reuse == 1), key=lambda place: place.lag, default=None)
    if first is None:
        return []
    table = [row for row in rows(runs, first) if row.correction != ON_POLICY]
    near = [row.correction for row in table if row.gap >= -NEAR]
    collapsed = [row for row in table if row.below]
    lines = [f"At {first.name}:", ""]
    lines += [f"- {len(near)} of {len(table)} end within {NEAR} of on-policy learning: {'; '.join(near)}."]
    lines += [f"- {row.correction}: {row.below} of {row.n} seeds end below their start." for row in collapsed]
    return [*lines, ""]


def _ours(runs: Sequence[Run], found: Sequence[Place]) -> list[str]:
    """Each of our own corrections against the best of the others at its place, seed by seed."""
    lines = [
        "## Our own, by age",
        "",
        "Against the best of the published ones there, as a difference with the same seeds. A verdict takes",
        "significance at 5 % by a paired t-test: with three seeds, 4.3 standard errors.",
        "",
        "| place | ours | best of the others | at the end | | along | |",
        "|---|---|---|---|---|---|---|",
    ]
    for place in found:
        at = by_correction(runs, place)
        best = next((row.correction for row in rows(runs, place) if row.correction not in (*OURS, ON_POLICY)), None)
        if best:
            pairs = [(name, _differences(at[name], at[best])) for name in OURS if name in at]
            lines += [f"| {place.name} | {name} | {best} | {difference} |" for name, difference in pairs]
    return [*lines, ""]


def _differences(ours: Sequence[Run], others: Sequence[Run]) -> str:
    return " | ".join(_difference(ours, others, measure) for measure in (final, over_training))


def _difference(ours: Sequence[Run], others: Sequence[Run], measure: Callable[[Run], float]) -> str:
    by_seed = {run["seed"]: measure(run) for run in others}
    differences = [measure(run) - by_seed[run["seed"]] for run in ours if run["seed"] in by_seed]
    if not differences:
        return "– | no seed in common"
    mean, error = mean_and_error(differences)
    needed = T_AT_5_PERCENT.get(len(differences) - 1)
    if needed is None or abs(mean) <= needed * error:
        verdict = "no difference shown"
    else:
        verdict = "better" if mean > 0 else "worse"
    return f"{_signed(mean, error)} | {verdict}"


def _sampled(runs: Sequence[Run], place: Place) -> list[str]:
    """Of reuse, what it saves."""
    if place.reuse == 1:
        return []
    attempts = next(run["attempts"] for run in runs if place_of(run) == place)
    usual = next(run["attempts"] for run in runs if is_on_policy(run))
    return [f"As many updates as without reuse, from {attempts:,} sampled answers instead of {usual:,}.", ""]


def _table(table: Sequence[Row]) -> list[str]:
    lines = [
        "| correction | seeds | at the end | gap | along | lowest | below | alarm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        gap = "" if row.correction == ON_POLICY else _signed(row.gap, row.gap_error)
        failed = f" ({row.failed} broke off)" if row.failed else ""
        below = str(row.below or "")
        alarmed = str(row.alarmed or "") if row.watched == row.n else f"{row.alarmed} of {row.watched}"
        alarmed = alarmed if row.watched else "–"
        lines.append(
            f"| {row.correction}{failed} | {row.n} | {_value(row.final, row.error)} | {gap} | "
            f"{_value(row.along, row.along_error)} | {row.lowest:.3f} | "
            f"{below} | {alarmed} |"
        )
    return lines


def _value(value: float, error: float) -> str:
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def _signed(value: float, error: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:+.3f}" if math.isnan(error) else f"{value:+.3f} ± {error:.3f}"


def _settings(runs: Sequence[Run]) -> list[str]:
    """What each name means, in keys of [algorithm]."""
    lines = ["## The corrections", "", "| correction | keys of `[algorithm]` |", "|---|---|"]
    for name, settings in {run["correction"]: run["settings"] for run in runs}.items():
        keys = {key.removeprefix("algorithm."): value for key, value in settings.items()}
        shown = ", ".join(
            f"`{key} = {json.dumps(value)}`" for key, value in keys.items() if key not in ("advantage", "aggregation")
        )
        lines.append(f"| {name} | {shown} |")
    return lines


def _footnote(document: dict[str, Any]) -> list[str]:
    machine, runs = document["machine"], document["runs"]
    cpu = sum(run["train_cpu_s"] + run["sample_cpu_s"] for run in runs)
    libraries = ", ".join(f"{name} {number}" for name, number in machine["libraries"].items())
    planned = plan(Grid())
    missing = [cell for cell in planned if not is_run(cell, runs)]
    return [
        f"{len(runs)} runs of {cpu / len(runs):.0f} CPU-seconds each, {document['made'][:10]}, {machine['processor']}, "
        f"Python {machine['python']}, {libraries}. Of the {len(planned)} runs that the command makes by default "
        f"{len(planned) - len(missing)} are here, and {len(runs) - len(planned) + len(missing)} besides; it goes on "
        "with the others when it is called with this file. They were made over two hours, while parts of the trainer "
        "around the corrections were still being written.",
    ]


# --- the picture -----------------------------------------------------------------------------------------------------

BLUE, ORANGE, GREY, RED, INK = "#1f6fb4", "#e07b16", "#8a929b", "#c0392b", "#2b2f36"
LINES = ("#1f6fb4", "#e07b16", "#2e8b57", "#8e44ad", "#8c6d31", "#c0392b", "#17808a")


def draw(document: dict[str, Any], path: Path) -> None:
    """Every correction at the first learning rate, left; curves, learning rates and reuse, right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = document["runs"]
    figure = Figure(figsize=(13, 9.5), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    _draw_corrections(left.subplots(), runs)
    above, middle, below = right.subplots(3, 1)
    _draw_curves(above, runs)
    _draw_rates(middle, runs)
    _draw_reuse(below, runs)
    figure.savefig(path)


def _draw_corrections(axes: Any, runs: Sequence[Run]) -> None:
    shown = [place for place in places(runs) if place.reuse == 1 and place.learning_rate == _main_rate(runs)]
    if not shown:
        return
    order = [row.correction for row in rows(runs, shown[0]) if row.correction != ON_POLICY][::-1]
    for index, (place, colour) in enumerate(zip(shown, (BLUE, ORANGE, GREY), strict=False)):
        found = {row.correction: row for row in rows(runs, place)}
        rowed = [(order.index(name), row) for name, row in found.items() if name in order]
        axes.errorbar(
            [row.final for _, row in rowed], [height - 0.16 * index for height, _ in rowed],
            xerr=[_bar(row.error) for _, row in rowed], fmt="o", color=colour, capsize=3, label=f"lag {place.lag}",
        )  # fmt: skip
    base = next((row for row in rows(runs, shown[0]) if row.correction == ON_POLICY), None)
    if base:
        axes.axvspan(base.final - _bar(base.error), base.final + _bar(base.error), color=GREY, alpha=0.25, linewidth=0)
        axes.axvline(base.final, color=GREY, label="on-policy")
    axes.axvline(start(runs[0]), color=RED, linestyle=(0, (5, 3)), linewidth=1, label="start")
    axes.set_yticks(range(len(order)), order)
    _dress(axes, f"learning rate {_main_rate(runs):g}: reward at the end ± standard error")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _draw_curves(axes: Any, runs: Sequence[Run]) -> None:
    """Evaluations along the runs at the largest lag: on-policy, uncorrected, the best and ours."""
    first = next((place for place in places(runs) if place.reuse == 1), None)
    if first is None:
        return
    found = by_correction(runs, first)
    ranked = [row.correction for row in rows(runs, first) if row.correction != ON_POLICY]
    best = [name for name in ranked if name not in OURS][:1]
    chosen = {ON_POLICY: on_policy(runs, first.learning_rate)} | {
        name: found[name] for name in ranked if name in (*best, *OURS, "uncorrected", "token, truncated at 2")
    }
    for (name, of), colour in zip(chosen.items(), (GREY, *LINES), strict=False):
        versions = [version for version, _ in of[0]["evals"]]
        columns = list(zip(*[[reward for _, reward in run["evals"]] for run in of], strict=True)) if of else []
        means = [sum(column) / len(column) for column in columns]
        axes.plot(versions, means, color=colour, label=name)
        axes.fill_between(versions, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15)
    _dress(axes, f"lag {first.lag}: along the runs (mean, lowest to highest seed)")
    axes.set_xlabel("version", color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center right")


def _draw_rates(axes: Any, runs: Sequence[Run]) -> None:
    """The largest lag at every learning rate that was tried there."""
    shown = [place for place in places(runs) if place.reuse == 1]
    far = max((place.lag for place in shown), default=0)
    points: dict[str, list[tuple[float, Row]]] = {}
    for place in sorted((place for place in shown if place.lag == far), key=lambda place: place.learning_rate):
        for row in rows(runs, place):
            points.setdefault(row.correction, []).append((place.learning_rate, row))
    several = {name: of for name, of in points.items() if len(of) > 1}
    for index, (name, of) in enumerate(sorted(several.items())):
        shift = 1 + 0.03 * (index - len(several) / 2)  # so that bars do not hide each other
        axes.errorbar(
            [rate * shift for rate, _ in of], [row.final for _, row in of], yerr=[_bar(row.error) for _, row in of],
            marker="o", markersize=4, capsize=2, color=GREY if name == ON_POLICY else LINES[index % len(LINES)],
            label=name,
        )  # fmt: skip
    axes.set_xscale("log")
    rates = sorted({rate for of in several.values() for rate, _ in of})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    _dress(axes, f"lag {far}: by learning rate")
    axes.set_xlabel("learning rate", color=INK)
    if several:
        axes.legend(frameon=False, fontsize=8)


def _draw_reuse(axes: Any, runs: Sequence[Run]) -> None:
    """Lag 0, equally many updates, by how often each batch trains."""
    shown = [place for place in places(runs) if place.lag == 0 and place.reuse > 1]
    base = next(iter(rows(runs, Place(0, 1, _main_rate(runs)))), None)
    points: dict[str, list[tuple[int, Row]]] = {}
    for place in sorted(shown, key=lambda place: place.reuse):
        for row in rows(runs, place):
            if row.correction != ON_POLICY:
                points.setdefault(row.correction, [(1, base)] if base else []).append((place.reuse, row))
    for index, (name, of) in enumerate(sorted(points.items())):
        axes.errorbar(
            [reuse + 0.05 * index for reuse, _ in of], [row.final for _, row in of],
            yerr=[_bar(row.error) for _, row in of], marker="o", markersize=4, capsize=2, color=LINES[index],
            label=name,
        )  # fmt: skip
    axes.set_xticks([1, *sorted({place.reuse for place in shown})])
    _dress(axes, "lag 0, equally many updates: by uses of each batch")
    axes.set_xlabel("uses", color=INK)
    if points:
        axes.legend(frameon=False, fontsize=8)


def _main_rate(runs: Sequence[Run]) -> float:
    """The learning rate with the most runs."""
    rates = [run["learning_rate"] for run in runs if not is_on_policy(run)]
    return float(max(set(rates), key=rates.count))


def _bar(error: float) -> float:
    return 0.0 if math.isnan(error) else error


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


if __name__ == "__main__":
    made = json.loads((HERE / "staleness.json").read_text())
    (HERE / "README.md").write_text(render(made))
    draw(made, HERE / "staleness.png")

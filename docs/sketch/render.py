"""docs/sketch/README.md and learning.png from the file that docs/sketch/learn.py writes:

    python docs/sketch/learn.py --jobs 2
    python docs/sketch/render.py

A test checks that the page is what this makes of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from async_rl.run.bench_staleness_results import Run, final, lowest, mean_and_error, over_training, start

HERE = Path(__file__).parent
DENSE = "dense AdamW"
STEADY, STEADY_KEPT = "sketch, momentum 0.9, redrawn every 20 steps", "sketch, momentum 0.9, never redrawn"
PLAIN, PLAIN_KEPT = "sketch, redrawn every step", "sketch, never redrawn"
WIDE = "sketch of rank 64, momentum 0.8, redrawn every 10 steps"
FAST = "ten times too fast"
BUDGET = "trainer.step_control.budget"
INK, LINES = "#1f2933", ("#52606d", "#0b69a3", "#c65d07", "#2f8132", "#8719e0", "#b3273e", "#0c7c72")

INTRODUCTION = """\
# What gradient sketches learn

Made by `python docs/sketch/render.py` of [learning.json](learning.json), which `python docs/sketch/learn.py --jobs 2`
writes. Every run starts from the quickstart's base model ({start:.3f} of the held-out instances right) and takes
{updates} updates of {groups} prompts × {group_size} answers with the quickstart's loss, on data that is exactly four
versions old; the rate is warmed up over 5 steps and falls to a tenth, as the quickstart's does. Rates are learning
rates, of sketches the update ratio; ranks are 16 where nothing is said. The seed decides projections, prompts and
sampling. Dense AdamW trains embeddings, head and norms as well.

*Final* is the mean of a run's last three evaluations, each of {eval_samples} held-out instances answered greedily,
*along* the mean over all versions of a run, each over the seeds ± its standard error; *lowest* is any seed's lowest
evaluation; *below* counts the seeds that end under where they began, and *alarm* those that `algorithm.alarms` would
have ended (here they go on).

![learning curves](learning.png)
"""


class Row(NamedTuple):
    arm: str
    rate: float
    runs: Sequence[Run]

    @property
    def final(self) -> tuple[float, float]:
        return mean_and_error([final(run) for run in self.runs])


def rows(runs: Sequence[Run]) -> list[Row]:
    """One for each arm and rate, in the order in which they first come."""
    found: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        found.setdefault((run["correction"], run["learning_rate"]), []).append(run)
    return [Row(arm, rate, sorted(of, key=lambda run: run["seed"])) for (arm, rate), of in found.items()]


def better_rate(table: Sequence[Row], arm: str) -> Row:
    """The row of an arm's better rate."""
    return max((row for row in table if row.arm == arm), key=lambda row: row.final[0])


def distance(one: Row, other: Row) -> tuple[float, float]:
    """Mean difference of two arms' final rewards, and its standard error; seeds of both taken as independent."""
    (a, ea), (b, eb) = one.final, other.final
    return a - b, math.hypot(ea, eb)


def render(document: Mapping[str, Any]) -> str:
    """The page's text."""
    table, machine = rows(document["runs"]), document["machine"]
    lines = [INTRODUCTION.format(**document["settings"], start=start(document["runs"][0])), *_verdict(table), ""]
    lines += [
        "| what learns | rate | seeds | final | along | lowest | below | alarm | CPU seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in table),
        "",
        *_redraw(table),
        *_noise(document["runs"]),
        *_control(document["runs"]),
        f"Made {document['made'][:10]} on {machine['cores']} cores ({machine['processor']}), beside other work.",
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    runs = row.runs
    along = mean_and_error([over_training(run) for run in runs])
    below = sum(final(run) < start(run) for run in runs)
    alarmed = sum(run["alarm_at"] is not None or bool(run["error"]) for run in runs)
    seconds = fmean(run["train_cpu_s"] for run in runs)
    return (
        f"| {row.arm} | {row.rate:g} | {len(runs)} | {_pm(row.final)} | {_pm(along)} "
        f"| {min(map(lowest, runs)):.3f} | {below} | {alarmed} | {seconds:.0f} |"
    )


def _pm(value: tuple[float, float]) -> str:
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def _verdict(table: Sequence[Row]) -> list[str]:
    dense = better_rate(table, DENSE)
    lines = [f"Against dense AdamW at its better rate, {dense.rate:g} ({_pm(dense.final)}):", ""]
    for arm in dict.fromkeys(row.arm for row in table):
        if arm == DENSE or FAST in arm:
            continue
        row = better_rate(table, arm)
        gap, error = distance(row, dense)
        within = "within" if abs(gap) <= 2 * error else "beyond"
        lines.append(f"- {arm}, {row.rate:g}: {gap:+.3f} ± {error:.3f}, {within} two standard errors.")
    return lines


def _redraw(table: Sequence[Row]) -> list[str]:
    """Whether other directions cost anything, and why."""
    gaps = [
        distance(better_rate(table, one), better_rate(table, other))
        for one, other in ((STEADY, STEADY_KEPT), (PLAIN, PLAIN_KEPT), (WIDE, better_rate(table, DENSE).arm))
    ]
    steady, plain, wide = (f"{gap:+.3f} ± {error:.3f}" for gap, error in gaps)
    return [
        f"**Redrawing.** Without a running mean other directions at every step cost nothing ({plain} against never).",
        f"With one, at rank 16, they do ({steady}): carried over to other directions the mean keeps its value only on",
        "average, and noise of √(in/r) times its norm comes with it, here 2.8 to 4 times at rank 16. At rank",
        f"64 that is 1.4 to 2 times, and a shorter mean redrawn every 10 steps is where dense AdamW is ({wide}).",
        "",
    ]


def _noise(runs: Sequence[Run]) -> list[str]:
    noise = [run["metrics"]["rounding_noise"] for run in runs if "rounding_noise" in run["metrics"]]
    return [f"**bfloat16.** The rounding's noise was {fmean(noise):.2f} times the update, on average.", ""]


def _control(runs: Sequence[Run]) -> list[str]:
    """What step control did to steps that were ten times too long."""
    budget = next(run["settings"][BUDGET] for run in runs if BUDGET in run["settings"])
    lines = [
        f"**Step control**, with a budget of {budget:g} nats a token falling to a tenth. Means over all steps:",
        "",
    ]
    for arm in dict.fromkeys(run["correction"] for run in runs if "step_scale" in run["metrics"]):
        of = [run["metrics"] for run in runs if run["correction"] == arm]
        scale, said, became = (fmean(each[key] for each in of) for key in ("step_scale", "applied_kl", "realised_kl"))
        lines.append(f"- {arm}: scale {scale:.2f}, predicted {said:.2g}, became {became:.2g}.")
    return [*lines, ""]


def draw(document: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    table = rows(document["runs"])
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    usual = [arm for arm in dict.fromkeys(row.arm for row in table) if FAST not in arm]
    _curves(left, [better_rate(table, arm) for arm in usual], "each at its better rate")
    _curves(right, [row for row in table if FAST in row.arm], "ten times too fast, without and with step control")
    figure.savefig(path, dpi=110)


def _curves(axes: Any, shown: Sequence[Row], title: str) -> None:
    for index, row in enumerate(shown):
        whole = [run for run in row.runs if len(run["evals"]) == max(len(each["evals"]) for each in row.runs)]
        versions = [version for version, _ in whole[0]["evals"]]
        columns = list(zip(*[[reward for _, reward in run["evals"]] for run in whole], strict=True))
        found = [mean_and_error(column) for column in columns]
        means, errors = [mean for mean, _ in found], [0.0 if math.isnan(error) else error for _, error in found]
        colour = LINES[index % len(LINES)]
        axes.plot(versions, means, color=colour, linestyle="-" if index < len(LINES) else "--", label=row.arm)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(versions, low, high, color=colour, alpha=0.15)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("version", color=INK)
    axes.set_ylabel("held-out reward, mean ± standard error", color=INK)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    made = json.loads((HERE / "learning.json").read_text())
    (HERE / "README.md").write_text(render(made))
    draw(made, HERE / "learning.png")

"""How far each step moved the policy, where steps are controlled ([trainer.step_control]): predicted, allowed, real."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.run.metrics import Record
from async_rl.run.report.plot import (
    BOUND,
    EVAL,
    INK,
    MUTED,
    TEAL,
    Plot,
    Trace,
    axis,
    chunks_of,
    layout,
    line,
    places,
    rounded,
    values,
    version_axis,
)
from async_rl.run.report.run_data import RunData

# Of a logarithmic axis: no ticks between; and of one of few decades: 1, 2 and 5 of each.
DECADES: dict[str, object] = {"dtick": 1, "exponentformat": "power", "showexponent": "all"}
WITHIN: dict[str, object] = {"dtick": "D2", "tickformat": ".0e"}
AGES = [[0, "#9fc5e8"], [1, "#123a63"]]  # of steps, from early to late


def control_plots(run: RunData) -> list[Plot]:
    """None for a run without step control."""
    steps = [step for step in run.steps if step.get("realised_kl") is not None]
    return [_calibration(steps), _lengths(steps)] if steps else []


def _calibration(steps: list[Record]) -> Plot:
    """One point a step; a long run is thinned evenly."""
    seen = [chunk[-1] for chunk in chunks_of(steps)]
    shown = [step for step in seen if step["applied_kl"] > 0 and step["realised_kl"] > 0]
    applied, realised = (rounded([step[key] for step in shown]) for key in ("applied_kl", "realised_kl"))
    data: list[Trace] = []
    ticks = DECADES
    if shown:
        ends = _ends([*applied, *realised])
        ticks = WITHIN if ends[1] < 30 * ends[0] else DECADES
        versions = [int(step["version"]) for step in shown]
        marker = {"size": 7, "opacity": 0.8, "color": versions, "colorscale": AGES, "line": {"width": 0}}
        data = [
            line(ends, ends, "realised as predicted", BOUND, mode="lines", line={"dash": "dash"}, hoverinfo="skip"),
            {"type": "scatter", "mode": "markers", "x": applied, "y": realised, "name": "a step (later is darker)",
             "marker": marker, "text": [f"step {version}" for version in versions],
             "hovertemplate": "%{text}: predicted %{x:.2e}, realised %{y:.2e}<extra></extra>"},
        ]  # fmt: skip
    words = (
        "KL divergence between the policies before and after a step, in nats a token, at the same places of the batch: "
        "as it was predicted for the step that was taken, and as it became. The prediction is no bound; points far "
        "above the line mean steps too long for it to hold."
    )
    shape = layout(
        xaxis=axis("predicted", type="log", **ticks),
        yaxis=axis("realised", type="log", **ticks),
        hovermode="closest",
    )
    return Plot("calibration", "Was the divergence predicted?", words, data, shape, 420)


def _lengths(steps: list[Record]) -> Plot:
    """Above, how long steps were made; below, what they used of their budget."""
    chunks = chunks_of(steps)
    x = places(chunks)
    applied, realised, budget = (values(chunks, key) for key in ("applied_kl", "realised_kl", "kl_budget"))
    data = [
        line(x, values(chunks, "step_scale"), "length of the step", INK),
        line(x, _positive(realised), "realised", TEAL, yaxis="y2"),
        line(x, _positive(applied), "predicted", EVAL, yaxis="y2", line={"dash": "dot"}),
        line(x, _positive(budget), "budget", BOUND, yaxis="y2", line={"dash": "dash"}),
    ]
    mismatch = values(chunks, "mismatch")
    if any(mismatch):
        data.append(line(x, _positive(mismatch), "the engines' share", MUTED, yaxis="y2"))
    words = (
        "How many times as long as the optimiser proposed a step was made, and the divergence that it caused against "
        "the budget that was left to it."
    )
    shape = layout(
        xaxis=version_axis(anchor="y2"),
        yaxis=axis("length", domain=[0.62, 1.0], rangemode="tozero", nticks=5),
        yaxis2=axis("divergence (nats)", domain=[0.0, 0.54], type="log", **DECADES),
    )
    return Plot("step_scale", "How long was a step made?", words, data, shape, 420)


def _ends(numbers: Sequence[float | None]) -> list[float]:
    """Of the diagonal."""
    known = [number for number in numbers if number is not None]
    return [min(known), max(known)]


def _positive(numbers: Sequence[float | None]) -> list[float | None]:
    """What a logarithmic axis can show."""
    return [number if number else None for number in numbers]

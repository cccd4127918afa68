"""How the pools worked together: who waited for whom, how fast each was, what a push and an attempt took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.run.report.plot import (
    BUFFER,
    GRID,
    INFERENCE,
    INK,
    MUTED,
    TRAINER,
    Plot,
    Trace,
    axis,
    chunks_of,
    has_values,
    layout,
    line,
    places,
    rounded,
    share_of,
    text,
    time_axis,
    values,
    version_axis,
)
from async_rl.run.report.run_data import RunData
from async_rl.run.report.timeline import Timeline, idle_share, pool_idle, step_parts, trainer_idle
from async_rl.run.summary import nested_ledger, percentile

ROW_HEIGHT, MOST_HEIGHT = 30, 900  # pixels of one node in the picture of who worked when, and of all
MOST_LINES = 600  # of the buffer's view, in a plot of its counts


def idle_plot(timeline: Timeline) -> Plot:
    x = timeline.middles
    inference, trainer = pool_idle(timeline), trainer_idle(timeline)
    data = []
    if has_values(inference, trainer):
        data = [
            line(x, rounded(inference), "inference idle", INFERENCE, hovertemplate="%{y:.0%}",
                 fill="tozeroy", fillcolor="rgba(47,111,179,0.12)"),
            line(x, rounded(trainer), "trainer waits for a batch", TRAINER, hovertemplate="%{y:.0%}",
                 fill="tozeroy", fillcolor="rgba(217,121,26,0.12)"),
        ]  # fmt: skip
    words = (
        "Share of the time without work. Inference idles when the bound keeps it from running further ahead of the "
        "trainer; the trainer waits when no whole batch is ready. A line near zero is a pool that never waited."
    )
    y = axis("idle", tickformat=".0%", range=[0, 1.02])
    return Plot(
        "idle", "Idle time", words, data, layout(xaxis=time_axis(timeline.unit, timeline.end), yaxis=y), 320, wide=True
    )


def rate_plot(timeline: Timeline) -> Plot:
    x = timeline.middles
    sampled = sum((node.tokens for node in timeline.nodes.values()), np.zeros(len(x)))
    data = []
    if timeline.nodes and sampled.any():
        data.append(line(x, rounded((sampled / timeline.width).tolist()), "inference: sampled", INFERENCE))
    if timeline.trained.any():
        data.append(line(x, rounded((timeline.trained / timeline.width).tolist()), "trainer: trained", TRAINER))
    words = (
        "Tokens of finished answers (evaluation included), and tokens that were trained, waiting included: both over "
        "the wall clock, so that the lines compare."
    )
    y = axis("tokens/s", rangemode="tozero", tickformat=",.0f")
    return Plot(
        "rates", "Tokens a second", words, data, layout(xaxis=time_axis(timeline.unit, timeline.end), yaxis=y), 320
    )


def work_plot(timeline: Timeline) -> Plot:
    """One row the trainer, one row each node; grey is what nothing is known of."""
    x = timeline.middles
    rows = {name: idle_share(node.busy, node.alive, timeline.width) for name, node in sorted(timeline.nodes.items())}
    data = [_strip(x, place, name, row, INFERENCE) for place, (name, row) in enumerate(rows.items(), 1)]
    if timeline.trained.any():
        data.insert(0, _strip(x, 0, "trainer", trainer_idle(timeline), TRAINER))
    words = "Each row is a machine: full colour is work all of the time, white is waiting, grey is not there."
    names = ["trainer", *map(text, rows)]
    ticks: dict[str, Any] = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.5, -0.5]}
    y = axis(showgrid=False, zeroline=False, ticks="", **ticks)
    shape = layout(xaxis=time_axis(timeline.unit, timeline.end), yaxis=y, plot_bgcolor=GRID, hovermode="closest")
    height = min(MOST_HEIGHT, 90 + ROW_HEIGHT * (len(names)))
    return Plot("work", "Who worked when", words, data, shape, height)


def step_plot(run: RunData) -> Plot:
    """What the trainer's time went into."""
    chunks = chunks_of(run.steps)
    x = places(chunks)
    data = []
    if any(step.get("step_s") for step in run.steps):
        parts = {
            "waiting": ("waits for a batch", "#f4dcc0"),
            "training": ("trains", TRAINER),
            "publishing": ("confirms and publishes", "#8c5a2b"),
            "other": ("checkpoints, rest", MUTED),
        }
        for part, (name, shade) in parts.items():
            seconds = values(chunks, lambda step, part=part: step_parts(step)[part])  # type: ignore[misc]
            data.append(share_of(x, seconds, name, shade, "step", hovertemplate="%{y:.2f} s"))
    words = "The trainer's seconds in each step."
    return Plot("step", "What a step took", words, data,
                layout(xaxis=version_axis(), yaxis=axis("seconds", rangemode="tozero")))  # fmt: skip


def journey_plot(run: RunData) -> Plot:
    """What an attempt's time went into before it was trained."""
    chunks = chunks_of(run.steps)
    x = places(chunks)
    parts = {
        "queued_s": ("waits for a slot", "#b9d2ea"),
        "sampling_s": ("is sampled", INFERENCE),
        "scoring_s": ("is scored", "#1d4672"),
        "held_s": ("lies in the buffer", BUFFER),
    }
    found = {key: values(chunks, key) for key in parts}
    data = []
    if has_values(*found.values()):
        data = [
            share_of(x, found[key], name, colour, "journey", hovertemplate="%{y:.3f} s")
            for key, (name, colour) in parts.items()
        ]
    words = "Mean seconds of an attempt from its lease to the draw."
    return Plot("journey", "What an attempt took", words, data,
                layout(xaxis=version_axis(), yaxis=axis("seconds", rangemode="tozero")))  # fmt: skip


def push_plot(run: RunData, timeline: Timeline) -> Plot:
    """Median and slowest push of each stretch of time, and the trainer's upload."""
    pushes = [(float(line["time_s"]), float(ms)) for line in run.pools for ms in line["pools"]["push_ms"]]
    bins: dict[int, list[float]] = {}
    for now, ms in pushes:
        bins.setdefault(int(np.searchsorted(timeline.edges, now)), []).append(ms)
    x = [timeline.in_unit((place - 0.5) * timeline.width) for place in sorted(bins)]
    held = [bins[place] for place in sorted(bins)]
    data = []
    if pushes:
        dots = {"mode": "markers", "hovertemplate": "%{y:.0f} ms"}
        data = [
            line(x, rounded([percentile(found, 50) for found in held]), "median", INK, **dots),
            line(x, rounded([max(found) for found in held]), "slowest", MUTED, **dots),
        ]
        data[1]["marker"] = {"color": MUTED, "symbol": "triangle-up-open", "size": 8}
        end = [0.0, timeline.end]
        for percent, dash in ((50, "solid"), (99, "dot")):
            level = percentile([ms for _, ms in pushes], percent)
            data.append(line(end, [level, level], f"p{percent}, whole run: {level:.0f} ms", MUTED, mode="lines",
                             line={"width": 1, "dash": dash}, hoverinfo="skip"))  # fmt: skip
    words = "From the moment the trainer announces a policy to the moment a node serves it."
    y = axis("milliseconds", rangemode="tozero")
    return Plot(
        "push", "Push latency", words, data, layout(xaxis=time_axis(timeline.unit, timeline.end), yaxis=y), wide=True
    )


def buffer_plot(run: RunData, timeline: Timeline) -> Plot:
    """The open attempts of the ledger over time."""
    every = max(1, -(-len(run.pools) // MOST_LINES))
    lines = run.pools[::every]
    x = [timeline.in_unit(float(record["time_s"])) for record in lines]
    holders = {
        "leased": ("leased (with a node)", INFERENCE),
        "ready": ("ready (in the buffer)", BUFFER),
        "batched": ("batched (with the trainer)", TRAINER),
    }
    ledgers = [nested_ledger(record["pools"]["ledger"]) for record in lines]
    data = [
        share_of(x, [float(ledger[state]) for ledger in ledgers], name, colour, "open", hovertemplate="%{y:,.0f}")
        for state, (name, colour) in holders.items()
        if lines
    ]
    words = "Attempts that are issued and not closed, by who has them."
    y = axis("attempts", rangemode="tozero")
    return Plot(
        "open", "Attempts under way", words, data, layout(xaxis=time_axis(timeline.unit, timeline.end), yaxis=y)
    )


def _strip(x: Sequence[float], place: int, name: str, idle: Sequence[float | None], colour: str) -> Trace:
    """A row of its own, as each has a name and a colour of its own."""
    return {
        "type": "heatmap",
        "x": list(x),
        "y": [place],
        "z": [rounded([None if share is None else 1 - share for share in idle])],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#ffffff"], [1, colour]],
        "showscale": False,
        "ygap": 3,
        "hoverongaps": False,
        "hovertemplate": f"{text(name)}: busy %{{z:.0%}}<extra></extra>",
    }

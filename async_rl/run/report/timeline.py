"""What both pools did and when, from what was recorded: seconds and tokens, spread over equal stretches of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_rl.run.metrics import Record

FloatArray = NDArray[np.float64]

MOST_BINS = 120  # more would be thinner than a line on a screen
LEAST_BIN_S = 1.0  # the buffer's view is recorded about once a second
COVERED = 0.1  # of a bin must be accounted for before a share of it is shown

UNITS = ((3 * 3600, "hours", 3600.0), (600, "minutes", 60.0), (0, "seconds", 1.0))  # from so many seconds on

COUNTERS = ("alive_s", "busy_s", "sampled_tokens")  # of a node: they only rise while it lives
PHASES = ("waiting", "training", "publishing", "other")


class Span(NamedTuple):
    """`amount` (seconds of work, tokens), done evenly between `start` and `end` (seconds since the run began)."""

    start: float
    end: float
    amount: float


@dataclass(frozen=True)
class NodeWork:
    """One node, each array of one value a bin: seconds busy, seconds alive, tokens of finished answers."""

    slots: int
    busy: FloatArray
    alive: FloatArray
    tokens: FloatArray


@dataclass(frozen=True)
class Timeline:
    """`edges` [bins + 1] in seconds; `phases` are the trainer's seconds in each of PHASES, `trained` its tokens."""

    edges: FloatArray
    nodes: dict[str, NodeWork]
    phases: dict[str, FloatArray]
    trained: FloatArray

    @property
    def width(self) -> float:
        """Seconds."""
        return float(self.edges[1] - self.edges[0])

    @property
    def unit(self) -> str:
        """What people read the time of this run in."""
        return self._unit[0]

    @property
    def middles(self) -> list[float]:
        """Of the bins, in `unit`."""
        return [self.in_unit(seconds) for seconds in (self.edges[1:] + self.edges[:-1]) / 2]

    @property
    def end(self) -> float:
        """In `unit`."""
        return self.in_unit(float(self.edges[-1]))

    def in_unit(self, seconds: float) -> float:
        return round(float(seconds) / self._unit[1], 4)

    @property
    def _unit(self) -> tuple[str, float]:
        return next((name, seconds) for least, name, seconds in UNITS if self.edges[-1] >= least)


def timeline(steps: Sequence[Record], pools: Sequence[Record], seconds: float) -> Timeline:
    """Bins over `seconds`, filled from the steps and from the buffer's view (see RunData.pools)."""
    bins = int(np.clip(seconds / LEAST_BIN_S, 1, MOST_BINS))
    edges = np.linspace(0.0, max(seconds, LEAST_BIN_S), bins + 1)
    phases = trainer_phases(steps)
    trained = [Span(start, end, float(step.get("tokens") or 0)) for step, (start, end) in _step_times(steps)]
    return Timeline(
        edges=edges,
        nodes={name: _node_work(spans, edges) for name, spans in node_spans(pools).items()},
        phases={name: spread(phases[name], edges) for name in PHASES},
        trained=spread(trained, edges),
    )


def spread(spans: Iterable[Span], edges: FloatArray) -> FloatArray:
    """How much of the spans' amounts falls between neighbouring edges [bins + 1] -> [bins]."""
    rows = [span for span in spans if span.end > span.start]
    if not rows:
        return np.zeros(len(edges) - 1)
    start, end, amount = np.array(rows, dtype=np.float64).T
    until = [float(np.sum(amount * np.clip((edge - start) / (end - start), 0.0, 1.0))) for edge in edges]
    return np.diff(np.array(until))


def idle_share(busy: FloatArray, alive: FloatArray, width: float) -> list[float | None]:
    """The share of each bin without work; None where (next to) nothing is known of it."""
    return [
        min(1.0, max(0.0, 1.0 - work / time)) if time > COVERED * width else None
        for work, time in zip(busy.tolist(), alive.tolist(), strict=True)
    ]


def pool_idle(line: Timeline) -> list[float | None]:
    """Of the inference pool, its nodes weighted by their slots."""
    zero = np.zeros(len(line.edges) - 1)
    busy = sum((node.busy * node.slots for node in line.nodes.values()), zero)
    alive = sum((node.alive * node.slots for node in line.nodes.values()), zero)
    return idle_share(busy, alive, line.width)


def trainer_idle(line: Timeline) -> list[float | None]:
    """The share of its steps that the trainer waited for a batch."""
    whole = sum((line.phases[name] for name in PHASES), np.zeros(len(line.edges) - 1))
    return idle_share(whole - line.phases["waiting"], whole, line.width)


# --- the trainer -----------------------------------------------------------------------------------------------------


def trainer_phases(steps: Sequence[Record]) -> dict[str, list[Span]]:
    """When the trainer waited for a batch, trained, published (confirmed and uploaded), and did other things
    (checkpoints), by the parts of each step in the order in which they come."""
    phases: dict[str, list[Span]] = {name: [] for name in PHASES}
    for step, (start, _) in _step_times(steps):
        for name, seconds in step_parts(step).items():
            phases[name].append(Span(start, start + seconds, seconds))
            start += seconds
    return phases


def step_parts(step: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of one step in each of PHASES. Older records know no cycle_s: publishing is then among "other"."""
    waiting, training, whole = (float(step.get(key) or 0) for key in ("draw_wait_s", "train_s", "step_s"))
    publishing = max(0.0, float(step.get("cycle_s") or training) - training)
    other = max(0.0, whole - waiting - training - publishing)
    return {"waiting": waiting, "training": training, "publishing": publishing, "other": other}


def _step_times(steps: Sequence[Record]) -> list[tuple[Record, tuple[float, float]]]:
    """Each step with its start and end; a step is recorded when it ends."""
    timed = [step for step in steps if step.get("step_s") and step.get("time_s") is not None]
    return [(step, (float(step["time_s"]) - float(step["step_s"]), float(step["time_s"]))) for step in timed]


# --- the nodes -------------------------------------------------------------------------------------------------------


class NodeSpans(NamedTuple):
    slots: int
    busy: list[Span]
    alive: list[Span]
    tokens: list[Span]


def node_spans(pools: Sequence[Record]) -> dict[str, NodeSpans]:
    """What each node did between two lines, from the differences of its counters. The counters of a node that came
    back, or of a buffer that was started again, begin anew; those of one that has not been heard of stand still."""
    found: dict[str, NodeSpans] = {}
    seen: dict[str, tuple[float, Record]] = {}
    session_start, uptime = 0.0, 0.0
    for line in pools:
        now, view = float(line["time_s"]), line["pools"]
        if view["uptime_s"] < uptime:  # another buffer
            seen, session_start = {}, now
        uptime = view["uptime_s"]
        for node in view["nodes"]:
            name = str(node["name"])
            then, before = seen.get(name, (session_start, None))
            if before is not None and node["alive_s"] == before["alive_s"]:
                continue
            if before is None or any(node[key] < before[key] for key in COUNTERS):
                before = dict.fromkeys(COUNTERS, 0)
                then = max(then, now - node["alive_s"])
            spans = found.setdefault(name, NodeSpans(int(node["slots"]), [], [], []))
            for key, series in (("busy_s", spans.busy), ("alive_s", spans.alive)):
                # No more than the time there was: a node may have lived before the run's clock began.
                series.append(Span(then, now, min(float(node[key] - before[key]), now - then)))
            spans.tokens.append(Span(then, now, float(node["sampled_tokens"] - before["sampled_tokens"])))
            seen[name] = (now, node)
    return found


def _node_work(spans: NodeSpans, edges: FloatArray) -> NodeWork:
    return NodeWork(spans.slots, spread(spans.busy, edges), spread(spans.alive, edges), spread(spans.tokens, edges))

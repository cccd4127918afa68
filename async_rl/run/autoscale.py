"""[launch.autoscale]: how many nodes a run should have, by who waits for whom.

Two shares say it all, each over one look at the pools (`every` seconds, and a training step, at least): that of the
trainer's time in which it waited for a batch, and that of the nodes' time in which they had work. A trainer that waits
while the nodes are busy wants more of them: what it could use is its batches over the time it works. Nodes without
work, be the buffer full or the bound reached, are too many: a smaller pool would do the same.

A pool is left alone for `cool_down` seconds after each change, and changes only when `looks` looks in a row say so, by
the least that any of them said. Between "too few" and "too many" lies room on purpose: a pool that was made smaller is
not busy enough to be made larger again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from async_rl.launch_config import AutoscaleConfig
from async_rl.run.metrics import Record
from async_rl.run.scaling import ScaleError, Sizes
from async_rl.wire.messages import Status


class Pressure(NamedTuple):
    """Shares from 0 to 1."""

    trainer_idle: float
    nodes_busy: float


def wanted(nodes: int, pressure: Pressure, settings: AutoscaleConfig) -> int:
    """How many nodes would do, within the bounds; at most twice as many as there are."""
    idle, busy = pressure
    if idle > settings.trainer_idle and busy > settings.nodes_busy:
        aim = math.ceil(nodes / max(1 - idle, 0.5))
    elif idle <= settings.trainer_idle:
        aim = min(nodes, math.ceil(round(nodes * busy / settings.nodes_busy, 6)))
    else:
        aim = nodes  # both wait: it is not their number
    return min(settings.max_nodes, max(settings.min_nodes, aim))


class Judge:
    """The rule over time: hysteresis and cool-down. Pure: time is what it is told."""

    def __init__(self, settings: AutoscaleConfig, now: float) -> None:
        self._settings = settings
        self._quiet_until = now + settings.cool_down
        self._said: list[int] = []

    def hear(self, now: float, nodes: int, pressure: Pressure) -> int:
        """How many nodes there shall be from now on."""
        if now < self._quiet_until:
            return nodes
        aim = wanted(nodes, pressure, self._settings)
        if self._said and (self._said[-1] > nodes) != (aim > nodes):
            self._said.clear()
        if aim == nodes:
            self._said.clear()
            return nodes
        self._said.append(aim)
        if len(self._said) < self._settings.looks:
            return nodes
        decided = min(self._said) if aim > nodes else max(self._said)
        self.changed(now)
        return decided

    def changed(self, now: float) -> None:
        """By whomever: it has to show first what it does."""
        self._said.clear()
        self._quiet_until = now + self._settings.cool_down


class Mark(NamedTuple):
    """Where a look begins: steps done, and each node's times."""

    now: float
    steps: int
    nodes: Mapping[str, tuple[float, float]]


class Autoscale:
    """Looks at a run's numbers as they come, and has its pool resized. `look` is called all the time."""

    def __init__(self, settings: AutoscaleConfig, sizes: Sizes, now: float) -> None:
        self._settings = settings
        self._sizes = sizes
        self._judge = Judge(settings, now)
        self._mark: Mark | None = None
        self._there: list[str] = []

    def look(self, now: float, steps: Sequence[Record], status: Status | None) -> str:
        """What was done, in words; mostly nothing. Does not wait."""
        there = self._sizes.present(self._settings.group)
        if there != self._there:  # somebody else changed it, or a node was lost for good
            self._there, self._mark = there, None
            self._judge.changed(now)
        mine = _times(status, there)
        if mine is None:
            self._mark = None
            return ""
        if self._mark is None or len(steps) < self._mark.steps:  # the trainer went back to a checkpoint
            self._mark = Mark(now, len(steps), mine)
            return ""
        if now - self._mark.now < self._settings.every or len(steps) <= self._mark.steps:
            return ""
        mark, self._mark = self._mark, Mark(now, len(steps), mine)
        pressure = pressure_of(mark, steps, mine)
        nodes = self._judge.hear(now, len(there), pressure)
        return self._resize(nodes, pressure) if nodes != len(there) else ""

    def _resize(self, nodes: int, pressure: Pressure) -> str:
        try:
            answer = self._sizes.resize(self._settings.group, nodes)
        except ScaleError as error:
            return f"autoscale: {error}"
        self._there, self._mark = self._sizes.present(self._settings.group), None
        done = ", ".join((*answer.started, *answer.dismissed))
        verb = "started" if answer.started else "dismissed"
        return (
            f"autoscale: {answer.before} → {nodes} nodes, {done} {verb}: the trainer waited "
            f"{pressure.trainer_idle:.0%} of its time, the nodes had work {pressure.nodes_busy:.0%} of theirs"
        )


def _times(status: Status | None, there: Sequence[str]) -> dict[str, tuple[float, float]] | None:
    """Seconds with work, and seconds alive, of each of these nodes; None unless all of them are at work."""
    if status is None:
        return None
    times = {node.name: (node.busy_s, node.alive_s) for node in status.nodes if node.state == "ready"}
    return {name: times[name] for name in there} if times.keys() >= set(there) else None


def pressure_of(mark: Mark, steps: Sequence[Record], nodes: Mapping[str, tuple[float, float]]) -> Pressure:
    """Between a mark and now, when the nodes' times are these."""
    new = steps[mark.steps :]
    before = float(steps[mark.steps - 1]["time_s"]) if mark.steps else 0.0
    span = max(float(new[-1]["time_s"]) - before, 1e-9)
    waited = sum(float(step.get("draw_wait_s") or 0.0) for step in new)
    # A node that joined anew counts from 0 again: its look says nothing.
    both = [(busy - mark.nodes[name][0], alive - mark.nodes[name][1]) for name, (busy, alive) in nodes.items()]
    alive_s = sum(alive for _, alive in both if alive > 0)
    busy_s = sum(min(max(busy, 0.0), alive) for busy, alive in both if alive > 0)
    return Pressure(min(1.0, waited / span), busy_s / alive_s if alive_s else 0.0)

"""What a person sees while a run goes on: a live panel in a terminal, plain lines anywhere else.

Pure functions turn a `Snapshot` into text; `view.RunView` gathers snapshots, and the two displays only print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.run.metrics import Record, set_of
from async_rl.run.summary import OPEN_STATES, nested_ledger
from async_rl.wire.messages import NodeStatus, Status

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
RECENT_STEPS = 10  # rates and time left are over the last steps, as the first ones are slow
PLAIN_EVERY = 5.0  # seconds between plain lines while steps are made
PLAIN_QUIET = 30.0  # seconds after which a line is due although nothing happened
LABEL_WIDTH = 9


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment. `status` is None until the buffer answers; `rollout_rate` is in tokens a
    second over the last seconds, None when unknown; `evals` are of the first set, `more_evals` of each other."""

    title: str
    total_steps: int
    bound: int
    elapsed_s: float
    steps: Sequence[Record] = ()
    evals: Sequence[Record] = ()
    more_evals: Sequence[Sequence[Record]] = ()
    status: Status | None = None
    rollout_rate: float | None = None

    @property
    def evaluations(self) -> int:
        return sum(map(len, (self.evals, *self.more_evals)))

    @property
    def done(self) -> int:
        return int(self.steps[-1]["version"]) if self.steps else 0


# --- text, pure ------------------------------------------------------------------------------------------------------


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """`values` as at most `width` bars from the smallest to the largest, each the mean of its share of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[len(BARS) // 2] * width
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_left(snapshot: Snapshot) -> float | None:
    """From the pace of the last steps; None before there is one."""
    recent = [float(step["step_s"]) for step in snapshot.steps[-RECENT_STEPS:] if step.get("step_s")]
    if not recent:
        return None
    return sum(recent) / len(recent) * (snapshot.total_steps - snapshot.done)


def train_rate(steps: Sequence[Record]) -> float | None:
    """Trained tokens a second over the last steps, waiting included."""
    recent = [step for step in steps[-RECENT_STEPS:] if step.get("tokens") and step.get("step_s")]
    seconds = sum(float(step["step_s"]) for step in recent)
    return sum(float(step["tokens"]) for step in recent) / seconds if seconds > 0 else None


def reward_text(steps: Sequence[Record]) -> str:
    rewards = [float(step["reward"]) for step in steps if step["reward"] is not None]
    if not rewards:
        return "–"
    recent = rewards[-RECENT_STEPS:]
    return f"{sum(recent) / len(recent):.3f}  {sparkline(rewards)}"


def eval_text(evals: Sequence[Record]) -> str:
    if not evals:
        return "–"
    last = evals[-1]
    start = f"{float(evals[0]['reward']):.3f} → " if len(evals) > 1 else ""
    passes = "".join(f", pass@{k} {each['value']:.3f}" for k, each in _passes(last))
    return f"{start}{float(last['reward']):.3f}{passes}  (version {last['version']}, {last['n']} samples)"


def _passes(evaluation: Record) -> Iterator[tuple[str, Record]]:
    """pass@k beyond the first, which is much like the mean."""
    return ((k, each) for k, each in evaluation.get("pass", {}).items() if k != "1" and each["value"] is not None)


def sets_text(snapshot: Snapshot) -> str:
    """A line for each set; with its name, where there are several."""
    sets = [snapshot.evals, *snapshot.more_evals]
    return "\n".join(f"{set_of(evals[0])}: {eval_text(evals)}" if len(sets) > 1 else eval_text(evals) for evals in sets)


def staleness_text(steps: Sequence[Record], bound: int) -> str:
    if not steps:
        return f"bound {bound}"
    last = steps[-1]
    return f"max {int(last['staleness_max'])}, mean {float(last['staleness_mean']):.2f}  (bound {bound})"


def rates_text(snapshot: Snapshot) -> str:
    return f"rollout {_rate(snapshot.rollout_rate)}, train {_rate(train_rate(snapshot.steps))}"


def node_text(node: NodeStatus) -> str:
    policy = f"policy {node.policy.short()}" if node.policy else "no policy yet"
    return f"{node.name}  {node.state}  {policy}  {node.leased_samples} in work  busy {node.busy_fraction:.0%}"


def ledger_text(flat: dict[str, int]) -> str:
    """The identity itself, as a person can check it."""
    ledger = nested_ledger(flat)
    parts = [f"{ledger[state]:,} {state}" for state in OPEN_STATES]
    dropped = {reason: count for reason, count in ledger["dropped"].items() if count}
    reasons = f" ({', '.join(f'{count:,} {reason}' for reason, count in dropped.items())})" if dropped else ""
    return f"{ledger['issued']:,} issued = {' + '.join(parts)} + {sum(dropped.values()):,} dropped{reasons}"


def plain_line(snapshot: Snapshot) -> str:
    """One line for a log."""
    left = seconds_left(snapshot)
    parts = [f"step {snapshot.done}/{snapshot.total_steps}"]
    if snapshot.steps:
        reward = snapshot.steps[-1]["reward"]
        parts.append(f"reward {reward:.3f}" if reward is not None else "reward –")
    if snapshot.evals:
        for last in (evals[-1] for evals in (snapshot.evals, *snapshot.more_evals)):
            name = "eval" if not snapshot.more_evals else f"eval {set_of(last)}"
            parts.append(f"{name} {float(last['reward']):.3f} at version {last['version']}")
    if snapshot.steps:
        parts.append(f"staleness {staleness_text(snapshot.steps, snapshot.bound)}")
        parts.append(f"tokens/s {rates_text(snapshot)}")
    if snapshot.status and snapshot.status.nodes:
        versions = (str(node.policy.version) if node.policy else "–" for node in snapshot.status.nodes)
        parts.append(f"nodes at version {', '.join(versions)}")
    if left is not None:
        parts.append(f"left {duration(left)}")
    if snapshot.status and snapshot.status.waiting and not snapshot.steps:
        parts.append(snapshot.status.waiting)
    return " | ".join(parts)


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f}"


# --- the panel -------------------------------------------------------------------------------------------------------


def live_panel(snapshot: Snapshot) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold cyan", width=LABEL_WIDTH)
    rows.add_column(overflow="fold")
    rows.add_row("steps", _progress(snapshot))
    rows.add_row("reward", Text(reward_text(snapshot.steps), style="green"))
    rows.add_row("eval", sets_text(snapshot))
    rows.add_row("staleness", staleness_text(snapshot.steps, snapshot.bound))
    rows.add_row("tokens/s", rates_text(snapshot))
    status = snapshot.status
    if status is not None:
        for index, node in enumerate(status.nodes):
            rows.add_row("nodes" if index == 0 else "", Text(node_text(node)))
        rows.add_row("ledger", Text(ledger_text(status.ledger)))
        rows.add_row("waiting", Text(status.waiting or "nobody", style="dim"))
    else:
        rows.add_row("waiting", Text("for the buffer to answer", style="dim"))
    return Panel(Group(rows), title=f"async-rl · {snapshot.title}", title_align="left", border_style="cyan")


def _progress(snapshot: Snapshot) -> RenderableType:
    left = seconds_left(snapshot)
    when = f"{duration(left)} left" if left is not None else "starting"
    line = Table.grid(padding=(0, 2))
    line.add_row(
        ProgressBar(total=snapshot.total_steps, completed=snapshot.done, width=SPARK_WIDTH),
        f"{snapshot.done}/{snapshot.total_steps}",
        f"{duration(snapshot.elapsed_s)} elapsed, {when}",
    )
    return line


# --- showing it ------------------------------------------------------------------------------------------------------


class Display(Protocol):
    """Shows snapshots; `update` may be called as often as one likes, `say` prints a line that stays."""

    def update(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class LiveDisplay:
    """Redraws one panel in place."""

    def __init__(self, console: Console) -> None:
        # No thread of rich's own: the launcher's loop draws, so nothing else runs when it forks.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        self._live.update(live_panel(snapshot), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """A line when the first step, a new evaluation or the last step is there, else every PLAIN_EVERY seconds while
    steps are made, and every PLAIN_QUIET seconds in any case, so that a log never looks dead."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last = clock()
        self._shown = (0, 0)

    def update(self, snapshot: Snapshot) -> None:
        if self._is_due(snapshot):
            self._shown = (snapshot.done, snapshot.evaluations)
            self._last = self._clock()
            self.say(plain_line(snapshot))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

    def _is_due(self, snapshot: Snapshot) -> bool:
        steps, evals = self._shown
        quiet = self._clock() - self._last
        if quiet >= PLAIN_QUIET or snapshot.evaluations > evals:
            return True
        if snapshot.done == steps:
            return False
        return steps == 0 or snapshot.done >= snapshot.total_steps or quiet >= PLAIN_EVERY


def make_display(console: Console | None = None) -> Display:
    console = console or Console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)

"""`async-rl bench rules`: what the replay buffer's rules cost per trajectory, however many groups are resident.

A steady state: in each step BATCH new tickets are leased, one batch is lent and confirmed, and BATCH * GROUP results
arrive, in one of two ways, each a cell:

- together: a node's results of a group arrive in one message, at any step between the lease and the draw. Resident are
  leased groups, and complete ones that wait for a straggler (fifo).
- apart: each result arrives on its own, at any such step. So what arrives in one step belongs to tickets, leases and
  nodes all over what is resident, nearly every event touches memory that no event touched for long, and nearly all
  groups are in part leased and in part held. This is the hardest mix that we know of.

The time is that of `Replay.apply` alone, for the whole life of an attempt with its share of the events that are not
its own: wanted, leased, arrived, drawn, registered, confirmed, attested. All payloads are the same 16 bytes: the
buffer never looks at them, and this is not about how much memory there is. The process treats the collector as the
service does (buffer/collector.py); `--collector default` leaves it alone.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Disposition, SamplingParams
from buffer.collector import collect_young_only
from buffer.events import (
    AnyEvent,
    BatchConfirmed,
    DrawRequested,
    Effect,
    GrantLease,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeWanted,
    PolicyRegistered,
    ResultArrived,
    ResultsArrived,
)
from buffer.replay import Replay
from buffer.rules import Rules

BATCH = 100  # tickets of a batch; one for each node, which so is leased one group a step
GROUP = 8
ALL = tuple(range(GROUP))
PAYLOAD = memoryview(bytes(16))
RESIDENT = (1_000, 10_000, 100_000, 1_000_000)
QUICK_RESIDENT = (1_000, 10_000)
STEPS, QUICK_STEPS = 100, 10  # of one measurement
CELLS = (("results of a group together", True), ("results apart", False))
METRICS = (
    Metric("cpu_us_per_traj", "CPU µs per trajectory", "lower"),
    Metric("ready_groups", "complete groups held back", "higher"),
    Metric("leased", "attempts leased", "higher"),
)


class SteadyState:
    """A replay in which `resident` groups are made and not spent, whenever no step is under way."""

    def __init__(self, resident: int, together: bool) -> None:
        self._together = together
        self._lag = resident // BATCH  # steps from the lease of a ticket until it is spent
        self._replay = Replay(steady_rules(self._lag))
        self._random = random.Random(resident)
        self._step = 0
        self._nodes = [f"node-{index}" for index in range(BATCH)]
        self._holders = array("H")  # by lease: the index of its node
        self._due: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))  # by step: lease * GROUP + sample
        self._runs: dict[int, tuple[VersionRun, ...]] = {}  # by version
        self._apply([PolicyRegistered(policy(0)), *(NodeJoined(node, GROUP) for node in self._nodes)])
        self._apply(NodeAttested(node, policy(0)) for node in self._nodes)

    def fill(self) -> None:
        """Up to the first draw."""
        while self._step < self._lag:
            self._leased(self._apply(self._wishes()))
            self._apply(self._arrivals())
            self._step += 1

    def measure(self, steps: int) -> Measures:
        """CPU time of the rules over so many steps."""
        seconds = 0.0
        for _ in range(steps):
            seconds += self._measured_step()
        counts = self._replay.ledger
        return {
            "cpu_us_per_traj": seconds * 1e6 / (steps * BATCH * GROUP),
            "ready_groups": self._replay.ready_groups,
            "leased": counts["leased"],
        }

    def _measured_step(self) -> float:
        version = self._step - self._lag
        wishes = self._wishes()
        started = time.process_time()
        effects = self._apply(wishes)
        seconds = time.process_time() - started
        self._leased(effects)
        before: list[AnyEvent] = [*self._arrivals(), DrawRequested(version)]
        started = time.process_time()
        effects = self._apply(before)
        seconds += time.process_time() - started
        (lent,) = [effect for effect in effects if isinstance(effect, LendBatch)]
        after: list[AnyEvent] = [PolicyRegistered(policy(version + 1)), self._confirmation(lent)]
        after += [NodeAttested(node, policy(version + 1)) for node in self._nodes]
        started = time.process_time()
        self._apply(after)
        seconds += time.process_time() - started
        self._step += 1
        return seconds

    def _apply(self, events: Iterable[AnyEvent]) -> list[Effect]:
        apply, now = self._replay.apply, float(self._step)
        return [effect for event in events for effect in apply(event, now)]

    def _wishes(self) -> list[AnyEvent]:
        """Each node asks for one more group."""
        return [NodeWanted(node, (self._step + 1) * GROUP) for node in self._nodes]

    def _leased(self, effects: Iterable[Effect]) -> None:
        """Decide when each sample of the leases granted will arrive: before its ticket is drawn."""
        for effect in effects:
            if isinstance(effect, GrantLease):
                self._holders.append(int(effect.node.removeprefix("node-")))
                arrives = self._some_step()
                for sample in effect.lease.samples:
                    arrives = arrives if self._together else self._some_step()
                    self._due[arrives].append(effect.lease.lease * GROUP + sample)

    def _some_step(self) -> int:
        return self._step + int(self._random.random() * self._lag)

    def _arrivals(self) -> list[AnyEvent]:
        """What arrives in this step, in random order."""
        due = list(self._due.pop(self._step, ()))
        if self._together:  # the samples of a lease are next to each other
            groups = [due[start : start + GROUP] for start in range(0, len(due), GROUP)]
            self._random.shuffle(groups)
            return [ResultsArrived(tuple(self._result(*divmod(each, GROUP)) for each in group)) for group in groups]
        self._random.shuffle(due)
        return [self._result(*divmod(attempt, GROUP)) for attempt in due]

    def _result(self, lease: int, sample: int) -> ResultArrived:
        version = max(0, lease // BATCH - self._lag)  # leases are granted by the batch, one a version
        runs = self._runs.get(version)
        if runs is None:
            runs = self._runs[version] = (VersionRun(version, policy(version).digest, 64),)
        node = self._nodes[self._holders[lease]]
        return ResultArrived(node, lease, sample, "ok", self._random.random(), runs, 64, PAYLOAD)

    def _confirmation(self, lent: LendBatch) -> BatchConfirmed:
        """Everything was trained. Leases are granted in the order of tickets and never again, so they are equal."""
        tickets = [group.ticket for group in lent.groups]
        return BatchConfirmed(lent.batch, tuple(Disposition(ticket, ALL, "trained") for ticket in tickets))


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


def steady_rules(lag: int) -> Rules:
    """Nothing but the nodes' wishes holds a ticket back."""
    return Rules(
        run_seed=7, steps=10**9, groups_per_step=BATCH, group_size=GROUP, max_staleness=lag, lead=lag, window=1,
        on_short_group="retry", zero_variance="keep", max_tries=8, capacity_bytes=10**15, group_bytes=10**5,
        lease_timeout=1e12, eval_share=0.5, sampling=SamplingParams(1.0, 1024),
    )  # fmt: skip


def cell(name: str, together: bool, resident: Sequence[int], steps: int, console: Console) -> Cell:
    """Its arms are filled and warmed up: two measurements' worth of steps that nobody sees."""

    def arm(count: int) -> Arm:
        console.print(f"{name}: filling a buffer with {count:,} groups", style="dim", highlight=False)
        state = SteadyState(count, together)
        state.fill()
        state.measure(2 * steps)
        return Arm(f"{count:,} resident", lambda: state.measure(steps))

    arms = [arm(count) for count in resident]
    return Cell(name, arms, arms[0].name)


def main(options: argparse.Namespace, console: Console) -> None:
    if options.collector == "service":
        collect_young_only()
    steps = QUICK_STEPS if options.quick else STEPS
    rounds = 2 if options.quick else options.rounds
    resident = options.resident or (QUICK_RESIDENT if options.quick else RESIDENT)
    settings = {"batch": BATCH, "group": GROUP, "steps": steps, "collector": options.collector}
    document: dict[str, Any] = {}
    for name, together in CELLS:
        # One cell after the other: each holds millions of attempts.
        made = run_bench("rules", [cell(name, together, resident, steps, console)], METRICS, rounds, settings, console)
        document = {**made, "cells": [*document.get("cells", []), *made["cells"]]}
    finish_bench(document, options, console)


def parser() -> argparse.ArgumentParser:
    parser = bench_parser("rules", "What the rules cost per trajectory, however many groups are resident.", rounds=7)
    parser.add_argument("--resident", type=int, nargs="+", metavar="N", help=f"groups, multiples of {BATCH}")
    parser.add_argument("--collector", choices=["service", "default"], default="service", help="Python's, of cycles")
    return parser


if __name__ == "__main__":
    bench_main(main, parser())

"""The real rules under a virtual clock: thousands of nodes, faults, hundreds of steps; seconds or minutes, not days.

`simulate(rules, scenario)` drives `Replay` as the service would. Only the world around it is pretended
(buffer.scenario): engines that decode step by step (buffer.virtual_node), pushes that take their time
(buffer.virtual_pushes), a trainer that looks at the version of every token it is given (buffer.virtual_trainer), and
everything that goes wrong with them. The same seed gives the same run. Times are in virtual seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from async_rl.wire.messages import Lease
from buffer.events import (
    AnyEvent,
    CancelLease,
    Effect,
    EndRun,
    EvalFinished,
    GrantLease,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeLost,
    NodeWanted,
    ResultArrived,
    ResultsArrived,
    RunFinished,
    Ticked,
)
from buffer.replay import Replay
from buffer.rules import Rules
from buffer.scenario import BLOCK, Scenario, Shapes, numbers, samples_asked
from buffer.virtual_node import ENDED, NEVER, Job, VirtualEngine
from buffer.virtual_pushes import IDLE, Pushes
from buffer.virtual_results import Outcomes
from buffer.virtual_trainer import StepRecord, VirtualTrainer

TICKS_PER_TIMEOUT = 4  # how often deadlines are looked at, for each lease time-out


class SimulationResult(NamedTuple):
    """`steps` confirmed in `seconds`; `error` is empty unless the run ended early, and says why. Staleness is counted
    per token lent to the trainer. Idle fractions are of the trainer's time, and of the live nodes'. Token counts are of
    training samples; `sampled_tokens` includes those that came to nothing, `trained_tokens` has each once however often
    it trains (`reused`: see buffer.reuse)."""

    steps: int
    seconds: float
    error: str
    staleness: dict[int, int]
    ledger: dict[str, int]
    eval_ledger: dict[str, int]
    outside: dict[str, int]
    evaluations: tuple[EvalFinished, ...]
    trainer_idle: float
    nodes_idle: float
    max_buffered_bytes: int
    events: int
    sampled_tokens: float
    trained_tokens: int
    log: tuple[StepRecord, ...]
    reused: dict[str, int]

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        tokens = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / tokens if tokens else 0.0


class _Node:
    """One life of a node; a node that joins again is a new one of the same name and place."""

    __slots__ = (
        "ahead", "alive", "asked", "closed", "due", "engine", "granted", "jobs", "joined_at", "lost_to_buffer", "name",
        "place", "touched",
    )  # fmt: skip

    def __init__(self, name: str, place: int, engine: VirtualEngine, ahead: int, now: float) -> None:
        self.name = name
        self.place = place
        self.engine = engine
        self.ahead = ahead
        self.joined_at = now
        self.jobs: dict[int, list[Job]] = {}  # by lease; what is not with the buffer yet
        self.closed = self.asked = self.granted = 0  # training samples; closed are delivered or cancelled
        self.due = NEVER
        self.alive = True
        self.lost_to_buffer = False
        self.touched = False


class Simulation:
    """State of a run; `simulate` is the way in. `check(replay, now)` is called after every event."""

    def __init__(self, rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None) -> None:
        self.rules = rules
        self.scenario = scenario
        self.replay = Replay(rules)
        self.now = 0.0
        self._check = check
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._events = 0
        self._max_bytes = 0
        self._error = ""
        self._evaluations: list[EvalFinished] = []
        # A stream for each thing that is random, so that a change in one leaves the others' draws as they were.
        chance, shapes, delivery, trainer, lives, self._factors, pushes = np.random.default_rng(scenario.seed).spawn(7)
        self._chance = _uniform(chance)
        self._shapes = Shapes(scenario.lengths, rules.group_size, scenario.slots, shapes)
        self._delivery_s = numbers(scenario.delivery_s, delivery)
        self._lives = lives
        self._outcomes = Outcomes(rules, scenario, self._chance)
        self._trainer = VirtualTrainer(rules.steps, scenario, self, self._chance, trainer)
        places = scenario.nodes + sum(count for _, count in scenario.joins)
        self._pushes = Pushes(places, scenario.push_s, pushes)
        self._nodes: dict[str, _Node] = {}
        self._at_place: list[_Node | None] = [None] * places
        self._touched: list[_Node] = []
        self._serving = 0  # live nodes with a policy
        self._node_s = self._busy_s = self._sampled = 0.0
        self._eval_tokens = 0

    def run(self) -> SimulationResult:
        scenario = self.scenario
        place = 0
        for seconds, count in ((0.0, scenario.nodes), *scenario.joins):
            self.at(seconds, self._join_all, place, place + count)
            place += count
        self.at(0.0, self._trainer.start)
        self.at(0.0, self._tick)
        self._loop()
        self.apply(RunFinished(self._error or "all steps are done"))
        for node in self._nodes.values():
            if node.alive:
                self._retire(node)
        return self._result()

    def _loop(self) -> None:
        """Until the last step is over, or the run cannot go on."""
        queue, pushes, trainer = self._queue, self._pushes, self._trainer
        while not (trainer.done or self._error):
            if self._touched:
                self._schedule()
            if pushes.next_at < queue[0][0]:
                self._flip()
            else:
                self.now, _, act, arguments = heapq.heappop(queue)
                act(*arguments)

    def _result(self) -> SimulationResult:
        replay, trainer = self.replay, self._trainer
        return SimulationResult(
            steps=replay.confirmed_batches,
            seconds=self.now,
            error=self._error,
            staleness=dict(trainer.staleness),
            ledger=replay.ledger,
            eval_ledger=replay.eval_ledger,
            outside=replay.outside,
            evaluations=tuple(self._evaluations),
            trainer_idle=sum(record.draw_wait_s for record in trainer.log) / self.now if self.now else 0.0,
            nodes_idle=1.0 - self._busy_s / self._node_s if self._node_s else 0.0,
            max_buffered_bytes=self._max_bytes,
            events=self._events,
            sampled_tokens=self._sampled - self._eval_tokens,
            trained_tokens=trainer.trained_tokens,
            log=tuple(trainer.log),
            reused=replay.reused,
        )

    # --- the clock, and the way into the rules -----------------------------------------------------------------------

    def at(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, act, arguments))

    def apply(self, event: AnyEvent) -> None:
        effects = self.replay.apply(event, self.now)
        self._events += 1
        if self._check is not None:
            self._check(self.replay, self.now)
        if effects:
            self._max_bytes = max(self._max_bytes, self.replay.groups.credit.held_bytes)
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case GrantLease(node=name, lease=lease):
                self._take(self._nodes[name], lease)
            case CancelLease(node=name, lease=lease_id):
                self._drop(self._nodes[name], lease_id)
            case LendBatch():
                self._trainer.lend(effect)
            case EvalFinished():
                self._evaluations.append(effect)
            case EndRun(error=error):
                self._error = error

    def _tick(self) -> None:
        """Deadlines are looked at, the trainer's own included."""
        self.at(self.rules.lease_timeout / TICKS_PER_TIMEOUT, self._tick)
        self.apply(Ticked())
        if self.replay.draw_pending and self.now - self._trainer.drawn_at > self.scenario.draw_timeout_s:
            self._error = f"stuck after {self.replay.confirmed_batches} steps: {self.replay.waiting(self.now)}"

    # --- a node's life -----------------------------------------------------------------------------------------------

    def _join_all(self, first: int, end: int) -> None:
        for place in range(first, end):
            self._join(f"node-{place}", place)

    def _join(self, name: str, place: int) -> None:
        scenario = self.scenario
        factor = self._factors.uniform(1.0, scenario.slowest)
        engine = VirtualEngine(scenario.slots, scenario.speed, factor, scenario.in_flight)
        node = _Node(name, place, engine, samples_asked(scenario.slots, self.rules.group_size), self.now)
        self._nodes[name] = self._at_place[place] = node
        self.apply(NodeJoined(name, scenario.slots))
        self._pushes.join(place, self.now)
        if scenario.node_life_s:
            self.at(self._lives.exponential(scenario.node_life_s), self._die, node)

    def announce(self, version: int) -> None:
        """A policy is registered: it is pushed to every node."""
        self._pushes.announce(version, self.now)

    def _flip(self) -> None:
        """Pushes are complete, up to the next thing that happens otherwise."""
        pushes, queue = self._pushes, self._queue
        while pushes.next_at < queue[0][0] and not self._touched:
            self.now, place, version = pushes.finish()
            if place == IDLE:
                continue
            node, policy = self._at_place[place], self._trainer.served[version]
            assert node is not None
            engine = node.engine
            if engine.policy is None:
                self._serving += 1
                self._touch(node)
            engine.flip(policy, self.now)
            if self.scenario.in_flight == "recompute":
                self._touch(node)
            self.apply(NodeAttested(node.name, policy))

    def _die(self, node: _Node) -> None:
        serves = node.engine.policy is not None
        if self._serving - serves < 1:
            return
        node.alive = False
        self._serving -= serves
        self._pushes.leave(node.place)
        if next(self._chance) < self.scenario.undead:
            node.lost_to_buffer = True
            node.engine.drain(self.now)
            self._touch(node)
            self.apply(NodeLost(node.name, "thought dead"))
        else:
            node.due = NEVER
            self.at(self.scenario.notice_s, self._notice, node)
        self._retire(node)
        self.at(self.scenario.rejoin_s, self._join, node.name, node.place)

    def _notice(self, node: _Node) -> None:
        """Unless a new life of that name has joined in the meantime, which has closed the old one's leases."""
        if self._nodes[node.name] is node:
            self.apply(NodeLost(node.name, "silent for three heartbeats"))

    def _retire(self, node: _Node) -> None:
        """Its books are closed; one that is only thought dead goes on outside of them."""
        if not node.lost_to_buffer:
            node.engine.stop(self.now)
        self._node_s += self.now - node.joined_at
        self._busy_s += min(node.engine.busy_s, self.now - node.joined_at)
        self._sampled += node.engine.done_rows

    # --- a node's work -----------------------------------------------------------------------------------------------

    def _ask(self, node: _Node) -> None:
        """Tell the demand, as a running total. As long as samples that were asked for are outstanding the buffer knows
        that this node waits, and would do nothing else if it heard more."""
        wanted = int(node.closed + node.engine.spared) + node.ahead
        if node.alive and node.engine.policy is not None and wanted > node.granted:
            node.asked = wanted
            self.apply(NodeWanted(node.name, wanted))

    def _take(self, node: _Node, lease: Lease) -> None:
        if not node.alive:
            return
        if self.scenario.whole_groups:
            jobs = [self._job(lease, lease.samples, self._shapes.whole(len(lease.samples)))]
        else:
            jobs = [self._job(lease, (sample,), self._shapes.single()) for sample in lease.samples]
        node.jobs[lease.lease] = jobs
        for job in jobs:
            node.engine.submit(job, self.now)
        if lease.split == "train":
            node.granted += len(lease.samples)
        self._touch(node)

    def _job(self, lease: Lease, samples: tuple[int, ...], shape: tuple[int, float, int]) -> Job:
        steps, rows, tokens = shape
        hangs = self.scenario.hangs and next(self._chance) < self.scenario.hangs
        return Job(lease, samples, NEVER if hangs else steps, rows, tokens)

    def _drop(self, node: _Node, lease_id: int) -> None:
        """A lease was cancelled."""
        if not node.alive:
            return
        for job in list(node.jobs.get(lease_id, ())):
            self._close(node, job)
            if job.end != ENDED:
                node.engine.cancel(job, self.now)
        self._touch(node)

    def _touch(self, node: _Node) -> None:
        if not node.touched:
            node.touched = True
            self._touched.append(node)

    def _schedule(self) -> None:
        """What changed in an engine decides anew when it is heard of next; its older entry in the queue is void. A
        node whose demand is met asks again."""
        while self._touched:
            node = self._touched.pop()
            node.touched = False
            if node.asked <= node.granted:
                self._ask(node)
            due = node.engine.due()
            if due == self.now:
                node.due = due
                self._advance(node, due)
            elif due != node.due:
                node.due = due
                if due < NEVER:
                    self._count += 1
                    heapq.heappush(self._queue, (due, self._count, self._advance, (node, due)))

    def _advance(self, node: _Node, due: float) -> None:
        if node.due != due:
            return
        node.due = NEVER
        ended = node.engine.advance(self.now)
        self._touch(node)
        if ended:
            delay = next(self._delivery_s)
            if delay:
                self.at(delay, self._deliver, node, ended)
            else:
                self._deliver(node, ended)

    def _deliver(self, node: _Node, ended: Sequence[Job]) -> None:
        """One message with all that ended together."""
        if not (node.alive or node.lost_to_buffer):
            return
        results: list[ResultArrived] = []
        for job in ended:
            if job.open:
                self._close(node, job)
                self._eval_tokens += job.tokens if job.lease.split == "eval" else 0
                results += self._outcomes.of(node.name, job)
        if results:
            self.apply(results[0] if len(results) == 1 else ResultsArrived(tuple(results)))
        if node.asked <= node.granted:
            self._ask(node)

    def _close(self, node: _Node, job: Job) -> None:
        job.open = False
        node.closed += len(job.samples) if job.lease.split == "train" else 0
        jobs = node.jobs[job.lease.lease]
        jobs.remove(job)
        if not jobs:
            del node.jobs[job.lease.lease]


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()


def simulate(
    rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None
) -> SimulationResult:
    """Run until all steps are confirmed, or the rules end the run (see `error`)."""
    return Simulation(rules, scenario, check).run()

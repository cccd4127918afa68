"""The real rules under a virtual clock: thousands of nodes, faults, hundreds of steps; seconds or minutes, not days.

`simulate(rules, scenario)` drives `Replay` as the service would. Only the world around it is pretended
(buffer.scenario): engines that decode step by step (buffer.virtual_node), pushes that take their time
(buffer.virtual_pushes), a trainer that looks at the version of every token it is given (buffer.virtual_trainer), and
everything that goes wrong with them. The same seed gives the same run. Times are in virtual seconds.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from async_rl.asking import Ask, Asking
from async_rl.shards import home_shard, shard_of, split_dispositions, total, whole_batch
from async_rl.version import PolicyId
from async_rl.wire.messages import Lease
from buffer.events import (
    AnyEvent,
    BatchConfirmed,
    BundleArrived,
    CancelLease,
    DrawRequested,
    Effect,
    EndRun,
    EvalFinished,
    EvalRequested,
    GrantLease,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeLost,
    NodeWanted,
    NothingFree,
    PolicyRegistered,
    ResultArrived,
    ResultsArrived,
    RunFinished,
    Ticked,
)
from buffer.replay import Replay
from buffer.rules import Rules, of_shard
from buffer.scenario import Scenario, Shapes, numbers, samples_asked, uniform
from buffer.virtual_node import ENDED, NEVER, Job, VirtualEngine
from buffer.virtual_pushes import IDLE, Pushes
from buffer.virtual_results import Outcomes, VirtualReplay, attempts_of
from buffer.virtual_trainer import StepRecord, VirtualTrainer

TICKS_PER_TIMEOUT = 4  # how often deadlines are looked at, for each lease time-out
CONTROL: Mapping[type, str] = {
    NodeJoined: "ready", NodeAttested: "serving", NodeWanted: "wants", PolicyRegistered: "published",
    DrawRequested: "draw", BatchConfirmed: "confirm", EvalRequested: "eval",
}  # fmt: skip
"""Events that a message of a node or of the trainer brings, by what the message is for."""


class SimulationResult(NamedTuple):
    """`steps` confirmed in `seconds`; `error` is empty unless the run ended early, and says why. Staleness is counted
    per token lent to the trainer. Idle fractions are of the trainer's time, and of the live nodes'. Token counts are of
    training samples; `sampled_tokens` includes those that came to nothing, `trained_tokens` has each once however often
    it trains (`reused`: see buffer.reuse). `control` are the messages between the shards of the buffer and their peers
    that carry no trajectory, by kind; `results` the attempts that came back. Ledgers are those of all shards."""

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
    control: dict[str, int]
    results: int

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
        "ahead", "alive", "asking", "closed", "due", "engine", "jobs", "joined_at", "leases", "lost_to_buffer", "name",
        "place", "touched", "turns_at", "untold",
    )  # fmt: skip

    def __init__(
        self, name: str, place: int, engine: VirtualEngine, ahead: int, now: float, asking: Asking, shards: int
    ) -> None:
        self.name = name
        self.place = place
        self.engine = engine
        self.ahead = ahead
        self.joined_at = now
        self.jobs: dict[int, list[Job]] = {}  # by lease; what is not with the buffer yet
        self.closed = 0  # training samples: delivered or cancelled
        self.asking = asking
        self.untold: list[list[PolicyId]] = [[] for _ in range(shards)]  # policies, oldest first, to be attested
        self.leases = [0] * shards  # open ones
        self.turns_at = NEVER
        self.due = NEVER
        self.alive = True
        self.lost_to_buffer = False
        self.touched = False


class Simulation:
    """State of a run; `simulate` is the way in. `check(replay, now)` is called after every event."""

    def __init__(self, rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None) -> None:
        self.rules = rules
        self.scenario = scenario
        self.replays = [VirtualReplay(of_shard(rules, shard)) for shard in range(rules.shards)]
        self.now = 0.0
        self._check = check
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._events = 0
        self._held_bytes = [0] * rules.shards
        self._max_bytes = self._all_bytes = 0
        self._parts: dict[int, LendBatch] = {}  # of the batch, by shard
        self._control: Counter[str] = Counter()
        self._results = 0
        self._error = ""
        self._evaluations: list[EvalFinished] = []
        # A stream for each thing that is random, so that a change in one leaves the others' draws as they were.
        chance, shapes, delivery, trainer, lives, self._factors, pushes = np.random.default_rng(scenario.seed).spawn(7)
        self._chance = uniform(chance)
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
        replays, trainer = self.replays, self._trainer
        return SimulationResult(
            steps=min(replay.confirmed_batches for replay in replays),
            seconds=self.now,
            error=self._error,
            staleness=dict(trainer.staleness),
            ledger=total(replay.ledger for replay in replays),
            eval_ledger=total(replay.eval_ledger for replay in replays),
            outside=total(replay.outside for replay in replays),
            evaluations=tuple(self._evaluations),
            trainer_idle=sum(record.draw_wait_s for record in trainer.log) / self.now if self.now else 0.0,
            nodes_idle=1.0 - self._busy_s / self._node_s if self._node_s else 0.0,
            max_buffered_bytes=self._max_bytes,
            events=self._events,
            sampled_tokens=self._sampled - self._eval_tokens,
            trained_tokens=trainer.trained_tokens,
            log=tuple(trainer.log),
            reused=total(replay.reused for replay in replays),
            control=dict(self._control),
            results=self._results,
        )

    # --- the clock, and the way into the rules -----------------------------------------------------------------------

    def at(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, act, arguments))

    def apply(self, event: AnyEvent) -> None:
        """What the trainer says, or the clock: every shard hears of it, or its own part."""
        shards = len(self.replays)
        if shards == 1 or isinstance(event, EvalRequested):
            self._tell(0, event)
        elif isinstance(event, BatchConfirmed):
            for shard, part in enumerate(split_dispositions(event.dispositions, shards)):
                self._tell(shard, BatchConfirmed(event.batch, part, event.ess, event.k3))
        else:
            for shard in range(shards):
                self._tell(shard, event)

    def _tell(self, shard: int, event: AnyEvent) -> None:
        replay = self.replays[shard]
        effects = replay.apply(event, self.now)
        self._events += 1
        if (kind := CONTROL.get(type(event))) is not None:
            self._control[kind] += 1
        if self._check is not None:
            self._check(replay, self.now)
        if effects:
            held = replay.groups.credit.held_bytes
            self._all_bytes += held - self._held_bytes[shard]
            self._held_bytes[shard] = held
            self._max_bytes = max(self._max_bytes, self._all_bytes)
            for effect in effects:
                self._carry_out(shard, effect)
            # Grants to one node that follow from one event are one message.
            self._control["leases"] += len({each.node for each in effects if isinstance(each, GrantLease)})

    def _carry_out(self, shard: int, effect: Effect) -> None:
        match effect:
            case GrantLease(node=name, lease=lease):
                self._take(self._nodes[name], shard, lease)
            case NothingFree(node=name, granted=granted):
                self._control["nothing free"] += 1
                self._nodes[name].asking.refused(shard, granted)
            case CancelLease(node=name, lease=lease_id):
                self._control["cancel"] += 1
                self._drop(self._nodes[name], lease_id)
            case LendBatch():
                self._lend(shard, effect)
            case EvalFinished():
                self._evaluations.append(effect)
            case EndRun(error=error):
                self._error = error

    def _lend(self, shard: int, part: LendBatch) -> None:
        """The trainer has a batch when it has every shard's part."""
        self._parts[shard] = part
        if len(self._parts) == len(self.replays):
            parts = [(self._parts[each].groups, self._parts[each].payloads) for each in range(len(self.replays))]
            groups, payloads = whole_batch(parts, attempts_of)
            self._parts = {}
            self._trainer.lend(LendBatch(part.batch, part.for_version, tuple(groups), tuple(payloads)))

    def _tick(self) -> None:
        """Deadlines are looked at, the trainer's own included."""
        self.at(self.rules.lease_timeout / TICKS_PER_TIMEOUT, self._tick)
        self.apply(Ticked())
        if self.now - self._trainer.drawn_at > self.scenario.draw_timeout_s:
            for replay in self.replays:
                if replay.draw_pending and not self._error:
                    self._error = f"stuck after {replay.confirmed_batches} steps: {replay.waiting(self.now)}"

    # --- a node's life -----------------------------------------------------------------------------------------------

    def _join_all(self, first: int, end: int) -> None:
        for place in range(first, end):
            self._join(f"node-{place}", place)

    def _join(self, name: str, place: int) -> None:
        scenario = self.scenario
        factor = self._factors.uniform(1.0, scenario.slowest)
        engine = VirtualEngine(scenario.slots, scenario.speed, factor, scenario.in_flight)
        shards = len(self.replays)
        asking = Asking(shards, self.rules.group_size, home_shard(name, shards))
        ahead = samples_asked(scenario.slots, self.rules.group_size)
        node = _Node(name, place, engine, ahead, self.now, asking, shards)
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
            if len(self.replays) == 1:
                self._tell(0, NodeAttested(node.name, policy))
            else:
                self._tell_shards(node, policy)

    def _tell_shards(self, node: _Node, policy: PolicyId) -> None:
        """A newer policy serves: those hear of it for whom it matters now."""
        node.asking.flipped(self.now)
        for shard, untold in enumerate(node.untold):
            if not node.leases[shard]:
                untold.clear()  # no token of these will come there
            untold.append(policy)
            if shard == 0 or node.asking.waits_at(shard):
                self._attest(node, shard)
        self._watch_turn(node)

    def _attest(self, node: _Node, shard: int) -> None:
        """A shard need not know what a node has served until tokens of that come, or it is asked for work; but for the
        first, which evaluates."""
        if untold := node.untold[shard]:
            node.untold[shard] = []
            for policy in untold if node.alive else ():
                self._tell(shard, NodeAttested(node.name, policy))

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
        """Tell the demand. As long as samples that were asked for are outstanding one buffer knows that this node
        waits, and would do nothing else if it heard more; of several, others may be asked for the rest."""
        if not node.alive or node.engine.policy is None or (len(self.replays) == 1 and node.asking.outstanding):
            return
        wanted = int(node.closed + node.engine.spared) + node.ahead
        while asks := node.asking.wants(wanted, self.now):
            self._send(node, asks)
            if len(self.replays) == 1:
                return
        self._watch_turn(node)

    def _send(self, node: _Node, asks: Sequence[Ask]) -> None:
        for shard, total_samples, once in asks:
            self._attest(node, shard)
            self._tell(shard, NodeWanted(node.name, total_samples, once))

    def _watch_turn(self, node: _Node) -> None:
        due = node.asking.turn_at
        if due < node.turns_at:
            node.turns_at = due
            self.at(due - self.now, self._turn, node)

    def _turn(self, node: _Node) -> None:
        node.turns_at = NEVER
        if node.alive:
            self._send(node, node.asking.turn(self.now))
            self._ask(node)
            self._watch_turn(node)

    def _take(self, node: _Node, shard: int, lease: Lease) -> None:
        if not node.alive:
            return
        if self.scenario.whole_groups:
            jobs = [self._job(lease, lease.samples, self._shapes.whole(len(lease.samples)))]
        else:
            jobs = [self._job(lease, (sample,), self._shapes.single()) for sample in lease.samples]
        node.jobs[lease.lease] = jobs
        node.leases[shard] += 1
        for job in jobs:
            node.engine.submit(job, self.now)
        if lease.split == "train":
            node.asking.granted(shard, len(lease.samples))
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
        by_shard: dict[int, list[ResultArrived | BundleArrived]] = defaultdict(list)
        for job in ended:
            if job.open:
                self._close(node, job)
                self._eval_tokens += job.tokens if job.lease.split == "eval" else 0
                self._results += len(job.samples)
                by_shard[shard_of(job.lease.lease, len(self.replays))] += self._outcomes.of(node.name, job)
        for shard, results in by_shard.items():
            self._attest(node, shard)
            self._tell(shard, results[0] if len(results) == 1 else ResultsArrived(tuple(results)))
        self._ask(node)

    def _close(self, node: _Node, job: Job) -> None:
        job.open = False
        node.closed += len(job.samples) if job.lease.split == "train" else 0
        jobs = node.jobs[job.lease.lease]
        jobs.remove(job)
        if not jobs:
            del node.jobs[job.lease.lease]
            node.leases[shard_of(job.lease.lease, len(self.replays))] -= 1


def simulate(
    rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None
) -> SimulationResult:
    """Run until all steps are confirmed, or the rules end the run (see `error`)."""
    return Simulation(rules, scenario, check).run()

"""Evaluation: instances 0..n-1 of a set's eval split, k samples of each, pinned to one policy, never trained on.

A run may have several sets, each with a task of its own, which the nodes find by its name. Evaluations hold no ticket,
take no capacity (only their rewards are kept) and do not count against what a node asked for. They go out before
training leases, at most `eval_share` of a node's slots at a time, first to nodes that serve exactly the policy; any
other ready node may get one too, since the lease pins the policy and the node pulls it. A node with one copy of the
weights comes to the policy and stays there while it holds leases pinned to it, but a later one, or another of the same
version (of a past that the trainer has given up), it cannot leave: when all have passed the policy, what is left of
its evaluation is given up at once. One runs at a time, the rest wait their turn; the time-out of each starts with it.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from async_rl.version import PolicyId
from async_rl.wire.messages import Lease, SamplingParams
from buffer.events import EvalFinished, EvalRequested
from buffer.leases import EVAL_TICKET, EvalLease, eval_seed
from buffer.ledger import EVALUATION, Ledger
from buffer.nodes import Node

ONLY_SAMPLE = 0b1  # the mask of an evaluation lease's samples


def eval_room(slots: int, eval_share: float) -> int:
    """How many evaluation samples a node may run at a time: its share of the slots, but at least one."""
    return max(1, int(slots * eval_share))


def _same_set(one: Running | EvalRequested, other: EvalRequested) -> bool:
    return (one.policy, one.eval_set) == (other.policy, other.eval_set)


class Running:
    """The evaluation under way, of `n` samples; that at place p is sample p % samples of instance p // samples.
    `rewards` has one for each place, not a number until there is one; `cancelled` counts those that will have none."""

    def __init__(self, request: EvalRequested, now: float) -> None:
        self.policy: PolicyId = request.policy
        self.eval_set = request.eval_set
        self.sampling: SamplingParams = request.sampling
        self.samples = request.samples
        self.n = request.n * request.samples
        self.started = now
        self.deadline = now + request.timeout_s
        self.pending = deque(range(self.n))
        self.tries: dict[int, int] = {}
        self.leases: set[int] = set()
        self.rewards = array("d", [math.nan]) * self.n
        self.evaluated = 0
        self.cancelled = 0

    @property
    def closed(self) -> int:
        return self.evaluated + self.cancelled

    def has_shape_of(self, request: EvalRequested) -> bool:
        return (self.n, self.samples) == (request.n * request.samples, request.samples)

    def message(self, lease: EvalLease, run_seed: int) -> Lease:
        """The lease as its node is told of it."""
        instance, sample = divmod(lease.place, self.samples)
        try_ = self.tries.get(lease.place, 0)
        seeds = (eval_seed(run_seed, self.eval_set, instance, sample, try_),)
        return Lease(
            lease.lease, EVAL_TICKET, try_, instance, "eval", (0,), seeds, lease.policy.version, self.sampling,
            lease.policy, self.eval_set,
        )  # fmt: skip

    def result(self, now: float) -> EvalFinished:
        """The mean over what was evaluated; not a number when nothing was."""
        done = self.evaluated
        mean = math.fsum(reward for reward in self.rewards if not math.isnan(reward)) / done if done else math.nan
        return EvalFinished(
            self.policy, done, mean, self.n - done, now - self.started, self.eval_set, self.rewards.tobytes()
        )


class Evaluations:
    def __init__(self, eval_share: float, max_tries: int, one_copy: bool = False) -> None:
        self._share = eval_share
        self._max_tries = max_tries
        self._one_copy = one_copy
        self.ledger = Ledger(EVALUATION)
        self.current: Running | None = None
        self._queue: deque[EvalRequested] = deque()
        # Ready nodes with room for one more, longest waiting first; filled only while something runs.
        self._serving: OrderedDict[str, Node] = OrderedDict()
        self._others: OrderedDict[str, Node] = OrderedDict()
        self._beyond: OrderedDict[str, Node] = OrderedDict()  # those that cannot come to the policy any more

    @property
    def idle(self) -> bool:
        return self.current is None and not self._queue

    def adopt(self, eval_share: float, max_tries: int) -> None:
        """Go on by other rules."""
        self._share, self._max_tries = eval_share, max_tries

    def request(self, request: EvalRequested) -> None:
        """Asked again by a trainer that was started again, it runs once; of as many samples as were asked for last."""
        for place, waiting in enumerate(self._queue):
            if _same_set(waiting, request):
                self._queue[place] = request
                return
        current = self.current
        if current is None or not _same_set(current, request) or not current.has_shape_of(request):
            self._queue.append(request)

    def start_next(self, now: float, ready: Iterable[Node]) -> None:
        """When none runs, begin the next; O(nodes), once for each evaluation."""
        if self.current is None and self._queue:
            self.current = Running(self._queue.popleft(), now)
            for node in ready:
                self.offer(node)

    def offer(self, node: Node) -> None:
        """The node's readiness, policy or room changed."""
        current = self.current
        if current is None:
            return
        self.withdraw(node)
        if node.state == "ready" and node.eval_open < eval_room(node.slots, self._share):
            beyond = self._one_copy and node.policy != current.policy and node.version >= current.policy.version
            others = self._beyond if beyond else self._others
            (self._serving if node.policy == current.policy else others)[node.name] = node

    def withdraw(self, node: Node) -> None:
        for nodes in (self._serving, self._others, self._beyond):
            nodes.pop(node.name, None)

    def next_grant(self) -> tuple[Node, int] | None:
        """Node and place of the next evaluation lease, taken off the list."""
        nodes = self._serving or self._others
        if self.current is None or not self.current.pending or not nodes:
            return None
        return next(iter(nodes.values())), self.current.pending.popleft()

    def granted(self, lease: EvalLease) -> None:
        assert self.current is not None
        self.current.leases.add(lease.lease)
        self.ledger.issue(lease, ONLY_SAMPLE)
        lease.holder.eval_open += 1
        self.offer(lease.holder)

    def evaluated(self, lease: EvalLease, reward: float) -> None:
        self._close(lease, "evaluated")
        assert self.current is not None
        self.current.rewards[lease.place] = reward
        self.current.evaluated += 1

    def dropped(self, lease: EvalLease, reason: str) -> None:
        """Taken back, through no fault of its own: leased again as it was."""
        self._close(lease, f"dropped.{reason}")
        assert self.current is not None
        self.current.pending.appendleft(lease.place)

    def failed(self, lease: EvalLease, reason: str) -> None:
        """Refused, or failed or given up by its node: costs a try, and at max_tries the sample is counted as
        cancelled, never as reward 0."""
        current = self.current
        assert current is not None
        current.tries[lease.place] = current.tries.get(lease.place, 0) + 1
        if current.tries[lease.place] < self._max_tries:
            self.dropped(lease, reason)
        else:
            self._close(lease, f"dropped.{reason}")
            current.cancelled += 1

    def due(self, now: float) -> bool:
        current = self.current
        if current is None:
            return False
        passed_by = self._beyond and not self._serving and not self._others and not current.leases
        return current.closed >= current.n or now >= current.deadline or bool(passed_by)

    def finish(self, now: float) -> EvalFinished:
        """Report; the caller has closed the leases that were open."""
        assert self.current is not None
        result = self.current.result(now)
        self._forget()
        return result

    def close(self) -> None:
        """The run is over: nothing is reported, for nobody waits for it."""
        self._queue.clear()
        self._forget()

    def _forget(self) -> None:
        self.current = None
        for nodes in (self._serving, self._others, self._beyond):
            nodes.clear()

    def _close(self, lease: EvalLease, end: str) -> None:
        assert self.current is not None
        self.current.leases.remove(lease.lease)
        self.ledger.move(lease, ONLY_SAMPLE, "leased", end)
        lease.holder.eval_open -= 1
        self.offer(lease.holder)

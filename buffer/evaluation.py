"""Evaluation: instances 0..n-1 of the eval split, one sample each, pinned to one policy, never trained on.

Evaluations hold no ticket, take no capacity (only their rewards are kept) and do not count against what a node asked
for. They go out before training leases, at most `eval_share` of a node's slots at a time, first to nodes that serve
exactly the policy; any other ready node may get one too, since the lease pins the policy and the node pulls it. A node
with one copy of the weights comes to the policy and stays there while it holds leases pinned to it, but a later one,
or another of the same version (of a past that the trainer has given up), it cannot leave: when all have passed the
policy, what is left of its evaluation is given up at once. One runs at a time, the rest wait their turn; the time-out
of each starts with it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable

from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from buffer.events import EvalFinished, EvalRequested
from buffer.leases import EvalLease
from buffer.ledger import EVALUATION, Ledger
from buffer.nodes import Node

ONLY_SAMPLE = 0b1  # the mask of an evaluation lease's samples


def eval_room(slots: int, eval_share: float) -> int:
    """How many evaluation samples a node may run at a time: its share of the slots, but at least one."""
    return max(1, int(slots * eval_share))


class Running:
    """The evaluation under way. `cancelled` counts instances that will have no reward."""

    def __init__(self, request: EvalRequested, now: float) -> None:
        self.policy: PolicyId = request.policy
        self.sampling: SamplingParams = request.sampling
        self.n = request.n
        self.started = now
        self.deadline = now + request.timeout_s
        self.pending = deque(range(request.n))
        self.tries: dict[int, int] = {}
        self.leases: set[int] = set()
        self.rewards: list[float] = []
        self.cancelled = 0

    @property
    def closed(self) -> int:
        return len(self.rewards) + self.cancelled

    def result(self, now: float) -> EvalFinished:
        """The mean over what was evaluated; not a number when nothing was."""
        done = len(self.rewards)
        mean = math.fsum(self.rewards) / done if done else math.nan  # in whatever order they came
        return EvalFinished(self.policy, done, mean, self.n - done, now - self.started)


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
        """Asked again by a trainer that was started again, it runs once."""
        running = self.current.policy if self.current else None
        if request.policy != running and all(request.policy != waiting.policy for waiting in self._queue):
            self._queue.append(request)

    def start_next(self, now: float, ready: Iterable[Node]) -> None:
        """When none runs, begin the next; O(nodes), once for each evaluation."""
        if self.current is None and self._queue:
            self.current = Running(self._queue.popleft(), now)
            for node in ready:
                self.offer(node)

    def offer(self, node: Node) -> None:
        """The node's readiness, policy or room changed."""
        self.withdraw(node)
        current = self.current
        if current and node.state == "ready" and node.eval_open < eval_room(node.slots, self._share):
            beyond = self._one_copy and node.policy != current.policy and node.version >= current.policy.version
            others = self._beyond if beyond else self._others
            (self._serving if node.policy == current.policy else others)[node.name] = node

    def withdraw(self, node: Node) -> None:
        for nodes in (self._serving, self._others, self._beyond):
            nodes.pop(node.name, None)

    def next_grant(self) -> tuple[Node, int, int] | None:
        """(node, instance, try) of the next evaluation lease, taken off the list."""
        nodes = self._serving or self._others
        if self.current is None or not self.current.pending or not nodes:
            return None
        instance = self.current.pending.popleft()
        return next(iter(nodes.values())), instance, self.current.tries.get(instance, 0)

    def granted(self, lease: EvalLease) -> None:
        assert self.current is not None
        self.current.leases.add(lease.lease)
        self.ledger.issue(lease, ONLY_SAMPLE)
        lease.holder.eval_open += 1
        self.offer(lease.holder)

    def evaluated(self, lease: EvalLease, reward: float) -> None:
        self._close(lease, "evaluated")
        assert self.current is not None
        self.current.rewards.append(reward)

    def dropped(self, lease: EvalLease, reason: str) -> None:
        """Taken back, through no fault of its own: leased again as it was."""
        self._close(lease, f"dropped.{reason}")
        assert self.current is not None
        self.current.pending.appendleft(lease.instance)

    def failed(self, lease: EvalLease, reason: str) -> None:
        """Refused, or failed or given up by its node: costs a try, and at max_tries the instance is counted as
        cancelled, never as reward 0."""
        current = self.current
        assert current is not None
        current.tries[lease.instance] = current.tries.get(lease.instance, 0) + 1
        if current.tries[lease.instance] < self._max_tries:
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

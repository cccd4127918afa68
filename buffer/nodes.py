"""Nodes: their life-cycle, and who waits for work.

    joining   connected, but no policy is registered yet: there is nothing to load
    syncing   a policy is registered; the node has attested none
    ready     the node attested a registered policy, and passed (buffer.proofs); only now may it be given leases
    draining  about to leave: it delivers or hands over what it holds, and gets nothing more
    quarantined  what it serves is not what was trained, or it cannot load that: it holds no leases. A later policy
              for which it passes makes it ready again, unless it failed the canary: then it has to be started again
    gone      lost, left, or replaced by a node of the same name, which starts anew

Demand is cumulative: the node says how many samples it has asked for since it joined, the buffer knows how many it
granted. A lease is granted while at least one asked-for sample is outstanding, and covers the whole group, so `granted`
may pass `wanted` by G - 1, and the node is then passed over until it has asked for more. (Waiting for G outstanding
samples instead would deadlock when G is larger than a node's slots.) Evaluation leases do not count: the node runs them
within its evaluation share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from async_rl.proof import LARGEST_BOUND, Mismatch
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeMismatch

KEPT_GONE = 1024
NodeState = Literal["joining", "syncing", "ready", "draining", "quarantined", "gone"]


class NodeView(NamedTuple):
    """What `status` shows of a node."""

    name: str
    state: NodeState
    slots: int
    policy: PolicyId | None
    leased_samples: int
    wanted: int
    granted: int
    reason: str
    mismatch: Mismatch | None = None
    bound: float = 0.0
    canary: NodeMismatch | None = None
    first: NodeMismatch | None = None


class Node:
    """`passed` has the (version, digest) of what its engine held and it passed for, oldest first; `proved` says
    whether it has shown its canary; `barred` is the place of the policy that it failed for (buffer.proofs: order).
    `mismatch` is the last measure, `canary` and `first` are those of its canary and of the first policy after that."""

    __slots__ = (
        "barred", "canary", "eval_open", "first", "granted", "leased_samples", "leases", "life", "logprob_bound",
        "mismatch", "name", "passed", "policy", "proved", "queued_under", "reason", "slots", "state", "wanted",
    )  # fmt: skip

    def __init__(
        self, name: str, slots: int, state: NodeState, logprob_bound: float = 0.0, life: str = "", granted: int = 0
    ) -> None:
        self.name = name
        self.life = life
        self.slots = slots
        self.state = state
        self.logprob_bound = logprob_bound
        self.proved = False
        self.passed: dict[tuple[int, str], None] = {}
        self.barred: int | None = None
        self.mismatch: Mismatch | None = None
        self.canary: NodeMismatch | None = None
        self.first: NodeMismatch | None = None
        self.policy: PolicyId | None = None
        self.wanted = 0
        self.granted = granted
        self.leases: set[int] = set()
        self.leased_samples = 0
        self.eval_open = 0
        self.queued_under: int | None = None
        self.reason = ""

    @property
    def version(self) -> int:
        """What the node attested. Raises when it attested nothing: nothing may be decided by a guess."""
        if self.policy is None:
            raise ValueError(f"node {self.name} has attested no policy")
        return self.policy.version

    def view(self) -> NodeView:
        return NodeView(
            self.name, self.state, self.slots, self.policy, self.leased_samples, self.wanted, self.granted, self.reason,
            self.mismatch, min(self.logprob_bound, LARGEST_BOUND), self.canary, self.first,
        )  # fmt: skip


class Nodes:
    """All nodes by name, and those with unmet demand in queues by version, longest waiting first.

    The newest version is served first: it is the freshest, and if its nodes may not have the lowest ticket no others
    may, so one look decides. Each change costs O(log versions)."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._gone: OrderedDict[str, Node] = OrderedDict()  # the last to go; of others nothing stays
        self._queues: dict[int, OrderedDict[str, Node]] = {}
        self._newest: list[int] = []  # heap of -version, one for each key of _queues
        self._anything_registered = False
        self.quarantined = 0
        """How often a node was set aside, and how often one came back."""
        self.returned = 0

    def get(self, name: str) -> Node | None:
        """The node, unless unknown or gone."""
        node = self._nodes.get(name)
        return None if node is None or node.state == "gone" else node

    def joined(self, name: str, slots: int, logprob_bound: float = 0.0, life: str = "", granted: int = 0) -> Node:
        """A node (again); close what an earlier one of that name held first."""
        state: NodeState = "syncing" if self._anything_registered else "joining"
        node = Node(name, slots, state, logprob_bound, life, granted)
        self._nodes[name] = node
        self._gone.pop(name, None)
        return node

    def policy_registered(self) -> None:
        if not self._anything_registered:
            self._anything_registered = True
            for node in self._nodes.values():
                if node.state == "joining":
                    node.state = "syncing"

    def attested(self, node: Node, policy: PolicyId) -> None:
        """The node serves a policy for which it passed."""
        self.returned += node.state == "quarantined"
        node.policy = policy
        node.reason, node.barred = "", None
        if node.state != "draining":
            node.state = "ready"
            self._file(node)

    def drains(self, node: Node) -> None:
        node.state = "draining"
        self._file(node)

    def quarantine(self, node: Node, order: int, reason: str) -> None:
        """Set a node aside for what it did with the policy of that place; take its leases back afterwards."""
        self.quarantined += node.state != "quarantined"
        self._unfile(node)
        node.reason = node.reason or reason  # what it began with: the policies after that are only more of it
        if node.state != "draining":  # that one is leased nothing in any case
            node.state = "quarantined"
        node.barred = max(order, order if node.barred is None else node.barred)

    def only_quarantined(self) -> list[Node]:
        """The quarantined nodes when there is no other that may work, now or soon; else none. O(nodes)."""
        if not self.quarantined:
            return []
        here = [node for node in self._nodes.values() if node.state != "gone"]
        return here if all(node.state == "quarantined" for node in here) else []

    def wants(self, node: Node, total_samples: int) -> None:
        node.wanted = max(node.wanted, total_samples)
        self._file(node)

    def forgets(self, node: Node) -> bool:
        """The node takes its demand elsewhere; whether there was any."""
        if node.wanted <= node.granted:
            return False
        node.wanted = node.granted
        self._file(node)
        return True

    def granted(self, node: Node, samples: int) -> None:
        """The node goes to the end of its queue, so that groups spread over the nodes."""
        node.granted += samples
        if node.wanted > node.granted and node.queued_under is not None:
            self._queues[node.queued_under].move_to_end(node.name)
        else:
            self._file(node)

    def lost(self, node: Node, reason: str) -> None:
        self._unfile(node)
        node.state = "gone"
        node.reason = reason
        self._gone[node.name] = node
        while len(self._gone) > KEPT_GONE:
            name, oldest = self._gone.popitem(last=False)
            if self._nodes.get(name) is oldest:
                del self._nodes[name]

    def newest_waiting(self) -> int | None:
        """The newest version that a node with unmet demand serves."""
        newest = self._newest
        while newest:
            if self._queues[-newest[0]]:
                return -newest[0]
            del self._queues[-heapq.heappop(newest)]
        return None

    def first_waiting(self, version: int) -> Node:
        return next(iter(self._queues[version].values()))

    def ready(self) -> Iterator[Node]:
        return (node for node in self._nodes.values() if node.state == "ready")

    def views(self) -> tuple[NodeView, ...]:
        return tuple(node.view() for node in tuple(self._nodes.values()))  # a test looks from its own thread

    def _file(self, node: Node) -> None:
        """Into the queue of its version when it waits; a node that waits already keeps its place."""
        version = None
        if node.wanted > node.granted and node.state == "ready" and node.policy is not None:
            version = node.policy.version
        if version == node.queued_under:
            return
        self._unfile(node)
        if version is not None:
            if version not in self._queues:
                self._queues[version] = OrderedDict()
                heapq.heappush(self._newest, -version)
            self._queues[version][node.name] = node
            node.queued_under = version

    def _unfile(self, node: Node) -> None:
        if node.queued_under is not None:
            del self._queues[node.queued_under][node.name]
            node.queued_under = None

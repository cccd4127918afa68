"""Quarantine: which nodes may work, by what they have shown of the policies that they hold.

    syncing ── canary passed, first flip passed ──> ready ── a flip fails, or a policy cannot be loaded ──> quarantined
       └── the canary fails ──> quarantined (until the node is started again)              ready <── a later flip passes

Each method says why the node is to be set aside ("" when it is not); taking back its leases is the caller's.
"""

from __future__ import annotations

from collections import deque

from async_rl.proof import CANARY, WHAT_TO_CHECK, Proof, Verdict
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeMismatch
from buffer.events import NodeHeld, NodeRefused
from buffer.nodes import Node, Nodes
from buffer.proofs import Proofs

KEPT = 256  # policies beyond the staleness bound for which proofs, and passes of each node, are remembered
KEPT_MEASURES = 1024  # between two looks at the status


class Quarantine:
    def __init__(self, nodes: Nodes, max_staleness: int) -> None:
        self.proofs = Proofs(max_staleness + KEPT)
        self._nodes = nodes
        self._kept = max_staleness + KEPT
        self._nobody_since: float | None = None
        self.measured: deque[NodeMismatch] = deque(maxlen=KEPT_MEASURES)
        """The newest measures of engine mismatch, of `measured_count` in all."""
        self.measured_count = 0

    def attested(self, node: Node, policy: PolicyId, proof: Proof | None) -> str:
        """The node's engine serves a registered policy; when it passes, the node may work under it."""
        if self.proofs.canary is not None and not node.proved:
            if node.state == "quarantined":
                return ""  # for its canary, and nothing that it serves makes up for that
            return self._judged(node, policy, Verdict("it has not shown its canary first", None))
        cause = self._judged(node, policy, self.proofs.judge(policy, proof, node.logprob_bound))
        if not cause and (node.barred is None or self.proofs.order(policy) > node.barred):
            self._nodes.attested(node, policy)
        return cause

    def showed(self, node: Node, event: NodeHeld | NodeRefused) -> str:
        """The node's engine holds a policy that it does not serve, or could not load one."""
        policy = event.policy
        if isinstance(event, NodeRefused):
            return self._judged(node, policy, Verdict(f"it cannot load it: {event.error}", None))
        cause = self._judged(node, policy, self.proofs.judge(policy, event.proof, node.logprob_bound))
        if policy == self.proofs.canary:
            node.proved = not cause
        return cause

    def nobody_left(self, now: float, limit: float, awaited: int | None) -> str:
        """Why the run cannot go on, once all of its nodes have been quarantined for `limit` seconds; before its first
        step at once, when these are as many as are `awaited`: nothing will be published that they could pass. None:
        the first step is done. O(nodes), if any is quarantined."""
        barred = self._nodes.only_quarantined()
        if not barred:
            self._nobody_since = None
        elif awaited is not None and len(barred) >= awaited:
            causes = "; ".join(f"{node.name}: {node.reason}" for node in barred)
            return f"no step was taken, as no node serves what the trainer has: {causes}; {WHAT_TO_CHECK}"
        elif self._nobody_since is None:
            self._nobody_since = now
        elif now - self._nobody_since >= limit:
            causes = "; ".join(f"{node.name}: {node.reason}" for node in barred)
            return f"every node has been quarantined for {limit:g} s: {causes}"
        return ""

    def _judged(self, node: Node, policy: PolicyId, verdict: Verdict) -> str:
        key = (policy.version, policy.digest)
        if verdict.mismatch is not None:
            node.mismatch = verdict.mismatch
            measure = NodeMismatch(node.name, policy.version, verdict.mismatch.max_dlogp, verdict.mismatch.k3)
            if policy.name == CANARY:
                node.canary = measure
            elif node.first is None:
                node.first = measure
            self.measured.append(measure)
            self.measured_count += 1
        if not verdict.cause:
            node.passed[key] = None
            while len(node.passed) > self._kept:
                del node.passed[next(iter(node.passed))]
            return ""
        node.passed.pop(key, None)
        cause = f"{policy.name} {policy.short()}: {verdict.cause}"
        self._nodes.quarantine(node, self.proofs.order(policy), cause)
        return cause

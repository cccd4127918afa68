"""Whether a node serves what the trainer trained: every proof of a node against the trainer's of the same policy.

A node has to show its canary (async_rl.proof) before anything else, and after each flip what the policy it serves does
on the probe. It never sees the trainer's numbers, so it cannot repeat them; and what it shows is judged here, not
there. The guarantee: no token counts that was sampled under a (version, digest) for which its node has not passed. A
policy that was registered without a proof asks for none (simulations, and the benchmarks of the rules).
"""

from __future__ import annotations

from async_rl.proof import CANARY, Proof, Verdict, compare
from async_rl.version import PolicyId

PASSED = Verdict("", None)


class Proofs:
    """What the trainer says of each policy, in the order of registration, which is that of announcement. Of the newest
    `kept`: an older one is nothing that a node should serve."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self.canary: PolicyId | None = None
        self._canary_proof: Proof | None = None
        self._base = b""
        self._registered = 0
        self._orders: dict[tuple[int, str], int] = {}
        self._proofs: dict[tuple[int, str], Proof] = {}

    def registered(self, policy: PolicyId, proof: Proof | None) -> None:
        """The same policy again changes nothing."""
        if policy.name == CANARY:
            self.canary, self._canary_proof = policy, proof
            self._base = proof.base if proof else b""
            return
        key = (policy.version, policy.digest)
        if key not in self._orders:
            self._orders[key] = self._registered
            self._registered += 1
            while len(self._orders) > self._kept:
                del self._orders[next(iter(self._orders))]
        if proof is not None and key not in self._proofs:
            self._proofs[key] = proof
            while len(self._proofs) > self._kept:
                del self._proofs[next(iter(self._proofs))]

    def order(self, policy: PolicyId) -> int:
        """Its place among all registered policies; -1 for the canary, and what is unknown or long ago."""
        return -1 if policy.name == CANARY else self._orders.get((policy.version, policy.digest), -1)

    def asks(self) -> bool:
        """Whether a node must have passed for a policy: also for one whose proof is not kept any more."""
        return bool(self._proofs)

    def judge(self, policy: PolicyId, shown: Proof | None, bound: float) -> Verdict:
        """`bound` in nats, as the node's engine declares it."""
        if policy.name == CANARY:
            expected = self._canary_proof if policy == self.canary else None
        else:
            expected = self._proofs.get((policy.version, policy.digest))
        if expected is None:
            return Verdict("it is no policy whose proof is kept", None) if self._should_be_known(policy) else PASSED
        if shown is None:
            return Verdict("it does not show what it does on the probe", None)
        return compare(expected, shown, bound, self._base)

    def _should_be_known(self, policy: PolicyId) -> bool:
        return self.asks() if policy.name != CANARY else self.canary is not None

"""What a node shows of the policies on its engine (async_rl.proof): scored by the engine, judged by the buffer."""

from __future__ import annotations

from async_rl.config import Config
from async_rl.proof import CANARY, Proof, make_proof, probe_tokens
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeHolds
from inference.engine import Engine, Installed

LOGPROB_BOUNDS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}
"""In nats, by the dtype of the weights: how far log-probabilities of the same tokens under the same policy may be apart
when two programs compute them. Measured on random and small trained models: docs/proof-of-delivery.md."""


def logprob_bound(engine: Engine, config: Config) -> float:
    """The engine's own, or that of the trainer's dtype where that is the coarser one."""
    return max(engine.capabilities.logprob_bound, LOGPROB_BOUNDS[config.model.dtype])


class Prover:
    """Scores the probe under a resident policy, and remembers what it has shown of those that are."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._tokens = probe_tokens(seed, engine.vocabulary_size)
        self._shown: dict[PolicyId, Proof] = {}

    def show(self, installed: Installed) -> Proof:
        policy = installed.policy
        proof = make_proof(self._tokens, self._engine.score(policy, self._tokens), installed.matched_modules)
        kept = self._engine.resident.keys() | {policy}
        self._shown = {other: old for other, old in self._shown.items() if other in kept or other.name == CANARY}
        self._shown[policy] = proof
        return proof

    def shown(self) -> list[NodeHolds]:
        """What was shown of the canary, and then of the policies that are resident: for a buffer that has forgotten."""
        order = sorted(self._shown, key=lambda policy: policy.name != CANARY)
        resident = self._engine.resident
        return [
            NodeHolds(policy, self._shown[policy]) for policy in order if policy.name == CANARY or policy in resident
        ]

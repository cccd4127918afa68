"""What the trainer says of each policy before it publishes it: the proof that a node's own is compared with."""

from __future__ import annotations

from pathlib import Path

from async_rl.proof import CANARY, Proof, make_proof, probe_tokens
from async_rl.version import PolicyId
from trainer.backend import Backend


class Prover:
    """`seed` is the run's: the probe and the canary follow from it, so a trainer that resumes makes them again."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self._backend = backend
        self._seed = seed
        self._tokens = probe_tokens(seed, backend.vocabulary_size)
        self._digest = ""
        self._proof: Proof | None = None

    def canary(self, path: Path) -> tuple[PolicyId, Proof]:
        """Write the canary's adapter file; the weights are afterwards what they were."""
        digest, logprobs, base = self._backend.canary(path, self._seed, self._tokens)
        return PolicyId(CANARY, 0, digest), make_proof(self._tokens, logprobs, self._backend.modules, base)

    def prove(self, digest: str) -> Proof:
        """Of the current weights, whose policy has this digest: after a skipped step still the one before."""
        if self._proof is None or digest != self._digest:
            logprobs = self._backend.logprobs(self._tokens)
            self._digest, self._proof = digest, make_proof(self._tokens, logprobs, self._backend.modules)
        return self._proof

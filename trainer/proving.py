"""What the trainer says of each policy before it publishes it: the proof that a node's own is compared with."""

from __future__ import annotations

from pathlib import Path

from async_rl.proof import CANARY, Proof, make_proof, probe_tokens
from async_rl.version import PolicyId
from trainer.backend import Backend


class Prover:
    """`seed` is the run's: the probe and the canary follow from it, so a trainer that resumes makes them again.
    `mixture`: the model has experts, and is judged as such (async_rl.proof.compare)."""

    def __init__(self, backend: Backend, seed: int, *, mixture: bool = False) -> None:
        self._backend = backend
        self._seed = seed
        self._mixture = mixture
        self._tokens = probe_tokens(seed, backend.vocabulary_size)
        self._digest = ""
        self._proof: Proof | None = None

    def canary(self, path: Path) -> tuple[PolicyId, Proof]:
        """Write the canary's adapter file; the weights are afterwards what they were."""
        digest, logprobs, base = self._backend.canary(path, self._seed, self._tokens)
        proof = make_proof(self._tokens, logprobs, self._backend.modules, base, mixture=self._mixture)
        return PolicyId(CANARY, 0, digest), proof

    def prove(self, digest: str) -> Proof:
        """Of the current weights, whose policy has this digest: after a skipped step still the one before."""
        if self._proof is None or digest != self._digest:
            logprobs = self._backend.logprobs(self._tokens)
            proof = make_proof(self._tokens, logprobs, self._backend.modules, mixture=self._mixture)
            self._digest, self._proof = digest, proof
        return self._proof

"""Each version's files, on their way to the store: the policy, and beside it whole copies where a policy's file only
says what has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.config import is_mixture
from async_rl.proof import Proof
from async_rl.run.process import PoolContext
from async_rl.trainer_config import publishes_factors
from async_rl.version import PolicyId
from async_rl.wire.messages import SNAPSHOT
from trainer.backend import Backend
from trainer.proving import Prover
from trainer.publish import Published, Publisher, publish_limit_s


class Releases:
    """Of the policy "main". Its first release may be that of a trainer that goes on from a checkpoint: then the store
    may lack what the version is a change of."""

    def __init__(self, context: PoolContext, backend: Backend, publisher: Publisher) -> None:
        self._folder = context.directory.adapters
        self._watchdog = context.watchdog
        self._trainer = context.config.trainer
        self._backend = backend
        self._publisher = publisher
        self._prover = Prover(backend, context.config.run.seed, mixture=is_mixture(context.config))
        self._first = True
        self._push_bytes = 0

    def canary(self) -> None:
        """Before any policy: no node may work that has not shown it. Nothing for a kind that has none."""
        if not self._backend.publishes_canary:
            return
        path = self._folder / "canary.safetensors"
        with self._watchdog.working("makes the canary"):
            canary, proof = self._prover.canary(path)
        self._upload(canary, path, proof)

    def release(self, version: int) -> tuple[PolicyId, Published]:
        """The weights as they are, under this version. Raises LinkError when the store does not confirm."""
        path = self._folder / "outgoing.safetensors"
        with self._watchdog.working(f"exports version {version}"):
            policy = PolicyId("main", version, self._backend.export(path))
            proof = self._prover.prove(policy.digest)
        if self._is_snapshot_due(version):
            self._store_snapshot(version)
        published = self._upload(policy, path, proof)
        self._push_bytes = max(self._push_bytes, published.size)
        self._first = False
        return policy, published

    def sizes(self) -> dict[str, Any]:
        """For the summary, in bytes: what a version takes (that moved anything), and what it would as whole weights,
        and as an adapter."""
        full, adapter = self._backend.push_sizes
        return {"push_bytes": self._push_bytes, "push_bytes_full": full, "push_bytes_adapter": adapter}

    def _is_snapshot_due(self, version: int) -> bool:
        if not publishes_factors(self._trainer) or version == 0:
            return False
        return self._first or version % self._trainer.snapshot_every == 0

    def _store_snapshot(self, version: int) -> None:
        """Under a name of its own, with the version's digest: no node is told of it, but one that joins late takes it
        as the way to what came after."""
        path = self._folder / "snapshot.safetensors"
        with self._watchdog.working(f"writes a whole copy of version {version}"):
            policy = PolicyId(SNAPSHOT, version, self._backend.export_whole(path))
        awaiting = f"waits for the store to take {policy.name} {policy.short()}"
        with self._watchdog.expect(awaiting, publish_limit_s(path.stat().st_size)):
            self._publisher.store(policy, path)
        path.unlink()  # as large as the model

    def _upload(self, policy: PolicyId, path: Path, proof: Proof) -> Published:
        awaiting = f"waits for buffer and store to take policy {policy.name} {policy.short()}"
        with self._watchdog.expect(awaiting, publish_limit_s(path.stat().st_size)):
            return self._publisher.publish(policy, path, proof)

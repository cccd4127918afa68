"""A trainer that a test plays: it publishes what it is told to, and looks at every trajectory of a batch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from async_rl.bundle import trajectories_of
from async_rl.config import load_config
from async_rl.fingerprint import fingerprint, pacing
from async_rl.run.dial import dial_services
from async_rl.run.directory import RunDirectory
from async_rl.run.model_cache import model_path
from async_rl.run.process import PoolContext
from async_rl.run.view import fetch_status
from async_rl.trajectory import MaskReason, Trajectory, segment_arrays
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Batch, Confirm, Confirmed, Disposition, Draw, Final, Finish, Status, TrainerReady
from trainer.backends import make_backend
from trainer.proving import Prover
from trainer.publish import Publisher

PATIENCE_S = 90.0


class Said(NamedTuple):
    """What an attempt came to."""

    text: tuple[int, ...]  # sampled token ids
    versions: tuple[VersionRun, ...]
    reward: float
    node: str


class PlayedTrainer:
    """For the run in `directory`, which a buffer made and holds."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory.open(directory)
        self.config = load_config(str(self.directory.config_path))
        context = PoolContext(self.config, self.directory, "trainer")
        self._path = model_path(self.config)
        self._backend = make_backend(self.config, self._path)
        self._buffer, self._store = dial_services(context, "trainer")
        self._publisher = Publisher(self._buffer, self._store)
        self._buffer.send(TrainerReady(fingerprint(self.config, self._path), pacing(self.config), life="played"))
        self._prover = Prover(self._backend, self.config.run.seed)
        self._file = self.directory.adapters / "played.safetensors"
        canary, proof = self._prover.canary(self._file)
        self._publisher.publish(canary, self._file, proof)
        self.version = 0

    def publish(self) -> PolicyId:
        """The weights as they are, under the present version."""
        policy = PolicyId("main", self.version, self._backend.export(self._file))
        self._publisher.publish(policy, self._file, self._prover.prove(policy.digest))
        return policy

    def draw(self) -> dict[tuple[int, int], Said]:
        """A batch, confirmed as trained: what was said, by ticket and place in the group."""
        self._buffer.send(Draw(self.version))
        received = self._buffer.receive(PATIENCE_S, "a batch")
        while not isinstance(received.message, Batch):
            received = self._buffer.receive(PATIENCE_S, "a batch")
        batch: Batch = received.message
        heads = [head for raw in batch.trajectories for head in trajectories_of(raw)]
        places = [(group.ticket, place) for group in batch.groups for place in range(group.size)]
        trained = tuple(Disposition(head.lease, (head.sample,), "trained") for head in heads)
        self._buffer.send(Confirm(batch.batch, trained))
        self._await(Confirmed)
        self.version += 1
        return {place: said(head) for place, head in zip(sorted(places), _in_group_order(batch, heads), strict=True)}

    def finish(self) -> Status:
        """End the run; the buffer's closing account."""
        self._store.send(Finish("the test is over"))
        self._buffer.send(Finish("the test is over"))
        final: Final = self._await(Final)
        return final.status

    def status(self) -> Status:
        return fetch_status(self._buffer)

    def close(self) -> None:
        self._buffer.close(1.0)
        self._store.close(1.0)

    def _await(self, kind: type) -> object:
        while True:
            message = self._buffer.receive(PATIENCE_S, kind.__name__).message
            if isinstance(message, kind):
                return message


def _in_group_order(batch: Batch, heads: list[Trajectory]) -> list[Trajectory]:
    """By ticket, and by sample within: which node delivered first does not matter."""
    ends = list(accumulate((group.size for group in batch.groups), initial=0))
    groups = [heads[start:end] for start, end in pairwise(ends)]
    by_ticket = sorted(zip(batch.groups, groups, strict=True), key=lambda pair: pair[0].ticket)
    return [head for _, group in by_ticket for head in sorted(group, key=lambda head: head.sample)]


def said(trajectory: Trajectory) -> Said:
    (arrays,) = segment_arrays(trajectory)
    text = arrays.tokens[arrays.mask == MaskReason.SAMPLED]
    return Said(tuple(text.tolist()), trajectory.versions, trajectory.reward, trajectory.node)

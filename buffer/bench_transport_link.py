"""The transport benchmark's arms with a buffer: the real service in a process of its own, reached over real links.

Nodes are processes that do what an inference node does but sample: they introduce themselves, say what they serve, ask
for work, and answer every attempt of every lease they get with a trajectory of its own, packed from arrays that were
made before; every message is acknowledged. Nothing about a lease or a result is made up: the ledger is looked at after
each measurement, and every attempt must be accounted for by what was delivered.

    ingest         nobody reads, so the buffer holds what arrives: rounds of a fixed amount, each until the buffer has
                   accepted the last trajectory, with everything drawn, confirmed and covered by a checkpoint between
                   them. Only the filling is timed, after some rounds that are not. The receiver here is the buffer,
                   which checks every header and keeps the arrays packed, by design; arrays are built and sampled in
                   the next arm only.
    ingest + draw  a trainer process draws batch after batch, decodes, checks the headers, publishes the next version,
                   which the nodes then serve, confirms, and while the next batch is on its way builds the arrays into
                   the same ring as the raw arm's receiver, and samples: what is timed is a steady state, by what the
                   trainer has taken in. (A trainer that trains confirms after that. Here there is nothing but the link,
                   which would wait for the ring and the ring for it.)

Both measure the link, the rules and the forwarding, so the service writes no journal (bench_transport_service.py);
`ingest, journal` is the first with the service as it is in a run. Its journal is not synced to the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from async_rl.bundle import Bundle, bundled, cut, decode_bundle, is_bundle, is_sound
from async_rl.config import Config, load_config
from async_rl.fingerprint import pacing
from async_rl.run.bench import Measures
from async_rl.run.pages import keep_pages
from async_rl.trajectory import (
    HEAD_BYTES,
    EncodedTrajectory,
    Packed,
    Segment,
    Trajectory,
    TrajectoryError,
    check_header,
    decode_trajectory,
    lay_out,
    segment_arrays,
)
from async_rl.version import VersionRun
from async_rl.wire.link import Client, LinkTimeout, Received
from async_rl.wire.messages import (
    COALESCE_BYTES,
    Batch,
    Checkpointed,
    Confirm,
    Confirmed,
    Disposition,
    Draw,
    Leases,
    NodeReady,
    NodeServing,
    NodeWants,
    PolicyPublished,
    Results,
    TrainerReady,
)
from async_rl.wire.payloads import pack_payloads, unpack_payloads
from buffer.bench_transport_arms import (
    START_S,
    Arrays,
    Crew,
    Load,
    Ring,
    measures,
    prepared,
    steady,
)
from buffer.bench_transport_house import (
    FINGERPRINT,
    GROUP_SIZE,
    STEPS,
    House,
    ask_status,
    check_status,
    dial,
    groups_per_step,
    house,
    policy,
    receive,
)

EMPTY = memoryview(b"")
AHEAD = 2048  # samples a node asks for beyond those it has delivered: with 1024 it was leases that nodes waited for
FILL_BYTES = 384 << 20  # of arrays in one round of ingest
WARM_FILLS = 3  # until all memory is touched, and the journal writes over its files
FILLS = 3
FILL_S = 120.0  # for one, on a busy machine
DRAW_STALENESS = 4  # batches that nodes may be ahead while a trainer draws: the default of a run
LOOK_S = 0.02  # how often a node without work looks for a new version


# --- nodes -----------------------------------------------------------------------------------------------------------


class Node:
    """One producer. It serves whatever `version` says was published last."""

    def __init__(
        self, link: Client, name: str, load: Load, per_message: int, seed: int, version: Any, delivered: Any
    ) -> None:
        self._link = link
        self._name = name
        self._seed = seed
        self._all_delivered = delivered
        self._per_message = per_message
        self._arrays = prepared(load.tokens, seed)
        self._random = random.Random(seed)
        self._published = version
        self._version = -1
        self._digest = ""
        self._owed: deque[tuple[int, int]] = deque()
        self._delivered = 0
        self._wanted = 0

    def work(self) -> None:
        self._link.send(NodeReady("bench", AHEAD, FINGERPRINT))
        while True:
            if self._published.value > self._version:
                self._version = self._published.value
                self._digest = policy(self._version).digest
                self._link.send(NodeServing(policy(self._version), 0, 0.0))
            if self._delivered + AHEAD * 3 // 4 >= self._wanted:
                self._wanted = self._delivered + AHEAD
                self._link.send(NodeWants(self._wanted))
            if self._owed:
                self._deliver()
                self._take(self._link.poll())
            else:
                self._wait()

    def _deliver(self) -> None:
        """One message with the next trajectories that are owed."""
        attempts: list[Packed] = []
        while self._owed and len(attempts) < self._per_message:
            lease, sample = self._owed.popleft()
            attempts.append(self._answer(lease, sample, next(self._arrays)))
        inline, blobs = pack_payloads(bundled(attempts))
        self._link.send(Results(inline), blobs)
        self._delivered += len(attempts)
        self._all_delivered[self._seed] = self._delivered

    def _answer(self, lease: int, sample: int, arrays: Arrays) -> Packed:
        prompt = max(1, len(arrays.tokens) // 8)
        run = VersionRun(self._version, self._digest, len(arrays.tokens) - prompt)
        headers, pieces = lay_out([Segment(*arrays, (run,), "stop")])
        reward = self._random.random()
        trajectory = Trajectory(lease, sample, "ok", reward, headers, EMPTY, node=self._name, engine="bench")
        return Packed(trajectory, pieces)

    def _wait(self) -> None:
        """For a lease, or until it is time to look for a new version."""
        with contextlib.suppress(LinkTimeout):
            self._take(self._link.receive(LOOK_S, "a lease"))

    def _take(self, received: Received | None) -> None:
        if received is not None and isinstance(received.message, Leases):
            for lease in received.message.leases:
                self._owed.extend((lease.lease, sample) for sample in lease.samples)


def node_main(path: Path, load: Load, per_message: int, seed: int, version: Any, delivered: Any) -> None:
    keep_pages()
    name = f"node-{seed}"
    Node(dial(path, "node", name), name, load, per_message, seed, version, delivered).work()


# --- the trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Draws, confirms, publishes. `take` is given what every payload is, decoded and checked."""

    def __init__(self, link: Client, config: Config, take: Callable[[Bundle | Trajectory], None]) -> None:
        self._link = link
        self._take = take
        link.send(TrainerReady(FINGERPRINT, pacing(config)))
        link.send(PolicyPublished(policy(0)))
        link.flush(START_S)

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Train batches first..last-1, and yield each version that is published by it. The next draw is asked for with
        the confirmation, before `take` sees any of this batch, so that there is always one under way."""
        self._link.send(Draw(first))
        for step in range(first, last):
            received = receive(self._link, Batch)
            payloads = unpack_payloads(received.message.trajectories, received.blobs)
            checked = [check_payload(payload) for payload in payloads]
            self._link.send(PolicyPublished(policy(step + 1)))
            self._link.send(Confirm(step, tuple(map(trained, checked))))
            if step + 1 < last:
                self._link.send(Draw(step + 1))
            for each in checked:
                self._take(each)
            receive(self._link, Confirmed)
            yield step + 1


def check_payload(payload: EncodedTrajectory) -> Bundle | Trajectory:
    """What it is, decoded, its headers checked. Raises TrajectoryError for what contradicts itself."""
    if not is_bundle(payload):
        trajectory = decode_trajectory(payload)
        check_header(trajectory)
        return trajectory
    bundle = decode_bundle(payload)
    if not is_sound(bundle):
        raise TrajectoryError(f"a bundle of lease {bundle.lease} contradicts itself")
    return bundle


def trained(checked: Bundle | Trajectory) -> Disposition:
    return Disposition(checked.lease, checked.samples if isinstance(checked, Bundle) else (checked.sample,), "trained")


def arrays_of(checked: Bundle | Trajectory) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """Views, three for each attempt."""
    if isinstance(checked, Bundle):
        segments = [attempt.segments[0] for attempt in cut(checked)]
    else:
        segments = segment_arrays(checked)
    return ((segment.tokens, segment.logprobs, segment.mask) for segment in segments)


def trainer_main(path: Path, load: Load, version: Any, count: Any) -> None:
    keep_pages()
    ring = Ring(load.tokens, count)

    def take(checked: Bundle | Trajectory) -> None:
        for arrays in arrays_of(checked):
            ring.add(arrays)

    trainer = Trainer(dial(path, "trainer", "trainer"), load_config(str(path / "config.toml")), take)
    version.value = 0
    for published in trainer.steps(0, STEPS):
        version.value = published


# --- the arms --------------------------------------------------------------------------------------------------------


def per_message(load: Load, coalesced: bool) -> int:
    """Trajectories to a message: one, or as many whole groups as a node would put into one."""
    groups = COALESCE_BYTES // (GROUP_SIZE * (load.nbytes + HEAD_BYTES))
    return GROUP_SIZE * groups if coalesced and groups else 1


def start_nodes(crew: Crew, made: House, load: Load, coalesced: bool, version: Any, delivered: Any) -> None:
    crew.pids.append(made.process.pid)
    for seed in range(load.producers):
        crew.start(node_main, made.path, load, per_message(load, coalesced), seed, version, delivered)


def measure_ingest(load: Load, coalesced: bool, journal: bool = False, curve: bool = False) -> Measures:
    """FILLS timed rounds after WARM_FILLS that are not; load's times do not apply."""
    groups = groups_per_step(load.tokens)
    batch = groups * GROUP_SIZE
    batches = math.ceil(FILL_BYTES / (batch * load.nbytes))
    with Crew() as crew, house(load.tokens, batches - 1, journal, curve) as made:
        version, delivered = shared(crew, load)
        link = dial(made.path, "trainer", "trainer")
        trainer = Trainer(link, made.config, lambda checked: None)
        start_nodes(crew, made, load, coalesced, version, delivered)
        seconds = used = 0.0
        for fill in range(WARM_FILLS + FILLS):
            started, before = time.monotonic(), crew.cpu_s()
            version.value = fill * batches
            due = (fill + 1) * batches * batch
            crew.wait_until(lambda due=due: sum(delivered) == due, "the nodes to deliver", FILL_S)  # type: ignore[misc]
            crew.wait_until(lambda: ask_status(link).ready_groups == batches * groups, "the buffer to accept")
            if fill >= WARM_FILLS:
                seconds, used = seconds + time.monotonic() - started, used + crew.cpu_s() - before
            for _ in trainer.steps(fill * batches, (fill + 1) * batches):
                pass
            link.send(Checkpointed((fill + 1) * batches))
        check_status(ask_status(link))
        link.close()
        return measures(load, FILLS * batches * batch, seconds, used)


def measure_draw(load: Load, coalesced: bool) -> Measures:
    with Crew() as crew, house(load.tokens, DRAW_STALENESS) as made:
        version, delivered = shared(crew, load)
        tool = dial(made.path, "tool", "tool")
        crew.start(trainer_main, made.path, load, version, crew.count)
        start_nodes(crew, made, load, coalesced, version, delivered)
        measured = steady(crew, load)
        check_status(ask_status(tool))
        tool.close()
        return measured


def shared(crew: Crew, load: Load) -> tuple[Any, Any]:
    """What stands for the policy store: the version published last (-1: none). And how much each node delivered."""
    version = crew.context.RawValue(ctypes.c_longlong, -1)
    return version, crew.context.RawArray(ctypes.c_longlong, load.producers)

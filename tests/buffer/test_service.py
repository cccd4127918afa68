"""The buffer as a service: real sockets, real links, no engine and no trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from async_rl.config import Config, config_from_table
from async_rl.run.process import StopEvent
from async_rl.trajectory import (
    Segment,
    Trajectory,
    decode_trajectory,
    encode_trajectory,
    pack_segments,
)
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.link import Client, LinkError, LinkRefused, Server
from async_rl.wire.messages import (
    BLOB_BYTES,
    Batch,
    Confirm,
    Confirmed,
    Disposition,
    Draw,
    EvalRequest,
    EvalResult,
    Final,
    Finish,
    Introduce,
    Lease,
    Leases,
    NodeReady,
    NodeServing,
    NodeWants,
    PolicyPublished,
    Results,
    SamplingParams,
    Status,
    StatusRequest,
    Stop,
    TrainerReady,
)
from buffer.service import RunFailed, Service

RUN, TOKEN, HEARTBEAT = "r1", "t" * 64, 0.1
FINGERPRINT = {"model config": "aaaa", "sampling": "temperature 1.0"}
V0 = PolicyId("main", 0, "0" * 64)
V1 = PolicyId("main", 1, "1" * 64)
PATIENCE_S = 10.0


class Context(NamedTuple):
    """What Service needs of a PoolContext."""

    config: Config
    stopping: StopEvent


class House:
    """A service in a thread, and clients that speak to it."""

    def __init__(self, folder: Path, **buffer: Any) -> None:
        table = {
            "run": {"steps": 2},
            "model": {"path": "unused"},
            "task": {"kind": "digit_sort"},
            "buffer": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1, "heartbeat": HEARTBEAT} | buffer,
        }
        self.endpoint = f"ipc://{folder / 'b'}"
        self.stopping = StopEvent()
        server = Server(self.endpoint, run=RUN, token=TOKEN, name="buffer", heartbeat_s=HEARTBEAT)
        self.service = Service(Context(config_from_table(table, "test"), self.stopping), server)
        self.failure: BaseException | None = None
        self._server = server
        self._clients: list[Client] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.service.serve()
        except BaseException as error:
            self.failure = error
        finally:
            self._server.close()

    def client(self, role: Any, name: str) -> Client:
        client = Client(self.endpoint, run=RUN, token=TOKEN, role=role, name=name, peer="buffer", heartbeat_s=HEARTBEAT)
        client.connect(PATIENCE_S)
        self._clients.append(client)
        return client

    def trainer(self) -> Client:
        trainer = self.client("trainer", "trainer")
        trainer.send(TrainerReady(FINGERPRINT))
        trainer.send(PolicyPublished(V0))
        trainer.flush(PATIENCE_S)
        return trainer

    def node(self, name: str = "node", wants: int = 4, fingerprint: dict[str, str] = FINGERPRINT) -> Client:
        node = self.client("node", name)
        node.send(NodeReady("torch", 8, fingerprint))
        node.send(NodeServing(V0, 3, 1.0))
        node.send(NodeWants(wants))
        return node

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the service did not end"

    def close(self) -> None:
        self.stopping.set()
        for client in self._clients:
            client.close(0.2)
        self._thread.join(PATIENCE_S)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(**buffer: Any) -> House:
        made.append(House(tmp_path, **buffer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def receive(client: Client, kind: type) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        received = client.receive(max(0.0, deadline - time.monotonic()), kind.__name__)
        if isinstance(received.message, kind):
            return received


def take_leases(node: Client, samples: int) -> list[Lease]:
    leases: list[Lease] = []
    while sum(len(lease.samples) for lease in leases) < samples:
        leases += receive(node, Leases).message.leases
    return leases


def answer(lease: Lease, sample: int, policy: PolicyId, n_tokens: int = 5, reward: float = 1.0) -> Trajectory:
    mask = (np.arange(n_tokens) < 2).astype(np.uint8)
    segment = Segment(
        np.arange(n_tokens, dtype=np.int32), np.full(n_tokens, -0.5, np.float32) * (mask == 0), mask,
        (VersionRun(policy.version, policy.digest, n_tokens - 2),), "stop",
    )  # fmt: skip
    headers, arrays = pack_segments([segment])
    return Trajectory(lease.lease, sample, "ok", reward, headers, arrays, node="node")


def deliver(node: Client, leases: list[Lease], policy: PolicyId = V0) -> None:
    results = [encode_trajectory(answer(lease, sample, policy)) for lease in leases for sample in lease.samples]
    node.send(Results(tuple(msgspec.Raw(data) for data in results)))


def confirm(trainer: Client, batch: Batch, policy: PolicyId) -> Confirmed:
    heads = [decode_trajectory(raw) for raw in batch.trajectories]
    trainer.send(Confirm(batch.batch, tuple(Disposition(head.lease, head.sample, "trained") for head in heads)))
    confirmed: Confirmed = receive(trainer, Confirmed).message
    trainer.send(PolicyPublished(policy))
    return confirmed


@contextmanager
def frozen(client: Client) -> Iterator[None]:
    """Silence, as of a stopped process: the I/O thread waits for a lock that is held here."""
    with client._changed:
        yield


def test_a_node_waits_in_joining_until_the_trainer_is_there_and_then_gets_leases(house):
    made = house()
    node = made.client("node", "node")
    node.send(NodeReady("torch", 8, FINGERPRINT))
    node.flush(PATIENCE_S)
    tool = made.client("tool", "tool")
    tool.send(StatusRequest())
    status: Status = receive(tool, Status).message
    assert [(one.name, one.state) for one in status.nodes] == [("node", "joining")]
    assert "trainer" in status.waiting
    made.trainer().flush(PATIENCE_S)
    node.send(NodeServing(V0, 3, 1.0))
    node.send(NodeWants(4))
    leases = take_leases(node, 4)
    assert [lease.ticket for lease in leases] == [0, 1]
    assert all(lease.min_version == 0 for lease in leases)


def test_a_node_of_another_setting_is_refused_with_the_part_and_both_values(house):
    made = house()
    made.trainer()
    stranger = made.node("stranger", fingerprint=FINGERPRINT | {"sampling": "temperature 0.5"})
    with pytest.raises(LinkRefused, match=r"sampling.*temperature 1\.0.*temperature 0\.5"):
        receive(stranger, Leases)


def test_two_steps_end_with_every_attempt_trained_and_everyone_told(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    for version, policy in ((0, V1), (1, PolicyId("main", 2, "2" * 64))):
        trainer.send(Draw(version))
        deliver(node, take_leases(node, 4))
        received = receive(trainer, Batch)
        assert received.message.for_version == version
        assert [group.size for group in received.message.groups] == [2, 2]
        confirm(trainer, received.message, policy)
        node.send(NodeWants(8))
    trainer.send(Finish("all steps are done"))
    final: Final = receive(trainer, Final).message
    assert final.status.ledger["issued"] == final.status.ledger["trained"] == 8
    assert receive(node, Stop).message.error == ""
    trainer.close()
    node.close()
    made.join()
    assert made.failure is None


def test_a_trajectory_above_a_megabyte_travels_whole(house):
    made = house(capacity_bytes=1 << 30)
    trainer, node = made.trainer(), made.node()
    leases = take_leases(node, 4)
    large = encode_trajectory(answer(leases[0], 0, V0, n_tokens=BLOB_BYTES // 4))
    node.send(Results((msgspec.Raw(b"\xc0"),)), [large])
    small = [
        encode_trajectory(answer(lease, sample, V0))
        for lease in leases
        for sample in lease.samples
        if (lease.lease, sample) != (leases[0].lease, 0)
    ]
    node.send(Results(tuple(msgspec.Raw(data) for data in small)))
    trainer.send(Draw(0))
    received = receive(trainer, Batch)
    assert [bytes(blob) for blob in received.blobs] == [large]
    assert sum(bytes(raw) == b"\xc0" for raw in received.message.trajectories) == 1


def test_broken_results_are_counted_and_their_samples_leased_again(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    leases = take_leases(node, 4)
    good = answer(leases[0], 0, V0)
    cut = msgspec.structs.replace(good, arrays=good.arrays[:-4])
    node.send(Results((msgspec.Raw(b"\x93\x01\x02\x03"), msgspec.Raw(encode_trajectory(cut)))))
    node.send(NodeWants(5))
    again = take_leases(node, 1)
    assert (again[0].ticket, again[0].samples) == (leases[0].ticket, (0,))
    trainer.send(StatusRequest())
    status: Status = receive(trainer, Status).message
    assert status.ledger["dropped.refused"] == 1
    assert status.outside["trouble"] == 1


def test_a_trajectory_of_a_policy_that_was_never_published_is_refused(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    deliver(node, take_leases(node, 4), PolicyId("main", 0, "f" * 64))
    node.send(NodeWants(8))
    assert {lease.ticket for lease in take_leases(node, 4)} == {0, 1}
    trainer.send(StatusRequest())
    assert receive(trainer, Status).message.ledger["dropped.refused"] == 4


def test_a_node_that_was_silent_introduces_itself_again_and_its_work_is_done_by_others(house):
    made = house()
    made.trainer()
    sleeper = made.node("sleeper")
    owed = take_leases(sleeper, 4)
    with frozen(sleeper):
        other = made.node("other", wants=8)
        assert {lease.ticket for lease in take_leases(other, 8)} > {lease.ticket for lease in owed}
    receive(sleeper, Introduce)
    sleeper.send(NodeReady("torch", 8, FINGERPRINT))
    sleeper.send(NodeServing(V0, 3, 1.0))
    sleeper.send(NodeWants(4))
    other.close()
    assert take_leases(sleeper, 4)


def test_evaluation_is_leased_pinned_and_reported_and_holds_no_ticket(house):
    made = house()
    trainer, node = made.trainer(), made.node(wants=0)
    trainer.send(EvalRequest(V0, 3, SamplingParams(0.0, 4), 30.0))
    leases = take_leases(node, 3)
    assert {lease.policy for lease in leases} == {V0}
    assert {(lease.ticket, lease.split) for lease in leases} == {(-1, "eval")}
    for lease, reward in zip(leases, (1.0, 0.0, 0.5), strict=True):
        node.send(Results((msgspec.Raw(encode_trajectory(answer(lease, 0, V0, reward=reward))),)))
    result: EvalResult = receive(trainer, EvalResult).message
    assert (result.n, result.mean_reward, result.cancelled) == (3, 0.5, 0)
    trainer.send(StatusRequest())
    assert receive(trainer, Status).message.ledger["issued"] == 0


def test_a_trainer_that_leaves_without_a_word_of_the_end_ends_the_run_and_is_named(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    take_leases(node, 4)
    trainer.close()
    assert "trainer" in receive(node, Stop).message.error
    node.close()
    made.join()
    assert isinstance(made.failure, RunFailed)
    assert "trainer" in str(made.failure)


def test_a_role_cannot_say_what_is_not_for_it_to_say(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    node.send(Finish("forged"))
    node.send(PolicyPublished(V1))
    trainer.send(StatusRequest())
    status: Status = receive(trainer, Status).message
    assert status.newest == V0
    with pytest.raises(LinkError):
        trainer.receive(0.3, "a Final that must not come")

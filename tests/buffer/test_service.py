"""The buffer as a service: real sockets, real links, no engine and no trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from buffer_house import (
    CLIENT_HEARTBEAT,
    FINGERPRINT,
    PATIENCE_S,
    RUN,
    TOKEN,
    V0,
    V1,
    House,
    answer,
    confirm,
    deliver,
    receive,
    take_leases,
)

from async_rl.fingerprint import pacing
from async_rl.trajectory import encode_trajectory
from async_rl.version import PolicyId
from async_rl.wire import frames
from async_rl.wire.link import Client, LinkError, LinkRefused
from async_rl.wire.messages import (
    Batch,
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
from async_rl.wire.payloads import BLOB_BYTES
from async_rl.wire.session import Report
from buffer import service as service_module
from buffer.attendance import MAX_HELD
from buffer.service import RunFailed

FORGED = Lease(10**6, 0, 0, 0, "train", (0,), (1,), 0, SamplingParams(1.0, 4))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(**buffer: Any) -> House:
        made.append(House(tmp_path, **buffer))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
    with pytest.raises(LinkRefused, match=r"sampling.*temperature 1\.0.*temperature 0\.5"):
        # It may hear of it while it still introduces itself.
        receive(made.node("stranger", fingerprint=FINGERPRINT | {"sampling": "temperature 0.5"}), Leases)


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
    trainer.close(PATIENCE_S)
    node.close(PATIENCE_S)
    made.join()
    assert made.failure is None


def test_a_trajectory_above_a_megabyte_travels_whole(house):
    made = house(max_context=300_000)
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
    peer = made._server._peers["sleeper"]
    with frozen(sleeper):
        peer.silence_s = 0.3
        other = made.node("other", wants=8)
        assert {lease.ticket for lease in take_leases(other, 8)} > {lease.ticket for lease in owed}
        peer.silence_s = 60.0  # it was lost, once: from here on it may be slow
    # Asked for before the node could know that it was given up: void.
    sleeper.send(NodeWants(5000))
    receive(sleeper, Introduce)
    sleeper.send(NodeReady("torch", 8, FINGERPRINT))
    sleeper.send(NodeServing(V0, 3, 1.0))
    sleeper.send(NodeWants(4))
    other.close(PATIENCE_S)
    assert sum(len(lease.samples) for lease in take_leases(sleeper, 4)) == 4
    with pytest.raises(LinkError):
        sleeper.receive(0.5, "leases beyond the four samples asked for")


def test_results_larger_than_what_was_reserved_are_refused(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    leases = take_leases(node, 4)
    node.send(Results((msgspec.Raw(encode_trajectory(answer(leases[0], 0, V0, n_tokens=5_000))),)))
    node.flush(PATIENCE_S)
    trainer.send(StatusRequest())
    assert receive(trainer, Status).message.ledger["dropped.refused"] == 1


def test_a_trainer_that_counts_otherwise_is_refused_with_both_values(house):
    made = house()
    other = made.client("trainer", "trainer")
    other.send(TrainerReady(FINGERPRINT, pacing(made.config) | {"buffer.max_staleness": "9"}))
    with pytest.raises(LinkRefused, match=r"buffer\.max_staleness: the buffer has 1, it has 9"):
        receive(other, Batch)


def test_a_second_trainer_is_refused_and_the_run_goes_on(house):
    made = house()
    trainer = made.trainer()
    other = made.client("trainer", "other")
    other.send(Finish("not mine to end"))
    other.send(TrainerReady(FINGERPRINT, pacing(made.config)))
    with pytest.raises(LinkRefused, match="has a trainer already: trainer"):
        receive(other, Batch)
    trainer.send(StatusRequest())
    assert receive(trainer, Status).message.trainer == "trainer"


def test_evaluation_is_leased_pinned_and_reported_and_holds_no_ticket(house):
    made = house()
    trainer, node = made.trainer(), made.node(wants=0)
    trainer.send(EvalRequest(V0, 3, SamplingParams(0.0, 4), 300.0))
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
    trainer.close(PATIENCE_S)
    assert "trainer" in receive(node, Stop).message.error
    node.close(PATIENCE_S)
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


def test_what_a_peer_says_out_of_place_is_counted_and_shown(house):
    made = house()
    trainer, node = made.trainer(), made.node()
    for _ in range(3):
        node.send(Finish("forged"))
    node.flush(PATIENCE_S)
    trainer.send(StatusRequest())
    assert receive(trainer, Status).message.outside == {"misplaced": 3}


def test_a_node_that_waits_for_the_trainer_can_say_only_so_much(house):
    made = house()
    node = made.node()
    for _ in range(1000):
        node.send(NodeWants(4))
    node.flush(PATIENCE_S)
    made.trainer()
    node.send(NodeServing(V0, 3, 1.0))
    assert len(take_leases(node, 4)) == 2
    tool = made.client("tool", "tool")
    tool.send(StatusRequest())
    assert receive(tool, Status).message.outside["too_early"] == 1000 + 2 - MAX_HELD


def test_results_of_a_node_that_is_not_admitted_change_nothing(house):
    made = house()
    node = made.node()
    node.send(Results((msgspec.Raw(encode_trajectory(answer(FORGED, 0, V0))),)))
    node.flush(PATIENCE_S)
    trainer = made.trainer()
    trainer.send(StatusRequest())
    status: Status = receive(trainer, Status).message
    assert status.outside["unknown_attempt"] == 1
    assert status.ready_groups == 0


def test_who_asks_on_and_on_and_reads_nothing_is_disconnected(house, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_BACKLOG", 50)
    made = house()
    with zmq.Context() as context, context.socket(zmq.DEALER) as tool:
        tool.setsockopt(zmq.LINGER, 0)
        tool.setsockopt(zmq.RCVTIMEO, 60_000)
        tool.connect(made.endpoint)
        hello = frames.Hello("tool", "tool", TOKEN, 0, 0, CLIENT_HEARTBEAT)
        tool.send(frames.link_frame(RUN, "tool", 5, Report(0, 1), hello))  # credit for one answer, and no more
        ask = frames.payload_of(StatusRequest(), ())
        for seq in range(1, 100):
            tool.send(frames.head_frame(RUN, "tool", 5, seq, Report(0, 1), ask))
        said = None
        while not isinstance(said, frames.Refused):
            envelope = frames.read_envelope(tool.recv(), 0)
            said = None if envelope.seq else frames.read_link_message(envelope)
    assert "50 answers unread" in said.reason

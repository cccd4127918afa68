"""Nodes that leave, at the buffer's socket: told by a tool, handing over what they have begun, and coming back."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from buffer_house import PATIENCE_S, V0, House, answer, deliver, receive, take_leases

from async_rl.trajectory import Segment, Trajectory, encode_trajectory, pack_segments
from async_rl.version import VersionRun
from async_rl.wire.link import Client
from async_rl.wire.messages import (
    Batch,
    Drain,
    DrainAnswer,
    Draw,
    GiveBack,
    HandOver,
    Lease,
    Leases,
    LeaseSamples,
    NodeDraining,
    NodeWants,
    Status,
    StatusRequest,
    TakeOver,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def house(tmp_path):
    made = House(tmp_path)
    yield made
    made.close()


def so_far(lease: Lease, sample: int) -> bytes:
    """Two prompt tokens and three sampled ones."""
    segment = Segment(
        np.arange(5, dtype=np.int32), np.array([0, 0, -1, -1, -1], np.float32), np.array([1, 1, 0, 0, 0], np.uint8),
        (VersionRun(V0.version, V0.digest, 3),), "abort",
    )  # fmt: skip
    headers, arrays = pack_segments([segment])
    return encode_trajectory(Trajectory(lease.lease, sample, "aborted", 0.0, headers, arrays, node="node"))


def status_of(tool: Client) -> Status:
    tool.send(StatusRequest())
    return receive(tool, Status).message


def test_a_tool_drains_a_node_and_what_it_began_goes_on_at_another_as_it_was_handed_over(house):
    trainer = house.trainer()
    first = house.node("first", wants=4)
    leases = take_leases(first, 4)
    second = house.node("second", wants=0)
    tool = house.client("tool", "tool")
    tool.send(Drain("first", 2.5))
    assert receive(tool, DrainAnswer).message == DrainAnswer("first")
    assert receive(first, Drain).message.grace_s == 2.5

    one, two = leases[:2]
    deliver(first, leases[2:])
    first.send(NodeDraining(2.5))
    first.send(GiveBack((LeaseSamples(two.lease, two.samples),)))
    payloads = [so_far(one, sample) for sample in one.samples]
    first.send(HandOver(tuple(msgspec.Raw(payload) for payload in payloads)))
    taken = receive(second, TakeOver).message
    assert [bytes(raw) for raw in taken.prefixes] == payloads
    assert (taken.lease.lease, taken.lease.samples, taken.lease.seeds) == (one.lease, one.samples, one.seeds)
    first.close(PATIENCE_S)

    deliver(second, [taken.lease])
    trainer.send(Draw(0))
    ledger = status_of(tool).ledger
    assert (ledger["dropped.node_lost"], ledger["dropped.cancelled"]) == (0, len(two.samples))
    second.send(NodeWants(4))
    deliver(second, take_leases(second, len(two.samples)))
    batch = receive(trainer, Batch).message
    assert [group.ticket for group in batch.groups] == [0, 1]
    status = status_of(tool)
    assert status.handovers == {"handed_over": len(one.samples), "mixed": 0}
    assert [node.name for node in status.nodes] == ["second"]


def test_a_node_that_is_not_there_cannot_be_drained_and_those_that_are_there_are_named(house):
    house.trainer()
    take_leases(house.node("alpha"), 4)
    tool = house.client("tool", "tool")
    tool.send(Drain("beta"))
    assert receive(tool, DrainAnswer).message.error == "there is no node 'beta' (there: alpha)"


def test_a_draining_node_shows_in_the_status_and_gets_no_lease(house):
    house.trainer()
    node = house.node("a", wants=2)
    take_leases(node, 2)
    tool = house.client("tool", "tool")
    node.send(NodeDraining(1.0))
    node.send(NodeWants(8))
    node.flush(PATIENCE_S)
    (view,) = status_of(tool).nodes
    assert (view.state, view.leased_samples) == ("draining", 2)


def test_a_prefix_that_is_broken_is_sampled_again(house):
    house.trainer()
    node = house.node("a", wants=2)
    (lease,) = take_leases(node, 2)
    tool = house.client("tool", "tool")
    broken = answer(lease, 0, V0)
    broken = msgspec.structs.replace(broken, arrays=broken.arrays[:-4])
    node.send(HandOver((msgspec.Raw(encode_trajectory(broken)), msgspec.Raw(b"\x93\x01\x02\x03"))))
    node.flush(PATIENCE_S)
    status = status_of(tool)
    assert status.ledger["dropped.cancelled"] == 2
    assert status.outside == {"trouble": 1}


def test_a_node_of_the_same_name_may_join_again_after_it_left_and_is_not_told_to_begin_again(house):
    house.trainer()
    node = house.node("a", wants=2)
    (lease,) = take_leases(node, 2)
    node.send(NodeDraining(1.0))
    node.send(GiveBack((LeaseSamples(lease.lease, lease.samples),)))
    node.close(PATIENCE_S)
    tool = house.client("tool", "tool")
    while status_of(tool).nodes:
        time.sleep(0.02)
    again = house.node("a", wants=2)
    first = again.receive(PATIENCE_S, "leases").message  # the very first thing that it hears
    assert isinstance(first, Leases)
    assert first.leases[0].seeds == lease.seeds

"""A node that was set aside by a shard of the buffer, and is well again, is well for that shard too."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.version import PolicyId
from async_rl.wire.messages import NodeServing, NodeTrouble, NodeWants
from buffer.events import (
    EndRun,
    GrantLease,
    NodeAttested,
    NodeJoined,
    NodeRefused,
    NodeWanted,
    NothingFree,
    QuarantineNode,
    Ticked,
)
from buffer.events import PolicyRegistered as Registered
from buffer.replay import Replay
from buffer.rules import of_shard
from inference.buffer_talk import BufferTalk

SHARDS = 4
POLICIES = [PolicyId("main", version, f"d{version}") for version in range(3)]


class Shard:
    """The end of a link behind which a shard's rules are: what is sent is applied, and what follows is kept for the
    node to hear."""

    sessions = 1

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.now = 0.0
        self.said: list[Any] = []
        for event in (NodeJoined("a", 8), *map(Registered, POLICIES)):
            replay.apply(event, 0.0)

    def send(self, message: object, blobs: object = ()) -> None:
        match message:
            case NodeServing(policy):
                event: Any = NodeAttested("a", policy)
            case NodeTrouble(policy, error):
                event = NodeRefused("a", policy, error)
            case NodeWants(total):
                event = NodeWanted("a", total, message.once)
            case _:
                raise AssertionError(message)
        self.said += self.replay.apply(event, self.now)


@pytest.fixture
def shards(tools):
    rules = tools.rules(groups_per_step=SHARDS, shards=SHARDS)
    return [Shard(Replay(of_shard(rules, shard))) for shard in range(SHARDS)]


@pytest.fixture
def talk(shards, monkeypatch):
    monkeypatch.setattr("inference.buffer_talk.clients_of", lambda buffer: tuple(buffer))
    return BufferTalk(shards, "a", 4, lambda: ())


def heard(talk: BufferTalk, shards: list[Shard]) -> None:
    """The node reads what the shards have said, as it does each time round."""
    for number, shard in enumerate(shards):
        said, shard.said = shard.said, []
        for each in said:
            match each:
                case GrantLease():
                    talk.granted(each.lease.lease, len(each.lease.samples))
                case NothingFree():
                    talk.asking.refused(number, each.granted)
                case QuarantineNode():
                    talk.set_aside(number)


@pytest.mark.parametrize("late", [False, True], ids=["told-before", "told-after"])
def test_no_shard_ends_a_run_over_nodes_that_serve_a_later_policy_by_now(talk, shards, late):
    talk.send(NodeServing(POLICIES[0], 1, 1.0))
    talk.send(NodeTrouble(POLICIES[1], "it cannot be read", refused=True))
    if not late:
        heard(talk, shards)
    talk.send(NodeServing(POLICIES[2], 1, 1.0))
    heard(talk, shards)
    for limit in (0.0, 31.0):
        for shard in shards:
            effects = shard.replay.apply(Ticked(), limit)
            assert not [each for each in effects if isinstance(each, EndRun)]
            assert shard.replay.nodes_view()["a"].state == "ready"


def test_a_shard_that_leases_to_a_node_again_hears_of_its_policies_when_that_matters(talk, shards):
    talk.set_aside(2)
    talk.send(NodeServing(POLICIES[0], 1, 1.0))
    assert [shard.replay.nodes_view()["a"].policy for shard in shards] == [POLICIES[0], None, POLICIES[0], None]
    talk.granted(6, 4)  # of shard 2
    talk.send(NodeServing(POLICIES[1], 1, 1.0))
    assert [shard.replay.nodes_view()["a"].policy for shard in shards] == [POLICIES[1], None, POLICIES[0], None]

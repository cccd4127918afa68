"""What is done about stale data: waited for (the default, see test_replay), dropped and leased again, or masked."""

from __future__ import annotations

import pytest

from async_rl.version import VersionRun
from async_rl.wire.messages import Lease
from buffer.rules import ENDLESS


def run(tools, on_stale: str, **changes):
    """B = 1, K = 1: tickets below v + 2 may be leased to a node at v. No straggler is waited for."""
    return tools.play(on_stale=on_stale, window=ENDLESS, lead=1, groups_per_step=1, max_staleness=1, **changes)


def overtake(play, batches: int) -> tuple[Lease, list[Lease]]:
    """Ticket 0 goes to `slow` and stays there; everything after it is delivered by `a` and trained."""
    play.publish()
    play.node("slow", 0)
    (straggler,) = play.want("slow", 1)
    play.node("a", 0)
    trained = []
    for count in range(batches):
        play.attest("a")
        (lease,) = play.want("a", 2 * count + 1)
        play.deliver(lease)
        play.draw()
        play.confirm()
        trained.append(lease)
    return straggler, trained


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_straggler_is_overtaken_and_what_comes_too_late_is_dropped_and_leased_again(tools, on_stale):
    play = run(tools, on_stale)
    straggler, trained = overtake(play, 3)
    assert (straggler.ticket, [lease.ticket for lease in trained]) == (0, [1, 2, 3])
    play.deliver(straggler, "slow")
    assert play.replay.ledger["dropped.stale"] == 2
    assert play.replay.ready_groups == 0
    play.attest("a")
    (again,) = play.want("a", 7)
    assert (again.ticket, again.min_version, again.seeds) == (0, 3, straggler.seeds)
    play.deliver(again)
    assert [group.ticket for group in play.draw()[0].groups] == [0]
    play.confirm()
    assert play.replay.ledger["trained"] == 8


def test_with_wait_it_is_waited_for(tools):
    play = tools.play(groups_per_step=1)
    play.publish()
    play.node("slow", 0)
    play.want("slow", 1)
    play.node("a", 0)
    (lease,) = play.want("a", 1)
    play.deliver(lease)
    assert play.draw() == []


@pytest.mark.parametrize(("on_stale", "dropped"), [("drop", 2), ("mask", 0)])
def test_what_is_fresh_in_part_is_dropped_or_kept(tools, on_stale, dropped):
    play = run(tools, on_stale)
    straggler, _ = overtake(play, 3)
    mixed = (VersionRun(0, "d0", 2), VersionRun(2, "d2", 3))
    play.replay.nodes.get("slow").passed[(2, "d2")] = None  # it has attested version 2 meanwhile
    play.deliver(straggler, "slow", versions=mixed)
    assert play.replay.ledger["dropped.stale"] == dropped
    assert play.replay.ready_groups == (0 if dropped else 1)

"""The order `fresh`: the newest data first, and what that leaves behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import VersionRun
from buffer.newest import NewestFirst


def test_the_groups_with_the_newest_tokens_are_drawn_and_of_equals_the_lowest_tickets():
    order = NewestFirst(2)
    for ticket in range(5):
        order.made(ticket)
    for ticket, version in ((0, 1), (1, 3), (2, 2), (4, 3)):
        order.ready(ticket, version)
    assert order.draw() == [1, 4]
    assert order.oldest_unsettled() == 3
    assert order.draw() == [0, 2]
    assert not order.batch_ready


@settings(max_examples=80, derandomize=True)
@given(st.integers(1, 4), st.data())
def test_the_draw_equals_its_definition_whatever_is_ready_and_opened_again(groups_per_batch, data):
    """Against a naive model: a table, sorted."""
    order = NewestFirst(groups_per_batch)
    made, ready, drawn = 0, dict[int, int](), set[int]()
    for _ in range(60):
        unsettled = [ticket for ticket in range(made) if ticket not in ready and ticket not in drawn]
        action = data.draw(st.sampled_from(["make", "ready", "ready", "reopen", "draw"]))
        if action == "make" or (action == "ready" and not unsettled):
            order.made(made)
            made += 1
        elif action == "ready":
            ticket = data.draw(st.sampled_from(unsettled))
            ready[ticket] = data.draw(st.integers(0, 4))
            order.ready(ticket, ready[ticket])
        elif action == "reopen" and ready:
            tickets = data.draw(st.sets(st.sampled_from(sorted(ready)), min_size=1))
            for ticket in tickets:
                del ready[ticket]
            order.reopened(tickets)
        if action == "draw" and order.batch_ready:
            newest = sorted(ready, key=lambda ticket: (-ready[ticket], ticket))[:groups_per_batch]
            assert order.draw() == sorted(newest)
            drawn.update(newest)
            for ticket in newest:
                del ready[ticket]
        unsettled = [ticket for ticket in range(made) if ticket not in ready and ticket not in drawn]
        assert order.oldest_unsettled() == min(unsettled, default=made)
        assert order.batch_ready == (len(ready) >= groups_per_batch)
        assert order.ready_groups == len(ready)


def test_a_newer_group_overtakes_an_older_one_which_is_dropped_when_it_is_too_old_and_sampled_anew(tools):
    """B = 1, K = 1: tickets 0 and 1 are ready under version 0, and then the next one under each newer version."""
    play = tools.play(newest_first=True, groups_per_step=1, steps=5)
    first, second = play.node("a", 4)
    play.deliver(first)
    play.deliver(second)
    drawn = []
    for wanted in (6, 8, 10):
        (batch,) = play.draw()
        drawn += [group.ticket for group in batch.groups]
        play.confirm()
        for lease in play.attest("a") + play.want("a", wanted):
            play.deliver(lease)
    assert drawn == [0, 2, 1]
    assert batch.groups[0].arrived == (2, 2)
    assert play.replay.ledger["dropped.stale"] == 2  # what ticket 1 was under version 0


def test_what_has_become_too_old_in_part_counts_at_the_size_of_the_rest_until_it_is_leased_again(tools):
    """B = 1, K = 1. Ticket 0 has a sample of version 0 and one of version 1, and newer groups are drawn."""
    play = tools.play(groups_per_step=1, max_staleness=1, newest_first=True)
    first, second = play.node("a", 4)
    play.result(first, 0)
    newer = play.publish()
    assert play.attest("a") == []
    mixed = {"versions": (VersionRun(newer.version, newer.digest, 5),)}
    play.result(first, 1, **mixed)
    for sample in (0, 1):
        play.result(second, sample, **mixed)
    assert [group.ticket for batch in play.draw() for group in batch.groups] == [1]
    play.confirm()
    (third,) = play.attest("a") + play.want("a", 6)
    play.deliver(third)
    assert [group.ticket for batch in play.draw() for group in batch.groups] == [2]
    play.confirm()
    rest = len(f"{first.lease}/1")
    assert (play.replay.reserved_bytes, play.replay.ready_bytes) == (0, rest)
    (again,) = play.attest("a") + play.want("a", 7)
    assert (again.ticket, again.samples) == (0, (0,))
    assert (play.replay.reserved_bytes, play.replay.ready_bytes) == (play.rules.group_bytes, 0)
    play.deliver(again)
    assert play.replay.groups.by_ticket[0].ready

"""The draw: lowest first, only what lies before the oldest unfinished ticket plus the window."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.order import Order


def with_tickets(groups_per_batch: int, window: int, made: int, ready: list[int]) -> Order:
    order = Order(groups_per_batch, window)
    for ticket in range(made):
        order.made(ticket)
    for ticket in ready:
        order.ready(ticket)
    return order


def test_fifo_waits_for_a_straggler():
    order = with_tickets(2, 1, 4, [1, 2, 3])
    assert not order.batch_ready
    assert order.oldest_unsettled() == 0
    order.ready(0)
    assert order.draw() == [0, 1]
    assert order.draw() == [2, 3]


def test_a_window_lets_a_batch_overtake_a_straggler_but_not_further_than_its_width():
    order = with_tickets(2, 3, 6, [1, 2, 3, 4, 5])
    assert order.draw() == [1, 2]  # below 0 + 3
    assert not order.batch_ready  # 3, 4 and 5 are beyond the window of ticket 0
    order.ready(0)
    assert order.draw() == [0, 3]


def test_a_ready_ticket_that_reopens_holds_up_the_order_again():
    order = with_tickets(2, 1, 4, [0, 1, 2, 3])
    order.reopened([1])
    assert not order.batch_ready
    assert order.oldest_unsettled() == 1
    assert order.ready_groups == 3
    order.ready(1)
    assert order.draw() == [0, 1]


@settings(max_examples=80, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_the_draw_equals_its_definition_and_batches_come_as_late_as_the_proof_allows(groups_per_batch, window, data):
    """Against a naive model: sets and sorting. And the bound: ticket n is in a batch no later than
    floor(n / B) + ceil((W - 1) / B)."""
    order = Order(groups_per_batch, window)
    made, ready, drawn = 0, set[int](), set[int]()
    batches = 0
    for _ in range(60):
        unsettled = [ticket for ticket in range(made) if ticket not in ready and ticket not in drawn]
        action = data.draw(st.sampled_from(["make", "ready", "ready", "reopen", "draw"]))
        if action == "make" or (action == "ready" and not unsettled):
            order.made(made)
            made += 1
        elif action == "ready":
            ticket = data.draw(st.sampled_from(unsettled))
            ready.add(ticket)
            order.ready(ticket)
        elif action == "reopen" and ready:
            tickets = data.draw(st.sets(st.sampled_from(sorted(ready)), min_size=1))
            ready -= tickets
            order.reopened(tickets)
        unsettled = [ticket for ticket in range(made) if ticket not in ready and ticket not in drawn]
        oldest = min(unsettled, default=made)
        eligible = sorted(ticket for ticket in ready if ticket < oldest + window)
        assert order.oldest_unsettled() == oldest
        assert order.batch_ready == (len(eligible) >= groups_per_batch)
        assert order.ready_groups == len(ready)
        if action == "draw" and order.batch_ready:
            batch = order.draw()
            assert batch == eligible[:groups_per_batch]
            for ticket in batch:
                assert batches <= ticket // groups_per_batch - (-(window - 1) // groups_per_batch)
            ready -= set(batch)
            drawn |= set(batch)
            batches += 1

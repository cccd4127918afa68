"""Which segments of a journal may go: none that holds what somebody can still ask for, and in the end all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.retention import Retention


def test_a_segment_goes_when_its_tickets_are_spent_and_a_checkpoint_covers_them():
    retention = Retention()
    retention.closed(0, [4, 5], confirmed=2)
    assert retention.covered(2) == []
    retention.confirmed([4, 9], 3)
    assert retention.covered(3) == []
    retention.confirmed([5, 6], 4)
    assert retention.covered(3) == []
    assert retention.needed == {0}
    assert retention.covered(4) == [0]
    assert retention.needed == set()


def test_segments_go_from_the_oldest_on():
    retention = Retention()
    retention.closed(0, [1], confirmed=0)
    retention.closed(1, [], confirmed=0)
    assert retention.covered(0) == []
    retention.confirmed([1], 1)
    assert retention.covered(1) == [0, 1]


@settings(max_examples=60, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_no_segment_goes_while_a_batch_that_is_not_covered_or_a_waiting_group_has_something_in_it(rng):
    """Tickets are sampled into the segment that is written to, confirmed two by two in a wild order, and a checkpoint
    covers now and then; what is needed is worked out anew each time."""
    retention = Retention()
    segment, made, covered = 0, 0, 0
    where: dict[int, int] = {}  # unspent ticket -> the last segment it has something in
    batches: list[list[int]] = []  # segments of each confirmed batch
    deleted: set[int] = set()
    for _ in range(rng.randrange(200)):
        match rng.randrange(4):
            case 0 | 1:
                where[made] = segment
                made += 1
            case 2 if len(where) >= 2:
                spent = rng.sample(sorted(where), 2)
                batches.append([where.pop(ticket) for ticket in spent])
                retention.confirmed(spent, len(batches))
            case 3 if rng.random() < 0.5:
                retention.closed(segment, where, len(batches))
                segment += 1
            case _:
                covered = rng.randint(covered, len(batches))
                deleted.update(retention.covered(covered))
        needed = {*where.values(), *(each for batch in batches[covered:] for each in batch), segment}
        assert not deleted & needed
        assert deleted == set(range(len(deleted)))
    retention.closed(segment, where, len(batches))
    retention.confirmed(list(where), len(batches) + 1)
    deleted.update(retention.covered(len(batches) + 1))
    assert deleted == set(range(segment + 1))

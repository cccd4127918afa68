import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.packing import computed_tokens, pack

rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40)


@given(rows, st.integers(1, 200), st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget_with_its_attempt(
    rows: list[tuple[int, int]], budget: int, padded: bool
) -> None:
    lengths, attempts = [length for length, _ in rows], [attempt for _, attempt in rows]
    batches = pack(lengths, attempts, budget, padded=padded)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    homes = {(attempts[row], index) for index, batch in enumerate(batches) for row in batch}
    assert len(homes) == len(set(attempts))
    for batch in batches:
        alone = len({attempts[row] for row in batch}) == 1
        computed = len(batch) * max(lengths[row] for row in batch) if padded else sum(lengths[row] for row in batch)
        assert computed_tokens(lengths, [batch], padded=padded) == computed
        assert alone or computed <= budget


@pytest.mark.parametrize("padded", [True, False])
def test_micro_batches_are_filled(padded: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 400).tolist()
    batches = pack(lengths, range(400), 4096, padded=padded)
    assert len(batches) <= 1.15 * sum(lengths) / 4096 + 1


def test_sorting_by_length_keeps_padding_small_and_packing_has_none() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 400).tolist()
    batches = pack(lengths, range(400), 4096, padded=True)
    assert sum(lengths) < computed_tokens(lengths, batches, padded=True) < 1.1 * sum(lengths)
    assert computed_tokens(lengths, pack(lengths, range(400), 4096, padded=False), padded=False) == sum(lengths)

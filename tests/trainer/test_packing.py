import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.packing import pack, padded_tokens

rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40)


@given(rows, st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_within_the_budget_with_its_attempt(
    rows: list[tuple[int, int]], budget: int
) -> None:
    lengths, attempts = [length for length, _ in rows], [attempt for _, attempt in rows]
    batches = pack(lengths, attempts, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    homes = {(attempts[row], index) for index, batch in enumerate(batches) for row in batch}
    assert len(homes) == len(set(attempts))
    for batch in batches:
        alone = len({attempts[row] for row in batch}) == 1
        assert alone or len(batch) * max(lengths[row] for row in batch) <= budget


def test_sorting_by_length_keeps_padding_small() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 400).tolist()
    batches = pack(lengths, range(400), 4096)
    assert padded_tokens(lengths, batches) < 1.1 * sum(lengths)

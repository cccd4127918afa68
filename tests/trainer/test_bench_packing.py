"""The benchmark of packing measures what it says: the same batch, the same gradient, memory that grows with tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.errors import AsyncRLError
from trainer.bench_packing import FULL, QUICK, SHARE, Scale, lengths, measure, with_shares, write_model
from trainer.bench_packing_arm import Job, batch, work

SMALL = Scale(attempts=12, longest=48, hidden=32, layers=2, vocabulary=64, large_vocabulary=64, steps=1)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_lengths_are_as_uneven_as_is_asked_for(scale: Scale) -> None:
    drawn = lengths(scale.attempts, scale.longest, seed=0)
    assert drawn == lengths(scale.attempts, scale.longest, seed=0)
    assert max(drawn) == scale.longest
    assert np.mean(drawn) / max(drawn) <= SHARE
    with pytest.raises(AsyncRLError, match="choose another"):
        lengths(2, scale.longest, seed=0)


def test_every_attempt_of_the_batch_trains() -> None:
    samples = batch([20, 7], 64)
    assert [len(sample.tokens) for sample in samples] == [20, 7]
    assert all(0 < (sample.mask == 0).sum() < len(sample.tokens) for sample in samples)


def test_all_arms_find_the_same_gradient(tmp_path: Path) -> None:
    drawn = [48, 30, 9, 12, 12, 20]
    job = Job(
        model=str(write_model(tmp_path, SMALL, 64)), lengths=drawn, vocabulary=64, steps=1, budget=1 << 40,
        gradient=str(tmp_path / "packed.f32"),
    )  # fmt: skip
    work(job)
    packed = np.fromfile(job.gradient, np.float32)
    assert np.abs(packed).max() > 0
    for number, change in enumerate(
        ({"packing": "never"}, {"packing": "never", "budget": sum(drawn)}, {"checkpointed": True}, {"chunked": False})
    ):
        other = msgspec.structs.replace(job, gradient=str(tmp_path / f"{number}.f32"), **change)
        measures = work(other)
        assert measures["cpu_s"] > 0
        np.testing.assert_allclose(
            np.fromfile(other.gradient, np.float32), packed, rtol=0, atol=1e-5 * np.abs(packed).max()
        )


def test_a_measurement_that_fails_says_why(tmp_path: Path) -> None:
    job = Job(model=str(tmp_path / "none"), lengths=[4], vocabulary=64, steps=1, budget=99, gradient="g.f32")
    with pytest.raises(AsyncRLError, match="no such directory"):
        measure(job, tmp_path / "g.f32")


def test_shares_are_within_a_round() -> None:
    arms = {
        "a": {"resident_mib": [10.0, 20.0], "tensors_mib": [4.0, 4.0]},
        "b": {"resident_mib": [5.0, 5.0], "tensors_mib": [1.0, 2.0]},
    }
    (cell,) = with_shares({"cells": [{"baseline": "a", "arms": arms}]})["cells"]
    assert cell["arms"]["b"]["resident_share"] == [0.5, 0.25]
    assert cell["arms"]["b"]["tensors_share"] == [0.25, 0.5]
    assert cell["arms"]["a"]["resident_share"] == [1.0, 1.0]

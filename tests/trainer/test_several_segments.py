"""Attempts of several segments: one attempt in the loss, however its turns lie in segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gradient_batches import CASES, VOCABULARY, gradient, make_backend, make_model

from async_rl.trajectory import MaskReason
from trainer.backend import Sample

S, P, E = MaskReason.SAMPLED, MaskReason.PROMPT, MaskReason.ENVIRONMENT
TURNS = ((4, 5, 3, 4), (3, 2, 4, 6), (5, 4, 2, 3), (2, 6, 3, 2))  # prompt, first turn, the world's words, second turn
LINEAR = [name for name in CASES if not name.startswith("score_centering")]  # which has tokens of its own at each place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[Sample]:
    """Each attempt one segment of two turns, μ within a few per cent of the policy's."""
    random = np.random.default_rng(4)
    batch = []
    for attempt, (prompt, first, world, second) in enumerate(TURNS):
        mask = np.repeat(np.array([P, S, E, S], np.uint8), [prompt, first, world, second])
        n = len(mask)
        behaviour = np.where(mask == S, np.float32(-1), np.float32(0))
        tokens, ages = random.integers(0, VOCABULARY, n).astype(np.int32), random.integers(0, 4, n).astype(np.int32)
        batch.append(Sample(tokens, behaviour, mask, ages, float(random.normal()), attempt, attempt // 2))
    proximal = make_backend(folder, CASES["ppo-token_mean"], "float64").step(batch, 0.0).proximal
    near = [own + random.normal(0, 0.03, len(own)) for own in proximal]
    return [
        sample._replace(behaviour=np.where(sample.mask == S, mu, 0).astype(np.float32))
        for sample, mu in zip(batch, near, strict=True)
    ]


def by_turns(batch: list[Sample]) -> list[Sample]:
    """The same with a segment for each turn: the second's prompt is all that was before it."""
    cut = []
    for sample, (prompt, first, _, _) in zip(batch, TURNS, strict=True):
        end = prompt + first
        cut.append(
            sample._replace(
                tokens=sample.tokens[:end], behaviour=sample.behaviour[:end], mask=sample.mask[:end],
                ages=sample.ages[:end],
            )
        )  # fmt: skip
        later = sample.mask.copy()
        later[:end] = P
        cut.append(sample._replace(mask=later, behaviour=np.where(later == S, sample.behaviour, np.float32(0))))
    return cut


@pytest.mark.parametrize("case", LINEAR)
def test_the_gradient_is_that_of_the_attempt_whether_its_turns_are_one_segment_or_two(
    folder: Path, whole: list[Sample], case: str
) -> None:
    """Ratios of a sequence, means over sequences and prompts: all count attempts. Also in micro-batches as small as an
    attempt allows."""
    backend = make_backend(folder, CASES[case], "float64")
    once = gradient(backend, whole)
    assert np.linalg.norm(once) > 1e-6
    for budget in (4096, 1):
        backend.trainer = type(backend.trainer)(rank=4, alpha=8.0, micro_batch_tokens=budget)
        assert np.linalg.norm(gradient(backend, by_turns(whole)) - once) <= 1e-9 * np.linalg.norm(once)

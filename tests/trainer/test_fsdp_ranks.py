"""Backend "torch" over ranks computes what one process does, and each goes on from the others' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsdp_ranks import KINDS, course, courses, make, recorded
from rank_pool import run_ranks
from sharded_models import SIZES
from tiny_lm import save_qwen3

from trainer.optimizer_state import read_counters
from trainer.torch_backend import TorchBackend

pytestmark = [pytest.mark.scale, pytest.mark.timeout(600)]

STEPS = 3
SMALL = {"micro_batch_tokens": 24}  # several micro-batches on each rank
WORLDS = (4, 2, 1)  # in this order: each goes on from a checkpoint of the one before
SAME_LOSS = 1e-5  # relative: sums are float32, in another order for each number of ranks, and on each kind of processor
Found = dict[tuple[str, int], list[dict[str, Any]]]


class House:
    """What each kind's course is on one process, and on ranks; where checkpoints lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Log-probabilities near those of a real policy: of larger ones the last bits alone are 1e-5 of a loss.
        self.model = save_qwen3(folder / "model", std=0.1, tie_word_embeddings=True, **SIZES)
        self.batches = recorded(self.model, STEPS)
        self.alone = {kind: self.of_one(kind, self.checkpoint(kind, 0)) for kind in KINDS}
        self.on_ranks: Found = {}
        self.resumed: Found = {}
        for before, world in zip((0, *WORLDS), WORLDS, strict=False):
            self._run(before, world)

    def checkpoint(self, kind: str, world: int) -> Path:
        """0 is one process, without ranks."""
        return self.folder / f"{kind}-{world}"

    def of_one(self, kind: str, folder: Path | None, start: Path | None = None, steps: int = STEPS) -> dict[str, Any]:
        return course(make(TorchBackend, self.model, KINDS[kind]), self.batches[-steps:], folder, start)

    def _run(self, before: int, world: int) -> None:
        cases = []
        for kind, trainer in KINDS.items():
            common = {"model": str(self.model), "trainer": trainer | SMALL}
            fresh = {"batches": self.batches, "folder": str(self.checkpoint(kind, world))}
            again = {"batches": self.batches[-1:], "start": str(self.checkpoint(kind, before))}
            cases += [common | fresh, common | again]
        if world == 2:
            cases += [case | {"folder": None} for case in cases[::2]]
        by_rank = run_ranks(world, f"{courses.__module__}:{courses.__name__}", cases, timeout=280)
        for number, kind in enumerate(KINDS):
            self.on_ranks[kind, world] = [rank[2 * number] for rank in by_rank]
            self.resumed[kind, world] = [rank[2 * number + 1] for rank in by_rank]
        if world == 2:
            self.repeated = dict(zip(KINDS, by_rank[0][2 * len(KINDS) :], strict=True))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("fsdp"))


def losses(found: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in found["steps"]]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_over_any_number_of_ranks_are_those_of_one_process(house: House, kind: str) -> None:
    alone = house.alone[kind]
    for world in WORLDS:
        found = house.on_ranks[kind, world][0]
        assert losses(found) == pytest.approx(losses(alone), rel=SAME_LOSS, abs=0), world
        for mine, theirs in zip(found["steps"], alone["steps"], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["tokens"] == theirs["tokens"]
        for when in ("before", "after"):
            for mine, theirs in zip(found[when], alone[when], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    # They learn: what is compared is not the first policy's loss again and again.
    assert max(abs(after - before).max() for before, after in zip(alone["before"], alone["after"], strict=True) if
               len(before)) > 1e-3  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_says_the_same(house: House, kind: str) -> None:
    for world in WORLDS:
        first, *others = house.on_ranks[kind, world]
        for other in others:
            assert other["steps"] == first["steps"]
            assert other["digests"] == first["digests"]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_ranks_compute_the_same_bits_again(house: House, kind: str) -> None:
    first, again = house.on_ranks[kind, 2][0], house.repeated[kind]
    assert again["steps"] == first["steps"]
    for mine, theirs in zip(first["after"], again["after"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_over_another_number_of_ranks_with_the_same_next_loss(house: House, kind: str) -> None:
    """One process → 4 → 2 → 1 → one process."""
    for before, world in zip((0, *WORLDS), WORLDS, strict=False):
        expected = house.alone[kind] if before == 0 else house.on_ranks[kind, before][0]
        (loss,) = losses(house.resumed[kind, world][0])
        assert loss == pytest.approx(losses(expected)[-1], rel=SAME_LOSS, abs=0), (before, world)
    for world in WORLDS:
        (loss,) = losses(house.of_one(kind, None, house.checkpoint(kind, world), steps=1))
        assert loss == pytest.approx(losses(house.on_ranks[kind, world][0])[-1], rel=SAME_LOSS, abs=0), world


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_ranks_is_the_policy_that_they_published(house: House, kind: str) -> None:
    for world in WORLDS:
        folder = house.checkpoint(kind, world)
        counters = read_counters(folder, kind)
        assert counters.optimizer_steps == STEPS - 1
        if kind != "sketch":  # of updates the file is named by a chain of them
            assert counters.digest == house.on_ranks[kind, world][0]["digests"][-2]

"""What goes wrong on one of FSDP's ranks is one error on all of them, soon, and changes nothing on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failing_ranks
import pytest
import torch
from fsdp_ranks import recorded
from rank_pool import run_ranks
from sharded_models import make_model

pytestmark = [pytest.mark.scale, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failures")
    model = make_model("dense", folder / "model")
    payload = {"model": str(model), "folder": str(folder), "batches": recorded(model, 2)}
    return run_ranks(2, f"{failing_ranks.__name__}:{failing_ranks.fail.__name__}", payload)


def test_a_checkpoint_is_not_written_where_a_rank_does_not_see_its_folder(found: list[dict[str, Any]]) -> None:
    """Else torch makes the folder on that rank's machine, and rank 0's lacks a part of every weight."""
    for rank in found:
        said, written = rank["apart"]
        assert "rank 1 does not see what rank 0 has put there" in said
        assert not any(name.startswith("shard-") for name in written)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_that_one_rank_cannot_read_is_refused_by_all(found: list[dict[str, Any]], kind: str) -> None:
    for rank, (said, unchanged) in enumerate(each[f"unread {kind}"] for each in found):
        assert "backend.json" in said
        assert "No such file" in said
        assert ("failed on rank 1" in said) == (rank == 0)
        assert unchanged


def test_a_rank_whose_disk_is_full_fails_the_checkpoint_on_all_and_the_next_is_written(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        said, files = rank["full disk"]
        assert "cannot be written: rank 1: " in said
        assert "Traceback" not in said
        assert len(files) == 3  # one of each rank, and backend.json


def test_parts_that_are_cut_are_one_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said, unchanged = rank["cut"]
        assert "cannot be read: " in said
        assert unchanged


def test_a_second_update_that_fails_takes_back_the_first_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["taken back"] == ("the second update", True, found[0]["taken back"][2])


def test_weights_in_half_precision_are_trained_on_ranks_as_on_one_process(
    found: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = make_model("dense", tmp_path / "model")
    batches = recorded(model, 2)
    # Without AVX-512 the kernels depend on what a sequence is packed with: its log-probabilities differ by up to 0.09.
    same, later = (1e-4, 0.1) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (0.1, 0.5)
    for kind, losses in found[0]["half"].items():
        alone = failing_ranks.losses_in_half(failing_ranks.alone(kind, model), batches, kind)
        assert losses[0] == pytest.approx(alone[0], rel=same)  # of the same weights
        assert losses[1] == pytest.approx(alone[1], rel=later)  # of weights rounded to 8 bits after another sum
        assert found[1]["half"][kind] == losses

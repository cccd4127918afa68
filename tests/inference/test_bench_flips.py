"""The benchmark of flips: it pushes what a trainer would, its moments are in order, and nothing stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from async_rl.version import PolicyId
from inference.bench_flips import PUSHES, QUIET, add_losses
from inference.bench_flips_house import Push
from inference.bench_flips_policies import AdapterMaker, WeightsMaker

TIMEOUT_S = 800.0


def policies(maker: AdapterMaker | WeightsMaker, folder: Path, count: int) -> Iterator[tuple[PolicyId, Path]]:
    for version in range(count):
        made, path = maker.make(version), folder / f"{version}.safetensors"
        upload = made.upload(made.write(path), path.stat().st_size)
        assert upload.policy.version == version
        yield upload.policy, path


def test_adapters_are_of_all_layers_but_the_head_and_change_the_model_a_little(qwen: Any, tmp_path: Path) -> None:
    engine, sequence, scores = qwen.engine(versions=(), max_resident=4), qwen.prompt(0, 20), []
    for policy, path in policies(AdapterMaker(qwen.path, rank=4, alpha=8), tmp_path, 3):
        assert len(engine.install(policy, path).matched_modules) == 14
        engine.flip(policy, "finish")
        scores.append(engine.score(policy, [sequence])[0])
    assert not np.array_equal(scores[0], scores[1])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)


@pytest.mark.parametrize("factors", [True, False])
def test_whole_weights_come_as_a_base_and_what_leads_on_from_it(qwen: Any, tmp_path: Path, factors: bool) -> None:
    engine, sequence, scores = qwen.engine(versions=(), storage="float32"), qwen.prompt(0, 20), []
    for policy, path in policies(WeightsMaker(qwen.path, "float32", 4, factors=factors), tmp_path, 3):
        engine.install(policy, path)
        engine.flip(policy, "continue")
        scores.append(engine.score(policy, [sequence])[0])
    assert not np.array_equal(scores[0], scores[1])
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-2)


def test_what_a_push_loses_is_the_time_that_its_tokens_would_have_taken() -> None:
    cell: dict[str, Any] = {
        "arms": {
            QUIET: {"tokens_per_s": [100.0, 200.0]},
            PUSHES: {"tokens_per_s": [90.0, 200.0], "window_s": [10.0, 10.0]},
        }
    }
    pushes = [Push(1.0, 2.0, 3.0, float(first)) for first in range(1, 101)]
    add_losses(cell, pushes, count=5)
    assert cell["arms"][PUSHES]["lost_ms"] == pytest.approx([200.0, 0.0])
    assert cell["pushes"][0] == {"stored_ms": 1.0, "fetched_ms": 2.0, "flipped_ms": 3.0, "first_ms": 1.0}
    assert "100 pushes, to the first token: p50 50 ms, p99 99 ms, slowest 100 ms" in cell["remarks"][0]
    assert "5 tokens/s less with a push every 2 s: 100 ms" in cell["remarks"][1]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the benchmark puts its files. A short name: it puts sockets there, too."""
    folder = Path(tempfile.mkdtemp(prefix="flips-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def bench(place: Path, config: str, written: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "inference.bench_flips", config, "--quick", "--json", str(written)],
        env=os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


def processes_of(place: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(place) in argument for argument in process.info["cmdline"] or ())
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_measures_every_way_in_order_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    written = tmp_path / "flips.json"
    done = bench(place, "quickstart", written)
    assert done.returncode == 0, done.stdout
    cells = json.loads(written.read_text())["cells"]
    ways = ("finish", "continue", "recompute")
    assert [cell["cell"] for cell in cells] == [f"torch, lora, {way}" for way in ways]
    for cell in cells:
        assert len(cell["pushes"]) == 4
        for push in cell["pushes"]:
            assert 0 < push["fetched_ms"] <= push["flipped_ms"] <= push["first_ms"]
            assert push["stored_ms"] > 0
        assert all(rate > 0 for arm in cell["arms"].values() for rate in arm["tokens_per_s"])
        assert "p99" in cell["remarks"][0]
    assert processes_of(place) == []
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_a_sketch_trainer_cannot_have_is_said_in_the_table(place: Path, tmp_path: Path) -> None:
    written = tmp_path / "flips.json"
    done = bench(place, "quickstart-sketch", written)
    assert done.returncode == 0, done.stdout
    cells = json.loads(written.read_text())["cells"]
    assert [bool(cell["unmeasured"]) for cell in cells] == [True, False, False]
    assert list(place.iterdir()) == []

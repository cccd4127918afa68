"""The memory estimate of what a layer keeps is the bytes that autograd saves of it, to the byte; and a whole rank's is
near to what a process takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kept_activations import RANK, TOKENS, model_of
from rank_pool import run_ranks

from async_rl.parallel_config import ParallelConfig
from trainer.megatron import memory
from trainer.megatron.layer_memory import Ranks, kept, micro_batch
from trainer.megatron.shape import shape_in

SEQUENCE = {"tensor": 2, "sequence": True}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("dense", {}), ("mixture", {})],
    2: [
        ("dense", {"tensor": 2}),
        ("dense", SEQUENCE),
        ("mixture", {"data": 2, "expert": 2}),
        ("mixture", SEQUENCE | {"expert": 2}),
        ("mixture", SEQUENCE | {"expert_tensor": 2}),
    ],
}
MEASURED = Path(__file__).parents[2] / "docs" / "bench" / "memory.json"


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_layer_keeps_what_was_counted(world: int, tmp_path: Path) -> None:
    cases = [
        {"path": str(model_of(kind, tmp_path)), "parallel": parallel, "dtype": dtype}
        for kind, parallel in LAYOUTS[world]
        for dtype in memory.BYTES
        if dtype != "float16"
    ]
    by_rank = run_ranks(world, "kept_activations:count", cases)
    for number, case in enumerate(cases):
        shape = shape_in(Path(case["path"]) / "config.json")
        layout = ParallelConfig(**case["parallel"])
        ranks, dtype = Ranks(*[RANK] * 7), memory.BYTES[case["dtype"]]
        work = micro_batch(shape, layout, ranks, TOKENS, dtype, replays=True)
        wanted = [kept(work, layer, first=layer == 0) for layer in range(shape.num_hidden_layers)]
        for found in by_rank:
            print(case, found[number], wanted)
            assert found[number] == wanted, case


def test_the_estimate_is_within_a_tenth_of_what_ranks_took() -> None:
    """As measured by `python -m trainer.megatron.measure_memory`."""
    cells = json.loads(MEASURED.read_text())["cells"]
    assert len(cells) >= 3
    for cell in cells:
        measured, estimated = (cell["arms"][arm]["mib"] for arm in ("measured", "estimated"))
        assert all(abs(guess / took - 1) <= 0.1 for guess, took in zip(estimated, measured, strict=True)), cell

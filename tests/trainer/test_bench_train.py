"""The benchmark of training steps counts what is there, times what trains, and says what does not fit."""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any, Literal

import msgspec
import pytest
import torch

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Measures, Unmeasured
from trainer.bench_memory import MIB, is_out_of_memory, kept, saved_activations
from trainer.bench_process import measured_apart
from trainer.bench_train import BASELINE, QUICK, _names, cells, with_remarks
from trainer.bench_train_arm import Job, Trial, work
from trainer.bench_train_shapes import SHAPES, make_model, weight_bytes
from trainer.push_sizes import push_sizes

TINY = Job(
    shape="tiny", dtype="float32", kind="full", rank=4, controlled=False, steps=1, device="cpu", measures=("time",)
)
CPU = torch.device("cpu")


def job(**changes: Any) -> Job:
    return msgspec.structs.replace(TINY, **changes)


@pytest.mark.parametrize(("shape", "billions"), [("1.5b", 1.54), ("7b", 7.62), ("27b", 27.0)])
def test_the_large_shapes_are_as_large_as_their_names(shape: str, billions: float) -> None:
    assert weight_bytes(SHAPES[shape], "bfloat16") == pytest.approx(2e9 * billions, rel=0.005)
    assert weight_bytes(SHAPES[shape], "float32") == 2 * weight_bytes(SHAPES[shape], "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_random_the_same_and_in_the_dtype_asked_for(dtype: str) -> None:
    one, other = (make_model(SHAPES["tiny"], dtype, CPU) for _ in range(2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.dtype == getattr(torch, dtype)
        assert torch.equal(a, b)
    assert one.get_output_embeddings().weight.std() > 0


@pytest.mark.parametrize("kind", ["full", "lora", "sketch"])
def test_what_a_step_keeps_is_counted_to_the_byte(
    kind: Literal["full", "lora", "sketch"], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(job(kind=kind), CPU)
    backend, seen = trial.backend, []
    norm = backend.learnable.norm

    def watched() -> float:
        seen.append(sum(each.grad.nbytes for each in backend.model.parameters() if each.grad is not None))
        if kind == "sketch":
            sketches = backend.learnable
            signs = [
                sketches.projections.signs(block.name, block.rank, block.columns) for block in sketches.blocks.values()
            ]
            seen.append(sketches.sketches.flat.nbytes + sum(each.nbytes for each in signs))
        return norm()

    monkeypatch.setattr(backend.learnable, "norm", watched)
    trial.step()
    parts = kept(backend.model, backend.learnable)
    if kind == "sketch":
        assert seen == [0, parts.gradients]  # no weight has a gradient
        assert parts.optimiser * 4 == backend.learnable.sketches.flat.nbytes  # a number a row, and the rank is 4
    else:
        assert seen == [parts.gradients]
        assert parts.optimiser == pytest.approx(2 * parts.gradients, rel=0.01)  # two moments, and counters
    if kind == "full":
        assert parts.weights == parts.gradients == weight_bytes(SHAPES["tiny"], "float32")


def test_a_trial_of_sketches_does_not_read_all_weights_for_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> str:
        raise AssertionError("all weights are hashed")

    monkeypatch.setattr("trainer.sketch.weights.weights_digest", refused)
    trial = Trial(job(kind="sketch"), CPU)
    trial.step()
    assert trial.push_bytes() > trial.backend.learnable.sketches.flat.nbytes / 2  # int16 for float32
    trial.step()


def test_saved_activations_count_shared_memory_once_and_parameters_not() -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8, requires_grad=True)
    assert saved_activations(layer, lambda: layer(x) * layer(x)) == x.nbytes + 2 * 16 * 4 * 4


@pytest.mark.parametrize("changes", [{"kind": "full"}, {"kind": "lora", "dtype": "bfloat16"},
                                     {"kind": "sketch"}, {"kind": "sketch", "controlled": True}])  # fmt: skip
def test_an_arm_trains_and_says_what_it_cost(changes: dict[str, Any]) -> None:
    measures = measured_apart(functools.partial(work, job(**changes, measures=("time", "memory"))), 120, changes)
    nothing = {name for name, value in measures.items() if not value > 0}
    assert nothing <= {"peak_mib"}  # so small a model may fit into pages that the process has already
    assert measures["peak_mib"] >= 0
    assert measures["weights_mib"] * MIB >= weight_bytes(SHAPES["tiny"], changes.get("dtype", "float32"))
    assert measures["tokens_per_s"] == pytest.approx(4 * 16 / measures["wall_s"])


def test_a_version_is_pushed_in_the_form_of_its_kind() -> None:
    pushed = {}
    for kind in ("full", "lora", "sketch"):
        trial = Trial(job(kind=kind), CPU)
        trial.step()
        pushed[kind] = trial.push_bytes()
    sizes = push_sizes(make_model(SHAPES["tiny"], "float32", CPU), TrainerConfig(rank=4))
    assert pushed["full"] == sizes.full
    assert sizes.adapter <= pushed["lora"] <= sizes.adapter + 8192  # names and shapes
    assert pushed["sketch"] < pushed["lora"]


def test_what_does_not_fit_is_a_result() -> None:
    small = job(shape="512x4", memory_gib=0.1, measures=("memory",))
    with pytest.raises(Unmeasured, match=r"more than the 0\.1 GiB .* moments alone are 0\.2188 GiB"):
        measured_apart(functools.partial(work, small), 120, small)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_a_process_that_fails_or_dies_says_so() -> None:
    def fails() -> Measures:
        raise ValueError("no such thing")

    with pytest.raises(AsyncRLError, match="ValueError: no such thing"):
        measured_apart(fails, 60, "a job")
    with pytest.raises(AsyncRLError, match="died: a job"):
        measured_apart(lambda: os._exit(1), 60, "a job")


def test_a_process_may_be_started_anew_as_a_gpu_needs_it() -> None:
    assert measured_apart(functools.partial(dict, wall_s=1.0), 120, TINY, start="spawn") == {"wall_s": 1.0}


def test_arms_share_all_but_what_learns() -> None:
    (cell, _) = cells(QUICK, "cpu")
    jobs = [arm.measure._job for arm in cell.arms]  # type: ignore[attr-defined]
    assert [(each.kind, each.rank, each.controlled) for each in jobs] == [
        ("full", 4, False), ("lora", 4, False), ("sketch", 4, False), ("sketch", 4, True),
    ]  # fmt: skip
    same = {(each.shape, each.dtype, each.steps, each.device) for each in jobs}
    assert len(same) == 1
    (large,) = cells(QUICK._replace(shapes=("27b",), dtypes=("bfloat16",), kinds=("sketch",)), "cuda")
    assert "54,017 MB" in large.name
    assert [arm.name for arm in large.arms] == [BASELINE, "sketch 4"]  # steps of the largest are not controlled


def test_remarks_are_parts_of_what_the_baseline_keeps() -> None:
    keys = ("gradients_mib", "optimiser_mib", "activations_mib", "peak_mib", "push_mb")
    arms = {name: dict(zip(keys, ([each] for each in values), strict=True)) for name, values in
            ((BASELINE, (10.0, 20.0, 8.0, 50.0, 9.0)), ("sketch", (0.5, 0.1, 4.0, 25.0, 0.3)))}  # fmt: skip
    document = with_remarks({"cells": [{"baseline": BASELINE, "arms": arms | {"other": {}}}]})
    assert document["cells"][0]["remarks"] == [
        "sketch: gradients and optimiser 1/50.0 of the baseline's, activations 0.50, peak 0.50, push 1/30.0"
    ]
    arms[BASELINE].clear()  # it did not fit
    assert with_remarks({"cells": [{"baseline": BASELINE, "arms": arms}]})["cells"][0]["remarks"] == []


def test_unknown_shapes_are_refused() -> None:
    assert _names(SHAPES)("tiny,7b") == ("tiny", "7b")
    with pytest.raises(argparse.ArgumentTypeError, match="'8b' is none of tiny"):
        _names(SHAPES)("tiny,8b")

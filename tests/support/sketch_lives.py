"""The life of a backend of kind "sketch" on a tiny model, the same on one process and on the ranks of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_ranks import SEED, TEMPERATURE, batch
from transformers import AutoModelForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.policy.experts import expert_modules, expert_weights
from async_rl.policy.tensor_file import read_header, read_tensors
from async_rl.policy.update_file import apply_update, read_update, weights_digest
from trainer.backend import Backend
from trainer.torch_backend import TorchBackend

ALGORITHM: dict[str, Any] = {"treatment": "clip", "surrogate": "ppo", "aggregation": "prompt_mean"}
TRAINER: dict[str, Any] = {"kind": "sketch", "rank": 8, "update_ratio": 1e-3}
RATE = 1e-3
STEPS = 3


def make(
    kind: Callable[..., Backend], model: Path, trainer: dict[str, Any], device: Any, dtype: str = "float32"
) -> Any:
    return kind(
        model, trainer=TrainerConfig(**TRAINER | trainer), algorithm=AlgorithmConfig(**ALGORITHM),
        temperature=TEMPERATURE, seed=SEED, dtype=dtype, device=device,
    )  # fmt: skip


def life(backend: Any, folder: Path) -> dict[str, Any]:
    """What a run asks of a backend, and what it says; files lie in `folder`."""
    learnable = backend.learnable
    out: dict[str, Any] = {"modules": backend.modules, "digests": [backend.export(folder / "v0")], "metrics": []}
    for number in range(STEPS):
        out["metrics"].append(backend.step(batch(backend, number), RATE).metrics)
        out["digests"].append(backend.export(folder / f"v{number + 1}"))
    out["whole"] = backend.export_whole(folder / "whole")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)  # every rank does so
    backend.save(checkpoint)
    samples = batch(backend, STEPS)
    back = learnable.snapshot()
    moved = [_step(backend, samples, folder) for _ in range(2)]
    back()
    undone = [_step(backend, samples, folder) for _ in range(2)]
    backend.load(checkpoint)
    again = backend.export(folder / "again")
    resumed = [_step(backend, samples, folder) for _ in range(2)]
    out["exact"] = (undone == moved, resumed == moved, again == out["digests"][-1], learnable.steps)
    nothing = backend.step([sample._replace(mask=np.ones_like(sample.mask)) for sample in samples], RATE)
    out["nothing"] = nothing.skipped, backend.export(folder / "still") == moved[-1][0]
    backend.export_final(folder / "final")
    backend.load(checkpoint)
    return out


def _step(backend: Any, samples: Any, folder: Path) -> tuple[str, dict[str, float]]:
    metrics = backend.step(samples, RATE).metrics
    return backend.export(folder / "moved"), metrics


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path, read_header(path))


# --- what must hold of it ----------------------------------------------------------------------------------------


def check_case(
    trainer: dict[str, Any], path: Path, ours: Path, theirs: Path, found: dict[str, Any], one: dict[str, Any]
) -> None:
    """A life on ranks (`found`, files in `ours`) is that of one process (`one`, in `theirs`)."""
    assert found["modules"] == one["modules"]
    assert found["digests"][0] == one["digests"][0], "the base"
    steps = STEPS * trainer.get("updates_per_batch", 1)
    more = 2 * trainer.get("updates_per_batch", 1)
    assert found["exact"] == one["exact"] == (True, True, True, steps + more), trainer
    assert found["nothing"] == one["nothing"] == (True, True)
    assert found["theirs"] == [one["digests"][-1], steps]
    assert (ours / "unchanged").read_bytes() == (theirs / "whole").read_bytes()
    for mine, other in zip(found["metrics"], one["metrics"], strict=True):
        mine.pop("rank_imbalance")
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5), trainer
    snapshots = tensors(ours / "whole"), tensors(theirs / "whole")
    worst = max(float((snapshots[0][name] - each).abs().max()) for name, each in snapshots[1].items())
    moved = max(float((snapshots[1][name] - each).abs().max()) for name, each in base_of(model_of(path)).items())
    same = sum(mine == other for mine, other in zip(found["digests"], one["digests"], strict=True))
    print(f"{trainer}: weights moved by {moved:.1e}, differ by {worst:.1e}; {same} of {STEPS + 1} digests are equal")
    assert worst <= 1e-6 < 1e-4 < moved, trainer
    assert (ours / "again").read_bytes() == (ours / f"v{STEPS}").read_bytes()
    final = base_of(model_of(theirs / "final"))
    for name, each in base_of(model_of(ours / "final")).items():
        torch.testing.assert_close(each, final[name], rtol=0, atol=2e-6)


def check_receiver(path: Path, ours: Path, dtype: str = "float32") -> None:
    """The base, with the published files applied as nodes apply them, is what the ranks have, bit for bit."""
    received = model_of(path, dtype)
    weights = {name: layer.weight.detach() for name, layer in received.named_modules() if hasattr(layer, "weight")}
    for where, module in expert_modules(received).items():
        weights |= {f"{where}.{name}": weight for name, weight in expert_weights(module).items()}
    for number in range(1, STEPS + 1):
        apply_update(read_update(ours / f"v{number}"), weights)
    assert weights_digest(base_of(received)) == weights_digest(tensors(ours / "whole"))


def check_files(
    trainer: dict[str, Any],
    path: Path,
    ours: Path,
    folder: Path,
    kept: list[tuple[dict[str, Any], float]],
    dtype: str = "float32",
) -> None:
    """Of the ranks' sketches one process makes their files, to the byte."""
    folder.mkdir()
    learnable = make(TorchBackend, path, trainer, "cpu", dtype).learnable
    updates = trainer.get("updates_per_batch", 1)
    for number in range(1, STEPS + 1):
        for views, energy in kept[(number - 1) * updates : number * updates]:
            for name, view in learnable.sketches.views.items():
                view.copy_(torch.from_numpy(views[name]))
            assert energy == pytest.approx(float(learnable.energy), rel=1e-6)
            learnable.energy = torch.tensor(energy, dtype=torch.float64)
            learnable.move(1.0, RATE)
        learnable.export(folder / "file")
        assert (folder / "file").read_bytes() == (ours / f"v{number}").read_bytes(), trainer


def model_of(path: Path, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# --- on the ranks ----------------------------------------------------------------------------------------------------


def live(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (model, folder, trainer, parallel, theirs): `life`, the sketches that steps were made of, and what
    is read of the folder of the torch backend's life, `theirs`."""
    from trainer.megatron import groups
    from trainer.megatron.backend import MegatronBackend

    def backend_of(case: dict[str, Any]) -> Any:
        trainer = case["trainer"] | {"backend": "megatron", "parallel": ParallelConfig(**case["parallel"])}
        return make(MegatronBackend, Path(case["model"]), trainer, torch.device("cpu"))

    return _live(payload, backend_of, groups.end)


def live_in_parts(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of the torch backend over ranks; a case may have a dtype."""
    from trainer.fsdp.backend import FsdpBackend

    def backend_of(case: dict[str, Any]) -> Any:
        trainer = case["trainer"] | {"parallel": ParallelConfig(data=torch.distributed.get_world_size())}
        return make(FsdpBackend, Path(case["model"]), trainer, torch.device("cpu"), case.get("dtype", "float32"))

    return _live(payload, backend_of, lambda: None)


def _live(
    payload: list[dict[str, Any]], backend_of: Callable[[dict[str, Any]], Any], end: Callable[[], None]
) -> list[dict[str, Any]]:
    out = []
    for case in payload:
        backend = backend_of(case)
        kept = _keep_sketches(backend.learnable)
        found = life(backend, Path(case["folder"]))
        said, *found["theirs"] = _read(backend, Path(case["theirs"]), Path(case["folder"]))
        out.append({"life": found, "kept": kept, "said": said})
        end()
    return out


def _read(backend: Any, theirs: Path, folder: Path) -> tuple[str, str, int]:
    """The error for a broken checkpoint; the policy that a good one has, and its steps. The first changes nothing of
    what the second made."""
    backend.load(theirs / "checkpoint")
    digest = backend.export(folder / "theirs")
    try:
        backend.load(theirs / "broken")
    except AsyncRLError as error:
        backend.export_whole(folder / "unchanged")
        return str(error), digest, backend.learnable.steps
    raise AssertionError("a checkpoint that was cut short was read")


def _keep_sketches(learnable: Any) -> list[tuple[dict[str, Any], float]]:
    """From now on the sketches of every step, whole (on rank 0), and the weights' energy before it."""
    kept: list[tuple[dict[str, Any], float]] = []
    collect = learnable.collect

    def keeping() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = collect()
        kept.append(({name: each.numpy().copy() for name, each in found.items()}, float(learnable.energy)))
        assert math.isfinite(kept[-1][1])
        return found

    learnable.collect = keeping
    return kept

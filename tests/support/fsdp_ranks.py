"""What the tests of FSDP run on their ranks: a trainer backend on recorded batches, as one process takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_options
import backend_ranks
import torch
import torch.distributed as dist
from backend_ranks import SEED, TEMPERATURE, TRAINER, batch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.parallel_config import ParallelConfig
from trainer.backend import Backend, Sample
from trainer.torch_backend import TorchBackend

ALGORITHM: dict[str, Any] = {"treatment": "clip", "ratio_low": 0.5, "ratio_high": 1.5, "surrogate": "ppo"}
ANCHORED = ALGORITHM | {"reference_kl": "k3", "reference_kl_weight": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "lora": TRAINER | {"learning_rate": 1e-3},
    "sketch": {"kind": "sketch", "rank": 8, "update_ratio": 1e-3},
    "full": {"kind": "full", "learning_rate": 5e-4, "weight_decay": 0.01},
}
"""By kind, [trainer]."""
RATES = {"lora": 1e-3, "full": 5e-4, "sketch": 1e-3}


def make(
    kind: Any, model: str | Path, trainer: dict[str, Any], device: Any = "cpu", dtype: str = "float32", **algorithm: Any
) -> Any:
    anchored = trainer.get("kind", "lora") == "lora"
    parts = (ANCHORED if anchored else ALGORITHM) | algorithm
    return kind(
        model, trainer=TrainerConfig(**trainer), algorithm=AlgorithmConfig(**parts), temperature=TEMPERATURE,
        seed=SEED, dtype=dtype, device=device,
    )  # fmt: skip


def recorded(model: Path, steps: int) -> list[list[Sample]]:
    """Batches for `course`, near the base policy."""
    backend = make(TorchBackend, model, TRAINER)
    return [batch(backend, number) for number in range(steps)]


def course(
    backend: Backend, batches: list[list[Sample]], folder: Path | None, start: Path | None = None, resave: bool = True
) -> dict[str, Any]:
    """What becomes of a backend (from checkpoint `start`, if any) that steps through `batches`, the last after it was
    saved in `folder`: metrics of each step, digests and log-probabilities before and after."""
    out: dict[str, Any] = {"digests": [], "steps": []}
    rate = RATES[backend.trainer.kind]  # type: ignore[attr-defined]
    if start is not None:
        backend.load(start)
    some = [batches[0][0].tokens, batches[0][2].tokens[:1], batches[0][3].tokens]
    path = Path("/dev/null") if folder is None else folder.with_suffix(f".{_rank()}")
    out["before"] = backend.logprobs(some, TEMPERATURE)
    for number, samples in enumerate(batches):
        if folder is not None and number == len(batches) - 1 and resave:
            if _rank() == 0:
                folder.mkdir()
            _barrier()
            backend.save(folder)
        result = backend.step(samples, rate)
        out["steps"].append(result.metrics)
        if folder is not None:
            out["digests"].append(backend.export(path))
    out["after"] = backend.logprobs(some, TEMPERATURE)
    return out


# --- on the ranks ----------------------------------------------------------------------------------------------------


def backend_of(case: dict[str, Any]) -> Any:
    from trainer.fsdp.backend import FsdpBackend

    trainer = case["trainer"] | {"parallel": ParallelConfig(data=dist.get_world_size())}
    return make(FsdpBackend, case["model"], trainer, dtype=case.get("dtype", "float32"), **case.get("algorithm", {}))


def courses(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (model, trainer, batches, folder and perhaps start, dtype, algorithm): `course`."""
    return [
        course(backend_of(case), case["batches"], *(None if case.get(key) is None else Path(case[key]) for key in
               ("folder", "start")))
        for case in payload
    ]  # fmt: skip


def live(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (model, folder, trainer): `backend_ranks.life`."""
    from trainer.fsdp.backend import FsdpBackend

    parallel = {"parallel": ParallelConfig(data=dist.get_world_size())}
    out = []
    for case in payload:
        backend = backend_ranks.make(FsdpBackend, Path(case["model"]), case["trainer"] | parallel, "cpu")
        out.append(backend_ranks.life(backend, Path(case["folder"])))
    return out


def centred(model: str) -> list[dict[str, Any]]:
    """Two steps with centred scores."""
    from trainer.fsdp.backend import FsdpBackend

    algorithm = AlgorithmConfig(**backend_options.CENTRED)
    parallel = {"parallel": ParallelConfig(data=dist.get_world_size())}
    return backend_options.steps(backend_options.make(FsdpBackend, model, algorithm, parallel, "cpu"), algorithm)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))

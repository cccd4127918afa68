"""What the tests of FSDP have go wrong on one of two ranks, and what all of them say and have afterwards."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_ranks import KINDS, RATES, backend_of, make

from async_rl.errors import AsyncRLError
from trainer.torch_backend import TorchBackend

SMALL_FILE = 4096


def fail(payload: dict[str, Any]) -> dict[str, Any]:
    """For each case (model, folder, batches): what was said, and what became of it."""
    folder, batches = Path(payload["folder"]), payload["batches"]
    full = backend_of({"model": payload["model"], "trainer": KINDS["full"] | {"updates_per_batch": 2}})
    full.step(batches[0], RATES["full"])
    lora = backend_of({"model": payload["model"], "trainer": KINDS["lora"]})
    out: dict[str, Any] = {"apart": _apart(full, folder)}
    out["full disk"] = _full_disk(full, folder)
    out["cut"] = _cut(full, folder)
    out["unread full"] = _unread(full, folder / "whole")
    _save(lora, folder / "adapter")
    lora.step(batches[0], RATES["lora"])
    out["unread lora"] = _unread(lora, folder / "adapter")
    out["taken back"] = _taken_back(full, batches[1])
    half = {kind: backend_of({"model": payload["model"], "trainer": KINDS[kind], "dtype": "bfloat16"}) for kind in
            ("lora", "full")}  # fmt: skip
    out["half"] = {kind: losses_in_half(backend, batches, kind) for kind, backend in half.items()}
    return out


def alone(kind: str, model: Path) -> Any:
    return make(TorchBackend, model, KINDS[kind], dtype="bfloat16")


def losses_in_half(backend: Any, batches: Any, kind: str) -> list[float]:
    return [backend.step(samples, RATES[kind]).metrics["loss"] for samples in batches]


def _apart(backend: Any, folder: Path) -> tuple[str, list[str]]:
    """Each rank has a folder of its own, as on machines that share no disk."""
    own = folder / f"apart-{dist.get_rank()}"
    own.mkdir()
    said = _said(lambda: backend.save(own))
    return said, [path.name for path in own.iterdir()]


def _full_disk(backend: Any, folder: Path) -> tuple[str, list[str]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, before[1]))
    said = _said(lambda: _save(backend, folder / "no-room"))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _save(backend, folder / "whole")
    return said, sorted(path.name for path in (folder / "whole").iterdir())


def _cut(backend: Any, folder: Path) -> tuple[str, bool]:
    """A file whose header is whole, and what it describes is not."""
    _save(backend, folder / "cut")
    if dist.get_rank() == 0:
        path = min((folder / "cut").glob("shard-*"))
        os.truncate(path, path.stat().st_size // 2)
    _wait()
    return _unchanged(backend, lambda: backend.load(folder / "cut"))


def _unread(backend: Any, folder: Path) -> tuple[str, bool]:
    place = folder if dist.get_rank() == 0 else folder.with_name("elsewhere")
    return _unchanged(backend, lambda: backend.load(place))


def _taken_back(backend: Any, samples: Any) -> tuple[str, bool, float]:
    """What the step says that fails after its first update, whether it left all as it was, and its loss when it is
    taken again."""
    move, moved = backend.learnable.move, []

    def once(norm: float, rate: float) -> None:
        if moved:
            raise AsyncRLError("the second update")
        moved.append(norm)
        move(norm, rate)

    backend.learnable.move = once
    said, unchanged = _unchanged(backend, lambda: backend.step(samples, RATES["full"]))
    backend.learnable.move = move
    return said, unchanged, backend.step(samples, RATES["full"]).metrics["loss"]


def _unchanged(backend: Any, work: Callable[[], Any]) -> tuple[str, bool]:
    before = _state(backend)
    said = _said(work)
    after = _state(backend)
    return said, before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def _state(backend: Any) -> dict[str, torch.Tensor]:
    """All that a step changes, as it lies on this rank."""
    learnable = backend.learnable
    out = {"steps": torch.tensor(learnable.steps)}
    for name, parameter in learnable.parameters.items():
        out[name] = _local(parameter)
        out |= {f"{key}/{name}": _local(value) for key, value in learnable.optimizer.state.get(parameter, {}).items()}
    return out


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def _save(backend: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    _wait()
    backend.save(folder)


def _said(work: Callable[[], Any]) -> str:
    try:
        work()
    except AsyncRLError as error:
        return str(error)
    return "nothing"


def _wait() -> None:
    dist.all_reduce(torch.zeros(1))

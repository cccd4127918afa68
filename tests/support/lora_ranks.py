"""What the tests of adapters under Megatron run on their ranks, and what one process computes of the same."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from sharded_models import CPU, TEMPERATURE, rows_of, sequences

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig

Arrays = dict[str, npt.NDArray[Any]]
STEPS = 3
SEED = 5


def trainer_config(**keys: Any) -> TrainerConfig:
    return TrainerConfig(**{"rank": 4, "alpha": 8.0, "learning_rate": 1e-3, "max_grad_norm": 1.0} | keys)


def fresh(path: Path, trainer: TrainerConfig) -> tuple[Any, dict[str, torch.nn.Parameter], dict[str, Any]]:
    """A Hugging Face model with the torch backend's fresh adapter, the adapter's parameters by name and its config."""
    from transformers import AutoModelForCausalLM

    from trainer.lora import adapter_config, attach_lora
    from trainer.targets import resolve_targets

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    targets = resolve_targets(model, trainer.targets)
    return model, attach_lora(model, targets, trainer, SEED), adapter_config(targets, trainer)


def random_adapter(path: Path, trainer: TrainerConfig) -> Arrays:
    """Of every tensor of the adapter: noise, B too, so that all of it has a gradient."""
    _, parameters, _ = fresh(path, trainer)
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: (torch.randn(parameters[name].shape, generator=generator) * 0.1).numpy() for name in sorted(parameters)
    }


def weighted(index: int, logprobs: torch.Tensor) -> torch.Tensor:
    """A loss in which nothing cancels, so that its relative error means something."""
    coefficients = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(index))
    return -(logprobs * coefficients).sum()


class OneProcess:
    """Hugging Face's model with the adapter merged into its weights, differentiated by autograd."""

    def __init__(self, path: Path, tensors: Arrays, scale: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        self.scale = scale
        self.start = tensors
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.reset()

    def reset(self) -> None:
        self.parameters = {
            name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in sorted(self.start.items())
        }

    def arrays(self) -> Arrays:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.parameters.items()}

    def loss(self) -> float:
        """Of `sequences`, and its gradient."""
        from merged_adapters import merged_logits

        for parameter in self.parameters.values():
            parameter.grad = None
        total = 0.0
        for index, micro_batch in enumerate(sequences()):
            parts = []
            for tokens in micro_batch:
                ids = torch.from_numpy(tokens.astype(np.int64))[None]
                logits = merged_logits(self.model, self.parameters, self.scale, ids)
                logprobs = torch.log_softmax(logits[0, :-1] / TEMPERATURE, dim=-1)
                parts.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
            flat = torch.cat(parts)
            loss = weighted(index, flat)
            loss.backward()
            total += float(loss.detach())
        return total


# --- on the ranks ----------------------------------------------------------------------------------------------------


class OnRanks:
    """A rank's part of a model and its adapter."""

    def __init__(
        self, path: str, parallel: dict[str, Any], recompute: bool, trainer: dict[str, Any], dtype: str = "float32"
    ) -> None:
        from trainer.megatron import groups, model
        from trainer.megatron.learnable import LoraShards
        from trainer.megatron.slices import Place, place_of

        self.parallel = ParallelConfig(**parallel)
        groups.begin(self.parallel, CPU)
        self.model = model.build(path, self.parallel, dtype=getattr(torch, dtype), device=CPU, recompute=recompute)
        pg = self.model.groups
        place = Place(*(each.rank() for each in (pg.pp, pg.tp, pg.dp, pg.expt_tp, pg.ep, pg.expt_dp)))
        assert place == place_of(dist.get_rank(), self.parallel)
        self.learnable = LoraShards(self.model, trainer_config(**trainer), SEED, path)

    def close(self) -> None:
        from trainer.megatron import groups

        groups.end()

    def put(self, tensors: Arrays) -> None:
        with torch.no_grad():
            for name, parameter in self.learnable.parameters.items():
                parameter.copy_(torch.from_numpy(tensors[name][self.learnable.pieces[name].index]))

    def whole(self, tensors: dict[str, torch.Tensor] | None = None) -> Arrays:
        from trainer.megatron.collect import gather

        full = gather(self.learnable.parameters if tensors is None else tensors, self.learnable.owners)
        return {name: tensor.numpy() for name, tensor in full.items()}

    def gradients(self) -> Arrays:
        return self.whole({name: _some(each.grad) for name, each in self.learnable.parameters.items()})

    def loss(self, learns: bool = True) -> float:
        """Of `sequences`, the same on every rank."""
        from trainer.megatron import passes

        pg = self.model.groups
        mine = list(range(len(sequences())))[pg.dp.rank() :: pg.dp.size()]
        total = torch.zeros((), dtype=torch.float64)

        def loss_of(index: int, logprobs: torch.Tensor) -> torch.Tensor:
            loss = weighted(mine[index], logprobs)
            if pg.tp.rank() == 0:
                total.add_(loss.detach().double())
            return loss

        self.learnable.zero()
        batches = [rows_of(sequences()[index]) for index in mine]
        passes.run(self.model, batches, loss_of, temperature=TEMPERATURE, learns=learns)
        dist.all_reduce(total)
        return float(total)

    def replicas(self) -> dict[tuple[Any, ...], str]:
        """A hash of each part that this rank holds, by name and place."""
        return {
            (name, piece.rows, piece.columns): hashlib.sha256(
                self.learnable.parameters[name].detach().numpy().tobytes()
            ).hexdigest()
            for name, piece in self.learnable.pieces.items()
        }

    def sgd(self, rate: float) -> None:
        with torch.no_grad():
            for parameter in self.learnable.parameters.values():
                parameter.add_(_some(parameter.grad), alpha=-rate)


def _some(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient


def learn(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case (path, parallel, recompute, trainer, tensors, rate): the digest of the fresh adapter; the loss and
    its gradient; the adapter after SGD; losses, norms and the adapter after AdamW; a hash of each part."""
    return [_learn(**case) for case in payload["cases"]]


def _learn(tensors: Arrays, rate: float, **case: Any) -> dict[str, Any]:
    ranks = OnRanks(**case)
    try:
        out: dict[str, Any] = {"fresh": ranks.whole(), "modules": ranks.learnable.modules}
        base = ranks.loss(learns=False)
        ranks.put(tensors)
        with ranks.learnable.off():
            out["off"] = ranks.loss(learns=False) - base
        out["loss"] = ranks.loss()
        out["norm"] = ranks.learnable.norm()
        out["gradients"] = ranks.gradients()
        for step in range(STEPS):
            if step:
                ranks.loss()
                ranks.learnable.norm()
            ranks.sgd(rate)
        out["sgd"] = ranks.whole()
        ranks.put(tensors)
        out["adamw"] = []
        for _ in range(STEPS):
            loss, norm = ranks.loss(), ranks.learnable.norm()
            ranks.learnable.move(norm, 1e-3)
            out["adamw"].append((loss, norm))
        out["adamw"].append((ranks.loss(), ranks.learnable.norm()))
        out["after"], out["replicas"] = ranks.whole(), ranks.replicas()
        return out
    finally:
        ranks.close()


def resume(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case of `cases` (path, parallel, recompute, trainer; save and perhaps load, folders): the loss after
    loading, or after putting `tensors` and two steps; saved there; then one step more: loss before it, norm, and the
    adapter after it; exported beside the checkpoint, as an adapter file, a PEFT folder and merged, as it was saved."""
    return [_resume(payload["tensors"], **case) for case in payload["cases"]]


def _resume(tensors: Arrays, save: str, load: str | None = None, **case: Any) -> dict[str, Any]:
    ranks = OnRanks(**case)
    try:
        learnable, folder = ranks.learnable, Path(save)
        if load is not None:
            learnable.load(Path(load))
        else:
            ranks.put(tensors)
            for _ in range(2):
                _step(ranks)
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        learnable.save(folder)
        digest = learnable.export(folder.with_suffix(".safetensors"))
        learnable.export_final(folder.with_suffix(".peft"))
        learnable.export_merged(folder.with_suffix(".merged"))
        steps = learnable.steps
        loss, norm = _step(ranks)
        return {"digest": digest, "steps": steps, "loss": loss, "norm": norm, "after": ranks.whole()}
    finally:
        ranks.close()


def _step(ranks: OnRanks) -> tuple[float, float]:
    loss, norm = ranks.loss(), ranks.learnable.norm()
    ranks.learnable.move(norm, 1e-3)
    return loss, norm


def half(payload: dict[str, Any]) -> dict[str, Any]:
    """On a base in bfloat16: loss and norm at `tensors`, the dtypes of what learns and of what is exported, and the
    merged model in `folder`."""
    ranks = OnRanks(**payload["case"], dtype="bfloat16")
    try:
        ranks.put(payload["tensors"])
        loss, norm = _step(ranks)
        learnable = ranks.learnable
        dtypes = {str(each.dtype) for each in learnable.parameters.values()}
        learnable.export(Path(payload["folder"]) / "adapter.safetensors")
        learnable.export_merged(Path(payload["folder"]) / "merged")
        return {"loss": loss, "norm": norm, "dtypes": dtypes}
    finally:
        ranks.close()


def unwritable(payload: dict[str, Any]) -> list[str]:
    """What merging into each of `folders` says on this rank; the last time the disk is full."""
    from trainer.megatron import hf_weights

    ranks, said = OnRanks(**payload["case"]), []
    full = mock.patch.object(hf_weights, "save_file", side_effect=OSError(28, "No space left on device"))
    try:
        for folder in payload["folders"]:
            with full if folder == payload["folders"][-1] else nullcontext():
                try:
                    ranks.learnable.export_merged(Path(folder))
                except AsyncRLError as error:
                    said.append(str(error))
        return said
    finally:
        ranks.close()


def refuse(payload: dict[str, Any]) -> dict[str, str]:
    """What loading each of `folders` says on this rank; nothing has changed then."""
    ranks = OnRanks(**payload["case"])
    try:
        _step(ranks)
        before, said = ranks.whole(), {}
        for folder in payload["folders"]:
            try:
                ranks.learnable.load(Path(folder))
            except AsyncRLError as error:
                said[Path(folder).name] = str(error)
        after = ranks.whole()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert ranks.learnable.steps == 1
        return said
    finally:
        ranks.close()


def canary(payload: dict[str, Any]) -> list[str]:
    """The digest of each case's canary, of scores that do not move; the adapter is then what it was."""
    found = []
    for number, case in enumerate(payload["cases"]):
        ranks = OnRanks(**case)
        try:
            before = ranks.replicas()
            path = Path(payload["folder"]) / f"canary-{number}.safetensors"
            found.append(ranks.learnable.canary(path, SEED, lambda: [np.zeros(1, np.float32)]).digest)
            assert ranks.replicas() == before
        finally:
            ranks.close()
    return found

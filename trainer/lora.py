"""LoRA: the adapter on the modules that were chosen (arXiv 2106.09685; on linear modules by peft).

B starts at zero, so a fresh adapter is the base policy exactly; A is drawn from the run's seed alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import TENSOR_PREFIX
from async_rl.policy.experts import expert_weights
from trainer.adapter_init import dense_a
from trainer.canary import same_norm
from trainer.expert_lora import attach_expert_lora, expert_loras
from trainer.peft_layout import to_peft
from trainer.targets import Targets

ADAPTER = "default"  # peft's name for the only adapter


class LoraError(AsyncRLError):
    """The adapter that was asked for cannot be put on this model; the message says what exists instead."""


def attach_lora(model: nn.Module, targets: Targets, trainer: TrainerConfig, seed: int) -> dict[str, nn.Parameter]:
    """Put a fresh adapter on `model`, in place, freeze everything else, and return the adapter's parameters by their
    names in the adapter file, sorted. A is drawn from `seed` (trainer.adapter_init), B is 0; both float32 on a
    half-precision base. Leaves torch's global random state as it was. Raises LoraError."""
    check_alpha(trainer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    parameters = _attach_linear(model, targets, trainer, seed) if targets.modules else {}
    parameters |= attach_expert_lora(model, targets.experts, trainer, seed)
    return dict(sorted(parameters.items()))


def check_alpha(trainer: TrainerConfig) -> None:
    """Raises LoraError."""
    if trainer.alpha != int(trainer.alpha):
        raise LoraError(f"[trainer] alpha = {trainer.alpha}: engines read it as an integer, so it must be one")


def _attach_linear(model: nn.Module, targets: Targets, trainer: TrainerConfig, seed: int) -> dict[str, nn.Parameter]:
    """The linear modules' part of it."""
    wanted = {target.name for target in targets.modules}
    config = LoraConfig(
        r=trainer.rank,
        lora_alpha=int(trainer.alpha),
        target_modules=[f"{_Unnamed.INNER}.{name}" for name in sorted(wanted)],
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, _Unnamed(model))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if layers.keys() != wanted:
        raise LoraError(
            f"peft adapted other modules than the {len(wanted)} that were resolved: "
            f"missing {sorted(wanted - layers.keys())}, unasked {sorted(layers.keys() - wanted)}"
        )
    in_features = {target.name: target.in_features for target in targets.modules}
    parameters: dict[str, nn.Parameter] = {}
    for name, initial in dense_a(in_features, trainer.rank, seed):
        for part in (layers[name].lora_A[ADAPTER], layers[name].lora_B[ADAPTER]):
            part.to(torch.promote_types(part.weight.dtype, torch.float32))
        a = model.get_parameter(f"{name}.lora_A.{ADAPTER}.weight")
        b = model.get_parameter(f"{name}.lora_B.{ADAPTER}.weight")
        with torch.no_grad():
            a.copy_(initial)
            b.zero_()
        parameters[f"{TENSOR_PREFIX}{name}.lora_A.weight"] = a
        parameters[f"{TENSOR_PREFIX}{name}.lora_B.weight"] = b
    return parameters


class _Unnamed(nn.Module):
    """A model without its config. From that peft would conclude which of a mixture's targets mean experts, and adapt
    these in its own way instead of the linear layers of the same name."""

    INNER = "inner"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(self.INNER, model)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is the base model: what `attach_lora` put on it is switched off."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    experts = expert_loras(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    for each in experts:
        each.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for each in experts:
            each.enabled = True


def adapted_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that an adapter's tensors are of, sorted: of experts each one's, and what all of them share."""
    return tuple(sorted({name.removeprefix(TENSOR_PREFIX).rpartition(".lora_")[0] for name in names}))


def weight_norms(model: nn.Module, targets: Targets) -> dict[str, float]:
    """What `trainer.canary.noise` asks for, of each module with an adapter."""
    squares = {
        target.name: _square(model.get_submodule(f"{target.name}.base_layer").weight) for target in targets.modules
    }
    for target in targets.experts:
        own = [_square(weight) for weight in expert_weights(model.get_submodule(target.path))[target.projection]]
        squares |= dict(zip(target.modules(), own, strict=True))
        squares[target.name] = math.fsum(own) / len(own)
    return {module: same_norm(square) for module, square in squares.items()}


def _square(weight: Any) -> float:
    norm = torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2


def adapter_config(targets: Targets, trainer: TrainerConfig) -> dict[str, Any]:
    """What `async_rl.policy.adapter` needs to know of the adapter beside its tensors."""
    return {"r": trainer.rank, "lora_alpha": int(trainer.alpha), "target_modules": sorted(targets.patterns)}


def write_peft_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], base_model: str
) -> None:
    """The adapter as `peft.PeftModel.from_pretrained(model, folder)` reads it. `tensors` and `config` are those of the
    adapter file; `base_model` is the path recorded as the model it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter = to_peft({name: tensor.detach().cpu() for name, tensor in tensors.items()}, config)
    kept = {name: tensor.contiguous() for name, tensor in adapter.tensors.items()}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config_class: Any = LoraConfig
    table: dict[str, Any] = config_class(
        **adapter.config,
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base_model,
        inference_mode=True,
    ).to_dict()
    table["target_modules"] = sorted(table["target_modules"] or ())
    text = json.dumps(table, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")

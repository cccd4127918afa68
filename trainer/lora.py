"""LoRA: the adapter on the modules that were chosen (arXiv 2106.09685, by peft).

B starts at zero, so a fresh adapter is the base policy exactly; A is drawn from the run's seed alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import TENSOR_PREFIX
from trainer.adapter_init import dense_a
from trainer.targets import Targets

ADAPTER = "default"  # peft's name for the only adapter


class LoraError(AsyncRLError):
    """The adapter that was asked for cannot be put on this model; the message says what exists instead."""


def attach_lora(model: nn.Module, targets: Targets, trainer: TrainerConfig, seed: int) -> dict[str, nn.Parameter]:
    """Put a fresh adapter on `model`, in place, freeze everything else, and return the adapter's parameters by their
    names in PEFT layout, sorted. A is uniform in ±1/√in (peft's initialisation) from `seed`, B is 0; both float32 on a
    half-precision base. Leaves torch's global random state as it was. Raises LoraError."""
    if trainer.alpha != int(trainer.alpha):
        raise LoraError(f"[trainer] alpha = {trainer.alpha}: engines read it as an integer, so it must be one")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=trainer.rank,
        lora_alpha=int(trainer.alpha),
        target_modules=list(targets.patterns),
        lora_dropout=0.0,
        bias="none",
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls a name that transformers is about to rename
        get_peft_model(model, config)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    wanted = {target.name for target in targets.modules}
    if layers.keys() != wanted:
        raise LoraError(
            f"peft adapted other modules than the {len(wanted)} that were resolved: "
            f"missing {sorted(wanted - layers.keys())}, unasked {sorted(layers.keys() - wanted)}"
        )
    in_features = {target.name: target.in_features for target in targets.modules}
    parameters: dict[str, nn.Parameter] = {}
    for name, initial in dense_a(in_features, trainer.rank, seed):
        a = model.get_parameter(f"{name}.lora_A.{ADAPTER}.weight")
        b = model.get_parameter(f"{name}.lora_B.{ADAPTER}.weight")
        with torch.no_grad():
            a.copy_(initial)
            b.zero_()
        parameters[f"{TENSOR_PREFIX}{name}.lora_A.weight"] = a
        parameters[f"{TENSOR_PREFIX}{name}.lora_B.weight"] = b
    return dict(sorted(parameters.items()))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is the base model: what `attach_lora` put on it is switched off."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_config(targets: Targets, trainer: TrainerConfig) -> dict[str, Any]:
    """What `async_rl.policy.adapter` needs to know of the adapter beside its tensors."""
    return {"r": trainer.rank, "lora_alpha": int(trainer.alpha), "target_modules": sorted(targets.patterns)}


def write_peft_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], base_model: str
) -> None:
    """The adapter as `peft.PeftModel.from_pretrained(model, folder)` reads it. `tensors` bear PEFT's names already;
    `config` is that of `adapter_config`; `base_model` is the path recorded as the model it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config_class: Any = LoraConfig
    table: dict[str, Any] = config_class(
        task_type="CAUSAL_LM",
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        target_modules=list(config["target_modules"]),
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base_model,
        inference_mode=True,
    ).to_dict()
    table["target_modules"] = sorted(table["target_modules"])
    text = json.dumps(table, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")

"""LoRA: which modules are adapted, and the adapter on them (arXiv 2106.09685, by peft).

Targets are resolved by our own list, because peft's `all-linear` also adapts routers. B starts at zero, so a fresh
adapter is the base policy exactly; A is drawn from the run's seed alone.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import TENSOR_PREFIX

ADAPTER = "default"  # peft's name for the only adapter
# Parts of a module path that mark a mixture-of-experts router: adapting it would move the routing.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


class LoraError(AsyncRLError):
    """The adapter that was asked for cannot be put on this model; the message says what exists instead."""


class Target(NamedTuple):
    """A linear module to adapt: full path, and W's shape."""

    name: str
    out_features: int
    in_features: int

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


class Targets(NamedTuple):
    """What is adapted, by path; `patterns` say the same to peft and to engines (last parts of paths where these are
    unambiguous); `notices` are what a person should know was left out."""

    modules: tuple[Target, ...]
    patterns: tuple[str, ...]
    notices: tuple[str, ...]

    def parameters(self, rank: int) -> int:
        """Trainable parameters: A is rank × in, B is out × rank."""
        return sum(rank * (target.in_features + target.out_features) for target in self.modules)

    def table(self, rank: int) -> str:
        """One line per target name: how many modules, how many trainable parameters."""
        count = Counter(target.last for target in self.modules)
        size: Counter[str] = Counter()
        for target in self.modules:
            size[target.last] += rank * (target.in_features + target.out_features)
        width = max(len(name) for name in (*count, "target", "total"))
        rows = [(name, count[name], size[name]) for name in sorted(count)]
        rows.append(("total", len(self.modules), self.parameters(rank)))
        lines = [f"{'target':<{width}}  modules  parameters"]
        lines += [f"{name:<{width}}  {modules:>7}  {parameters:>10,}" for name, modules, parameters in rows]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])


def resolve_targets(model: nn.Module, names: Sequence[str] = ()) -> Targets:
    """The linear modules that `names` mean (last parts of paths, or more of the path); none means every nn.Linear
    except routers and the output head. Raises LoraError for a name that matches no nn.Linear and for a model without
    any, naming what exists."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_default = {name: module for name, module in linear.items() if not _left_out(model, name, module)}
    fused = fused_experts(model)
    if names:
        for name in names:
            if not any(_matches(path, name) for path in linear):
                raise LoraError(_no_such_target(model, name, linear, fused))
        chosen = {path: module for path, module in linear.items() if any(_matches(path, name) for name in names)}
    else:
        chosen = by_default
    if not chosen:
        kinds = Counter(type(module).__name__ for module in model.modules() if hasattr(module, "weight"))
        raise LoraError(
            f"model {type(model).__name__}: no nn.Linear to adapt besides routers and head; its weights are in "
            f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}. Only nn.Linear layers can be "
            "adapted (a GPT-2-like Conv1D cannot): use a model with linear layers"
        )
    modules = tuple(Target(path, chosen[path].out_features, chosen[path].in_features) for path in sorted(chosen))
    return Targets(modules, _patterns(model, modules), _notices(fused))


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
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, nn.Parameter] = {}
    for name in sorted(layers):
        a = model.get_parameter(f"{name}.lora_A.{ADAPTER}.weight")
        b = model.get_parameter(f"{name}.lora_B.{ADAPTER}.weight")
        bound = 1.0 / math.sqrt(a.shape[1])
        with torch.no_grad():
            a.copy_((torch.rand(a.shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound)
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


def _matches(path: str, name: str) -> bool:
    """peft's rule for a list of target modules."""
    return path == name or path.endswith(f".{name}")


def _left_out(model: nn.Module, name: str, module: nn.Module) -> bool:
    return module is model.get_output_embeddings() or not ROUTER_NAMES.isdisjoint(name.split("."))  # type: ignore[operator]


def _patterns(model: nn.Module, modules: Sequence[Target]) -> tuple[str, ...]:
    """Last parts of paths, which every engine understands, unless one also matches a module that is not a target;
    then the full paths instead."""
    chosen = {target.name for target in modules}
    paths = [name for name, _ in model.named_modules()]
    ambiguous = {
        last
        for last in {target.last for target in modules}
        if any(_matches(path, last) and path not in chosen for path in paths)
    }
    return tuple(sorted({target.name if target.last in ambiguous else target.last for target in modules}))


def fused_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Expert weights that are one 3-D parameter per layer (transformers 5), by path."""
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and "expert" in name
    }


def _notices(fused: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    if not fused:
        return ()
    name, shape = next(iter(fused.items()))
    return (
        f"{len(fused)} fused expert parameters (3-D, such as {name} {list(shape)}) are not adapted: LoRA on fused "
        "experts is not implemented; attention and other linear layers are",
    )


def _no_such_target(model: nn.Module, name: str, linear: Mapping[str, nn.Linear], fused: Mapping[str, Any]) -> str:
    hits = [path for path in fused if _matches(path, name)]
    if hits:
        return (
            f"[trainer] targets: {name!r} is only fused expert parameters here ({hits[0]}, 3-D), and LoRA on those is "
            "not implemented: leave it out"
        )
    others = {type(module).__name__ for path, module in model.named_modules() if _matches(path, name)}
    what = f"is a {', '.join(sorted(others))}, not an nn.Linear" if others else "matches no module"
    exist = sorted({path.rpartition(".")[2] for path in linear})
    return (
        f"[trainer] targets: {name!r} {what} of {type(model).__name__}; linear modules here: "
        f"{', '.join(exist) if exist else 'none'}"
    )

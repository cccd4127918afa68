"""LoRA on fused experts: a low-rank path beside each projection, inside the grouped product.

In the file an expert's projection is a module of its own, as in the checkpoint; here it is a parameter of its own, too,
so that AdamW, canary and files need know nothing of experts. The forward pass stacks them: y_e = W_e x + s B_e (A_e x).
A shared-outer adapter has one A for all experts of a gate or up projection, or one B for all of a down projection:
what meets the hidden width is shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import nn

from async_rl.config import TrainerConfig
from async_rl.policy.adapter import TENSOR_PREFIX
from async_rl.policy.experts import DOWN, ExpertTarget, Product, expert_weights, forward_by_projection, put_projections
from async_rl.trainer_config import ExpertAdapters
from trainer.adapter_init import expert_a

Part = Literal["A", "B"]


def tensor_names(target: ExpertTarget, layout: ExpertAdapters, part: Part) -> list[str]:
    """Of lora_A or lora_B in an adapter file, by expert; one where the experts share it."""
    shared = layout == "shared_outer" and part == ("B" if target.projection == DOWN else "A")
    modules = [target.name] if shared else target.modules()
    return [f"{TENSOR_PREFIX}{module}.lora_{part}.weight" for module in modules]


class ExpertLora(nn.Module):
    """One projection of all experts of a layer. `weight` is a view, [experts, out, in]; the adapter's tensors [rank,
    in] and [out, rank] are parameters, float32 or wider, under `names`, those of the adapter file."""

    def __init__(self, weight: torch.Tensor, target: ExpertTarget, trainer: TrainerConfig) -> None:
        super().__init__()
        self.weight = weight
        self.enabled = True
        self.scale = trainer.alpha / trainer.rank
        layout, rank = trainer.expert_adapters, trainer.rank
        self.names: dict[Part, list[str]] = {
            "A": tensor_names(target, layout, "A"),
            "B": tensor_names(target, layout, "B"),
        }
        wide = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        of_a = [torch.zeros(rank, target.in_features, **wide) for _ in self.names["A"]]
        of_b = [torch.zeros(target.out_features, rank, **wide) for _ in self.names["B"]]
        self.a, self.b = nn.ParameterList(of_a), nn.ParameterList(of_b)

    def named(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters as the file names them."""
        names = [*self.names["A"], *self.names["B"]]
        return dict(zip(names, [*self.a, *self.b], strict=True))

    def stacked(self, tensors: Mapping[str, torch.Tensor], part: Part) -> torch.Tensor:
        """[experts, …] of `tensors` by the file's names: a view of the one where it is shared."""
        found = [tensors[name] for name in self.names[part]]
        return found[0].expand(len(self.weight), -1, -1) if len(found) == 1 else torch.stack(found)

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, product: Product) -> torch.Tensor:
        """[n, out] of x [n, in], whose rows are sorted by expert: see `async_rl.policy.experts.put_projections`."""
        out = product(x, self.weight.transpose(1, 2), bounds)
        if not self.enabled:
            return out
        inner = _apply(x.to(self.a[0].dtype), self.a, bounds, product)
        change: torch.Tensor = out + self.scale * _apply(inner, self.b, bounds, product)
        return change.to(out.dtype)


def _apply(x: torch.Tensor, factors: nn.ParameterList, bounds: torch.Tensor, product: Product) -> torch.Tensor:
    """x [n, k] times each row's own factor [m, k], transposed: [n, m]."""
    if len(factors) == 1:
        return nn.functional.linear(x, factors[0])
    return product(x, torch.stack(list(factors)).transpose(1, 2), bounds)


class _Plain(nn.Module):
    """A projection without an adapter beside ones that have it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, product: Product) -> torch.Tensor:
        return product(x, self.weight.transpose(1, 2), bounds)


def attach_expert_lora(
    model: nn.Module, targets: tuple[ExpertTarget, ...], trainer: TrainerConfig, seed: int
) -> dict[str, nn.Parameter]:
    """Put a fresh adapter on the experts of `model`, in place, and return its parameters by the names of the file. A as
    trainer.adapter_init has it, B is 0."""
    parameters: dict[str, nn.Parameter] = {}
    for path in sorted({target.path for target in targets}):
        experts = model.get_submodule(path)
        parts: dict[str, nn.Module] = {name: _Plain(weight) for name, weight in expert_weights(experts).items()}
        for target in targets:
            if target.path == path:
                weight = parts[target.projection].weight
                assert isinstance(weight, torch.Tensor)
                part = ExpertLora(weight, target, trainer)
                parts[target.projection] = part
                parameters |= part.named()
                _initialise(part, trainer.rank, target.in_features, seed)
        put_projections(experts, parts, partial(forward_by_projection, experts))
    return parameters


@torch.no_grad()
def _initialise(part: ExpertLora, rank: int, in_features: int, seed: int) -> None:
    for name, parameter in zip(part.names["A"], part.a, strict=True):
        parameter.copy_(expert_a(name, rank, in_features, seed))


def expert_loras(model: nn.Module) -> dict[str, ExpertLora]:
    """What `attach_expert_lora` put on a model, by module path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, ExpertLora)}

"""What learns by AdamW (arXiv 1711.05101), be it an adapter or every parameter: the part that both kinds share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from async_rl.config import TrainerConfig

Deltas = dict[str, torch.Tensor]


class AdamW:
    """`parameters` by name, sorted, all on one device. Gradients are clipped to a global norm of
    `trainer.max_grad_norm` before each step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], trainer: TrainerConfig) -> None:
        self.parameters = dict(parameters)
        self.trainer = trainer
        self.steps = 0
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
            fused=True,  # one pass over all of it, on CPU too
        )

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def norm(self) -> float:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def move(self, norm: float, rate: float) -> None:
        self._advance(norm, rate)
        self.steps += 1

    @torch.no_grad()
    def displacement(self, norm: float, rate: float) -> Deltas:
        """What a step changes of each parameter. The optimiser has then taken it, the parameters have not."""
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._advance(norm, rate)
        deltas = {}
        for name, parameter in self.parameters.items():
            deltas[name] = parameter - before[name]
            parameter.copy_(before.pop(name))
        return deltas

    @torch.no_grad()
    def add(self, deltas: Deltas, scale: float) -> None:
        for name, parameter in self.parameters.items():
            parameter.add_(deltas[name], alpha=scale)
        self.steps += 1

    def metrics(self) -> dict[str, float]:
        return {}

    def snapshot(self) -> Callable[[], None]:
        """See `trainer.learnable.Learnable.snapshot`."""
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        state, steps = copy.deepcopy(self.optimizer.state_dict()), self.steps

        def restore() -> None:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(kept[name])
            self.optimizer.load_state_dict(state)
            self.steps = steps

        return restore

    def _advance(self, norm: float, rate: float) -> None:
        first = next(iter(self.parameters.values()))
        total = torch.tensor(norm, device=first.device)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.trainer.max_grad_norm, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

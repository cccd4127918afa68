"""Kind "lora": an adapter on the linear layers and experts learns, by AdamW; the base stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.policy.adapter import TENSOR_PREFIX, write_adapter
from trainer import optimizer_state
from trainer.adamw import AdamW
from trainer.canary import Canary, Scores, make_canary, noise
from trainer.expert_lora import expert_loras
from trainer.learnable import LowRank, Proposal
from trainer.lora import adapted_modules, adapter_config, attach_lora, weight_norms, write_peft_folder
from trainer.targets import resolve_targets

log = logging.getLogger("trainer")


class LoraWeights(AdamW):
    """`trainer.learnable.Learnable`. The adapter is float32, or what is wider if the base is. Raises
    TargetError and LoraError."""

    has_base = True
    rounds = False

    def __init__(self, model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> None:
        self.model = model
        self.model_path = model_path
        self.targets = resolve_targets(model, trainer.targets)
        log.info("LoRA of rank %d:\n%s", trainer.rank, self.targets.table(trainer.rank, trainer.expert_adapters))
        super().__init__(attach_lora(model, self.targets, trainer, seed), trainer)
        self.modules = adapted_modules(self.parameters)

    # --- moving ------------------------------------------------------------------------------------------------------

    def propose(self, norm: float, rate: float) -> Proposal:
        """ΔW = scale (δB A + B δA) to first order; what a step does to the second, scale δB δA, no multiple of it
        does."""
        deltas = self.displacement(norm, rate)
        now: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in self.parameters.items()}
        tangents = {}
        for target in self.targets.modules:
            key_a, key_b = (f"{TENSOR_PREFIX}{target.name}.lora_{part}.weight" for part in "AB")
            a, b = now[key_a].clone(), now[key_b] * self._scale
            tangents[target.name] = (LowRank(a, deltas[key_b] * self._scale), LowRank(deltas[key_a], b))
        for path, experts in expert_loras(self.model).items():
            a, b = experts.stacked(now, "A").clone(), experts.stacked(now, "B") * self._scale
            of_a, of_b = experts.stacked(deltas, "A"), experts.stacked(deltas, "B") * self._scale
            tangents[path] = (LowRank(a, of_b), LowRank(of_a, b))
        return Proposal(tangents, {}, deltas)

    def take(self, proposal: Proposal, scale: float) -> None:
        self.add(proposal.own, scale)

    @property
    def _scale(self) -> float:
        return self.trainer.alpha / self.trainer.rank

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        return write_adapter(path, self.parameters, self._config)

    def export_whole(self, path: Path) -> str:
        """An adapter is whole as it is."""
        return self.export(path)

    def export_final(self, folder: Path) -> None:
        write_peft_folder(folder, self.parameters, self._config, self.model_path)

    def save(self, folder: Path) -> None:
        """adapter.safetensors (an adapter file), optimizer.safetensors and backend.json."""
        digest = write_adapter(folder / optimizer_state.ADAPTER_FILE, self.parameters, self._config)
        optimizer_state.write_moments(folder, self.parameters, self.optimizer)
        optimizer_state.write_counters(folder, optimizer_state.Counters(self.steps, digest, self.model_path, "lora"))

    def load(self, folder: Path) -> None:
        counters = optimizer_state.read_counters(folder, "lora")
        if not (folder / optimizer_state.ADAPTER_FILE).is_file():
            self._load_parts(folder, counters)
            self.steps = counters.optimizer_steps
            return
        tensors = optimizer_state.read_adapter_tensors(folder, counters, self._config)
        optimizer_state.restore(folder, tensors, self.parameters, self.optimizer)
        self.steps = counters.optimizer_steps

    def _load_parts(self, folder: Path, counters: optimizer_state.Counters) -> None:
        """Of backend megatron."""
        from trainer.megatron import saved

        state = saved.read_for_one_process(folder, counters, self.parameters, self._config)
        saved.restore(state, self.parameters, self.optimizer)

    @property
    def _config(self) -> dict[str, Any]:
        return adapter_config(self.targets, self.trainer)

    # --- proof -------------------------------------------------------------------------------------------------------

    def canary(self, path: Path, seed: int, score: Callable[[], Scores]) -> Canary:
        """See the backend's; `score` gives the probe's log-probabilities under the weights as they are."""
        shapes = {name: (parameter.shape[0], parameter.shape[1]) for name, parameter in self.parameters.items()}
        norms = weight_norms(self.model, self.targets)

        def fill(strength: float) -> None:
            for name, values in noise(shapes, norms.__getitem__, self._scale, seed, strength):
                self.parameters[name].copy_(values)

        return make_canary(self.parameters, fill, score, partial(self.export, path))

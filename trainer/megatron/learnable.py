"""What learns under Megatron: an adapter of which each rank holds a part, by AdamW, element by element."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.policy.adapter import policy_digest, shared_name, write_adapter
from trainer.adamw import AdamW
from trainer.adapter_init import dense_a, expert_a
from trainer.canary import Canary, Scores, make_canary, noise, same_norm
from trainer.lora import adapted_modules, adapter_config, check_alpha, write_peft_folder
from trainer.megatron import collect, merge, saved
from trainer.megatron.layout import stage_layers
from trainer.megatron.lora import Adapters, Factors, find_sites
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import pieces as base_pieces
from trainer.megatron.slices import (
    PARTS,
    Owners,
    Part,
    Piece,
    Plan,
    check_plan,
    locate,
    pieces,
    place_of,
    tensor_name,
    whole,
)
from trainer.optimizer_state import Counters, read_counters, write_counters
from trainer.ranks import agreement
from trainer.targets import Target, Targets, resolve_targets

log = logging.getLogger("trainer")


class LoraShards(AdamW):
    """`trainer.learnable.Learnable`, but for what step control needs of one; every method is called on all ranks at
    once. `parameters` are this rank's parts, by the names of the adapter file; float32, or what is wider if the base
    is. A fresh adapter is the torch backend's, bit for bit. Raises TargetError, LoraError and SliceError."""

    has_base = True
    rounds = False

    def __init__(self, model: ShardedModel, trainer: TrainerConfig, seed: int, model_path: str) -> None:
        check_alpha(trainer)
        self.model = model
        self.model_path = model_path
        self.targets = resolve_targets(skeleton(model.config), trainer.targets)
        self.plan = make_plan(model, _modules(self.targets), trainer)
        self.owners = Owners(self.plan)
        if dist.get_rank() == 0:
            log.info("LoRA of rank %d:\n%s", trainer.rank, self.targets.table(trainer.rank, trainer.expert_adapters))
        held = pieces(self.plan, place_of(dist.get_rank(), model.parallel))
        self.pieces = {piece.name: piece for piece in held.values()}
        parameters = _fresh(self.plan, self.pieces, seed, model)
        factors = _factors(held, parameters)
        self.adapters = Adapters(find_sites(model), factors, trainer.alpha / trainer.rank)
        super().__init__(dict(sorted(parameters.items())), trainer)
        self.modules = adapted_modules(whole(self.plan))

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model is the base model."""
        return self.adapters.off()

    # --- moving ------------------------------------------------------------------------------------------------------

    def norm(self) -> float:
        """Of the whole gradient; the same number on every rank. Each rank's parts are made whole first, once between
        two calls of `zero`."""
        gradients = {name: _gradient(parameter) for name, parameter in self.parameters.items()}
        collect.sum_over_ranks(gradients, self.pieces, self.model.groups)
        return collect.global_norm(gradients, self.pieces, self.model.device)

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        tensors = collect.gather(self.parameters, self.owners)
        return self._on_rank_0(lambda: write_adapter(path, tensors, self._config), f"writing {path}")

    def export_whole(self, path: Path) -> str:
        """An adapter is whole as it is."""
        return self.export(path)

    def export_final(self, folder: Path) -> None:
        tensors = collect.gather(self.parameters, self.owners)

        def write() -> str:
            write_peft_folder(folder, tensors, self._config, self.model_path)
            return policy_digest(tensors, self._config)

        self._on_rank_0(write, f"writing {folder}")

    def export_merged(self, folder: Path) -> None:
        """The whole model with the adapter in its weights, in Hugging Face layout."""
        merge.write_merged(self.model, self.adapters, folder, self.model_path)

    def save(self, folder: Path) -> None:
        """shard-*.safetensors of the ranks that own some of the adapter, and backend.json, into a folder that all ranks
        see."""
        counters = Counters(self.steps, self._digest(), self.model_path, "lora")
        mine, error = self.owners.of(dist.get_rank()), None
        writing = agreement.ranks_that(bool(mine), self.model.device)
        try:
            if mine:
                own = (mine, self.parameters, self.optimizer)
                saved.write_shard(folder, counters, dist.get_rank(), writing, *own, self._config)
        except Exception as raised:
            error = raised
        agreement.agree(error, f"writing a part of checkpoint {folder}", self.model.device)

        def write() -> str:
            write_counters(folder, counters)
            return counters.digest

        self._on_rank_0(write, f"writing checkpoint {folder}")

    def load(self, folder: Path) -> None:
        """See the contract; of a checkpoint of any layout, or of the torch backend."""
        error, counters, state = None, None, None
        try:
            counters = read_counters(folder, "lora")
            state = saved.read_state(folder, counters, self.pieces.values(), whole(self.plan), self._config)
        except Exception as raised:
            error = raised
        agreement.agree(error, f"reading checkpoint {folder}", self.model.device)
        assert counters is not None
        assert state is not None
        saved.restore(state, self.parameters, self.optimizer)
        self.steps = counters.optimizer_steps

    def _digest(self) -> str:
        """Of the policy, on every rank; the whole adapter is on rank 0 only for as long as this takes."""
        tensors = collect.gather(self.parameters, self.owners)
        return self._on_rank_0(lambda: policy_digest(tensors, self._config), "reading the policy's digest")

    def _on_rank_0(self, make: Callable[[], str], what: str) -> str:
        return agreement.on_rank_0(make, what, self.model.device)

    @property
    def _config(self) -> dict[str, Any]:
        return adapter_config(self.targets, self.trainer)

    # --- proof -------------------------------------------------------------------------------------------------------

    def canary(self, path: Path, seed: int, score: Callable[[], Scores]) -> Canary:
        """See the backend's; `score` gives the probe's log-probabilities under the weights as they are, the same on
        every rank: they decide how strong the noise is."""
        norms, shapes = self._base_norms(), whole(self.plan)

        def fill(strength: float) -> None:
            for name, values in noise(shapes, norms.__getitem__, self.adapters.scale, seed, strength):
                if name in self.parameters:
                    self.parameters[name].copy_(values[self.pieces[name].index])

        return make_canary(self.parameters, fill, score, partial(self.export, path))

    @torch.no_grad()
    def _base_norms(self) -> dict[str, float]:
        """Of the weights of all adapted modules, by path; of those that share a factor, the root of the mean square."""
        places = {module.name: place for place, module in enumerate(self.plan.modules)}
        squares = torch.zeros(len(places), dtype=torch.float64, device=self.model.device)
        for piece in base_pieces(self.model):
            module = piece.name.removesuffix(".weight")
            if piece.owned and module in places:
                squares[places[module]] = piece.local.double().square().sum()
        dist.all_reduce(squares)
        by_module = dict(zip(places, squares.tolist(), strict=True))
        shared: dict[str, list[float]] = {}
        for module, square in by_module.items():
            shared.setdefault(shared_name(module), []).append(square)
        means = {module: sum(each) / len(each) for module, each in shared.items()}
        return {module: same_norm(square) for module, square in (means | by_module).items()}


def skeleton(config: Any) -> PreTrainedModel:
    """The whole model without its weights: what targets are resolved on, by the rules of the torch backend."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def make_plan(model: ShardedModel, modules: tuple[Target, ...], trainer: TrainerConfig) -> Plan:
    """How what learns of these projections (experts' one by one) lies on the ranks. Raises SliceError."""
    layers, pipeline = model.config.num_hidden_layers, model.parallel.pipeline
    plan = Plan(
        modules=modules,
        rank=trainer.rank,
        shared_outer=trainer.expert_adapters == "shared_outer",
        parallel=model.parallel,
        stages=tuple(tuple(stage_layers(layers, pipeline, stage)) for stage in range(pipeline)),
        experts=getattr(model.config, "num_experts", 0),
    )
    check_plan(plan)
    return plan


def _modules(targets: Targets) -> tuple[Target, ...]:
    """Every adapted projection, of experts each one's, by path."""
    experts = [Target(path, each.out_features, each.in_features) for each in targets.experts for path in each.modules()]
    return tuple(sorted([*targets.modules, *experts]))


def _fresh(plan: Plan, held: Mapping[str, Piece], seed: int, model: ShardedModel) -> dict[str, nn.Parameter]:
    """A rank's parts of an adapter that has learned nothing: A from the seed, B zero."""
    dtype = torch.promote_types(model.stage.config.params_dtype, torch.float32)
    parameters = {
        name: nn.Parameter(torch.zeros(piece.local_shape, dtype=dtype, device=model.device))
        for name, piece in held.items()
    }
    for name, values in _initial_a(plan, held, seed):
        with torch.no_grad():
            parameters[name].copy_(values[held[name].index])
    return parameters


def _initial_a(plan: Plan, held: Mapping[str, Piece], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A, whole, of each tensor that is held. Linear modules share a stream of random numbers, of which none can be left
    out; experts have streams of their own."""
    linear = {module.name: module.in_features for module in plan.modules if locate(module.name).expert is None}
    for module, values in dense_a(linear, plan.rank, seed):
        name = tensor_name(module, "A")
        if name in held:
            yield name, values
    for name, piece in held.items():
        if ".mlp.experts." in name and name.endswith(".lora_A.weight"):
            yield name, expert_a(name, plan.rank, piece.shape[1], seed)


def _factors(held: Mapping[tuple[str, Part], Piece], parameters: Mapping[str, nn.Parameter]) -> dict[str, Factors]:
    """By module path."""
    modules = {module for module, _ in held}
    return {module: Factors(*(parameters[held[module, part].name] for part in PARTS)) for module in modules}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Of what nothing reached (an expert without tokens), zeros: its optimiser state must move on as elsewhere."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

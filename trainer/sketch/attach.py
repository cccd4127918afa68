"""Which weights of a model are sketched, and the sketching put on it, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from async_rl.config import TrainerConfig
from async_rl.policy.adapter import means
from async_rl.policy.experts import DOWN, GATE_UP, expert_modules
from trainer.sketch.blocks import Accumulator, Block
from trainer.sketch.experts import attach_experts, expert_blocks
from trainer.sketch.linear import attach_linear
from trainer.sketch.projections import Projections
from trainer.sketch.sketches import Sketches
from trainer.targets import TargetError, resolve_targets


class Attached(NamedTuple):
    """The blocks by name, in order of name; their sketches; and what draws the projections."""

    blocks: dict[str, Block]
    sketches: Sketches
    projections: Projections


def attach_sketches(model: nn.Module, trainer: TrainerConfig, base_seed: int) -> Attached:
    """Freeze all parameters of `model`, which lies on its device, and sketch the gradients of its linear layers and
    fused experts (those that `trainer.targets` names; all, when it names none) in every backward pass from now on.
    Raises AsyncRLError for names, of targets or ranks, that match nothing or mean the head, for layers that share a
    weight, and for experts of an unknown layout."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    blocks = find_blocks(model, trainer)
    linear = [block for block in blocks.values() if block.module == block.name]
    named = [block for block in blocks.values() if block.module != block.name]
    device = next(iter(blocks.values())).weight.device
    sketches = Sketches({name: block.sketch_shape for name, block in blocks.items()}, device)
    projections = Projections(base_seed, 0, device)
    anchor = torch.zeros((), device=device, requires_grad=True)
    into = {name: Accumulator(block, sketches.views[name], projections) for name, block in blocks.items()}
    for block in linear:
        layer = model.get_submodule(block.module)
        assert isinstance(layer, nn.Linear)
        attach_linear(layer, into[block.name], anchor)
    for path in sorted({block.name.rpartition(".")[0] for block in named}):
        own = {name.rpartition(".")[2]: each for name, each in into.items() if name.rpartition(".")[0] == path}
        attach_experts(model.get_submodule(path), own, anchor)
    return Attached(blocks, sketches, projections)


def find_blocks(model: nn.Module, trainer: TrainerConfig) -> dict[str, Block]:
    """What `attach_sketches` sketches, by name, in order of name; of a model on device meta too, whose blocks have
    shapes alone. Raises as it does."""
    experts = {
        path: expert_blocks(path, module, trainer.ranks, trainer.rank) for path, module in expert_modules(model).items()
    }
    named = [block for three in experts.values() for block in three if _chosen(block, trainer.targets)]
    linear = linear_blocks(model, trainer, named)
    blocks = {block.name: block for block in sorted([*linear, *named], key=lambda block: block.name)}
    _check_ranks(blocks, trainer.ranks)
    return blocks


def linear_blocks(model: nn.Module, trainer: TrainerConfig, experts: Sequence[Block]) -> list[Block]:
    """Of the linear layers. A name that means experts need not mean a linear layer too."""
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [
        name
        for name in trainer.targets
        if any(means(name, path) for path in linear) or not any(_means(block, name) for block in experts)
    ]
    if trainer.targets and not names:
        return []
    blocks = []
    owners: dict[int, str] = {}
    for target in resolve_targets(model, names).modules:
        if model.get_submodule(target.name) is model.get_output_embeddings():  # type: ignore[operator]
            raise TargetError(
                f"[trainer] targets: {target.name} is the output head, which is not sketched (it is computed a chunk "
                'of tokens at a time, by its weight alone): leave it out, or set publish = "snapshots" and '
                "train_embeddings = true"
            )
        weight = model.get_parameter(f"{target.name}.weight")
        if (owner := owners.setdefault(id(weight), target.name)) != target.name:
            raise TargetError(
                f"[trainer] targets: {owner} and {target.name} share one weight, which would take two steps of two "
                "projections at once: name neither of them as a target"
            )
        rank = trainer.ranks.get(target.last, trainer.rank)
        blocks.append(Block(target.name, target.name, weight.detach(), rank))
    return blocks


def table(blocks: Mapping[str, Block]) -> str:
    """One line per kind of projection: how many matrices, at which rank, and how many weights learn."""
    matrices: Counter[tuple[str, int]] = Counter()
    weights: Counter[tuple[str, int]] = Counter()
    for block in blocks.values():
        kind = block.name.rpartition(".")[2], block.rank
        matrices[kind] += block.weight.numel() // (block.weight.shape[-1] * block.weight.shape[-2])
        weights[kind] += block.weight.numel()
    lines = [f"{'projection':<12}  rank  matrices      weights"]
    lines += [
        f"{name:<12}  {rank:>4}  {matrices[name, rank]:>8}  {weights[name, rank]:>11,}"
        for name, rank in sorted(matrices)
    ]
    return "\n".join([*lines, f"{'total':<12}        {matrices.total():>8}  {weights.total():>11,}"])


def _check_ranks(blocks: Mapping[str, Block], ranks: Mapping[str, int]) -> None:
    exist = sorted({name.rpartition(".")[2] for name in blocks})
    if unused := sorted(ranks.keys() - exist):
        raise TargetError(
            f"[trainer.ranks] {unused[0]}: no projection of that name is sketched here; there are: {', '.join(exist)}"
        )


def _chosen(block: Block, names: Sequence[str]) -> bool:
    return not names or any(_means(block, name) for name in names)


def _means(block: Block, name: str) -> bool:
    """Whether the name of a target means this projection of experts: its own, or that of the parameter it is in."""
    path, _, last = block.name.rpartition(".")
    return means(name, block.name) or (last != DOWN and means(name, f"{path}.{GATE_UP}"))

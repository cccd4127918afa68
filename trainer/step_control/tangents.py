"""The forward pass of a model that is on its way to another: what a proposed step adds to the outputs of its layers.

No weight is touched. A low-rank change b a of a weight is never multiplied out either: it adds (x aᵀ) bᵀ to the
layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from async_rl.policy.grouped import separate_products
from trainer.learnable import LowRank, Proposal

T = TypeVar("T")
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of an output and its change, what takes its place


def dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Inside a dual level: a value with its derivative, of the same shape and dtype."""
    made: torch.Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return made


def undual(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A value without its derivative, and that; None where there is none. The first shares the value's memory."""
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return primal, tangent


def is_nothing(proposal: Proposal) -> bool:
    """Whether a proposal changes no weight."""
    pairs = (pair for pairs in proposal.tangents.values() for pair in pairs)
    moves = any(pair.a.any() and pair.b.any() for pair in pairs)
    return not moves and not any(change.any() for change in proposal.dense.values())


def moves(model: nn.Module, module: nn.Module, proposal: Proposal) -> bool:
    """Whether a proposal changes a weight of this module of the model."""
    parameters = {id(parameter) for parameter in module.parameters()}
    names = {name for name, each in model.named_modules() if each is module}
    return not names.isdisjoint(proposal.tangents) or any(
        id(model.get_parameter(name)) in parameters for name in proposal.dense
    )


def along(model: nn.Module, proposal: Proposal, function: Callable[[], T]) -> T:
    """What `function` returns when everything that `model` computes is dual, with the proposal as its direction; the
    caller is inside a dual level. Raises NotImplementedError for an operator without forward mode."""
    with _low_rank(model, proposal.tangents, _add_tangent):
        return _with_parameters(model, _duals(dict(model.named_parameters()), proposal.dense), function)


def shifted(model: nn.Module, proposal: Proposal, length: float, function: Callable[[], T]) -> T:
    """What `function` returns when each layer of `model` adds to its output `length` times what the proposal changes
    there, in float32 or what is wider, so that a change too small for the weights' dtype is not lost. Raises
    NotImplementedError for whole changed parameters of a layer that has no forward mode itself."""

    def add(out: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(out.dtype, torch.float32)
        return (out.to(wide) + length * change.to(wide)).to(out.dtype)

    with _low_rank(model, proposal.tangents, add), _whole_parameters(model, proposal.dense, add):
        return function()


def _add_tangent(out: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    primal, tangent = undual(out)
    change = change.to(primal.dtype)
    return dual(primal, change if tangent is None else tangent + change)


@contextmanager
def _low_rank(model: nn.Module, tangents: Mapping[str, Sequence[LowRank]], add: Add) -> Iterator[None]:
    def hook(name: str, module: nn.Module, args: Sequence[Any], out: torch.Tensor) -> torch.Tensor:
        pairs, x = tangents[name], undual(args[0])[0]  # asked for layer by layer: they may be made only then
        wide = torch.promote_types(x.dtype, torch.float32)
        a = torch.cat([pair.a for pair in pairs], dim=-2).to(x.device, wide)
        b = torch.cat([pair.b for pair in pairs], dim=-1).to(x.device, wide)
        # Of experts rows are sorted by expert, with bounds args[1]; all of a layer may share a.
        x = x.to(wide)
        inner = x @ a.T if a.dim() == 2 else separate_products(x, a.transpose(1, 2), args[1])
        if b.dim() == 2:
            return add(out, inner @ b.T)
        return add(out, separate_products(inner, b.transpose(1, 2), args[1]))

    handles: list[RemovableHandle] = []
    try:
        handles += [model.get_submodule(name).register_forward_hook(partial(hook, name)) for name in tangents]
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _whole_parameters(model: nn.Module, dense: Mapping[str, torch.Tensor], add: Add) -> Iterator[None]:
    """Each module that owns changed parameters adds its own derivative in their direction, at the input it has."""

    def hook(changes: dict[str, torch.Tensor], module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        several = isinstance(out, tuple)  # as a router's are
        with forward_ad.dual_level():
            duals = _duals(dict(module.named_parameters(recurse=False)), changes)
            # Its `forward` and not itself, whose hooks have been called already.
            moved = _with_parameters(module, duals, lambda: module.forward(*args, **kwargs))
            tangents = [undual(each)[1] for each in (moved if several else (moved,))]
        found = zip(out if several else (out,), tangents, strict=True)
        added = tuple(each if tangent is None else add(each, tangent) for each, tangent in found)
        return added if several else added[0]

    # By identity, because tied parameters have one name here and several owners.
    changed = {id(model.get_parameter(name)): change for name, change in dense.items()}
    handles: list[RemovableHandle] = []
    try:
        for module in model.modules() if dense else ():
            own = {n: changed[id(p)] for n, p in module.named_parameters(recurse=False) if id(p) in changed}
            if own:
                handles.append(module.register_forward_hook(partial(hook, own), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _duals(parameters: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: dual(parameters[name].detach(), change.to(parameters[name])) for name, change in changes.items()}


class _Around(nn.Module):
    """Calls a function while torch.func.functional_call has replaced parameters of `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def _with_parameters(module: nn.Module, parameters: Mapping[str, torch.Tensor], function: Callable[[], T]) -> T:
    """What `function` returns while these are parameters of `module`, under every name that they are tied to."""
    if not parameters:
        return function()
    renamed = {f"inner.{name}": each for name, each in parameters.items()}
    result: T = functional_call(_Around(module), renamed, (function,))
    return result

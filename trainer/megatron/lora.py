"""LoRA on Megatron's linear layers: each projection of a fused one has an adapter of its own, as in the adapter file.

Nothing of the model is replaced: a forward hook adds scale·B(A x) to what a layer gives, so names, shapes and saved
weights stay Megatron's, and a switch turns all adapters off. How A and B lie on the ranks, and which gradients are
partial: `trainer.megatron.slices`. Only A x crosses ranks, never a whole activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn.functional import linear

from trainer.megatron.model import ShardedModel


class Factors(NamedTuple):
    """This rank's parts of A and B of one projection; float32, or what is wider if the base is."""

    a: nn.Parameter
    b: nn.Parameter


class Site(NamedTuple):
    """One linear layer of Megatron, and the projections that it is made of: their module paths in the adapter file, and
    how many features each has here. Megatron lays them out in `groups`, one after the other: of attention a group's
    queries, its key, its value. `by_rows`: W is cut by rows over the tensor ranks, not by columns."""

    layer: nn.Module
    projections: tuple[str, ...]
    widths: tuple[int, ...]
    groups: int
    by_rows: bool
    expert: bool

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The layer's output [..., features] from that of each projection."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each projection's part of the layer's output."""
        by_group = whole.unflatten(-1, (self.groups, -1)).split([width // self.groups for width in self.widths], -1)
        return [part.flatten(-2) for part in by_group]


class Adapters:
    """The adapters of a rank's part of the model: `factors` by module path, put on the `sites` that have some.
    `scale` is alpha / rank."""

    def __init__(self, sites: Iterable[Site], factors: Mapping[str, Factors], scale: float) -> None:
        self.scale = scale
        self.on = True
        self.sites = [site for site in sites if any(path in factors for path in site.projections)]
        self.factors = dict(factors)
        for site in self.sites:
            site.layer.register_forward_hook(self._hook(site))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the base model."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    @torch.no_grad()
    def weight_change(self, path: str) -> torch.Tensor | None:
        """scale·B·A of this rank's part of a projection's weight: [out, in], in the adapter's dtype; None where it has
        no adapter."""
        found = self.factors.get(path)
        return None if found is None else self.scale * (found.b @ found.a)

    def _hook(self, site: Site) -> Callable[..., Any]:
        parts = [self.factors.get(path) for path in site.projections]
        delta = _column if site.by_rows else _row

        def add(layer: nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
            if not self.on:
                return None
            out, bias = output
            return (out + self.scale * delta(site, parts, inputs[0])).to(out.dtype), bias

        return add


def find_sites(model: ShardedModel) -> Iterator[Site]:
    """The linear layers of this rank's part of the model."""
    for number, layer in model.named_layers():
        path = f"model.layers.{number}"
        yield from _attention(layer.self_attention, f"{path}.self_attn")
        mlp: Any = layer.mlp
        if not layer.is_moe_layer:
            yield from _mlp(mlp, f"{path}.mlp", expert=False)
            continue
        for expert, each in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
            yield from _mlp(each, f"{path}.mlp.experts.{expert}", expert=True)


def _attention(attention: Any, path: str) -> Iterator[Site]:
    config = attention.config
    ranks = attention.linear_qkv.tp_group.size()
    groups, heads = config.num_query_groups // ranks, config.num_attention_heads // ranks
    widths = tuple(count * config.kv_channels for count in (heads, groups, groups))
    names = tuple(f"{path}.{name}_proj" for name in "qkv")
    yield Site(attention.linear_qkv, names, widths, groups, by_rows=True, expert=False)
    out = (f"{path}.o_proj",)
    yield Site(attention.linear_proj, out, (config.hidden_size,), 1, by_rows=False, expert=False)


def _mlp(mlp: Any, path: str, *, expert: bool) -> Iterator[Site]:
    half = mlp.linear_fc1.output_size_per_partition // 2
    names = (f"{path}.gate_proj", f"{path}.up_proj")
    yield Site(mlp.linear_fc1, names, (half, half), 1, by_rows=True, expert=expert)
    out = (f"{path}.down_proj",)
    yield Site(mlp.linear_fc2, out, (mlp.linear_fc2.output_size,), 1, by_rows=False, expert=expert)


def _column(site: Site, parts: Sequence[Factors | None], x: torch.Tensor) -> torch.Tensor:
    """B(A x) where W is cut by rows. x is whole on each tensor rank, or with sequence parallelism each has its tokens:
    then A is applied to these, and what it gives is gathered. Backwards the gradients of it, each rank's from its rows
    of B, are summed, so that A's is whole (without sequence parallelism) or of the rank's tokens (with it). Experts
    leave their sums to who brings the tokens back."""
    present = [part for part in parts if part is not None]
    a = torch.cat([part.a for part in present]) if len(present) > 1 else present[0].a
    inner = linear(x.to(a.dtype), a)
    layer: Any = site.layer
    if not site.expert and layer.tp_group.size() > 1:
        if layer.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=layer.tp_group)
        else:
            inner = copy_to_tensor_model_parallel_region(inner, group=layer.tp_group)
    inners = iter(inner.split([part.a.shape[0] for part in present], dim=-1))
    return _joined(site, [None if part is None else linear(next(inners), part.b) for part in parts])


def _row(site: Site, parts: Sequence[Factors | None], x: torch.Tensor) -> torch.Tensor:
    """B(A x) where W is cut by columns: each rank has its features of x, and A's columns for them; their sum is taken
    before B, and with sequence parallelism each rank goes on with its tokens of it."""
    (part,) = parts
    assert part is not None
    inner = linear(x.to(part.a.dtype), part.a)
    layer: Any = site.layer
    if not site.expert and layer.tp_group.size() > 1:
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if layer.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        inner = reduce(inner, group=layer.tp_group)
    return linear(inner, part.b)


def _joined(site: Site, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`site.join`, with zeros for projections that are not adapted."""
    some = next(part for part in parts if part is not None)
    filled = [
        some.new_zeros(*some.shape[:-1], width) if part is None else part
        for part, width in zip(parts, site.widths, strict=True)
    ]
    return site.join(filled)

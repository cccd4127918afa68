"""Stands in for the Triton kernels that SGLang computes experts with where they have adapters, in PyTorch: a kernel of
Triton's runs on a GPU alone. How adapters are kept and found, what is added where, and by which of the batch's adapters
is SGLang's own code; of the kernels themselves nothing is shown by this.

Each function takes the place of the kernel's launcher, and as many of its arguments as an unquantised model needs.
`route` is a place in [tokens, k]: a token together with one of the experts that it goes to."""

from __future__ import annotations

from typing import Any

import torch

ALIGNED = 64
"""Of sorted routes, how many there are of one expert before the next begins, the last of them fillers: as SGLang's
lora_moe_runners asks of its alignment."""


def prepare(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, chosen: torch.Tensor, **_: Any) -> tuple[Any, ...]:
    """The plan of a launch, of which a plain product needs nothing."""
    return {"BLOCK_SIZE_M": ALIGNED}, None, False, False, None, None, None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> None:
    """out [..., n] = x W_eᵀ of every route, times its gate where asked for; x is [tokens, m], or [routes, m]."""
    gates, chosen, mul_routed_weight, k = arguments[3], arguments[4], arguments[8], arguments[9]
    assert bias is None
    experts = chosen.reshape(-1).long()
    rows = x.repeat_interleave(k, dim=0)
    result = out.view(-1, out.shape[-1])
    assert len(rows) == len(experts) == len(result)
    for expert in experts.unique().tolist():
        own = experts == expert
        result[own] = rows[own] @ weight[expert].T
    if mul_routed_weight:
        result *= gates.reshape(-1, 1).to(result.dtype)


def add_low_rank(
    output: torch.Tensor,
    qcurr_hidden_states: torch.Tensor,
    lora_a_stacked: list[torch.Tensor],
    lora_b_stacked: list[torch.Tensor],
    topk_weights: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    top_k_num: int,
    lora_ids: torch.Tensor,
    adapter_enabled: torch.Tensor,
    mul_routed_weight: bool = False,
    **_: Any,
) -> None:
    """output [tokens, k, n] += B_e A_e x of every route, by the adapter under which it stands in `sorted_token_ids`
    [adapters, routes]; its slices (gate, up) lie one behind the other in n."""
    routes = topk_weights.numel()
    x, result = qcurr_hidden_states, output.view(routes, -1)
    shared = routes // len(x)  # k where x is of tokens, 1 where it is of routes
    for adapter in lora_ids.tolist():
        if not adapter_enabled[adapter]:
            continue
        for block in range(int(num_tokens_post_padded[adapter]) // ALIGNED):
            expert = int(expert_ids[adapter, block])
            places = sorted_token_ids[adapter, block * ALIGNED : (block + 1) * ALIGNED].long()
            places = places[places < routes]
            rows = x[places // shared]
            added = [rows @ a[adapter, expert].T @ b[adapter, expert].T
                     for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)]  # fmt: skip
            gates = topk_weights.reshape(-1, 1)[places] if mul_routed_weight else 1.0
            result[places] += torch.cat(added, dim=-1) * gates


def sum_experts(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """out [tokens, n] = scale · Σ over k of x [tokens, k, n]."""
    torch.sum(x, dim=1, out=out)
    out *= scale

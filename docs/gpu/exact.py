"""On a GPU: the kernels of a sketch give what torch gives on the CPU, the exact application to the bit.

    python -P docs/gpu/exact.py [cpu]

Run by docs/gpu/check.sh. The last line is "all equal"; anything else is a failure. With "cpu" only the script is tried.
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from async_rl.policy.factors import apply_, encode
from async_rl.policy.grouped import expert_products, separate_products, sorted_bounds
from async_rl.policy.projection import signs, triton_runs_on
from trainer.kernels.sketching import accumulate_, accumulate_groups_, project

KEY, ROUNDING = (1234567, 89), (5, 4_000_000_000)
LAYERS = ((7, 130, 5), (257, 1000, 64), (1536, 8960, 256))  # rows, columns, rank
EXPERTS = (3, 65, 96, 16)
GROUPS = (5, 64, 96, 16)  # rows that torch's grouped product takes
TOKENS = (1, 333, 4096)


def same_weights(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], rank: int, start: int) -> None:
    """The application on the CPU, and its kernel: whole weights, experts, and columns from `start` on."""
    weight = torch.randn(shape).to(dtype)
    factors = encode(1e-3 * torch.randn(*shape[:-1], rank))
    factors.q[..., 0, :] = 0
    there = weight.to(device)
    rounding = ROUNDING if dtype == torch.bfloat16 else None
    columns = {"start": start, "total_columns": start + shape[-1] + 3}
    apply_(weight, factors, KEY, **columns, rounding=rounding)
    apply_(there, type(factors)(*(each.to(device) for each in factors)), KEY, **columns, rounding=rounding)
    pattern = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(weight.view(pattern), there.cpu().view(pattern)), f"apply: {dtype}, {shape}, rank {rank}"


def same_signs(device: torch.device, rank: int, columns: int) -> None:
    """Drawn by the CPU and there: a whole projection, and a part that begins within a Philox call."""
    for start in (0, 77):
        drawn = signs(KEY, rank, start, columns, device).cpu()
        assert torch.equal(drawn, signs(KEY, rank, start, columns)), f"signs: rank {rank}, columns {start} … {columns}"


def close_products(device: torch.device, dtype: torch.dtype, tokens: int, layer: tuple[int, int, int]) -> None:
    """Products that round as their dtype does."""
    rows, columns, rank = layer
    x, gradient = torch.randn(tokens, columns).to(dtype), torch.randn(tokens, rows).to(dtype)
    drawn = signs(KEY, rank, 0, columns)
    projected = project(x.to(device), KEY, rank, lambda: drawn)
    exact = x.double() @ drawn.double().T
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    gap = float((projected.double().cpu() - exact).abs().max() / exact.abs().max())
    assert gap <= limit, f"project: {dtype}, {tokens} tokens, {layer}: {gap:.2g}"
    sketch = torch.zeros(rows, rank, device=device)
    for _ in range(2):
        accumulate_(sketch, gradient.to(device), projected, 0.5)
    whole = gradient.double().T @ projected.double().cpu()
    gap = float((sketch.double().cpu() - whole).abs().max() / whole.abs().max())
    assert gap <= 1e-4, f"accumulate: {dtype}, {tokens} tokens, {layer}: {gap:.2g}"


def close_groups(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Products of experts with their own tokens, forward, backward, and into their sketches."""
    experts, rows, columns, rank = GROUPS
    chosen = torch.randint(experts - 1, (tokens,)).sort().values  # the last expert gets none
    bounds, there = sorted_bounds(chosen, experts), sorted_bounds(chosen.to(device), experts)
    weight = torch.randn(experts, 2 * rows, columns).to(dtype).chunk(2, dim=1)[1]
    for x, factor in (
        (torch.randn(tokens, columns).to(dtype), weight.transpose(1, 2)),
        (torch.randn(tokens, rows).to(dtype), weight),
    ):
        exact = separate_products(x.double(), factor.double(), bounds)
        found = expert_products(x.to(device), factor.to(device), there)
        gap = float((found.double().cpu() - exact).abs().max() / exact.abs().max())
        assert gap <= (1e-5 if dtype == torch.float32 else 1e-2), f"experts: {dtype}, {tokens} tokens: {gap:.2g}"
    gradient, projected = torch.randn(tokens, rows).to(dtype), torch.randn(tokens, rank).to(dtype)
    sketch, exact = torch.zeros(experts, rows, rank, device=device), torch.zeros(experts, rows, rank).double()
    accumulate_groups_(sketch, gradient.to(device), projected.to(device), there, 0.5)
    accumulate_groups_(exact, gradient, projected, bounds, 0.5)
    gap = float((sketch.double().cpu() - exact).abs().max() / exact.abs().max())
    assert gap <= 1e-4, f"sketches of experts: {dtype}, {tokens} tokens: {gap:.2g}"


def main() -> None:
    device = torch.device("cpu" if sys.argv[1:] == ["cpu"] else "cuda")
    assert device.type == "cpu" or triton_runs_on(device), "Triton is not installed, so there is no kernel to compare"
    layers = LAYERS[:2] if device.type == "cpu" else LAYERS
    torch.manual_seed(0)
    for _, columns, rank in layers:
        same_signs(device, rank, columns)
    for dtype in (torch.float32, torch.bfloat16):
        for (rows, columns, rank), start in product(layers, (0, 5)):
            same_weights(device, dtype, (rows, columns), rank, start)
        *shape, rank = EXPERTS
        same_weights(device, dtype, tuple(shape), rank, 0)
        for tokens in TOKENS:
            close_groups(device, dtype, tokens)
        for tokens, layer in product(TOKENS, layers):
            close_products(device, dtype, tokens, layer)
        print(
            f"{dtype}: {2 * len(layers) + 1} applications to the bit, {len(TOKENS) * (len(layers) + 1)} products close"
        )
    print("all equal")


if __name__ == "__main__":
    main()

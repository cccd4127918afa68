"""Products of fused experts, each with its own tokens: one grouped product where torch has it, else one by one.

Tokens are sorted by the expert they go to. `bounds`, int32 [experts + 1], says where each expert's rows begin: those of
expert e are bounds[e] … bounds[e + 1] − 1. They stay on the device, so that nothing has to wait for it.
"""

from __future__ import annotations

import torch
from torch import nn

ALIGNED = 16  # bytes: of every row that torch's grouped product takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sorted_bounds(expert: torch.Tensor, experts: int) -> torch.Tensor:
    """`bounds` of expert numbers that are sorted, [n]."""
    edges = torch.arange(experts + 1, dtype=expert.dtype, device=expert.device)
    return torch.searchsorted(expert, edges, out_int32=True)


def expert_products(x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """[n, out]: x [n, in] times weight [experts, in, out], each row with its expert's. Either order of the weight's
    last two axes may be the one in memory."""
    x = x.contiguous()
    if len(x) and takes_grouped(x, weight if weight.stride(-1) == 1 else weight.transpose(1, 2)):
        return nn.functional.grouped_mm(x, weight, offs=bounds[1:])
    return separate_products(x, weight, bounds)


def separate_products(x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The same, one expert after the other: by operators that have a forward mode, in every dtype."""
    products = [part @ own for part, own in zip(parts(x, bounds), weight, strict=True) if len(part)]
    return torch.cat(products) if products else x.new_zeros(0, weight.shape[-1])


def parts(x: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows of each expert, one expert after the other."""
    return torch.split(x, bounds.diff().tolist())


def takes_grouped(*factors: torch.Tensor) -> bool:
    """Whether torch's grouped product takes matrices that lie like these, row by row."""
    device = factors[0].device
    return (
        hasattr(nn.functional, "grouped_mm")
        and factors[0].dtype in DTYPES
        and all(each.dtype == factors[0].dtype and _aligned(each) for each in factors)
        and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))
    )


def _aligned(matrix: torch.Tensor) -> bool:
    strides = matrix.stride()
    whole_rows = all(stride * matrix.element_size() % ALIGNED == 0 for stride in strides[:-1])
    return strides[-1] == 1 and strides[-2] >= matrix.shape[-1] and whole_rows and matrix.data_ptr() % ALIGNED == 0

"""A model computed in float32, whatever its weights are stored in.

In bfloat16 any change of the weights, however small, makes the arithmetic round differently, and what that does to the
policy is soon more than what the step does: it is found between any two kernels, and no shorter step avoids it. To see
the step alone, both passes are computed wide. One operand of one operator is widened at a time, so that there is never
a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NARROW = (torch.bfloat16, torch.float16)


class Widened(TorchDispatchMode):
    """Within it, every operator takes its bfloat16 and float16 operands as float32, and makes float32 where it was to
    make one of these. Weights stay as they are: nothing that is written to is widened, and neither are views. Without
    gradients only."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") in NARROW:
            named["dtype"] = torch.float32
        if func.is_view:
            return func(*args, **named)
        if func is torch.ops.aten.embedding.default:  # rows of the largest weight: they are looked up, not computed
            return _widen(func(*args, **named))
        written = {each.name for each in func._schema.arguments if each.alias_info is not None}
        names = [each.name for each in func._schema.arguments]
        wide = [each if name in written else _widen(each) for name, each in zip(names, args, strict=False)]
        return func(*wide, **{name: each if name in written else _widen(each) for name, each in named.items()})


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(each) for each in value)
    return value


def in_float32(function: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What `function` computes, in float32 or what is wider."""
    with torch.no_grad(), Widened():
        return function()

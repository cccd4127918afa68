"""Lets SGLang, as it is on PyPI, run on a machine without an accelerator: test equipment, in the site-packages of the
SGLang test environment, and awake only in a server's own processes (SGLANG_USE_CPU_ENGINE=1, which
inference.sglang_child sets). Nothing is imported before SGLang does so itself: a server is several processes, and each
pays for what it imports."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

UNPINNED = (
    "sglang.srt.lora.layers",
    "sglang.srt.lora.lora",
    "sglang.srt.lora.backend.torch_backend",
)
"""They ask for page-locked memory, which only a driver gives, whatever the device is."""


class Unpinned:
    """torch, as a module sees it that must not get page-locked memory. To replace torch's own functions instead would
    be seen by all who compare them: models built on the meta device came out silently wrong."""

    def __getattr__(self, name: str) -> Any:
        import torch

        made = getattr(torch, name)
        if name not in ("tensor", "empty", "zeros", "arange"):
            return made

        def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            return made(*args, **options)

        return unpinned


def declare_operators(_: ModuleType) -> None:
    """torchvision, which SGLang imports, looks at operators that only its compiled part declares; it is built for
    another torch than the CPU's."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)  # what it declared goes with it


def unpin(module: ModuleType) -> None:
    import torch

    module.torch = Unpinned()  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]


def register_nothing(module: ModuleType) -> None:
    """Routes are collected in host memory that is made known to CUDA."""
    module._cuda_host_register = lambda *_, **__: None  # type: ignore[attr-defined]


def multiply_experts(module: ModuleType) -> None:
    import torch_experts

    own: Any = module
    own._prepare_fused_moe_run, own.invoke_fused_moe_kernel = torch_experts.prepare, torch_experts.product
    own.moe_sum_reduce_triton = torch_experts.sum_experts


def add_low_rank(module: ModuleType) -> None:
    import torch_experts

    module.fused_moe_lora = torch_experts.add_low_rank  # type: ignore[attr-defined]


def align_in_python(module: ModuleType) -> None:
    """SGLang's way for small batches, and all batches of an XPU."""
    module._is_xpu = True  # type: ignore[attr-defined]


KEPT: list[Any] = []
BEFORE: dict[str, Callable[[ModuleType], None]] = {"torchvision": declare_operators}
AFTER: dict[str, Callable[[ModuleType], None]] = {
    **dict.fromkeys(UNPINNED, unpin),
    "sglang.srt.mem_cache.pool_host.common": register_nothing,
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe": multiply_experts,
    "sglang.kernels.ops.lora.moe.fused_moe_lora_kernel": add_low_rank,
    "sglang.srt.lora.lora_moe_runners": align_in_python,
}


class Loader(importlib.abc.Loader):
    """A module's own loader, with something done before and after."""

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self.loader, self.name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        BEFORE.get(self.name, lambda _: None)(module)
        self.loader.exec_module(module)
        AFTER.get(self.name, lambda _: None)(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in BEFORE and name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, name)
        return spec


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, Finder())

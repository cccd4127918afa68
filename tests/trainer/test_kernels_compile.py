"""The Triton kernels compile for a GPU (Hopper), which needs none: the interpreter takes what a compiler refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs a Triton that compiles"),
]

NUMBER = "i32"
UNALIGNED = {"gradient_token", "tokens_a_split", "key0", "key1", "noise_key0", "noise_key1", "first_row"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """`kernel` for compute capability 9.0: `types` of pointers, whole numbers for the rest, all but a few of them
    multiples of 16, as they are for real layers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, NUMBER) for name in names}
    aligned = [name for name in names if name not in constants and name not in UNALIGNED and signature[name] != "fp32"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


@pytest.mark.parametrize(("weight", "shared"), [("*fp32", True), ("*i16", True), ("*i16", False)])
def test_the_application_compiles_with_sums_on_int8_tensor_cores(weight: str, shared: bool) -> None:
    from async_rl.policy import kernels

    constants = {
        "weight_column": 1,
        "rounded": weight == "*i16",
        "shared_noise": shared,
        "tile_rows": kernels.TILE_ROWS,
        "tile_columns": kernels.TILE_COLUMNS,
        "tile_rank": kernels.TILE_RANK,
    }
    code = compiled(kernels._apply_kernel, {"weight": weight, "q": "*i16", "s": "*fp32"}, constants).asm["ptx"]
    assert ".s32.s8.s8.s32" in code or ".s32.s8.s8" in code


def test_signs_alone_compile_to_stores_of_several_at_once() -> None:
    from async_rl.policy import kernels

    tiles = {"tile_rows": kernels.DRAWN_ROWS, "tile_columns": kernels.DRAWN_COLUMNS}
    code = compiled(kernels._signs_kernel, {"out": "*i8"}, tiles).asm["ptx"]
    assert "st.global.v4" in code


@pytest.mark.parametrize(("dtype", "rank"), [("bf16", 16), ("bf16", 128), ("fp32", 16), ("fp32", 64)])
def test_the_products_of_a_sketch_compile_with_loads_ahead(dtype: str, rank: int) -> None:
    import triton.language as tl

    from trainer.kernels import triton_kernels as kernels

    operand = {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    tiles = {"tile_tokens": kernels.TILE_TOKENS, "tile_rank": rank, "operand": operand}
    types = {"x": f"*{dtype}", "gradient": f"*{dtype}", "projected": f"*{dtype}", "partial": "*fp32", "scale": "fp32"}
    project = compiled(
        kernels._project_kernel, types, {"x_column": 1, "tile_columns": kernels.TILE_COLUMNS, **tiles}
    ).asm["ptx"]
    accumulate = compiled(
        kernels._accumulate_kernel,
        types,
        {"bounds": None, "gradient_row": 1, "add": True, "tile_rows": kernels.TILE_ROWS, **tiles},
    ).asm["ptx"]
    by_expert = compiled(
        kernels._accumulate_kernel,
        types | {"bounds": "*i32"},
        {"gradient_row": 1, "add": True, "tile_rows": kernels.TILE_ROWS, **tiles},
    ).asm["ptx"]
    for code in (project, accumulate, by_expert):
        assert "mma" in code
    assert "cp.async" in project

"""Compiling the decode step ahead of time, in a process of its own:

    python -P -m inference.compiled_build PACKAGE PARENT the layout (see StepLayout) as JSON on standard input

It takes half a minute of one core and a C++ compiler. What comes out is a file that any process on this machine loads
in milliseconds. Who waits for it goes on sampling meanwhile, and is not hurt when this process fails: the last line
of standard error says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from async_rl.run.process import die_with_parent
from inference.decode_step import Draw, decode_step
from inference.dense_decoder import DenseShape, DenseWeights

EXAMPLE_ROWS, EXAMPLE_SEEN = 7, 5  # two different numbers, so that the exporter does not take one for the other
BUILD_TIMEOUT_S = 900.0
REAP_S = 10.0  # a killed process is gone at once, unless its disk does not answer
NICENESS = 10  # what is compiled is wanted later; who samples and trains is wanted now


class StepArguments(NamedTuple):
    """What a decode step takes: see dense_decoder.decode_rows, and Draw with `greedy` given."""

    weights: DenseWeights
    rotation: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    ids_n: torch.Tensor
    positions_n: torch.Tensor
    seen_l: torch.Tensor
    draw: Draw


class StepLayout(msgspec.Struct, frozen=True):
    """All that decides the code. Of the tensors only sizes and dtypes count, and of these not how many rows there are
    and how many positions are read: both may change from call to call, from 2 up."""

    shape: DenseShape
    tensors: StepArguments
    device: str
    threads: int


def step_layout(shape: DenseShape, arguments: StepArguments, device: torch.device) -> bytes:
    """The layout of a call as JSON, the same for all calls that one package can serve."""

    def with_rows(tensor: torch.Tensor, rows: int = EXAMPLE_ROWS) -> torch.Tensor:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    uniforms = with_rows(arguments.draw.uniforms)
    tensors = StepArguments(
        arguments.weights,
        arguments.rotation,
        [with_rows(rows) for rows in arguments.keys],
        [with_rows(rows) for rows in arguments.values],
        with_rows(arguments.ids_n),
        with_rows(arguments.positions_n),
        with_rows(arguments.seen_l, min(EXAMPLE_SEEN, arguments.keys[0].shape[2] - 1)),
        Draw(with_rows(arguments.draw.temperature), uniforms.bool(), uniforms),
    )
    layout = StepLayout(shape, tensors, str(device), torch.get_num_threads())
    return msgspec.json.encode(layout, enc_hook=lambda tensor: (str(tensor.dtype), list(tensor.shape)))


def decode_layout(data: bytes) -> StepLayout:
    """Its tensors have no memory: the weights need not fit beside those that are being served."""

    def empty(_type: type, tensor: tuple[str, list[int]]) -> torch.Tensor:
        return torch.empty(tensor[1], dtype=getattr(torch, tensor[0].removeprefix("torch.")), device="meta")

    return msgspec.json.decode(data, type=StepLayout, dec_hook=empty)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure in a fixed order: how a compiled step takes its arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]


def build(layout: StepLayout, package: Path) -> None:
    """Export, compile, and put the package in its place when it is whole."""
    torch.set_num_threads(layout.threads)
    leaves, structure = pytree.tree_flatten(layout.tensors)
    with FakeTensorMode():
        fakes = [
            leaf if leaf is None else torch.empty(leaf.shape, dtype=leaf.dtype, device=layout.device) for leaf in leaves
        ]
    with torch.no_grad():
        step = _Step(layout.shape, structure)
        program = torch.export.export(step, (fakes,), dynamic_shapes=(_changing_sizes(layout.tensors),))
        partial = package.with_suffix(f".{os.getpid()}.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=str(partial))
    partial.replace(package)


class _Step(torch.nn.Module):
    """decode_step over a flat list: exporting knows nothing of our named tuples."""

    def __init__(self, shape: DenseShape, structure: pytree.TreeSpec) -> None:
        super().__init__()
        self._shape, self._structure = shape, structure

    def forward(self, leaves: list[torch.Tensor | None]) -> torch.Tensor:
        arguments: StepArguments = pytree.tree_unflatten(leaves, self._structure)
        return decode_step(self._shape, *arguments)


def _changing_sizes(tensors: StepArguments) -> list[dict[int, Any] | None]:
    """For each leaf of the arguments, by dimension, what may change."""
    rows = torch.export.Dim("rows", min=2)
    # A row has room for one position more than is ever read (see kv_slots): equal sizes would make special cases.
    seen = torch.export.Dim("seen", min=2, max=tensors.keys[0].shape[2] - 1)
    fixed = len(pytree.tree_leaves((tensors.weights, tensors.rotation)))
    per_row = len(tensors.keys) + len(tensors.values) + 2
    return [None] * fixed + [{0: rows}] * per_row + [{0: seen}] + [{0: rows}] * len(tensors.draw)


class Build:
    """A build under way. The child ends with this process, whatever ends it."""

    def __init__(self, package: Path, layout: bytes) -> None:
        """Raises OSError when nothing can be started or written."""
        package.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._deadline = time.monotonic() + BUILD_TIMEOUT_S
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (no pipe: nobody reads while it writes)
        command = [sys.executable, "-P", "-m", "inference.compiled_build", str(package), str(os.getpid())]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said)
        assert self._child.stdin is not None
        with self._child.stdin as stdin:
            stdin.write(layout)

    def failure(self, wait: bool) -> str | None:
        """None while it is under way (never after `wait`), "" when the package is there, else what went wrong."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, self._deadline - time.monotonic()) if wait else 0.0)
        if self._child.returncode is None and time.monotonic() < self._deadline:
            return None
        if self._child.returncode == 0:
            return ""
        if self._child.returncode is None:
            return f"compiling took longer than {BUILD_TIMEOUT_S:g} s"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._child.returncode}")

    def stop(self) -> None:
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(REAP_S)
        self._said.close()


def main() -> None:
    """Two that build the same take turns, and the second finds the package there."""
    die_with_parent(int(sys.argv[2]))
    os.nice(NICENESS)
    package, layout = Path(sys.argv[1]), decode_layout(sys.stdin.buffer.read())
    with package.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not package.exists():
            build(layout, package)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # A compiler may fail in any way; who waits wants a reason, and goes on without.
        sys.exit(f"{type(error).__name__}: " + " ".join(str(error).split())[:400])

"""The decode step: eager at first, compiled when that pays.

A package has a price, BUILD_S of a core, or LOAD_S where one lies in the cache already; using it saves SAVED_SHARE of
every eager step. Nobody knows beforehand how long a run will be, so the step stays eager until the package would have
paid for itself by now. Whenever the run ends then, what it wasted is at most what the best choice would have cost.

A package is used only after it has done on random rows what the eager step does there. Whatever fails on the way (a
machine has no C++ compiler, for one) leaves the step eager, with one line in the log. Compiled and eager steps round
differently (float32: log-probabilities by some 3e-6): where two tokens lie that close together a seed may give the
other one, and when the step changes over depends on the clock.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from async_rl.run.model_cache import cache_directory
from inference import compiled_build, decode_step, dense_decoder, sampling, slot_linear
from inference.compiled_build import Build, StepArguments, step_layout, tensors_of
from inference.decode_step import Draw
from inference.dense_decoder import DenseShape, DenseWeights

log = logging.getLogger("engine")

CompileMode = Literal["auto", "never", "always"]

# CPU-seconds to build a package, and to load one that is there (the import of torch's loader), and what part of an
# eager step it saves: measured for the quickstart's model. A larger model takes longer, and saves less.
BUILD_S, LOAD_S, SAVED_SHARE = 25.0, 1.5, 0.4
CHECKED_ROWS, CHECKED_POSITIONS = 8, 64
# By how much log-probabilities and KV rows of two right steps may differ.
TOLERANCE, TOLERANCE_LOW_PRECISION = 1e-4, 0.1
SOURCES = (compiled_build, decode_step, dense_decoder, sampling, slot_linear)


class DecodeStep:
    """Call it as inference.decode_step.decode_step, with the policy's slot first. With `top` the mode must be "never":
    a package returns sampled tokens alone."""

    def __init__(self, mode: CompileMode, shape: DenseShape, device: torch.device, top: int = 0) -> None:
        self._mode, self._shape, self._device, self._top = mode, shape, device, top
        self._eager_s = 0.0
        # Known from the first call on, whose weights say what is to be compiled.
        self._package: Path | None = None
        self._layout, self._price_s = b"", 0.0
        self._build: Build | None = None
        self._build_started = 0.0
        self._compiled: CompiledStep | None = None
        self._done = mode == "never"  # with trying to compile
        self._note = ""

    def __call__(self, slot: int, arguments: StepArguments) -> torch.Tensor:
        """See inference.decode_step.sampled."""
        if not self._done:
            self._consider(arguments)
        if self._compiled is not None:
            out = self._compiled(slot, arguments)
            if out is not None:
                return out
        started = time.monotonic()
        out = decode_step.decode_step(self._shape, *arguments, self._top)
        self._eager_s += time.monotonic() - started
        return out

    def describe(self) -> str:
        how = "compiled" if self._compiled is not None else "eager"
        return f"{how}, {self._note}" if self._note else how

    def close(self) -> None:
        """End a build that is under way."""
        self._done = True
        if self._build is not None:
            self._build.stop()

    # --- when to compile ---------------------------------------------------------------------------------------------

    def _consider(self, arguments: StepArguments) -> None:
        if self._package is None:
            self._layout = step_layout(self._shape, arguments, self._device)
            self._package = package_path(self._layout)
            self._price_s = LOAD_S if self._package.exists() else BUILD_S
        if self._build is not None:
            self._look_at(self._build, arguments)
        elif self._mode == "always" or self._eager_s * SAVED_SHARE >= self._price_s:
            if self._package.exists():
                self._load(arguments, "from the cache")
            else:
                self._start(arguments)

    def _start(self, arguments: StepArguments) -> None:
        assert self._package is not None  # _consider has found it
        self._note, self._build_started = "compiling", time.monotonic()
        try:
            self._build = Build(self._package, self._layout)
        except OSError as error:
            self._give_up(f"the compiler's process cannot be started: {error}")
        else:
            self._look_at(self._build, arguments)

    def _look_at(self, build: Build, arguments: StepArguments) -> None:
        failure = build.failure(wait=self._mode == "always")
        if failure:
            self._give_up(failure)
        elif failure is not None:
            self._load(arguments, f"built in {time.monotonic() - self._build_started:.0f} s")

    def _load(self, arguments: StepArguments, note: str) -> None:
        try:
            compiled = CompiledStep(self._package, self._layout, self._shape, self._device)
            difference = compiled.difference(arguments)
        except Exception as error:  # it is a foreign library, and may be of another torch or broken
            difference = f"{type(error).__name__}: {error}"
        if difference:
            self._give_up(f"{self._package} is of no use: {difference}")
            return
        self._compiled, self._note = compiled, note
        self.close()
        log.info("decode step compiled, %s", note)

    def _give_up(self, reason: str) -> None:
        self._note = f"not compiled: {reason}"
        log.warning("the decode step stays eager: %s", reason)
        self.close()


class CompiledStep:
    """A loaded package. Making one raises whatever torch raises for a file that it cannot load."""

    def __init__(self, package: Path | None, layout: bytes, shape: DenseShape, device: torch.device) -> None:
        self._run = torch._inductor.aoti_load_package(str(package), run_single_threaded=True).loader.run
        self._layout, self._shape, self._device = layout, shape, device
        self._no_row = torch.zeros(0, dtype=torch.bool, device=device)
        self._weights: dict[int, tuple[DenseWeights, list[torch.Tensor] | None]] = {}

    def __call__(self, slot: int, arguments: StepArguments) -> torch.Tensor | None:
        """As DecodeStep; None for what the package was not made for: one row, one position, weights of another
        layout."""
        rows = len(arguments.ids_n)
        weights = self._weight_tensors(slot, arguments)
        if weights is None or rows < 2 or len(arguments.seen_l) < 2:
            return None
        if len(self._no_row) < rows:
            self._no_row = torch.zeros(rows, dtype=torch.bool, device=self._device)
        _, rotation, keys, values, ids, positions, seen, (temperature, greedy, uniforms) = arguments
        greedy = self._no_row[:rows] if greedy is None else greedy
        # In the order of `tensors_of`, which takes longer.
        rest = (rotation, *keys, *values, ids, positions, seen, temperature, greedy, uniforms)
        out: torch.Tensor = self._run([*weights, *rest])[0]
        return out

    def _weight_tensors(self, slot: int, arguments: StepArguments) -> list[torch.Tensor] | None:
        """The weights as the package takes them, found once for each policy; None when they do not fit."""
        known = self._weights.get(slot)
        if known is None or known[0] is not arguments.weights:
            fits = step_layout(self._shape, arguments, self._device) == self._layout
            known = arguments.weights, tensors_of(arguments.weights) if fits else None
            self._weights[slot] = known
        return known[1]

    def difference(self, arguments: StepArguments) -> str:
        """Where this and the eager step differ by more than rounding, on a few random rows under the given weights;
        empty when they agree."""
        compiled, eager = (_random_call(arguments) for _ in range(2))
        out = self(0, compiled)
        expected = decode_step.decode_step(self._shape, *eager)
        if out is None or out.shape != expected.shape:
            return "it does not take this model's weights"
        tolerance = TOLERANCE if arguments.keys[0].dtype == torch.float32 else TOLERANCE_LOW_PRECISION
        same = out[0] == expected[0]
        if same.sum() * 2 < len(same):
            return f"tokens {out[0].tolist()} instead of {expected[0].tolist()}"
        results = (out[1][same], *compiled.keys, *compiled.values), (expected[1][same], *eager.keys, *eager.values)
        error = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
        return "" if error <= tolerance else f"log-probabilities or KV rows that are off by {error:g}"


def _random_call(arguments: StepArguments) -> StepArguments:
    """A call of a few rows with random contents, always the same ones."""
    device = arguments.ids_n.device
    generator = torch.Generator().manual_seed(0)
    seen = min(CHECKED_POSITIONS, arguments.keys[0].shape[2] - 1)

    def normal(like: torch.Tensor) -> torch.Tensor:
        shape = (CHECKED_ROWS, *like.shape[1:])
        return torch.randn(shape, generator=generator).to(device, like.dtype)

    def integers(below: int) -> torch.Tensor:
        return torch.randint(below, (CHECKED_ROWS,), generator=generator).to(device)

    positions = integers(seen)
    positions[0] = seen - 1
    draw = Draw(
        torch.ones(CHECKED_ROWS, device=device),
        integers(2).bool(),
        torch.rand(CHECKED_ROWS, generator=generator, dtype=torch.float64).to(device),
    )
    return arguments._replace(
        keys=[normal(rows) for rows in arguments.keys],
        values=[normal(rows) for rows in arguments.values],
        ids_n=integers(arguments.weights.embedding.shape[0]),
        positions_n=positions,
        seen_l=torch.arange(seen, device=device),
        draw=draw,
    )


def package_path(layout: bytes) -> Path:
    """Where the package of a layout lies: named after everything that decides its code."""
    sources = [inspect.getsource(module) for module in SOURCES]
    deciding = "\0".join([layout.decode(), torch.__version__, platform.machine(), _processor_features(), *sources])
    digest = hashlib.sha256(deciding.encode())
    return cache_directory() / "compiled" / f"{digest.hexdigest()[:16]}.pt2"


def _processor_features() -> str:
    """The compiler is told to use all that this processor has; another one that shares the cache may lack some."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()

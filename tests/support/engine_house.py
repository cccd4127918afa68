"""The engines that tests/engines asks for: one at a time, started as seldom as can be, shared by tests of a kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
from served_model import ServedModel
from sketched_policies import File, SketchedPolicies

from async_rl.version import PolicyId, VersionRun
from inference.engine import Completion, Engine, InFlight, Request
from inference.server import Call, EngineDied, Piece, Server
from inference.torch_engine import TorchEngine

SLOTS, CONTEXT, RESIDENT = 8, 512, 3
CLOSE = 2e-4  # nats: two programs' roundings apart in float32, of a model that hides no difference between policies
LONG = 160  # tokens; enough that a request is still under way when something has happened to it


class Kind(NamedTuple):
    """What an engine is started for: policies that are adapters or whole weights, and requests in flight."""

    whole: bool = False
    in_flight: InFlight = "finish"


ADAPTERS, CONTINUING, WHOLE = Kind(), Kind(in_flight="continue"), Kind(whole=True, in_flight="continue")
DECLARES: dict[str, dict[Kind, set[str]]] = {
    "torch": {
        ADAPTERS: {"finish", "recompute", "continue", "span", "seeds"},
        CONTINUING: {"finish", "recompute", "continue", "span", "seeds"},
        WHOLE: {"recompute", "continue", "span", "seeds"},
    },
    "vllm": {
        ADAPTERS: {"finish", "recompute", "name", "top_p", "seeds", "process"},
        CONTINUING: {"finish", "recompute", "continue", "span", "top_p", "seeds", "process"},
        WHOLE: {"recompute", "continue", "span", "top_p", "seeds", "process"},
    },
    "sglang": {
        ADAPTERS: {"finish", "recompute", "name", "top_p", "process"},
        WHOLE: {"recompute", "continue", "span", "top_p", "process"},
    },
}
"""By engine, what it is tested for; a test holds this against what the engine says of itself."""


def make_server(name: str, kind: Kind, model: Path, log: Path) -> Server:
    """Of vllm or sglang, not started."""
    options: dict[str, Any] = {
        "slots": SLOTS, "max_context": CONTEXT, "max_adapters": RESIDENT, "device": "cpu", "dtype": "float32",
        "whole": kind.whole,
    }  # fmt: skip
    if name == "vllm":
        from inference.vllm_engine import VllmServer

        return VllmServer(model, in_flight=kind.in_flight, arguments={}, **options)
    from inference.sglang_engine import SglangServer

    python = os.environ["ASYNC_RL_SGLANG_PYTHON"]
    return SglangServer(model, python=python, endpoint="", arguments={}, log=log, **options)


def make_engine(
    name: str, kind: Kind, model: Path, log: Path, stop_tokens: Collection[int] = (), stall_timeout_s: float = 120.0
) -> Engine:
    storage = "float32" if kind.whole else None
    options: dict[str, Any] = {
        "slots": SLOTS, "max_context": CONTEXT, "max_resident": RESIDENT, "storage": storage, "stop_tokens": stop_tokens
    }  # fmt: skip
    if name == "torch":
        return TorchEngine(model, device="cpu", dtype="float32", compile_mode="never", **options)
    from inference.served_engine import ServedEngine

    return ServedEngine(make_server(name, kind, model, log), model, stall_timeout_s=stall_timeout_s, **options)


class Bed:
    """An engine with what a test does to it. Where policies are whole weights, `updates` has their files; the first of
    them serves from the beginning. It keeps files below `memory`."""

    def __init__(self, name: str, kind: Kind, model: ServedModel, engine: Engine, folder: Path, memory: Path) -> None:
        self.name, self.kind, self.model, self.engine, self._memory = name, kind, model, engine, memory
        self._keys: set[tuple[int, int]] = set()
        self._folder, self._ways, self._calls = folder, 0, 0
        folder.mkdir()
        if kind.whole:
            self.updates = SketchedPolicies(model.path, folder, size=0.2)
            self.serve_files(self.updates.main)

    def install(self, *versions: int) -> None:
        for version in versions:
            self.engine.install(*self.model.policy(version))

    def serve(self, version: int, in_flight: InFlight = "finish") -> None:
        self.install(version)
        self.engine.flip(self.model.policy(version)[0], in_flight)

    def install_files(self, files: Sequence[File]) -> PolicyId:
        """A policy that is whole weights: one file as it is, several as a folder."""
        policy, path = PolicyId("main", files[-1].policy.version, files[-1].policy.digest), files[0].path
        if len(files) > 1:
            self._ways += 1
            path = self._folder / f"way-{self._ways}"
            path.mkdir()
            for number, file in enumerate(files):
                shutil.copy(file.path, path / f"{number:06}.safetensors")
        self.engine.install(policy, path)
        return policy

    def serve_files(self, files: Sequence[File], in_flight: InFlight = "continue") -> None:
        self.engine.flip(self.install_files(files), in_flight)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.submit(request)
            self._keys.add(request.key)

    def send(self) -> None:
        """What waits begins; with a server nothing is waited for, so that it may not even know of it yet."""
        if self.name == "torch":
            self.engine.step()
        else:
            self.engine._send()  # type: ignore[attr-defined]

    def begin(self, requests: Iterable[Request], steps: int = 5) -> None:
        """Submit, and go on until each has a token and the engine has stepped some more."""
        self.submit(requests)
        deadline = time.monotonic() + 60
        while self.engine.waiting() or not self._all_have_tokens():
            assert time.monotonic() < deadline, f"of {self.engine.active} requests some have no token after 60 s"
            assert self.engine.step() == []
        for _ in range(steps):
            assert self.engine.step() == []

    def _all_have_tokens(self) -> bool:
        """A torch engine samples one with every step."""
        return self.name == "torch" or all(attempt.tokens for attempt in self.engine._running.values())  # type: ignore[attr-defined]

    def finish(self, timeout_s: float = 60.0) -> dict[int, Completion]:
        """Step until nothing is active; completions by sample."""
        done: dict[int, Completion] = {}
        deadline = time.monotonic() + timeout_s
        while self.engine.active:
            assert time.monotonic() < deadline, f"{self.engine.active} requests are active after {timeout_s} s"
            for completion in self.engine.step():
                assert completion.key[1] not in done
                done[completion.key[1]] = completion
        return done

    def run(self, requests: Iterable[Request]) -> dict[int, Completion]:
        self.submit(requests)
        return self.finish()

    def death(self) -> str:
        """What `step` says of the engine's end, which is near."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.engine.step()
            except EngineDied as error:
                return str(error)
        raise AssertionError("a minute later it has not been noticed")

    def start_over(self) -> None:
        """As before the first test: version 0 serves, alone; or, of whole weights, the last one."""
        for key in self._keys:
            self.engine.abort(key)
        self.finish()
        self._keys.clear()
        if not self.kind.whole:
            self._evict_all_but_serving()
            self.serve(0, self.kind.in_flight)
            self._evict_all_but_serving()

    def _evict_all_but_serving(self) -> None:
        for policy in set(self.engine.resident) - {self.engine.serving}:
            self.engine.evict(policy)

    # --- past the engine, to its server ------------------------------------------------------------------------------

    @property
    def server(self) -> Any:
        return self.engine._server  # type: ignore[attr-defined]

    def ask(self, work: Coroutine[Any, Any, Any], within_s: float = 120.0) -> Any:
        return self.engine._calls.run(work, "what a test asks", within_s)  # type: ignore[attr-defined]

    def call(self, ids: npt.NDArray[np.int32], adapter: str | None, cache_key: str, most: int = 8) -> Call:
        self._calls += 1
        return Call(f"test-{self._calls}", ids, most, 1.0, 1.0, self._calls, (), adapter, cache_key)

    def sample(self, call: Call) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and log-probabilities, as the server says them."""
        sampled = self.ask(self._pieces(call))
        tokens = [token for piece in sampled for token in piece.tokens]
        logprobs = [logprob for piece in sampled for logprob in piece.logprobs]
        return np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32)

    async def _pieces(self, call: Call) -> list[Piece]:
        return [piece async for piece in self.server.generate(call)]

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return self.engine._calls._loop.start(work)  # type: ignore[attr-defined]

    def begin_call(self, call: Call) -> Future[Any]:
        """Goes on until it has a token, and further."""
        begun = threading.Event()

        async def pieces() -> None:
            async for _ in self.server.generate(call):
                begun.set()

        running = self.start(pieces())
        assert begun.wait(60.0)
        return running

    # --- what it should be -------------------------------------------------------------------------------------------

    def in_memory(self) -> int:
        """How many folders it has for a server to load from."""
        return sum(path.is_dir() for path in self._memory.glob("*/*"))

    def uses(self) -> dict[int, int]:
        """How many requests use each resident policy, by version."""
        return {policy.version: uses for policy, uses in self.engine.resident.items()}

    def seconds_until_server_idle(self) -> float:
        """What runs behind the engine says so itself: within a minute, or it fails."""
        started = time.monotonic()
        time.sleep(0 if self.name == "torch" else 0.5)  # what it said last is older than this
        while (now := getattr(self.engine, "signals", None)) is not None and now.running + now.queued > 0:
            assert time.monotonic() < started + 60.0, now
            time.sleep(0.1)
        return time.monotonic() - started

    def runs(self, *counts: tuple[int, int]) -> tuple[VersionRun, ...]:
        """From (version, count) pairs."""
        return tuple(VersionRun(version, self.model.policy(version)[0].digest, count) for version, count in counts)

    def assert_sampled_by(
        self, version: int, request: Request, completion: Completion, places: slice = slice(None)
    ) -> None:
        """The log-probabilities at these places are those of transformers with peft."""
        sampling = request.sampling
        expected = self.model.logprobs(version, request.prompt, completion.tokens, sampling.temperature, sampling.top_p)
        np.testing.assert_allclose(completion.logprobs[places], expected[places], atol=CLOSE, rtol=0)


class Engines:
    """At most one engine is up; another kind ends it."""

    def __init__(self, name: str, model: ServedModel, folder: Path, memory: Path) -> None:
        self.name, self.model, self._folder, self._memory = name, model, folder, memory
        self._up: Bed | None = None
        self._started = 0

    def bed(self, kind: Kind) -> Bed:
        if self.name == "torch" and not kind.whole:
            kind = kind._replace(in_flight="finish")  # one engine does all of it
        if self._up is None or self._up.kind != kind:
            self._up = self.extra(kind)
        self._up.start_over()
        return self._up

    def extra(self, kind: Kind, **options: Any) -> Bed:
        """One whose engine the caller closes, while no other is up."""
        engine = self.start(kind, **options)
        return Bed(self.name, kind, self.model, engine, self._folder / f"bed-{self._started}", self._memory)

    def start(self, kind: Kind, **options: Any) -> Engine:
        self.close()
        return make_engine(self.name, kind, self.model.path, self.log(), **options)

    def log(self) -> Path:
        self._started += 1
        return self._folder / f"engine-{self._started}.log"

    def close(self) -> None:
        if self._up is not None:
            self._up.engine.close()
            self._up = None


def children() -> list[psutil.Process]:
    """Of this process, and theirs; without Python's own, which keeps an eye on shared memory and ends with us."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def resident_bytes() -> int:
    """Memory of this process and its children."""
    total = 0
    for process in (psutil.Process(), *children()):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def unheld_memory(*, semaphores: bool = False) -> set[str]:
    """What lies in /dev/shm and no living process has mapped or open: what engines that ended have left, or others.
    Python's semaphores are only counted where told to: they go with the process that started their owner."""
    # Before who holds what is looked at: what others make meanwhile is not taken for left.
    there = [path for path in Path("/dev/shm").iterdir() if semaphores or not path.name.startswith("sem.mp-")]
    held = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held |= {line.split()[5] for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line}
            held |= {os.readlink(file) for file in (folder / "fd").iterdir()}
    return {str(path) for path in there if path.exists()} - held

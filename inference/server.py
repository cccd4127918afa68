"""What a program that serves a model with a loop of its own (vLLM, SGLang) offers to inference.served_engine.

Every coroutine runs on one event loop, in a thread that belongs to the engine. A server knows nothing of policies: it
knows adapters by name, and labels of its weights. Names are never used for two contents, so a server may cache by them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from async_rl.trajectory import Finish
from inference.engine import Capabilities, EngineError


class EngineDied(EngineError):
    """The server is gone, or does not answer any more; what it had begun can go on elsewhere. The message says how it
    ended, and where its log is."""


class Call(NamedTuple):
    """A request to sample at most `most` tokens after `ids` int32[n], which were checked against the vocabulary. `name`
    is used once. `adapter` is one that is loaded; None is the weights as they are. Prompts share a prefix cache only
    where `cache_key` is the same. It ends at a token of `stop`, which is part of what it returns."""

    name: str
    ids: npt.NDArray[np.int32]
    most: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[int, ...]
    adapter: str | None
    cache_key: str


class Piece(NamedTuple):
    """What was sampled since the last piece: ids, their processed log-probabilities (see inference.engine), and, where
    the server says by itself which weights computed each, runs of (label, count) over them. `finish` is None but on
    the last one. `routes` [positions, layers, experts each] comes with the last one, where the server was made to."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[tuple[str, int]] | None = None
    finish: Finish | None = None
    routes: npt.NDArray[np.int32] | None = None


class Signals(NamedTuple):
    """How the server is doing: `kv_use` is the share of its KV cache in use, 0 to 1; `running` and `queued` are its
    requests; `preempted` counts, since its start, the requests whose KV cache it had to give up."""

    kv_use: float
    running: int
    queued: int
    preempted: int


class Server(Protocol):
    @property
    def capabilities(self) -> Capabilities:
        """Known before `start`."""

    @property
    def vocabulary_size(self) -> int:
        """Of what can be both prompted and sampled."""

    async def start(self) -> None:
        """Returns when it can serve. Raises EngineError."""

    async def load(self, adapter: str, folder: Path) -> None:
        """Load an adapter from a folder in PEFT's layout, which stays there, unchanged, until `unload` has returned.
        Raises EngineError, and keeps what it had."""

    async def unload(self, adapter: str) -> None:
        """Of an adapter that no call uses."""

    async def swap(self, adapter: str, folder: Path, label: str) -> None:
        """Replace what is loaded as `adapter` (or load it) between two decode steps, while calls use it and keep their
        KV cache; tokens from then on have `label`. Only where an adapter may be flipped under `continue`."""

    async def reload(self, folder: Path, label: str) -> None:
        """Make all weights those of a checkpoint in Hugging Face layout, between two decode steps; calls go on with
        their KV cache, and their tokens from then on have `label`. Raises EngineError."""

    def generate(self, call: Call) -> AsyncIterator[Piece]:
        """Ends after the piece with a `finish`. Raises EngineError for a call that the server refuses, EngineDied when
        it is gone."""

    async def abort(self, name: str) -> None:
        """Nothing of the call runs when this returns, or soon after. Unknown names are ignored."""

    async def score(
        self, adapter: str | None, sequences: Sequence[npt.NDArray[np.int32]]
    ) -> list[npt.NDArray[np.float32]]:
        """See inference.engine.Engine.score; never from a cache."""

    async def signals(self) -> Signals: ...

    async def check(self) -> None:
        """Raises EngineDied unless it is well; cheap."""

    def describe(self) -> dict[str, Any]: ...

    async def close(self) -> None:
        """No process is left behind. May be called at any time, also when `start` failed."""

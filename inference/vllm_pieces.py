"""What vLLM's outputs say, in the words of inference.server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.trajectory import Finish
from inference.engine import EngineError
from inference.server import Piece, Signals

FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
Starts = Sequence[tuple[str, int]]


class PieceMaker:
    """Pieces of one call. With `spans` each has labels: they are at hand while the call runs, and come with its last
    output; what comes in between waits for that one."""

    def __init__(self, engine: Any, name: str, *, spans: bool) -> None:
        self._processor = engine.output_processor
        self._name = name
        self._spans = spans
        self._sent = 0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def made_of(self, output: Any) -> Piece | None:
        """None when there is nothing to tell yet. Raises EngineError when the request failed in the engine."""
        part = output.outputs[0]
        self._tokens.extend(part.token_ids)
        self._logprobs.extend(part.logprobs.logprobs if part.logprobs else ())
        if len(self._logprobs) != len(self._tokens):
            raise EngineError(f"vLLM gave {len(self._tokens)} tokens with {len(self._logprobs)} log-probabilities")
        finish = self._finish(part) if output.finished else None
        starts = self._starts(part) if self._spans else ()
        if finish is None and (not self._tokens or starts is None):
            return None
        labels = runs_between(starts, self._sent, self._sent + len(self._tokens)) if starts else None
        piece = Piece(self._tokens, self._logprobs, labels, finish)
        self._sent += len(self._tokens)
        self._tokens, self._logprobs = [], []
        return piece

    def _finish(self, part: Any) -> Finish:
        if part.finish_reason not in FINISH:
            raise EngineError(f"vLLM ended the request with {part.finish_reason!r}")
        return FINISH[part.finish_reason]

    def _starts(self, part: Any) -> Starts | None:
        if part.finish_reason is not None:
            return [(span.version, span.start) for span in part.weight_versions or ()]
        for number in self._processor.external_req_ids.get(self._name, ()):
            if state := self._processor.request_states.get(number):
                return list(state.weight_version_starts)
        return None


def runs_between(starts: Starts, begin: int, end: int) -> list[tuple[str, int]]:
    """Of the tokens from `begin` to `end` of a request: (label, count), where labels start at tokens."""
    ends = [start for _, start in starts[1:]] + [end]
    cut = [(label, min(stop, end) - max(start, begin)) for (label, start), stop in zip(starts, ends, strict=True)]
    return [(label, count) for label, count in cut if count > 0]


def prompt_logprobs(output: Any, length: int) -> npt.NDArray[np.float32]:
    """float32[length - 1] of a request that asked for no more than its own tokens'."""
    found = np.asarray(output.prompt_logprobs.logprobs, np.float32)
    if len(found) != length - 1:
        raise EngineError(f"vLLM gave {len(found)} log-probabilities for {length} tokens")
    return found


class Stats:
    """The engine's own numbers, as it last told them."""

    def __init__(self) -> None:
        self._kv_use = 0.0
        self._running = self._queued = self._preempted = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Stats:
        """vLLM makes its loggers by calling this."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._kv_use = float(scheduler_stats.kv_cache_usage)
            self._running = int(scheduler_stats.num_running_reqs)
            self._queued = int(scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self._preempted += int(iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        """Part of what vLLM calls; there is nothing to say."""

    def log(self) -> None:
        """As above."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """As above; the node never sends the engine to sleep."""

    def signals(self, idle: bool) -> Signals:
        """An idle engine tells nothing any more, so its last numbers are not true."""
        if idle:
            return Signals(0.0, 0, 0, self._preempted)
        return Signals(self._kv_use, self._running, self._queued, self._preempted)

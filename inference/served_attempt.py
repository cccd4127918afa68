"""A request on its way through a server, over as many calls as it takes: pure book-keeping, no server."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from async_rl.trajectory import Finish
from async_rl.version import PolicyId, VersionRun
from inference.engine import Completion, EngineError, Prefix, Request
from inference.request_checks import request_name
from inference.server import Call, Piece

_calls = itertools.count()  # of this process: the same request may come again


def label_of(policy: PolicyId) -> str:
    """What a server is told that its weights are."""
    return f"{policy.version}-{policy.digest}"


def run_of(label: str, count: int) -> VersionRun:
    """Raises EngineError for what is no label of ours: tokens of such weights belong to no policy."""
    version, _, digest = label.partition("-")
    if not version.isdigit() or len(digest) != 64:
        raise EngineError(f"the engine attests weights {label!r} for {count} tokens: no policy that it was given")
    return VersionRun(int(version), digest, count)


def extended(runs: tuple[VersionRun, ...], more: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """Runs after one another; neighbours of the same policy become one."""
    joined = list(runs)
    for run in more:
        if joined and (joined[-1].version, joined[-1].digest) == (run.version, run.digest):
            run = VersionRun(run.version, run.digest, joined.pop().count + run.count)
        if run.count:
            joined.append(run)
    return tuple(joined)


def seed_after(seed: int, sampled: int) -> int:
    """The seed of a call that begins after so many tokens: servers count their random numbers from the beginning of a
    call, so with the same seed the second part would repeat the numbers of the first. Below 2^31, as servers want."""
    if not sampled:
        return seed % (1 << 31)
    words = hashlib.blake2b(f"{seed}/{sampled}".encode(), digest_size=4).digest()
    return int.from_bytes(words, "little") >> 1


@dataclass(slots=True)
class Attempt:
    """`policy` is the one it uses (None while it waits unpinned), `call` the name of the call that runs for it, on
    `adapter`. `spans`: the server says for itself which weights made each token; else they are the policy's. It had
    `begun_at` tokens when that call began. Times are of the monotonic clock, in seconds."""

    request: Request
    limit: int
    policy: PolicyId | None
    submitted: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: tuple[VersionRun, ...] = ()
    resumed: int = 0
    queued_s: float = 0.0
    sampling_s: float = 0.0
    call: str | None = None
    adapter: str | None = None
    spans: bool = False
    calls: int = 0
    started: float = 0.0
    begun_at: int = 0
    routes: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        prefix = self.request.prefix
        if prefix is not None:
            self.tokens, self.logprobs = prefix.tokens.tolist(), prefix.logprobs.tolist()
            self.runs, self.resumed = prefix.versions, len(self.tokens)
            self.queued_s, self.sampling_s = prefix.queued_s, prefix.sampling_s

    @property
    def left(self) -> int:
        """How many tokens more it may have."""
        return self.limit - len(self.tokens)

    @property
    def silent(self) -> bool:
        """Whether nothing has come of the call that runs: the server may not even have begun with it."""
        return len(self.tokens) == self.begun_at

    def begin(self, stop: tuple[int, ...], adapter: str | None, cache_key: str, spans: bool, now: float) -> Call:
        """The next call for it: the prompt and what was sampled so far are its prompt. No other call has its name."""
        key, sampling = self.request.key, self.request.sampling
        self.calls += 1
        self.call, self.adapter, self.spans = f"{key[0]}-{key[1]}-{next(_calls)}", adapter, spans
        self.queued_s += now - self.submitted
        self.started, self.begun_at = now, len(self.tokens)
        ids = np.concatenate([self.request.prompt, np.asarray(self.tokens, dtype=np.int32)]).astype(np.int32)
        seed = seed_after(self.request.seed, len(self.tokens))
        return Call(self.call, ids, self.left, sampling.temperature, sampling.top_p, seed, stop, adapter, cache_key)

    def take(self, piece: Piece) -> None:
        """What its call has sampled. Raises EngineError when its parts are not over the same tokens, or when these are
        more than were asked for."""
        count = len(piece.tokens)
        if count != len(piece.logprobs) or count > self.left:
            raise EngineError(
                f"{request_name(self.request)}: {count} tokens came with {len(piece.logprobs)} log-probabilities, and "
                f"{self.left} were left to be sampled"
            )
        if not self.spans:
            assert self.policy is not None
            more = [VersionRun(self.policy.version, self.policy.digest, count)]
        else:
            more = [run_of(label, n) for label, n in piece.labels or ()]
        if sum(run.count for run in more) != count:
            raise EngineError(f"{request_name(self.request)}: {count} tokens came with versions {more}")
        self.tokens.extend(piece.tokens)
        self.logprobs.extend(piece.logprobs)
        self.runs = extended(self.runs, more)
        self.routes = piece.routes  # of the last call, whose prompt is all that came before

    def pause(self, now: float) -> None:
        """Its call runs no more; it waits for another."""
        if self.call is not None:
            self.sampling_s += now - self.started
            self.submitted, self.call, self.adapter = now, None, None

    def completion(self, finish: Finish, now: float) -> Completion:
        self._end(now)
        times = self.queued_s, self.sampling_s
        return Completion(self.request.key, *self._sampled(), finish, *times, self.resumed, routes=self.routes)

    def prefix(self, now: float) -> Prefix | None:
        """All that was sampled of it, None when nothing was."""
        self._end(now)
        if not self.tokens:
            return None
        return Prefix(*self._sampled(), self.queued_s, self.sampling_s, resumed=self.resumed)

    def _end(self, now: float) -> None:
        if self.call is None:
            self.queued_s += now - self.submitted
        self.pause(now)

    def _sampled(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], tuple[VersionRun, ...]]:
        return np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32), self.runs

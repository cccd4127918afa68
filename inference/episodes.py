"""Attempts of several calls: a driver plays each, in an event loop beside the node's thread.

    node thread                                   event loop's thread
    begin(attempt) ─────────────────────────────> driver.play(play)
    inbox: Call ──> engine.submit    <─────────── await play.sample(prompt)
    completed(completion) ──────────────────────>    its completion, recorded in play.transcript
    inbox: Ended ──> the trajectory  <─────────── an Outcome, or what went wrong
    cancel(attempt) ────────────────────────────> the play is cancelled, and its calls are withdrawn (inbox: Withdrawn)

A driver (an environment, an agent that speaks HTTP) decides what the prompts are; it never sees the engine. Each call
is one request of the engine, under the policy that serves when it starts (or the lease's, if it is pinned), and its
tokens carry what the engine stamped on them. Several calls of one attempt may be under way at a time.

What a node that leaves has not finished within its grace is given back and sampled anew: an attempt whose world is in
this process's hands cannot go on elsewhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import itertools
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.trajectory import MAX_SEGMENTS, Status
from inference.engine import Completion, Request
from inference.event_loop import EventLoop
from inference.rollout import Attempt, Key, Outcome, Played
from inference.transcript import Place, Transcript

log = logging.getLogger("episodes")

CLOSE_S = 5.0  # for the plays that are under way at the end to be cancelled


class NoRoom(AsyncRLError):
    """The attempt may not sample another token: a limit of its length is reached. A driver ends it as cut."""


class SampleFailed(AsyncRLError):
    """A call that the engine could not answer, or gave up."""


class Call(NamedTuple):
    """To the node: submit this request."""

    request: Request


class Withdrawn(NamedTuple):
    """To the node: nobody waits for this call any more."""

    key: Key


class Ended(NamedTuple):
    """To the node: a play is over. With `error` not empty the attempt has none: its environment failed, or the engine
    (`status`)."""

    key: Key
    played: Played
    status: Status = "ok"
    error: str = ""


class Limits(NamedTuple):
    """`context`: prompt and answer of one call, in tokens; `attempt`: all segments of an attempt together, which is
    what the buffer keeps room for."""

    context: int
    attempt: int


class Play:
    """One attempt while it is played: what a driver has to do with. All of it in the event loop's thread."""

    def __init__(self, attempt: Attempt, limits: Limits, ask: Callable[[Request], asyncio.Future[Completion]]) -> None:
        self.attempt = attempt
        self.transcript = Transcript()
        self.world_s = 0.0
        """Seconds that this attempt's world took, as far as the driver says."""
        self._limits = limits
        self._ask = ask
        self._calls = itertools.count()
        self._under_way = 0  # tokens that calls may still add
        self._going_on: list[int | None] = []  # of each of them the segment; None where it may begin one

    def room(self, prompt: Sequence[int] | npt.NDArray[np.int32]) -> int:
        """How many tokens a call with this prompt may sample: by the context, by the lease, and by what is left of the
        attempt; below 1 it may not be made."""
        ids = np.asarray(prompt, dtype=np.int32)
        added, segment = self._adds(ids)
        if segment is None and self.transcript.n_segments + self._going_on.count(None) >= MAX_SEGMENTS:
            return 0
        left = self._limits.attempt - self.transcript.n_tokens - self._under_way - added
        return min(self.attempt.sampling.max_new_tokens, self._limits.context - len(ids), left)

    def _adds(self, ids: npt.NDArray[np.int32]) -> tuple[int, int | None]:
        """How many tokens a call adds before its first sampled one, at most, and the segment in which it goes on. Of
        several that are under way after the same tokens one does; the others begin segments, with all of their prompt,
        and which that will be is not known before."""
        segment = self.transcript.continues(ids)
        if segment is None or segment in self._going_on:
            return len(ids), None
        return self.transcript.grows_by(ids), segment

    async def sample(
        self,
        prompt: Sequence[int] | npt.NDArray[np.int32],
        reasons: Sequence[int] | npt.NDArray[np.uint8] | None = None,
        max_new_tokens: int | None = None,
        until: Callable[[Completion], Completion] = lambda completion: completion,
    ) -> tuple[Completion, Place]:
        """What the model says after `prompt`, recorded: its tokens with log-probabilities and versions, and where they
        stand in the transcript (to be rewarded). Temperature and top_p are the lease's, as every token's
        log-probability must be of the distribution that the run samples from; so is the seed, with the number of the
        call. `reasons`: why each token of the prompt does not train (Transcript.sampled). `until` may give back less of
        it, from the start, where what stands there already says that it ends: the rest is as if it was never sampled.

        Raises NoRoom when a limit of length leaves no token, SampleFailed when the engine has no answer."""
        ids = np.asarray(prompt, dtype=np.int32)
        room = min(self.room(ids), max_new_tokens if max_new_tokens is not None else 1 << 31)
        if room < 1:
            raise NoRoom(f"attempt {self.attempt.key[0]}/{self.attempt.key[1]}: no room for another token")
        sampling = self.attempt.sampling
        seed = seed_of_call(self.attempt.seed, next(self._calls))
        own = type(sampling)(sampling.temperature, room, sampling.top_p)
        added, segment = self._adds(ids)
        reserved = added + room
        self._under_way += reserved
        self._going_on.append(segment)
        try:
            completion = await self._ask(Request(self.attempt.key, ids, own, seed, self.attempt.policy))
        finally:
            self._under_way -= reserved
            self._going_on.remove(segment)
        if completion.finish == "abort" or not len(completion.tokens):
            raise SampleFailed("the engine aborted a call of it")
        completion = until(completion)
        place = self.transcript.sampled(ids, completion, None if reasons is None else np.asarray(reasons, np.uint8))
        return completion, place


class Driver(Protocol):
    """What plays attempts, many at a time in one event loop; it must not block that. What it raises is a failed
    environment (env_failed: tried again, never a reward of 0), but for SampleFailed, which is the engine's."""

    async def play(self, play: Play) -> Outcome:
        """Play one attempt to its end. Cancelled when its lease is."""

    async def close(self) -> None:
        """End what it has started."""


def seed_of_call(seed: int, call: int) -> int:
    """The seed of an attempt's call number `call`: an int64 ≥ 0."""
    digest = hashlib.blake2b(f"{seed} {call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Episodes:
    """The node's side: its methods are called by the node's thread. What is to be done there comes by `inbox`. Of each
    task one driver, by the names that attempts have for tasks."""

    def __init__(self, drivers: Mapping[str, Driver], limits: Limits, inbox: queue.SimpleQueue[Any]) -> None:
        self._drivers = drivers
        self._limits = limits
        self._inbox = inbox
        self._loop = EventLoop("episodes")
        self._plays: dict[Key, concurrent.futures.Future[None]] = {}
        self._calls: dict[Key, asyncio.Future[Completion]] = {}
        self._serial = itertools.count(1)
        self._closed = False

    @property
    def tasks(self) -> frozenset[str]:
        """Those whose attempts are played."""
        return frozenset(self._drivers)

    def begin(self, attempt: Attempt) -> None:
        """Play it. `Ended` comes by the inbox, unless it is cancelled before."""
        self._plays[attempt.key] = self._loop.start(self._play(attempt))

    def cancel(self, key: Key) -> None:
        """Nobody waits for this attempt any more; unknown ones are ignored."""
        future = self._plays.pop(key, None)
        if future is not None:
            future.cancel()

    def ended(self, key: Key) -> None:
        self._plays.pop(key, None)

    def is_wanted(self, key: Key) -> bool:
        """Whether a call is still waited for: it may have been withdrawn while it was on its way here."""
        return key in self._calls

    def completed(self, completion: Completion) -> None:
        """What the engine made of a call; ignored where that was withdrawn."""
        self._resolve(completion.key, lambda future: future.set_result(completion))

    def failed(self, key: Key, error: AsyncRLError) -> None:
        """A call that cannot be made: SampleFailed, or what the engine refuses in it, which is the driver's fault."""
        self._resolve(key, lambda future: future.set_exception(error))

    def _resolve(self, key: Key, settle: Callable[[asyncio.Future[Completion]], None]) -> None:
        future = self._calls.pop(key, None)
        if future is not None:
            future.get_loop().call_soon_threadsafe(lambda: None if future.done() else settle(future))

    def close(self) -> None:
        """Cancel what is under way, and end what the driver has started."""
        if self._closed:
            return
        self._closed = True
        for key in list(self._plays):
            self.cancel(key)
        for driver in self._drivers.values():
            try:
                self._loop.run(driver.close(), CLOSE_S, "to end what it plays with")
            except Exception as error:
                log.warning("%s", error)
        self._loop.close()

    # --- in the event loop's thread ----------------------------------------------------------------------------------

    async def _play(self, attempt: Attempt) -> None:
        play = Play(attempt, self._limits, self._ask)
        outcome, error = Outcome(), ""
        status: Status = "ok"
        started = time.monotonic()
        try:
            outcome = await self._drivers[attempt.task].play(play)
        except SampleFailed as failed:
            status, error = "aborted", str(failed)
        except NoRoom:  # of a driver that left it to us
            outcome = Outcome(cut=True)
        except Exception as failure:  # somebody's code, which may fail in any way
            status, error = "env_failed", str(failure) if isinstance(failure, AsyncRLError) else repr(failure)
            log.debug("attempt %d/%d failed", *attempt.key, exc_info=True)
        seconds = play.world_s or max(0.0, time.monotonic() - started - play.transcript.sampling_s)
        self._inbox.put(Ended(attempt.key, Played(play.transcript, outcome, seconds), status, error))

    def _ask(self, request: Request) -> asyncio.Future[Completion]:
        """A call of its own name: negative, where a sample's number would be."""
        key = (request.key[0], -next(self._serial))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._calls[key] = future
        future.add_done_callback(lambda done: self._withdraw(key) if done.cancelled() else None)
        self._inbox.put(Call(request._replace(key=key)))
        return future

    def _withdraw(self, key: Key) -> None:
        if self._calls.pop(key, None) is not None:
            self._inbox.put(Withdrawn(key))

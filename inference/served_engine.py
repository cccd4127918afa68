"""An engine over a server that owns its loop (inference.server): vLLM, SGLang.

One thread, the node's, keeps all books; the server's coroutines run in another, and what they have goes through one
queue, which `step` empties. So nothing here is shared but that queue.

    submit ─> waiting ── gate: `limit` in flight ──> a call of the server ─> pieces ─> step ─> completions
                 ▲                                        │
                 └──── recompute: the call is aborted, ◄──┘
                       and what it sampled is part of the next one's prompt

A policy that is an adapter has a name of its own on the server, `<version>-<digest8>`, which is never used again, and
its requests are calls under that name: what a token was sampled under is what its call was made with. Under `continue`
unpinned requests are calls of one adapter, LIVE, which the server replaces between two steps and whose tokens it stamps
by itself; so it does where policies are all of the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.policy.update_file import Storage
from async_rl.trajectory import Finish
from async_rl.version import PolicyId, VersionRun
from inference.adapter_slots import Adapter
from inference.concurrency import ConcurrencyLimit
from inference.engine import Capabilities, Completion, EngineError, InFlight, Installed, PolicyContent, Prefix, Request
from inference.request_checks import check_ids, check_request, request_name
from inference.resident import ResidentPolicies
from inference.served_attempt import Attempt, label_of
from inference.served_calls import Key, News, ServerCalls
from inference.served_policies import AdapterFolders, MasterModel, end_tokens_of, memory_scratch, modules_of
from inference.server import Server, Signals
from inference.whole_weights import WholeWeights

log = logging.getLogger("engine")

LIVE = "live"  # the adapter that is replaced under `continue`
STEP_S = 0.02  # how long a step waits for the first token
RELOAD_S = 600.0  # for a server to load all weights of a model


class ServedEngine:
    """Implements inference.engine.Engine. `slots` requests run at once, each of at most `max_context` tokens, prompt
    included; `stop_tokens` end a request (default: the model's own). With `storage` policies are weights of the whole
    model, which the trainer keeps in that dtype. A server that samples nothing for `stall_timeout_s` while it has work
    counts as dead. Starts the server; raises EngineError when that fails."""

    def __init__(
        self,
        server: Server,
        model_path: Path,
        *,
        slots: int,
        max_context: int,
        max_resident: int,
        storage: Storage | None = None,
        stop_tokens: Collection[int] | None = None,
        stall_timeout_s: float = 120.0,
    ) -> None:
        self._server, self._slots, self._max_context = server, slots, max_context
        self._stop = tuple(end_tokens_of(model_path) if stop_tokens is None else stop_tokens)
        self._resident = ResidentPolicies(max_resident if storage is None else 2)  # one serves, one waits for its flip
        self._matched: dict[PolicyId, tuple[str, ...]] = {}
        self._waiting: dict[Key, Attempt] = {}
        self._running: dict[Key, Attempt] = {}
        self._finished: list[Completion] = []
        self._concurrency = ConcurrencyLimit(slots)
        self._looked: Signals | None = None  # the signals that the limit has seen
        self._ended = 0
        self._first_token: dict[tuple[int, str], float] = {}  # by version and digest
        self._live = False  # whether new requests are calls of LIVE
        self._reload_label = ""
        self._scratch = memory_scratch()
        try:
            self._folders = AdapterFolders(self._scratch.path, *modules_of(model_path, server.capabilities.experts))
            self._whole: WholeWeights | None = None
            if storage is not None:
                master = MasterModel(model_path, storage, self._scratch.path, self._reload)
                self._whole = WholeWeights(master, model_path, storage)
            self._calls = ServerCalls(server, stall_timeout_s)
        except BaseException:
            self._scratch.remove()
            raise
        self.vocabulary_size = server.vocabulary_size

    # --- what the node may ask ---------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self._server.capabilities._replace(
            resident_versions=self._resident.max_resident, in_place=self._whole is not None
        )

    @property
    def serving(self) -> PolicyId | None:
        return self._resident.serving

    @property
    def resident(self) -> Mapping[PolicyId, int]:
        return self._resident.uses

    @property
    def limit(self) -> int:
        """How many calls may run at once by now."""
        return self._concurrency.limit

    @property
    def free_slots(self) -> int:
        return max(0, self.limit - len(self._running) - len(self._waiting))

    def first_token(self, policy: PolicyId) -> float | None:
        return self._first_token.get((policy.version, policy.digest))

    @property
    def active(self) -> int:
        return len(self._running) + len(self._waiting) + len(self._finished)

    @property
    def signals(self) -> Signals | None:
        """The server's latest, None before the first."""
        return self._calls.signals

    def describe(self) -> dict[str, Any]:
        return {
            **self._server.describe(),
            "slots": self._slots,
            "max_context": self._max_context,
            "max_resident": self._resident.max_resident,
            "adapter_targets": len(self._matched[self.serving]) if self.serving else 0,
        }

    def score(self, policy: PolicyId, tokens: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        for sequence in tokens:
            check_ids("a sequence to score", sequence, self.vocabulary_size)
        return self._calls.run(self._server.score(self._adapter(policy, policy == self.serving), tokens), "scoring")

    # --- policies ----------------------------------------------------------------------------------------------------

    def read(self, policy: PolicyId, path: Path) -> PolicyContent:
        return self._whole.read(policy, path) if self._whole else self._folders.read(policy, path)

    def install(self, policy: PolicyId, files: Path | PolicyContent) -> Installed:
        if policy not in self._resident:
            self._resident.free_slot()  # there must be one
            content = self.read(policy, files) if isinstance(files, Path) else files
            if self._whole is not None:
                self._matched[policy] = self._whole.install(policy, content)
            else:
                assert isinstance(content, Adapter)
                self._matched[policy] = self._load(policy, content)
            self._resident.add(policy)
        return Installed(policy, self._matched[policy])

    def _load(self, policy: PolicyId, content: Adapter) -> tuple[str, ...]:
        matched = self._folders.write(policy, content)
        name, folder = policy.short(), self._folders.folder(policy)
        try:
            self._calls.run(self._server.load(name, folder), f"loading {name}")
        except EngineError:
            self._folders.remove(policy)
            raise
        return matched

    def flip(self, policy: PolicyId, in_flight: InFlight) -> None:
        if in_flight not in self.capabilities.in_flight:
            raise EngineError(f"in_flight {in_flight!r}: choose {', '.join(sorted(self.capabilities.in_flight))}")
        self._resident.slot(policy)
        self._take_news()
        if self._whole is not None:
            self._flip_weights(self._whole, policy, in_flight)
            return
        if in_flight == "continue":
            self._calls.must(self._server.swap(LIVE, self._folders.folder(policy), label_of(policy)), "the flip")
        self._live = in_flight == "continue"
        self._resident.serve(policy)
        if in_flight != "finish":
            self._move(self._unpinned(self._running.values()), in_flight)
            self._unbind_waiting(self.resident.keys() - {policy})

    def _flip_weights(self, whole: WholeWeights, policy: PolicyId, in_flight: InFlight) -> None:
        ending = self.serving if self.serving != policy else None
        attempts = (*self._waiting.values(), *self._running.values())
        if ending is not None and any(attempt.request.policy == ending for attempt in attempts):
            raise EngineError(f"policy {ending.short()} is pinned by requests, and a flip would end it: wait for them")
        if in_flight == "recompute":
            self._requeue(self._unpinned(self._running.values()))
            self._calls.wait_for_ending()
        self._reload_label = label_of(policy)
        try:
            whole.flip(policy)
        except EngineError as error:
            raise (self._calls.ended(f"{whole.broken} ({error})") if whole.broken else error) from error
        self._resident.serve(policy)
        self._move(self._unpinned(self._running.values()), in_flight)
        self._unbind_waiting(self.resident.keys() - {policy})
        if ending is not None:
            self.evict(ending)

    def _reload(self, folder: Path) -> None:
        self._calls.run(self._server.reload(folder, self._reload_label), "loading the weights", RELOAD_S)

    def evict(self, policy: PolicyId) -> None:
        self._resident.remove(policy)
        del self._matched[policy]
        self._first_token.pop((policy.version, policy.digest), None)
        if self._whole is not None:
            self._whole.evict(policy)
            return
        self._calls.wait_for_ending(policy.short())
        try:
            self._calls.must(self._server.unload(policy.short()), f"unloading {policy.short()}")
        finally:
            self._folders.remove(policy)

    def rebind(self, policy: PolicyId) -> int:
        self._resident.slot(policy)
        if policy == self.serving:
            return 0
        self._take_news()
        chosen = [each for each in self._unpinned(self._running.values()) if each.policy == policy]
        self._requeue(chosen)
        return len(chosen) + self._unbind_waiting([policy])

    def _move(self, attempts: Iterable[Attempt], in_flight: InFlight) -> None:
        """Requests that run go on under the serving policy: those whose weights were changed under them, without
        noticing; the others, and those that would begin with the old one's cache for a prompt, by recomputing."""
        assert self.serving is not None
        again = []
        for attempt in attempts:
            if in_flight == "continue" and attempt.spans and not attempt.silent:
                self._unbind(attempt)
                self._bind(attempt, self.serving)
            elif attempt.policy != self.serving:
                again.append(attempt)
        self._requeue(again)

    def _requeue(self, attempts: Sequence[Attempt]) -> None:
        """End their calls; they wait, before all others, for the next."""
        for attempt in attempts:
            del self._running[attempt.request.key]
            self._end_call(attempt)
            attempt.pause(time.monotonic())
            self._unbind(attempt)
        self._waiting = {attempt.request.key: attempt for attempt in attempts} | self._waiting

    def _unpinned(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        return [attempt for attempt in attempts if attempt.request.policy is None]

    def _unbind_waiting(self, policies: Collection[PolicyId]) -> int:
        """Those that wait to go on under one of these policies, and are not pinned, go on under the serving one."""
        chosen = [each for each in self._unpinned(self._waiting.values()) if each.policy in policies]
        for attempt in chosen:
            self._unbind(attempt)
        return len(chosen)

    def _bind(self, attempt: Attempt, policy: PolicyId) -> None:
        self._resident.acquire(policy)
        attempt.policy = policy

    def _unbind(self, attempt: Attempt) -> None:
        if attempt.policy is not None:
            self._resident.release(attempt.policy)
            attempt.policy = None

    def _adapter(self, policy: PolicyId, serves: bool) -> str | None:
        """The server's name for a resident policy, as requests that it serves have it, or for pinned ones."""
        if self._whole is not None:
            self._whole.slot(policy)  # it must be what the weights are
            return None
        self._resident.slot(policy)
        return LIVE if serves and self._live else policy.short()

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        check_request(request, self.vocabulary_size, self._max_context, top_p=self.capabilities.top_p)
        if request.key in self._waiting or request.key in self._running:
            raise EngineError(f"{request_name(request)}: already submitted and not finished")
        policy = request.policy
        if policy is None and request.prefix is not None and request.prefix.policy in self._resident.uses:
            policy = request.prefix.policy
        limit = min(request.sampling.max_new_tokens, self._max_context - len(request.prompt))
        attempt = Attempt(request, limit, None, time.monotonic())
        if policy is not None:
            self._adapter(policy, serves=False)
            self._bind(attempt, policy)
        self._waiting[request.key] = attempt

    def abort(self, key: Key) -> None:
        attempt = self._taken(key)
        if attempt is not None:
            self._finished.append(attempt.completion("abort", time.monotonic()))

    def waiting(self) -> list[Request]:
        return [attempt.request for attempt in self._waiting.values() if not attempt.calls]

    def take_out(self, key: Key) -> Prefix | None:
        attempt = self._taken(key)
        return attempt.prefix(time.monotonic()) if attempt is not None else None

    def _taken(self, key: Key) -> Attempt | None:
        """Out of the books, its call ended; what of it has not been looked at is lost."""
        attempt = self._waiting.pop(key, None) or self._running.pop(key, None)
        if attempt is not None:
            self._end_call(attempt)
            self._unbind(attempt)
        return attempt

    def step(self) -> list[Completion]:
        if self._calls.died is None:
            self._look()
            if not self._running:
                self._calls.check_stall(0)  # it begins now that something is expected, however long nothing was
            self._send()
            self._take_news(STEP_S if self._running and not self._finished else 0.0)
            self._calls.check_stall(len(self._running))
        if self._calls.died is not None and not self._finished:
            raise self._calls.died
        return self._handed_out()

    def finished(self) -> list[Completion]:
        self._take_news()
        return self._handed_out()

    def _handed_out(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._calls.close()
        self._scratch.remove()
        self._waiting.clear()
        self._running.clear()

    def _look(self) -> None:
        """What the server says of its load sets the gate, once for each time that it says so."""
        signals = self._calls.signals
        if signals is not None and signals is not self._looked:
            self._looked = signals
            self._concurrency.look(signals, in_flight=len(self._running), finished=self._ended, now=time.monotonic())

    # --- calls of the server -----------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Make calls of what waits, as many as the gate lets through."""
        if self.serving is None:
            return
        for key in list(self._waiting)[: max(0, self.limit - len(self._running))]:
            attempt = self._waiting[key]
            policy = attempt.policy or self.serving
            adapter = self._adapter(policy, attempt.request.policy is None and policy == self.serving)
            spans = self._whole is not None or adapter == LIVE
            if attempt.policy is None:
                self._bind(attempt, policy)
            self._running[key] = self._waiting.pop(key)
            self._calls.begin(key, attempt.begin(self._stop, adapter, label_of(policy), spans, time.monotonic()))

    def _end_call(self, attempt: Attempt) -> None:
        if attempt.call is not None:
            self._calls.end(attempt.call, attempt.adapter)

    def _take_news(self, wait_s: float = 0.0) -> None:
        for news in self._calls.news(wait_s):
            attempt = self._running.get(news.key)
            if attempt is not None and attempt.call == news.call:  # else of a call that was ended
                self._on_news(attempt, news)

    def _on_news(self, attempt: Attempt, news: News) -> None:
        if isinstance(news.what, Exception):
            log.error("%s: %s", request_name(attempt.request), news.what)
            self._finish(attempt, "abort")
            return
        try:
            attempt.take(news.what)
        except EngineError as error:
            log.error("%s", error)
            self._end_call(attempt)
            self._finish(attempt, "abort")
            return
        if news.what.tokens:
            self._note_first(attempt.runs[-1])
        if news.what.finish is not None:
            self._finish(attempt, news.what.finish)

    def _note_first(self, newest: VersionRun) -> None:
        if any((each.version, each.digest) == (newest.version, newest.digest) for each in self.resident):
            self._first_token.setdefault((newest.version, newest.digest), time.monotonic())

    def _finish(self, attempt: Attempt, finish: Finish) -> None:
        del self._running[attempt.request.key]
        self._ended += 1
        self._unbind(attempt)
        self._finished.append(attempt.completion(finish, time.monotonic()))

"""The embedded engine: any Hugging Face causal language model on CPU or CUDA, continuous batching over slots.

One step, from top to bottom: admit a wave of waiting requests to free rows; compute the KV cache of rows that lack
one (new requests, each distinct prompt once, and requests that a flip told to recompute) and sample their next token;
then one decode forward per policy in use (normally one) and one sampling over all rows. The host learns the tokens
once per sampling; all books are numpy arrays over rows and seats, so a token costs no Python of its own.

A request has a *row* (its place in the batch and the KV cache, which changes as others end) and a *seat* (its buffers),
which it keeps. Stamps are serial numbers of installed policies, from the very array that chose the forward's weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.policy.update_file import Storage
from async_rl.trajectory import Finish
from async_rl.version import PolicyId
from inference.compiled_step import CompileMode
from inference.engine import Capabilities, Completion, EngineError, InFlight, Installed, PolicyContent, Prefix, Request
from inference.model_loading import pick_device, stop_table
from inference.policy_weights import policy_weights
from inference.proof import LOGPROB_BOUNDS
from inference.request_checks import check_ids, check_request, check_top_tokens, request_name
from inference.resident import ResidentPolicies
from inference.rows import DEAD, ROW_DTYPE, IntArray, plan_rows, policy_ranges
from inference.runner import Draws, ModelRunner, Sampled
from inference.seats import Seats
from inference.stamps import Stamps

# Ended rows are decoded in vain until new requests take their places or they are this share of the batch, and a wave
# of new requests starts when the rows that stood idle for want of it have lost so many steps' worth of work. Measured
# with 64 and 256 rows: halving or doubling either changes little, moving rows after every end costs 5 %.
MAX_DEAD_SHARE, WAVE_STEPS = 1 / 4, 1 / 2

NOTHING = Prefix(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), ())


@dataclass(slots=True)
class _Attempt:
    """A request on its way, with the policy that it uses (None while it waits unpinned) and its prompt as bytes."""

    request: Request
    limit: int
    policy: PolicyId | None
    prompt_bytes: bytes
    submitted: float
    started: float = 0.0


class TorchEngine:
    """Implements inference.engine.Engine. `slots` requests run at once, each of at most `max_context` tokens, prompt
    included; `stop_tokens` end a request (default: the model's own end tokens). With `exact` a pinned request gets the
    same bits whatever else runs (inference.exact_shapes). A completion has the `top_tokens` likeliest tokens at each
    place; then the decode step stays eager, and a prefix, which lacks them, is refused. With `routes` it tells where
    every position went. With `storage` policies are weights of the whole model, of which there is one copy, and which
    the trainer keeps in that dtype."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        slots: int,
        max_context: int,
        max_resident: int,
        device: str = "auto",
        dtype: str = "auto",
        compile_mode: CompileMode = "auto",
        stop_tokens: Collection[int] | None = None,
        exact: bool = False,
        top_tokens: int = 0,
        routes: bool = False,
        storage: Storage | None = None,
    ) -> None:
        if slots < 1 or max_context < 2:
            raise EngineError(f"slots is {slots} and max_context is {max_context}: need at least 1 and 2")
        self._resident = ResidentPolicies(max_resident if storage is None else 2)  # one serves, one waits for its flip
        self._runner = ModelRunner(
            Path(model_path),
            rows=slots,
            positions=max_context,
            policy_slots=max_resident if storage is None else 1,
            device=pick_device(device),
            dtype=dtype,
            compile_mode="never" if exact or top_tokens else compile_mode,
            exact=exact,
            top=top_tokens,
            routes=routes,
        )
        self._weights = policy_weights(self._runner, self._resident, Path(model_path), storage)
        self._exact = exact
        self._slots, self._max_context = slots, max_context
        self.vocabulary_size = self._runner.input_vocab
        check_top_tokens(top_tokens, self.vocabulary_size)
        self._top_tokens = top_tokens
        self._is_stop = stop_table(self._runner.model, self._runner.vocab, stop_tokens)
        self._matched: dict[PolicyId, tuple[str, ...]] = {}
        self._stamps = Stamps()
        self._first_token: dict[PolicyId, float] = {}

        self._waiting: dict[tuple[int, int], _Attempt] = {}
        self._seat_of: dict[tuple[int, int], int] = {}
        self._finished: list[Completion] = []
        self._idle_row_steps = 0

        self._rows = np.zeros(slots, dtype=ROW_DTYPE)
        self._n = 0  # rows [0:n) are in use, those that ended since the last arrangement included
        self._split = False  # whether rows of one policy may be apart
        self._attempts: dict[int, _Attempt] = {}  # by seat
        self._seats = Seats(slots, max_context, top_tokens)

    # --- what the node may ask ---------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        bound = LOGPROB_BOUNDS[str(self._runner.dtype).removeprefix("torch.")]
        own = self._weights
        most, routes, experts = self._resident.max_resident, self._runner.forward.routes is not None, not own.in_place
        return Capabilities("torch", own.in_flight, most, "span", bound, own.in_place, routes=routes, experts=experts)

    @property
    def serving(self) -> PolicyId | None:
        return self._resident.serving

    @property
    def resident(self) -> Mapping[PolicyId, int]:
        return self._resident.uses

    @property
    def limit(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - len(self._attempts) - len(self._waiting))

    def first_token(self, policy: PolicyId) -> float | None:
        return self._first_token.get(policy)

    @property
    def active(self) -> int:
        return len(self._attempts) + len(self._waiting) + len(self._finished)

    def describe(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "engine": "torch",
            "model": str(runner.model.config.name_or_path),
            "model_type": runner.config.model_type,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "slots": self._slots,
            "max_context": self._max_context,
            "max_resident": self._resident.max_resident,
            "kv_cache_bytes": runner.cache.nbytes,
            **runner.forward.describe(),
            "linear_modules": len(runner.linears),
            "adapter_targets": len(self._matched[self.serving]) if self.serving else 0,
        }

    def score(self, policy: PolicyId, tokens: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """See Engine.score; sequences may be longer than max_context, but not than the model's positions."""
        most = self._runner.max_positions or math.inf
        for sequence in tokens:
            check_ids("a sequence to score", sequence, self.vocabulary_size)
            if len(sequence) > most:
                raise EngineError(f"a sequence to score has {len(sequence)} tokens, the model has {most} positions")
        return self._runner.score(self._weights.slot(policy), tokens)

    # --- policies ----------------------------------------------------------------------------------------------------

    def read(self, policy: PolicyId, path: Path) -> PolicyContent:
        return self._weights.read(policy, path)

    def install(self, policy: PolicyId, files: Path | PolicyContent) -> Installed:
        if policy not in self._resident:
            self._resident.free_slot()  # there must be one
            content = self.read(policy, files) if isinstance(files, Path) else files
            self._matched[policy] = self._weights.install(policy, content)
            self._resident.add(policy)
        return Installed(policy, self._matched[policy])

    def flip(self, policy: PolicyId, in_flight: InFlight) -> None:
        if in_flight not in self._weights.in_flight:
            raise EngineError(f"in_flight {in_flight!r}: choose {', '.join(sorted(self._weights.in_flight))}")
        self._resident.slot(policy)
        ending = self.serving if self._weights.in_place and self.serving != policy else None
        attempts = (*self._waiting.values(), *self._attempts.values())
        if ending is not None and any(attempt.request.policy == ending for attempt in attempts):
            raise EngineError(f"policy {ending.short()} is pinned by requests, and a flip would end it: wait for them")
        self._weights.flip(policy)
        self._resident.serve(policy)
        if in_flight != "finish":
            self._unbind_waiting(self.resident.keys() - {policy})
            self._rebind(self._unpinned_rows() & (self._live("policy") != self._stamps.serial(policy)), in_flight)
        self._stamps.forget_all_but(self._seats.numbers(self._rows[: self._n]))
        if ending is not None:
            self.evict(ending)

    def evict(self, policy: PolicyId) -> None:
        self._resident.remove(policy)
        self._weights.evict(policy)
        del self._matched[policy]
        self._first_token.pop(policy, None)

    def rebind(self, policy: PolicyId) -> int:
        self._resident.slot(policy)
        if policy == self.serving:
            return 0
        rows = self._unpinned_rows() & (self._live("policy") == self._stamps.serial(policy))
        return self._unbind_waiting([policy]) + self._rebind(rows, "recompute")

    def _unbind(self, attempt: _Attempt) -> None:
        """The attempt uses no policy any more."""
        if attempt.policy is not None:
            self._resident.release(attempt.policy)
            attempt.policy = None

    def _unbind_waiting(self, policies: Collection[PolicyId]) -> int:
        """Those that wait to go on under one of these policies, and are not pinned, go on under the serving one."""
        waiting = [each for each in self._waiting.values() if each.request.policy is None and each.policy in policies]
        for attempt in waiting:
            self._unbind(attempt)
        return len(waiting)

    def _rebind(self, chosen: npt.NDArray[np.bool_], in_flight: InFlight) -> int:
        """Move rows to the serving policy; under recompute their KV cache is built again before they go on."""
        serving = self._resident.serving
        if serving is None:
            return 0
        rows = np.flatnonzero(chosen)
        for seat in self._rows["seat"][rows].tolist():
            self._unbind(self._attempts[seat])
            self._bind(self._attempts[seat], serving)
        self._rows["policy"][rows] = self._stamps.serial(serving)
        if in_flight == "recompute":
            self._rows["stale"][rows] = 1
        self._split = True
        return len(rows)

    def _unpinned_rows(self) -> npt.NDArray[np.bool_]:
        unpinned = [seat for seat, attempt in self._attempts.items() if attempt.request.policy is None]
        return np.isin(self._live("seat"), unpinned) & (self._live("alive") == 1)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        check_request(request, self.vocabulary_size, self._max_context, self._top_tokens)
        if request.key in self._waiting or request.key in self._seat_of:
            raise EngineError(f"{request_name(request)}: already submitted and not finished")
        policy = request.policy
        if policy is None and request.prefix is not None and request.prefix.policy in self._resident.uses:
            policy = request.prefix.policy
        if policy is not None:
            self._weights.slot(policy)
            self._resident.acquire(policy)
        limit = min(request.sampling.max_new_tokens, self._max_context - len(request.prompt))
        prompt_bytes = np.ascontiguousarray(request.prompt, dtype=np.int32).tobytes()
        self._waiting[request.key] = _Attempt(request, limit, policy, prompt_bytes, time.monotonic())

    def abort(self, key: tuple[int, int]) -> None:
        if key in self._waiting:
            attempt = self._waiting.pop(key)
            self._unbind(attempt)
            so_far = attempt.request.prefix or NOTHING
            queued_s = so_far.queued_s + time.monotonic() - attempt.submitted
            self._finished.append(
                Completion(key, *so_far[:3], "abort", queued_s, so_far.sampling_s, len(so_far.tokens))
            )
        elif key in self._seat_of:
            self._finished.append(self._leave(self._row_of(key), "abort"))

    def waiting(self) -> list[Request]:
        return [attempt.request for attempt in self._waiting.values()]

    def take_out(self, key: tuple[int, int]) -> Prefix | None:
        if key in self._waiting:
            attempt = self._waiting.pop(key)
            self._unbind(attempt)
            prefix = attempt.request.prefix
            return prefix and prefix._replace(resumed=len(prefix.tokens))
        if key not in self._seat_of:
            return None
        taken = self._leave(self._row_of(key), "abort")
        return Prefix(*taken[1:4], taken.queued_s, taken.sampling_s, resumed=taken.resumed)

    def step(self) -> list[Completion]:
        if self._resident.serving is not None:
            self._admit(self._resident.serving)
            self._refresh()
            self._decode()
        return self.finished()

    def finished(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Let go of the model and its memory; the engine cannot be used afterwards."""
        self._runner.forward.close()
        del self._runner
        self._waiting.clear()
        self._attempts.clear()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _admit(self, serving: PolicyId) -> None:
        """Start waiting requests in waves, whose cost hardly depends on their size; at once when nothing else runs."""
        count = min(self._slots - len(self._attempts), len(self._waiting))
        self._idle_row_steps = self._idle_row_steps + count if count else 0
        if not count or (self._attempts and self._idle_row_steps < WAVE_STEPS * self._slots):
            return
        self._idle_row_steps = 0
        wave = [self._waiting.pop(key) for key in list(self._waiting)[:count]]
        serials = np.array([self._stamps.serial(self._bind(attempt, serving)) for attempt in wave], dtype=np.int64)
        placed = self._arrange(serials)
        holders = {} if self._exact else self._prompt_holders(exclude=placed)
        shared = []
        for attempt, serial, row in zip(wave, serials.tolist(), placed.tolist(), strict=True):
            self._seat(attempt, serial, row)
            holder = holders.get((serial, attempt.prompt_bytes))
            if holder is not None and attempt.request.prefix is None:
                shared.append((holder, row))
        self._share_prompts(shared)

    def _bind(self, attempt: _Attempt, serving: PolicyId) -> PolicyId:
        """The policy under which a request starts: its pinned one, else the serving one, counted from now on."""
        if attempt.policy is None:
            self._resident.acquire(serving)
            attempt.policy = serving
        return attempt.policy

    def _seat(self, attempt: _Attempt, serial: int, row: int) -> None:
        """Fill a row and a seat for a request that starts."""
        request, temperature = attempt.request, attempt.request.sampling.temperature
        so_far = request.prefix or NOTHING
        seat = self._seats.take(request, attempt.limit, self._stamps.of_runs(so_far.versions))
        greedy, produced = temperature == 0, len(so_far.tokens)
        length, last = len(request.prompt) + produced, (so_far.tokens if produced else request.prompt)[-1]
        self._rows[row] = (
            seat, 1, serial, serial, length, last, produced, attempt.limit,
            1.0 if greedy else temperature, greedy, 1,
        )  # fmt: skip
        self._attempts[seat] = attempt
        self._seat_of[request.key] = seat
        attempt.started = time.monotonic()

    def _prompt_holders(self, exclude: IntArray) -> dict[tuple[int, bytes], int]:
        """Rows whose KV cache holds a prompt, by (policy that computed it, prompt): what a late member of a group
        may copy instead of computing it again."""
        rows = self._rows[: self._n]
        usable = (rows["alive"] == 1) & (rows["stale"] == 0)
        usable[exclude] = False
        return {
            (int(rows["prompt_policy"][row]), self._attempts[int(rows["seat"][row])].prompt_bytes): int(row)
            for row in np.flatnonzero(usable)
        }

    def _share_prompts(self, shared: list[tuple[int, int]]) -> None:
        """Copy prompts from (row, to row), all but the last token, which the next decode feeds."""
        if shared:
            source, target = np.array(shared, dtype=np.int64).T.copy()
            self._runner.move_rows(source, target, int(self._rows["length"][target].max()) - 1)
            self._rows["stale"][target] = 0

    def _refresh(self) -> None:
        """Compute the KV cache of rows that lack it, and sample their next token."""
        if not self._live("stale").any():
            return
        stale = np.flatnonzero(self._live("stale"))
        draws, parts = self._draws(stale), []
        for serial, start, end in policy_ranges(self._rows["policy"][stale]):
            rows = stale[start:end]
            seats = zip(self._rows["seat"][rows].tolist(), self._rows["length"][rows].tolist(), strict=True)
            sequences = [self._seats.sequence(seat, length) for seat, length in seats]
            slot = self._slot_of_serial(serial)
            parts.append(self._runner.prefill(slot, sequences, rows, draws.part(start, end)))
        self._rows["stale"][stale] = 0
        self._rows["prompt_policy"][stale] = self._rows["policy"][stale]
        self._record(stale, np.concatenate(parts, axis=1))

    def _decode(self) -> None:
        """One token for every row."""
        if not self._attempts:
            self._n = 0
            return
        if self._needs_arranging():
            self._arrange()
        rows = self._rows[: self._n]
        tokens, positions, draws = rows["token"], rows["length"] - 1, self._draws(np.arange(self._n))
        parts = [
            self._runner.decode(
                self._slot_of_serial(serial), start, tokens[start:end], positions[start:end], draws.part(start, end)
            )
            for serial, start, end in policy_ranges(rows["policy"])
        ]
        alive = np.flatnonzero(rows["alive"])
        self._record(alive, np.concatenate(parts, axis=1)[:, alive])

    def _needs_arranging(self) -> bool:
        alive, ranges = self._live("alive"), list(policy_ranges(self._live("policy")))
        dead = self._n - len(self._attempts)
        # A policy that only ended rows used may be evicted by now, and is not worth a forward in any case.
        idle_range = dead > 0 and not all(alive[start:end].any() for _, start, end in ranges)
        return self._split or idle_range or dead > MAX_DEAD_SHARE * self._n

    def _draws(self, index: IntArray) -> Draws:
        """What decides the next token of rows `index`, besides the logits."""
        rows = self._rows[index]
        return Draws(rows["temperature"], rows["greedy"], self._seats.uniforms(rows["seat"], rows["produced"]))

    def _record(self, index: IntArray, sampled: Sampled) -> None:
        """Write down what was sampled for rows `index`, and end the requests that are done."""
        rows = self._rows[index]
        ids, produced = sampled[0].astype(np.int64), rows["produced"] + 1
        for policy in self._resident.uses.keys() - self._first_token.keys():  # seldom any
            if (rows["policy"] == self._stamps.serial(policy)).any():
                self._first_token[policy] = time.monotonic()
        self._seats.record(rows, sampled)
        self._rows["token"][index] = ids
        self._rows["length"][index] = rows["length"] + 1
        self._rows["produced"][index] = produced
        stopped = self._is_stop[ids]
        for i in np.flatnonzero(stopped | (produced >= rows["limit"])).tolist():
            self._finished.append(self._leave(int(index[i]), "stop" if stopped[i] else "length"))

    def _leave(self, row: int, finish: Finish) -> Completion:
        """Take a request out of the batch; its row is reused at the next arrangement."""
        seat, length, produced = (int(self._rows[name][row]) for name in ("seat", "length", "produced"))
        attempt = self._attempts.pop(seat)
        key, so_far = attempt.request.key, attempt.request.prefix or NOTHING
        del self._seat_of[key]
        tokens, logprobs, stamps, top = self._seats.leave(seat, length, produced)
        queued_s = so_far.queued_s + attempt.started - attempt.submitted
        sampling_s = so_far.sampling_s + time.monotonic() - attempt.started
        self._unbind(attempt)
        self._rows["alive"][row] = self._rows["stale"][row] = 0
        runs, resumed = self._stamps.runs(stamps), len(so_far.tokens)
        routes = self._runner.routes_of(row, length - 1)  # the last token was not computed
        return Completion(key, tokens, logprobs, runs, finish, queued_s, sampling_s, resumed, top, routes)

    def _arrange(self, new: IntArray | None = None) -> IntArray:
        """Make rows compact and sorted by policy, with room for new requests of policies `new`; returns their rows."""
        current = np.where(self._live("alive") == 1, self._live("policy"), DEAD)
        plan = plan_rows(current, np.empty(0, dtype=np.int64) if new is None else new)
        if len(plan.source):
            self._runner.move_rows(plan.source, plan.target, int(self._rows["length"][plan.source].max()) - 1)
            self._rows[plan.target] = self._rows[plan.source]
        self._n, self._split = plan.n, False
        return plan.placed

    # --- small things ------------------------------------------------------------------------------------------------

    def _row_of(self, key: tuple[int, int]) -> int:
        (row,) = np.flatnonzero((self._live("seat") == self._seat_of[key]) & (self._live("alive") == 1))
        return int(row)

    def _live(self, field: str) -> npt.NDArray[Any]:
        return self._rows[field][: self._n]

    def _slot_of_serial(self, serial: int) -> int:
        return self._weights.slot(self._stamps.policy(serial))

"""Which policy a node serves: install, flip, evict, in that order and between decode steps.

At most `max_resident` policies are resident, the one being loaded included. When all are in use the newest waits;
after `flip_timeout` the requests of the oldest unpinned one are recomputed under the serving policy, which frees it.

Where a policy changes the weights in place, a flip ends the one that served. So versions come in their order, none
before one that a pinned request waits for, and each stays while leases are pinned to it: until the last of them is
closed (the buffer cancels them at `eval_timeout`), and PARTING_S longer for more of them. A policy that the engine has
passed is gone, and what is pinned to it cannot start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.proof import CANARY
from async_rl.run.killpoints import reached
from async_rl.version import PolicyId
from inference.engine import BaseMoved, Engine, EngineError, InFlight, Installed, Prefix, Request
from inference.policies import TRIES, PolicyFetched
from inference.server import EngineDied

log = logging.getLogger("serving")

PARTING_S = 1.0  # an evaluation has more leases than a node may hold: the next one comes when the buffer has a result


class Flipped(NamedTuple):
    installed: Installed
    load_ms: float


class Incoming(NamedTuple):
    """A policy without a slot: when its file came, and when the first of those that it replaced did."""

    fetched: PolicyFetched
    arrived: float
    waiting_since: float


class Serving:
    """`advance` is called before every decode step; it returns what changed. `ask` fetches a policy that only
    evaluation or a hand-over wants. `held` hears of every policy that is on the engine now without being served: such a
    one, and the canary, which is taken off again at once. `failed` hears of policies that could not be loaded (the old
    one goes on serving), `unstarted` of the pinned requests that cannot run for that reason, or that the engine refuses
    once their policy is here. `pinned` are the policies of open leases. `again` is given a policy whose files lead from
    weights that the engine has left; it says whether it will come by another way. What may take long is done within
    `working`, which is told what it is."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        flip_timeout_s: float,
        ask: Callable[[PolicyId], None],
        failed: Callable[[PolicyId, str], None],
        unstarted: Callable[[Request, str], None],
        held: Callable[[Installed], None],
        pinned: Callable[[], Collection[PolicyId]] = tuple,
        again: Callable[[PolicyFetched], bool] = lambda _: False,
        working: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine = engine
        self._in_flight: InFlight = in_flight
        self._flip_timeout_s = flip_timeout_s
        self._ask = ask
        self._failed = failed
        self._unstarted = unstarted
        self._held = held
        self._pinned = pinned
        self._again = again
        self._working = working
        self._stays_until = 0.0  # the serving policy, where a flip would end it
        self._served_order = 0
        self._incoming: list[Incoming] = []
        self.recomputed = 0
        """Requests that lost their policy to flip_timeout, and were moved to the serving one."""
        self._waiting: dict[
            PolicyId, list[Request]
        ] = {}  # requests whose pinned policy, or their prefix's, is not here yet
        self._left_behind: Counter[PolicyId] = Counter()  # how often what they wait for led from weights of the past

    def fetched(self, policy: PolicyFetched, now: float) -> None:
        """A newer policy to serve replaces an older one that still waits for its slot, and inherits its patience: a
        trainer that is faster than flip_timeout would otherwise put off the flip for ever. In place, an older one that
        requests wait for has its turn first."""
        waiting_since = now
        if policy.order:
            for entry in [entry for entry in self._incoming if entry.fetched.order]:
                if self._in_place and self._waiting.get(entry.fetched.policy):
                    continue
                waiting_since = min(waiting_since, entry.waiting_since)
                self._drop(entry)
        self._incoming.append(Incoming(policy, now, waiting_since))

    def fetch_failed(self, policy: PolicyId, error: str) -> None:
        """A policy will not come, as the store has it damaged or no more: nothing that waits for it can start. The one
        that serves goes on, and a joiner that serves none yet waits for a newer one, so this is nobody's end."""
        self._give_up(policy, error)

    def submit(self, request: Request) -> None:
        """Start a request now, or when its policy has come. Raises EngineError."""
        if request.prefix is not None and self._in_flight != "finish":
            request = request._replace(prefix=request.prefix._replace(policy=None))
        policy = self._wanted(request)
        if policy is None or policy in self._engine.resident:
            self._engine.submit(request)
            return
        serving = self._engine.serving
        if self._in_place and serving is not None and policy.version <= serving.version:
            raise EngineError(
                f"policy {policy.short()} is gone, {serving.short()} serves: there is one copy of the weights"
            )
        if policy not in self._waiting:
            self._waiting[policy] = []
            if all(entry.fetched.policy != policy for entry in self._incoming):
                self._ask(policy)
        self._waiting[policy].append(request)

    def _wanted(self, request: Request) -> PolicyId | None:
        """The policy without which it should not start: the one that it is pinned to; else the one that sampled its
        prefix (under `finish`), if that can be had without waiting for a slot."""
        if request.policy is not None or request.prefix is None:
            return request.policy
        has_room = len(self._engine.resident) < self._engine.capabilities.resident_versions or self._idle()
        return request.prefix.policy if has_room or request.prefix.policy in self._waiting else None

    def waiting(self) -> list[Request]:
        """Requests that have not begun, here or in the engine."""
        return [*self._engine.waiting(), *(request for requests in self._waiting.values() for request in requests)]

    def take_out(self, key: tuple[int, int]) -> Prefix | None:
        """As Engine.take_out, of a request that may not have come as far as the engine."""
        for request in [request for requests in self._waiting.values() for request in requests]:
            if request.key == key:
                self.forget(key)
                return request.prefix and request.prefix._replace(resumed=len(request.prefix.tokens))
        return self._engine.take_out(key)

    def forget(self, key: tuple[int, int]) -> None:
        """A cancelled request need not wait any longer."""
        for requests in self._waiting.values():
            requests[:] = [request for request in requests if request.key != key]

    def advance(self, now: float) -> Flipped | None:
        """Install what has come as far as slots allow, and flip to the newest; in place, to one at a time."""
        if self._in_place:
            return self._advance_in_place(now)
        flipped = None
        for entry in list(self._incoming):
            fetched = entry.fetched
            if not self._make_room(fetched, now - entry.waiting_since):
                if not self._only_resumed(fetched):
                    break
                self._incoming.remove(entry)
                fetched.discard()
                self._give_up(fetched.policy, "there is no slot for its policy")
                continue
            self._incoming.remove(entry)
            installed = self._install(fetched)
            if installed is None:
                continue
            if fetched.order > self._served_order:
                flipped = self._flip(entry, installed, now)
            else:
                self._held(installed)
                if fetched.policy.name == CANARY:
                    self._engine.evict(fetched.policy)
            self._start_waiting(fetched.policy)
        return flipped

    def _flip(self, entry: Incoming, installed: Installed, now: float) -> Flipped:
        fetched = entry.fetched
        reached("node.before-flip")
        with self._working(f"flips to policy {fetched.policy.short()}"):
            self._engine.flip(fetched.policy, self._in_flight)
        reached("node.after-flip")
        self._served_order = max(self._served_order, fetched.order)
        return Flipped(installed, fetched.fetch_ms + (now - entry.arrived) * 1e3)

    @property
    def _in_place(self) -> bool:
        return self._engine.capabilities.in_place

    def _advance_in_place(self, now: float) -> Flipped | None:
        for entry in sorted(self._incoming, key=lambda entry: entry.fetched.policy.version):
            fetched = entry.fetched
            if self._must_stay(now) or self._is_before_its_turn(fetched.policy):
                return None
            self._incoming.remove(entry)
            if not self._is_to_come(fetched):
                fetched.discard()
                self._give_up(fetched.policy, "a newer one serves")
                continue
            installed = self._install(fetched)
            if installed is not None:
                flipped = self._flip(entry, installed, now)
                self._start_waiting(fetched.policy)
                return flipped
        return None

    def _must_stay(self, now: float) -> bool:
        """Whether leases are pinned to what serves, or were until a moment ago."""
        if self._engine.serving in self._pinned():
            self._stays_until = now + PARTING_S
        return now < self._stays_until

    def _is_before_its_turn(self, policy: PolicyId) -> bool:
        """Whether requests wait for an earlier policy that is still on its way."""
        here = {entry.fetched.policy for entry in self._incoming}
        return any(
            requests and other.version < policy.version and other not in here
            for other, requests in self._waiting.items()
        )

    def _is_to_come(self, fetched: PolicyFetched) -> bool:
        """Whether it was announced after what serves, or requests wait for it and it is not passed yet."""
        serving = self._engine.serving
        later = serving is None or fetched.policy.version > serving.version
        return fetched.order > self._served_order or (later and bool(self._waiting.get(fetched.policy)))

    def _start_waiting(self, policy: PolicyId) -> None:
        for request in self._no_longer_waiting(policy):
            self._start(request)

    def _no_longer_waiting(self, policy: PolicyId) -> list[Request]:
        self._left_behind.pop(policy, None)
        return self._waiting.pop(policy, [])

    def _give_up(self, policy: PolicyId, error: str) -> None:
        """Pinned requests cannot run; those that only prefer this policy go on under the serving one."""
        for request in self._no_longer_waiting(policy):
            if request.policy is not None:
                self._unstarted(request, error)
            else:
                log.info("request %d/%d goes on under another policy: %s", *request.key, error)
                self._start(request)

    def _start(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except EngineDied:
            raise
        except AsyncRLError as error:
            self._unstarted(request, str(error))

    def _only_resumed(self, fetched: PolicyFetched) -> bool:
        """Whether the policy was asked for by none but requests that can do without it."""
        wanted = fetched.order or fetched.policy.name == CANARY
        return not wanted and all(request.policy is None for request in self._waiting.get(fetched.policy, ()))

    def _install(self, fetched: PolicyFetched) -> Installed | None:
        try:
            if isinstance(fetched.content, AsyncRLError):
                raise fetched.content
            with self._working(f"installs policy {fetched.policy.short()}"):
                return self._engine.install(fetched.policy, fetched.content or fetched.path)
        except BaseMoved as moved:
            self._leads_from_the_past(fetched, str(moved))
            return None
        except EngineDied:  # no fault of the policy's
            raise
        except AsyncRLError as error:
            self._failed(fetched.policy, str(error))
            self._give_up(fetched.policy, str(error))
            return None
        finally:
            fetched.discard()

    def _leads_from_the_past(self, fetched: PolicyFetched, error: str) -> None:
        """The engine flipped while it came, which is no fault of the policy's: it is asked for again, a few times, and
        never told as refused. Requests that wait for it need it even if it is the newest no more."""
        policy = fetched.policy
        waited_for = bool(self._waiting.get(policy))
        comes = self._again(fetched)
        if waited_for and not fetched.order:
            self._left_behind[policy] += 1
            comes = self._left_behind[policy] < TRIES
        if not comes:
            log.warning("not asked for again: %s", error)
            self._give_up(policy, error)
            return
        log.info("asked for again: %s", error)
        if waited_for:
            self._ask(policy)

    def _make_room(self, fetched: PolicyFetched, waited_s: float) -> bool:
        resident = self._engine.resident
        if fetched.policy in resident or len(resident) < self._engine.capabilities.resident_versions:
            return True
        idle = self._idle()
        if not idle and waited_s >= self._flip_timeout_s:
            idle = self._recompute_oldest()
        if not idle:
            return False
        # One to which leases are pinned may be between two turns of an attempt, and would have to come again.
        pinned = self._pinned()
        self._engine.evict(min(idle, key=lambda policy: (policy in pinned, policy.version)))
        return True

    def _idle(self) -> list[PolicyId]:
        """Policies that can be evicted."""
        return [
            policy for policy, users in self._engine.resident.items() if users == 0 and policy != self._engine.serving
        ]

    def _recompute_oldest(self) -> list[PolicyId]:
        for policy in sorted(self._engine.resident, key=lambda policy: policy.version):
            if policy != self._engine.serving:
                moved = self._engine.rebind(policy)
                self.recomputed += moved
                if moved and self._engine.resident[policy] == 0:
                    log.warning("flip_timeout: %d requests of policy %s are recomputed", moved, policy.short())
                    return [policy]
        return []

    def _drop(self, entry: Incoming) -> None:
        self._incoming.remove(entry)
        entry.fetched.discard()
        if entry.fetched.policy in self._waiting:
            self._ask(entry.fetched.policy)

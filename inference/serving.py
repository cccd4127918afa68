"""Which policy a node serves: install, flip, evict, in that order and between decode steps.

At most `max_resident` policies are resident, the one being loaded included. When all are in use the newest waits;
after `flip_timeout` the requests of the oldest unpinned one are recomputed under the serving policy, which frees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.version import PolicyId
from inference.engine import Engine, InFlight, Installed, Request
from inference.policies import PolicyFetched

log = logging.getLogger("serving")


class Flipped(NamedTuple):
    installed: Installed
    load_ms: float


class Serving:
    """`advance` is called before every decode step; it returns what changed. `failed` hears of policies that could
    not be loaded; the old one goes on serving. `ask` fetches a policy that only evaluation wants."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        flip_timeout_s: float,
        ask: Callable[[PolicyId], None],
        failed: Callable[[PolicyId, str], None],
    ) -> None:
        self._engine = engine
        self._in_flight: InFlight = in_flight
        self._flip_timeout_s = flip_timeout_s
        self._ask = ask
        self._failed = failed
        self._served_order = 0
        self._incoming: list[tuple[PolicyFetched, float]] = []  # with the time it arrived
        self._waiting: dict[PolicyId, list[Request]] = {}  # pinned requests whose policy is not here yet

    def fetched(self, policy: PolicyFetched, now: float) -> None:
        """A newer policy to serve replaces an older one that still waits for its slot."""
        if policy.order:
            for waiting, _ in [entry for entry in self._incoming if entry[0].order]:
                self._drop(waiting)
        self._incoming.append((policy, now))

    def fetch_failed(self, policy: PolicyId, error: str) -> list[Request]:
        """Report it; returns the pinned requests that cannot run."""
        self._failed(policy, error)
        return self._waiting.pop(policy, [])

    def submit(self, request: Request) -> None:
        """Start a request now, or when its pinned policy has come. Raises EngineError."""
        policy = request.policy
        if policy is None or policy in self._engine.resident:
            self._engine.submit(request)
            return
        if policy not in self._waiting:
            self._waiting[policy] = []
            if all(entry.policy != policy for entry, _ in self._incoming):
                self._ask(policy)
        self._waiting[policy].append(request)

    def forget(self, key: tuple[int, int]) -> None:
        """A cancelled request need not wait any longer."""
        for requests in self._waiting.values():
            requests[:] = [request for request in requests if request.key != key]

    def advance(self, now: float) -> Flipped | None:
        """Install what has come as far as slots allow, and flip to the newest."""
        flipped = None
        for entry in list(self._incoming):
            fetched, since = entry
            if not self._make_room(fetched, now - since):
                break
            self._incoming.remove(entry)
            installed = self._install(fetched)
            if installed is not None and fetched.order > self._served_order:
                self._engine.flip(fetched.policy, self._in_flight)
                self._served_order = fetched.order
                flipped = Flipped(installed, fetched.fetch_ms + (now - since) * 1e3)
            for request in self._waiting.pop(fetched.policy, []):
                self._engine.submit(request)
        return flipped

    def _install(self, fetched: PolicyFetched) -> Installed | None:
        try:
            return self._engine.install(fetched.policy, fetched.path)
        except AsyncRLError as error:
            self._failed(fetched.policy, str(error))
            return None
        finally:
            fetched.path.unlink(missing_ok=True)

    def _make_room(self, fetched: PolicyFetched, waited_s: float) -> bool:
        resident = self._engine.resident
        if fetched.policy in resident or len(resident) < self._engine.capabilities.resident_versions:
            return True
        idle = [policy for policy, users in resident.items() if users == 0 and policy != self._engine.serving]
        if not idle and waited_s >= self._flip_timeout_s:
            idle = self._recompute_oldest()
        if not idle:
            return False
        self._engine.evict(min(idle, key=lambda policy: policy.version))
        return True

    def _recompute_oldest(self) -> list[PolicyId]:
        for policy in sorted(self._engine.resident, key=lambda policy: policy.version):
            if policy != self._engine.serving:
                moved = self._engine.rebind(policy)
                if moved and self._engine.resident[policy] == 0:
                    log.warning("flip_timeout: %d requests of policy %s are recomputed", moved, policy.short())
                    return [policy]
        return []

    def _drop(self, waiting: PolicyFetched) -> None:
        self._incoming = [entry for entry in self._incoming if entry[0] is not waiting]
        waiting.path.unlink(missing_ok=True)
        if waiting.policy in self._waiting:
            self._ask(waiting.policy)

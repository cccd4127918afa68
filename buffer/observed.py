"""What the buffer's service notes for people, and decides nothing by: demand, pushes, trouble; the Status of it, and
the reading for Prometheus."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from async_rl.config import Config
from async_rl.proof import CANARY
from async_rl.run.exporter import Histogram, Reading, link_reading
from async_rl.run.lengths import length_bin
from async_rl.version import PolicyId, tokens_of
from async_rl.wire.link import Server
from async_rl.wire.messages import NodeReady, NodeStatus, NodeWants, Status
from async_rl.wire.seen import NOTHING_SEEN, Seen
from buffer import gauges
from buffer.events import BundleArrived, ResultArrived
from buffer.leases import EVAL_TICKET, Leases
from buffer.nodes import NodeView
from buffer.replay import Replay

KEPT_PUSHES = 4096  # the newest push latencies, for the summary


class Push(NamedTuple):
    """When a policy was published, and the nodes of that moment that do not serve it yet."""

    since: float
    awaited: set[str]


class Observed:
    """`now` is in seconds on the service's monotonic clock."""

    def __init__(self, config: Config, now: float) -> None:
        self.trouble = 0
        self.strays: Counter[str] = Counter()  # messages that cost their count and no more, by a few kinds
        self.wants: dict[str, NodeWants] = {}
        self.messages: Counter[str] = Counter()  # to and from peers (Status.messages)
        self._life = secrets.token_hex(8)
        self._config = config
        self._started = now
        self._newest: PolicyId | None = None
        self._pushes: dict[PolicyId, Push] = {}
        self._push_ms: list[float] = []
        self._push_count = 0
        self._lengths: Counter[int] = Counter()
        self._push_seconds = Histogram()

    def arrived(self, results: Iterable[ResultArrived | BundleArrived], leases: Leases) -> None:
        """Before they are applied: how many tokens were sampled for each good answer that may train."""
        lengths = self._lengths
        for number, of_lease in groupby(results, attrgetter("lease")):
            lease = leases.find(number)
            if lease is None or lease.ticket == EVAL_TICKET:
                continue
            for result in of_lease:
                if isinstance(result, BundleArrived):
                    for sampled in result.sampled:
                        lengths[length_bin(sampled)] += 1
                elif result.status == "ok":
                    runs = result.versions
                    lengths[length_bin(runs[0].count if len(runs) == 1 else tokens_of(runs))] += 1

    def published(self, policy: PolicyId, nodes: Iterable[str], now: float) -> None:
        if policy.name == CANARY:
            return
        self._newest = policy
        self._pushes[policy] = Push(now, set(nodes))
        for old in list(self._pushes)[: -self._config.buffer.max_staleness - 2]:
            del self._pushes[old]

    def serving(self, node: str, policy: PolicyId, now: float) -> None:
        """Counts once for each node that was there when the policy was published: not a joiner's delay."""
        push = self._pushes.get(policy)
        if push is not None and node in push.awaited:
            push.awaited.discard(node)
            self._push_ms.append((now - push.since) * 1e3)
            self._push_seconds.observe(now - push.since)
            self._push_count += 1
            del self._push_ms[:-KEPT_PUSHES]

    def status(
        self, replay: Replay, nodes: Mapping[str, NodeReady], trainer: str, now: float, seen: Seen = NOTHING_SEEN
    ) -> Status:
        """For one who has `seen` some of the history already."""
        views = replay.nodes_view()
        measured, count = replay.quarantine.measured, replay.quarantine.measured_count
        pushes, mismatches = seen.since(Seen(self._life, self._push_count, count))
        return Status(
            uptime_s=now - self._started,
            nodes=tuple(self._node(name, nodes[name], views.get(name)) for name in sorted(nodes)),
            trainer=trainer,
            newest=self._newest,
            confirmed_batches=replay.confirmed_batches,
            steps=self._config.run.steps,
            ledger=replay.ledger,
            eval_ledger=replay.eval_ledger,
            outside=self._outside(replay),
            ready_groups=replay.ready_groups,
            ready_bytes=replay.ready_bytes,
            reserved_bytes=replay.reserved_bytes,
            waiting=replay.waiting(now) if trainer else "the buffer waits for a trainer to join",
            push_ms=tuple(self._push_ms[-pushes:]) if pushes else (),
            bound=self._config.buffer.max_staleness,
            pushes=self._push_count,
            handovers=dict(replay.handovers.counts),
            sampled_lengths=dict(self._lengths),
            mismatches=tuple(measured)[-mismatches:] if mismatches else (),
            mismatch_count=count,
            quarantined=replay.nodes.quarantined,
            returned=replay.nodes.returned,
            reused=replay.reused,
            adaptive_bound=replay.bound.bound if replay.rules.adaptive else None,
            life=self._life,
            messages=dict(self.messages),
        )

    def reading(self, replay: Replay, nodes: Iterable[str], trainer: str, server: Server) -> Reading:
        """What /metrics shows of the buffer. O(nodes)."""
        views = replay.nodes_view()
        return {
            **gauges.attempts_reading(replay.ledger, replay.eval_ledger, self._outside(replay)),
            gauges.REUSED: replay.reused.get("trained", 0),
            gauges.READY_GROUPS: replay.ready_groups,
            gauges.READY_BYTES: replay.ready_bytes,
            gauges.RESERVED_BYTES: replay.reserved_bytes,
            gauges.CAPACITY_BYTES: self._config.buffer.capacity_bytes,
            gauges.QUARANTINES: replay.nodes.quarantined,
            gauges.MISMATCH: gauges.worst_mismatch(views.values()),
            gauges.NODES: gauges.nodes_by_state(views[name].state if name in views else "joining" for name in nodes),
            gauges.TRAINERS: int(bool(trainer)),
            gauges.NEWEST: self._newest.version if self._newest else None,
            gauges.BOUND: self._config.buffer.max_staleness,
            gauges.ADAPTIVE_BOUND: replay.bound.bound if replay.rules.adaptive else None,
            gauges.BATCHES: replay.confirmed_batches,
            gauges.PUSH: self._push_seconds.read(),
            gauges.REFUSED: gauges.refused(server),
            **link_reading({"buffer": server}),
        }

    def _outside(self, replay: Replay) -> dict[str, int]:
        return replay.outside | self.strays | ({"trouble": self.trouble} if self.trouble else {})

    def _node(self, name: str, ready: NodeReady, view: NodeView | None) -> NodeStatus:
        wants = self.wants.get(name)
        return NodeStatus(
            name=name,
            state=view.state if view else "joining",
            engine=ready.engine,
            slots=ready.slots,
            policy=view.policy if view else None,
            leased_samples=view.leased_samples if view else 0,
            busy_fraction=wants.busy_s / wants.alive_s if wants and wants.alive_s else 0.0,
            sampled_tokens=wants.sampled_tokens if wants else 0,
            busy_s=wants.busy_s if wants else 0.0,
            alive_s=wants.alive_s if wants else 0.0,
            decode_steps=wants.decode_steps if wants else 0,
            limit=wants.limit if wants else 0,
            reason=view.reason if view else "",
            max_dlogp=view.mismatch.max_dlogp if view and view.mismatch else None,
            k3=view.mismatch.k3 if view and view.mismatch else None,
            bound=view.bound if view else None,
            canary=view.canary if view else None,
            first=view.first if view else None,
        )

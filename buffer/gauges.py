"""What the buffer and the policy store tell Prometheus. Counters of attempts go on after a resume; the others begin
with the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from async_rl.run.exporter import Metric, Reading, link_reading
from async_rl.version import PolicyId
from async_rl.wire.link import Server
from async_rl.wire.messages import StoreStatus
from buffer.nodes import NodeState, NodeView

MENDED = ("duplicate", "gap", "resends")  # by sending again
OPEN = ("leased", "ready", "batched")
DROPPED = "dropped."
NODE_STATES = [state for state in get_args(NodeState) if state != "gone"]

ATTEMPTS = Metric("gauge", "async_rl_buffer_attempts", "Attempts that are not closed yet, by place.", "place")
ISSUED = Metric("counter", "async_rl_buffer_issued_attempts_total", "Attempts ever leased to a node.")
TRAINED = Metric("counter", "async_rl_buffer_trained_attempts_total", "Attempts that were trained on.")
REUSED = Metric("counter", "async_rl_buffer_reused_attempts_total", "Trained attempts that were trained on once more.")
LOST = Metric("counter", "async_rl_buffer_dropped_attempts_total", "Attempts dropped, by reason.", "reason")
OUTSIDE = Metric("counter", "async_rl_buffer_outside_results_total", "What changed nothing, by kind.", "kind")
EVALUATING = Metric("gauge", "async_rl_buffer_evaluation_attempts", "Evaluation attempts with a node.")
EVALUATED = Metric("counter", "async_rl_buffer_evaluated_attempts_total", "Evaluation attempts that were scored.")
READY_GROUPS = Metric("gauge", "async_rl_buffer_ready_groups", "Groups that wait to be drawn.")
READY_BYTES = Metric("gauge", "async_rl_buffer_ready_bytes", "Payloads held.")
RESERVED_BYTES = Metric("gauge", "async_rl_buffer_reserved_bytes", "Room kept for what is leased.")
CAPACITY_BYTES = Metric("gauge", "async_rl_buffer_capacity_bytes", "Room for payloads: buffer.capacity_bytes.")
NODES = Metric("gauge", "async_rl_buffer_nodes", "Nodes by state.", "state")
QUARANTINES = Metric("counter", "async_rl_buffer_quarantines_total", "How often a node was set aside (docs: proof).")
MISMATCH = Metric("gauge", "async_rl_buffer_engine_mismatch_nats", "The largest |dlogp| of any node's last probe.")
TRAINERS = Metric("gauge", "async_rl_buffer_trainers", "1 when the trainer is here.")
NEWEST = Metric("gauge", "async_rl_buffer_newest_version", "The newest policy version that was published.")
ADAPTIVE_BOUND = Metric(
    "gauge", "async_rl_buffer_adaptive_bound_versions", "The bound that nodes work by, with buffer.adaptive."
)
BOUND = Metric("gauge", "async_rl_buffer_max_staleness_versions", "The bound: buffer.max_staleness.")
BATCHES = Metric("counter", "async_rl_buffer_confirmed_batches_total", "Batches in the weights' lineage.")
PUSH = Metric("histogram", "async_rl_buffer_push_seconds", "From a policy's publication to a node that serves it.")

REFUSED = Metric(
    "counter", "async_rl_link_refused_total", "Connections, hellos and frames that were not let in, by kind.", "kind"
)

POLICIES = Metric("gauge", "async_rl_store_policies", "Policies kept.")
STORED_BYTES = Metric("gauge", "async_rl_store_policy_bytes", "Their files' bytes.")
STORE_NEWEST = Metric("gauge", "async_rl_store_newest_version", "The newest policy version that was announced.")
PULLS = Metric("counter", "async_rl_store_pulls_total", "Chunks asked for.")
SERVED_BYTES = Metric("counter", "async_rl_store_served_bytes_total", "Bytes of policies sent to nodes.")
RELAYS = Metric("gauge", "async_rl_store_relays", "Nodes that pass policies on to others.")
RELAYED_BYTES = Metric("counter", "async_rl_store_relayed_bytes_total", "Bytes of policies that relays sent.")
BYPASSES = Metric("counter", "async_rl_store_bypassed_relays_total", "Pulls that left a relay, by reason.", "reason")


def attempts_reading(ledger: Mapping[str, int], evaluation: Mapping[str, int], outside: Mapping[str, int]) -> Reading:
    """The two ledgers (buffer.ledger: counts) and what is counted beside them. Of every reading it holds that issued =
    the open ones + trained + dropped."""
    return {
        ATTEMPTS: {place: ledger[place] for place in OPEN},
        ISSUED: ledger["issued"],
        TRAINED: ledger["trained"],
        LOST: {place.removeprefix(DROPPED): n for place, n in ledger.items() if place.startswith(DROPPED)},
        OUTSIDE: outside,
        EVALUATING: evaluation["leased"],
        EVALUATED: evaluation["evaluated"],
    }


def refused(server: Server) -> dict[str, int]:
    """What a server counts, but for what a link mends by itself."""
    return {kind: count for kind, count in server.counters.copy().items() if kind not in MENDED}


def nodes_by_state(states: Iterable[str]) -> dict[str, int]:
    """Every state that a node can be in, also those that none is in."""
    return {**dict.fromkeys(NODE_STATES, 0), **Counter(states)}


def worst_mismatch(views: Iterable[NodeView]) -> float | None:
    return max((view.mismatch.max_dlogp for view in views if view.mismatch and view.state != "gone"), default=None)


class StoreGauges:
    """What the store counts, and its reading."""

    def __init__(self) -> None:
        self._pulls = 0
        self.served_bytes = 0
        self._misplaced = 0

    def misplaced(self) -> None:
        self._misplaced += 1

    def pulled(self, size: int) -> None:
        self._pulls += 1
        self.served_bytes += size

    def reading(
        self, sizes: Mapping[PolicyId, int], newest: PolicyId | None, server: Server, relaying: StoreStatus
    ) -> Reading:
        """`sizes` of the policies kept, in bytes."""
        return {
            POLICIES: len(sizes),
            STORED_BYTES: sum(sizes.values()),
            STORE_NEWEST: newest.version if newest else None,
            PULLS: self._pulls,
            SERVED_BYTES: self.served_bytes,
            RELAYS: len(relaying.relays),
            RELAYED_BYTES: relaying.relayed_bytes,
            BYPASSES: relaying.bypasses,
            REFUSED: refused(server) | {"misplaced": self._misplaced},
            **link_reading({"store": server}),
        }

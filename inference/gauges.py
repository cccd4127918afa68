"""What an inference node tells Prometheus. Everything begins with the process."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.run.exporter import Histogram, Link, Metric, Reading, link_reading
from inference.engine import Engine
from inference.relay import Relay

TOKENS = Metric("counter", "async_rl_node_sampled_tokens_total", "Tokens sampled, of completions that are done.")
STEPS = Metric("counter", "async_rl_node_decode_steps_total", "Decode steps taken.")
BUSY = Metric("counter", "async_rl_node_busy_seconds_total", "Time with work.")
SERVING = Metric("gauge", "async_rl_node_serving_version", "The policy version that new requests start under.")
SLOTS = Metric("gauge", "async_rl_node_slots", "Slots by state.", "state")
LIMIT = Metric("gauge", "async_rl_node_concurrency_limit", "Requests that the engine would have in flight by now.")
RESIDENT = Metric("gauge", "async_rl_node_resident_policies", "Policies held, the serving one included.")
FLIPS = Metric("counter", "async_rl_node_flips_total", "Times that the serving policy changed.")
LOADING = Metric("histogram", "async_rl_node_policy_load_seconds", "From a policy's first chunk to its flip.")
FAILURES = Metric("counter", "async_rl_node_policy_failures_total", "Policies that did not come or did not load.")
RECOMPUTED = Metric("counter", "async_rl_node_recomputed_requests_total", "Requests moved by inference.flip_timeout.")
SCORING = Metric("gauge", "async_rl_node_scoring_queue", "Completions that wait for their score.")
RELAYED = Metric("counter", "async_rl_node_relayed_bytes_total", "Bytes of policies passed on to other nodes.")


class NodeGauges:
    """What the node's loop counts for its reading alone, and what it need not know of otherwise."""

    def __init__(self, slots: int, links: Mapping[str, Link], relay: Relay | None = None) -> None:
        self._slots = slots
        self._links = links
        self._relay = relay
        self._loading = Histogram()
        self._flips = 0
        self._failures = 0

    def flipped(self, load_s: float) -> None:
        self._flips += 1
        self._loading.observe(load_s)

    def failed(self) -> None:
        self._failures += 1

    def reading(
        self, engine: Engine, tokens: int, steps: int, busy_s: float, scoring: int, recomputed: int = 0
    ) -> Reading:
        free = engine.free_slots
        return {
            TOKENS: tokens,
            STEPS: steps,
            BUSY: busy_s,
            SERVING: engine.serving.version if engine.serving else None,
            SLOTS: {"active": self._slots - free, "free": free},
            LIMIT: engine.limit,
            RESIDENT: len(engine.resident),
            FLIPS: self._flips,
            LOADING: self._loading.read(),
            FAILURES: self._failures,
            RECOMPUTED: recomputed,
            SCORING: scoring,
            RELAYED: self._relay.served_bytes if self._relay is not None else None,
            **link_reading(self._links),
        }

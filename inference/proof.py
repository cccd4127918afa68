"""What a node shows of the policies on its engine (async_rl.proof): scored by the engine, judged by the buffer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from async_rl.config import Config
from async_rl.proof import CANARY, Proof, make_proof, probe_tokens
from async_rl.version import PolicyId
from async_rl.wire.messages import Message, NodeHolds, NodeServing
from inference.engine import Engine, Installed

log = logging.getLogger("node")

LOGPROB_BOUNDS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}
"""In nats, by the dtype of the weights: how far log-probabilities of the same tokens under the same policy may be apart
when two programs compute them. Measured on random and small trained models: docs/proof-of-delivery.md."""


def logprob_bound(engine: Engine, config: Config) -> float:
    """What the config sets; else the engine's own, or that of the trainer's dtype where that is the coarser one."""
    return config.inference.logprob_bound or max(engine.capabilities.logprob_bound, LOGPROB_BOUNDS[config.model.dtype])


class Prover:
    """Scores the probe under each policy that comes onto the engine, tells the buffer (`send`), and remembers it for a
    buffer that is started again. The buffer believes no token of a policy that was not shown, so a policy is shown
    before its first one."""

    def __init__(self, engine: Engine, seed: int, send: Callable[[Message], object]) -> None:
        self._engine = engine
        self._send = send
        self._tokens = probe_tokens(seed, engine.vocabulary_size)
        self._held: dict[PolicyId, NodeHolds] = {}
        self._serving: NodeServing | None = None

    def flipped(self, installed: Installed, load_ms: float) -> None:
        started = time.monotonic()
        proof = self._proof(installed)
        log.info(
            "serving policy %s (%d modules, %.0f ms, %.1f to show it)", installed.policy.short(),
            proof.module_count, load_ms, (time.monotonic() - started) * 1e3,
        )  # fmt: skip
        self._remember(NodeHolds(installed.policy, proof))
        self._serving = NodeServing(installed.policy, proof.module_count, load_ms, proof)
        self._send(self._serving)

    def holds(self, installed: Installed) -> None:
        """It is on the engine without being served: the canary, or what evaluation or a hand-over asks for."""
        message = NodeHolds(installed.policy, self._proof(installed))
        log.info("holding policy %s %s", installed.policy.name, installed.policy.short())
        self._remember(message)
        self._send(message)

    def again(self) -> None:
        """The canary, then what else is resident, then what serves."""
        served = self._serving.policy if self._serving else None
        canary_first = sorted(self._held.values(), key=lambda message: message.policy.name != CANARY)
        for message in canary_first:
            resident = message.policy in self._engine.resident and message.policy != served
            if message.policy.name == CANARY or resident:
                self._send(message)
        if self._serving is not None:
            self._send(self._serving)

    def _proof(self, installed: Installed) -> Proof:
        return make_proof(self._tokens, self._engine.score(installed.policy, self._tokens), installed.matched_modules)

    def _remember(self, message: NodeHolds) -> None:
        resident = self._engine.resident
        self._held = {held: old for held, old in self._held.items() if held in resident or held.name == CANARY}
        self._held[message.policy] = message

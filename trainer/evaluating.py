"""Evaluation, as the trainer sees it: it asks for one when a version is due, and writes down what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from async_rl.config import Config
from async_rl.eval_config import best_set, eval_sets
from async_rl.eval_stats import eval_record
from async_rl.run.metrics import Record
from async_rl.version import PolicyId
from async_rl.wire.messages import EvalRequest, EvalResult
from trainer.best import Best
from trainer.publish import Publisher

log = logging.getLogger("learner")


class Evaluating:
    """`pending` has not been reported yet, since before this process began."""

    def __init__(self, config: Config, best: Best, publisher: Publisher, pending: Iterable[EvalRequest]) -> None:
        self._steps = config.run.steps
        self._sets = {each.name: each for each in eval_sets(config)}
        self._by = best_set(config)
        self.best = best
        self._publisher = publisher
        self._pending = {(request.policy, request.eval_set): request for request in pending}

    @property
    def pending(self) -> tuple[EvalRequest, ...]:
        return tuple(self._pending.values())

    def pin(self) -> None:
        """What is pending, before the store has a reason to let go of it."""
        for policy, _ in self._pending:
            self._publisher.pin(policy, True)

    def ask(self, policy: PolicyId, send: Callable[[EvalRequest], None]) -> None:
        """For every set that is due at this version, which the weights are."""
        due = [each for each in self._sets.values() if each.is_due(policy.version, self._steps)]
        if not due:
            return
        self._publisher.pin(policy, True)
        if any(each.name == self._by for each in due):
            self.best.candidate(policy)
        for each in due:
            request = EvalRequest(policy, each.instances, each.sampling, each.timeout_s, each.name, each.samples)
            self._pending[policy, each.name] = request
            send(request)

    def take(self, result: EvalResult) -> Record | None:
        """The record of a result; None of a past that was given up, or reported before the buffer was started again,
        and once more now. What has another number of samples than was asked for was asked before the config was
        changed: the buffer knows of both, and the other is still to come."""
        request = self._pending.get((result.policy, result.eval_set))
        if request is not None and result.rewards and len(result.rewards) != 8 * request.n * request.samples:
            return None
        self._pending.pop((result.policy, result.eval_set), None)
        if all(policy != result.policy for policy, _ in self._pending):
            self._publisher.pin(result.policy, False)  # also what a trainer that is gone has pinned
        if request is None:
            return None
        rewards = np.full((request.n, request.samples), np.nan)
        if result.rewards:
            rewards[:] = np.frombuffer(result.rewards, "<f8").reshape(rewards.shape)
        known = self._sets.get(request.eval_set)
        threshold, pass_at = (known.pass_reward, known.pass_at) if known else (1.0, (1,))
        pass_at = tuple(k for k in pass_at if k <= request.samples)  # of a config that was changed since
        record = eval_record(result.policy.version, request.eval_set, rewards, threshold, pass_at)
        self.best.judge(result.policy, record)
        cancelled = f", {result.cancelled} cancelled" if result.cancelled else ""
        log.info(
            "evaluation of %s on %s: %.3f (n=%d%s)",
            result.policy.short(), request.eval_set, record["reward"], record["n"], cancelled,
        )  # fmt: skip
        return record

    def patience_s(self, more_s: float) -> float:
        """How long the next result may take: they come one after the other."""
        return max(request.timeout_s for request in self._pending.values()) + more_s

    def awaited(self) -> str:
        return f"the evaluation of {next(iter(self._pending))[0].short()}"

"""What the trainer tells Prometheus, from the records that it writes. Counters begin with the process."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.run.exporter import Exporter, Histogram, Link, Metric, link_reading
from async_rl.run.metrics import Record, eval_numbers, eval_sets_of

GAUGES = {
    "step": Metric("gauge", "async_rl_trainer_step", "The last training step, from 0."),
    "version": Metric("gauge", "async_rl_trainer_version", "The policy version that it made."),
    "reward": Metric("gauge", "async_rl_trainer_reward", "Mean reward of its batch."),
    "staleness_max": Metric("gauge", "async_rl_trainer_staleness_max_versions", "Age of its oldest token."),
    "staleness_mean": Metric("gauge", "async_rl_trainer_staleness_mean_versions", "Mean age of its tokens."),
    "loss": Metric("gauge", "async_rl_trainer_loss", "Its loss."),
    "grad_norm": Metric("gauge", "async_rl_trainer_gradient_norm", "Its gradient's norm before clipping."),
    "learning_rate": Metric("gauge", "async_rl_trainer_learning_rate", "Its learning rate."),
    "update_ratio": Metric("gauge", "async_rl_trainer_update_ratio", "A sketch's step over the weights' norm."),
    "ess": Metric("gauge", "async_rl_trainer_effective_sample_ratio", "Effective sample size over sample size."),
    "k3": Metric("gauge", "async_rl_trainer_k3_nats", "k3 estimate of the KL between trainer and sampling policy."),
    "learning_fraction": Metric("gauge", "async_rl_trainer_learning_ratio", "Share of tokens that move the policy."),
    "reference_kl": Metric("gauge", "async_rl_trainer_reference_kl_nats", "k3 estimate of the KL from the base model."),
    "kept_fraction": Metric("gauge", "async_rl_trainer_kept_ratio", "Share of tokens inside the ratio bounds."),
}
"""By key of a step's record (async_rl.run.metrics)."""
TOTALS = {
    "draw_wait_s": Metric("counter", "async_rl_trainer_draw_wait_seconds_total", "Time waited for batches."),
    "train_s": Metric("counter", "async_rl_trainer_train_seconds_total", "Time spent on steps, without waiting."),
    "tokens": Metric("counter", "async_rl_trainer_trained_tokens_total", "Tokens trained on."),
    "trained": Metric("counter", "async_rl_trainer_trained_attempts_total", "Attempts trained on."),
    "dropped": Metric("counter", "async_rl_trainer_dropped_attempts_total", "Attempts drawn and not trained on."),
}
STEP_SECONDS = Metric("histogram", "async_rl_trainer_step_seconds", "A step, from one publication to the next.")
EVALS = {
    "version": Metric("gauge", "async_rl_trainer_evaluation_version", "Of a set's last evaluation.", "set"),
    "reward": Metric("gauge", "async_rl_trainer_evaluation_reward", "Its mean reward.", "set"),
    "reward_low": Metric("gauge", "async_rl_trainer_evaluation_reward_low", "Where its 95 % interval begins.", "set"),
    "reward_high": Metric("gauge", "async_rl_trainer_evaluation_reward_high", "Where its 95 % interval ends.", "set"),
    "n": Metric("gauge", "async_rl_trainer_evaluation_samples", "Samples that it is of.", "set"),
    "cancelled": Metric("gauge", "async_rl_trainer_evaluation_cancelled_samples", "Samples that had no time.", "set"),
}
PASSES = Metric("gauge", "async_rl_trainer_evaluation_pass_ratio", "pass@k of a set's last evaluation, SET@K.", "pass")


class TrainerGauges:
    """Listens to records (trainer.trackers) and hands what they come to to the exporter."""

    name = "Prometheus"

    def __init__(self, exporter: Exporter, links: Mapping[str, Link]) -> None:
        self._exporter = exporter
        self._links = links
        self._last: dict[Metric, float | None] = {}
        self._totals = dict.fromkeys(TOTALS.values(), 0.0)
        self._evals: dict[Metric, dict[str, float]] = {}
        self._steps = Histogram()

    def write(self, record: Record) -> None:
        if "reward" in record:
            self._last |= {metric: record.get(key) for key, metric in GAUGES.items()}
            for key, metric in TOTALS.items():
                self._totals[metric] += record.get(key) or 0.0
            self._steps.observe(record["step_s"])
        for name, evaluations in eval_sets_of([record]).items():
            self._evaluated(name, evaluations[-1])
        self._exporter.publish(
            {**self._last, **self._evals, **self._totals, STEP_SECONDS: self._steps.read(), **link_reading(self._links)}
        )

    def _evaluated(self, name: str, evaluation: Record) -> None:
        numbers = eval_numbers(evaluation) | {"version": evaluation["version"]}
        for key, metric in EVALS.items():
            if key in numbers:
                self._evals[metric] = self._evals.get(metric, {}) | {name: numbers[key]}
        passes = {f"{name}@{k}": each["value"] for k, each in evaluation.get("pass", {}).items()}
        if known := {label: value for label, value in passes.items() if value is not None}:
            self._evals[PASSES] = self._evals.get(PASSES, {}) | known

    def close(self, failed: bool) -> None:
        """The process serves its last reading until its end."""

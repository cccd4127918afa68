"""Alarms: rules over the metrics of the steps so far that say when learning goes wrong, and what to do about it.

Each rule looks at one metric. One step beyond its bound is a warning; `steps` of them in a row stop the run, while its
last checkpoint is still worth something. The rules are pure: a state machine that is fed records as metrics.jsonl keeps
them, by the learner as they happen, and once more when a run is resumed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from async_rl.alarm_config import AlarmConfig

HISTORY = 100  # steps from which the usual gradient norm and the noise of the reward are taken
ENOUGH = 10  # steps of history without which nothing is compared with what was usual
WINDOW = 8  # steps of whose rewards a mean is taken: one step's is too noisy
NOISE = 6.0  # standard errors by which the reward must have fallen, whatever its size


class Remedies(NamedTuple):
    """What to do, as clauses of a sentence; a run adds what its settings are now."""

    slower: str = "lower trainer.learning_rate"
    shorter: str = "trainer.max_grad_norm"
    fresher: str = "lower buffer.max_staleness"
    corrected: str = "choose another correction (algorithm.preset, algorithm.treatment)"


class Alarm(NamedTuple):
    """`level` "stop" ends the run unless alarms only warn; `text` is a whole message; `rule` is the metric's name."""

    level: Literal["warning", "stop"]
    text: str
    rule: str


class Finding(NamedTuple):
    """What a rule saw at one step: the metric's value beyond the bound that it names; `severe` is worth a stop."""

    value: float
    bound: str
    severe: bool


class Alarms:
    """Fed with every step's record. `harder` says that what is asked becomes harder as the policy becomes better
    (async_rl.buffer_config.keeps_history): a lower reward is then only a warning."""

    def __init__(self, config: AlarmConfig, remedies: Remedies, *, harder: bool = False) -> None:
        self._config = config
        self._harder = harder
        self._remedies = remedies
        self._severe: dict[str, list[float]] = {}
        self._quiet: dict[str, int] = {}
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = -math.inf
        self._lowest = math.inf

    def observe(self, record: Mapping[str, Any]) -> list[Alarm]:
        """What there is to say after one more step, stops first. Of `record` it looks at `step`, `learning_fraction`,
        `ess`, `k3`, `grad_norm`, `skipped`, `reward` and `reward_min`; what is missing or None is not judged."""
        self._remember_reward(record)
        findings = {
            "learning_fraction": self._learning(record),
            "ess": self._effective_size(record),
            "k3": self._divergence(record),
            "grad_norm": self._gradient(record),
            "reward": self._reward(),
        }
        if not record.get("skipped") and (norm := _number(record, "grad_norm")) is not None:
            self._norms.append(norm)
        alarms = [alarm for name, found in findings.items() if (alarm := self._judge(name, found, record))]
        return sorted([*_not_finite(record, self._remedies), *alarms], key=lambda alarm: alarm.level != "stop")

    def resume(self) -> None:
        """What was observed so far was of another life of the run: it says what is usual, but no step of it counts
        towards a stop. Else the steps that ended that life would end this one at its first."""
        self._severe.clear()
        self._quiet.clear()
        self._recent.clear()

    # --- the rules ---------------------------------------------------------------------------------------------------

    def _learning(self, record: Mapping[str, Any]) -> Finding | None:
        bound = self._config.learning_low
        return _below(_number(record, "learning_fraction"), bound, severe=True)

    def _effective_size(self, record: Mapping[str, Any]) -> Finding | None:
        value = _number(record, "ess")
        return _below(value, self._config.ess_low, severe=True) or _below(value, self._config.ess_warn, severe=False)

    def _divergence(self, record: Mapping[str, Any]) -> Finding | None:
        value = _number(record, "k3")
        return _above(value, self._config.k3_high, severe=True) or _above(value, self._config.k3_warn, severe=False)

    def _gradient(self, record: Mapping[str, Any]) -> Finding | None:
        """Against the median of earlier steps: what is large depends on the model."""
        factor = self._config.grad_norm_factor
        if not factor or len(self._norms) < ENOUGH:
            return None
        return _above(_number(record, "grad_norm"), factor * statistics.median(self._norms), severe=True)

    def _remember_reward(self, record: Mapping[str, Any]) -> None:
        reward = _number(record, "reward")
        if reward is None:
            return
        lowest = _number(record, "reward_min")
        self._lowest = min(self._lowest, reward if lowest is None else lowest)
        self._rewards.append(reward)
        self._recent.append(reward)
        if len(self._recent) == WINDOW:
            self._best = max(self._best, _mean(self._recent))

    def _reward(self) -> Finding | None:
        """The mean of the last steps against the best such mean so far, both above the lowest reward of any attempt: so
        it does not matter where the scale of a task's rewards begins. The fall must also be beyond the noise, which
        is taken from the changes from step to step: those that learning makes are small beside it."""
        share = self._config.reward_drop
        if not share or len(self._rewards) < ENOUGH or len(self._recent) < WINDOW:
            return None
        now = _mean(self._recent)
        changes = [after - before for before, after in itertools.pairwise(self._rewards)]
        # A change has twice a step's variance, and so has the difference of two means that of one.
        noise = math.hypot(*changes) / math.sqrt(len(changes) * WINDOW)
        bound = self._best - max(share * (self._best - self._lowest), NOISE * noise)
        if now >= bound:
            return None
        aside = ", while the tasks that are asked are chosen by their past rewards" if self._harder else ""
        return Finding(now, f"below {bound:.3g}, having been at {self._best:.3g}{aside}", not self._harder)

    # --- from findings to alarms -------------------------------------------------------------------------------------

    def _judge(self, name: str, found: Finding | None, record: Mapping[str, Any]) -> Alarm | None:
        severe = self._severe.setdefault(name, [])
        if found is None or not found.severe:
            severe.clear()
        else:
            severe.append(found.value)
        needed = 1 if name == "reward" else self._config.steps  # the reward is a mean over steps already
        if found and len(severe) >= needed:
            return Alarm("stop", self._stop_text(name, found, record), name)
        quiet = self._quiet.get(name, 0)
        self._quiet[name] = self._config.steps if found else max(0, quiet - 1)
        if found is None or quiet:
            return None  # said, and not well for long enough since
        return Alarm("warning", f"{_at(record)}{name} is {found.value:.3g}, {found.bound}: {MEANING[name]}", name)

    def _stop_text(self, name: str, found: Finding, record: Mapping[str, Any]) -> str:
        steps = WINDOW if name == "reward" else self._config.steps
        over = f"over the last {steps} steps" if steps > 1 else "at the last step"
        values = self._severe[name][-steps:]
        measured = (
            f"{name} was {found.value:.3g}"
            if len(values) == 1
            else f"{name} was {min(values):.3g} to {max(values):.3g}"
        )
        return (
            f"{_at(record)}{measured} {over}, {found.bound}: {MEANING[name]}. What to do: "
            f"{advice(name, self._remedies)} (algorithm.alarms.{SWITCH[name]} = 0 turns this alarm off)"
        )


MEANING = {
    "learning_fraction": "gates and bounds stop nearly all tokens, so hardly anything is learned from",
    "ess": "a few tokens carry all the weight, so the gradient is mostly noise",
    "k3": "the policy is far from the one that sampled its data",
    "grad_norm": "the gradient is far larger than it used to be",
    "reward": "the policy has lost what it could do",
}
SWITCH = {
    "learning_fraction": "learning_low",
    "ess": "ess_low",
    "k3": "k3_high",
    "grad_norm": "grad_norm_factor",
    "reward": "reward_drop",
}


def advice(name: str, remedies: Remedies) -> str:
    if name == "grad_norm":
        return f"{remedies.slower}, or {remedies.shorter}"
    return f"{remedies.slower}, {remedies.fresher}, or {remedies.corrected}"


def not_finite_text(cause: object, remedies: Remedies) -> str:
    """The message for a step that could not be taken, from what the backend says of it."""
    return f"{cause}. What to do: {advice('grad_norm', remedies)}, or look for rewards that are too large"


def _not_finite(record: Mapping[str, Any], remedies: Remedies) -> list[Alarm]:
    broken = [
        f"{key} {value}" for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    text = not_finite_text(f"{_at(record)}not finite: {', '.join(broken)}", remedies)
    return [Alarm("stop", text, "not finite")] if broken else []


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _mean(values: Collection[float]) -> float:
    """Whose sum may be beyond the largest float."""
    return math.fsum(value / len(values) for value in values)


def _below(value: float | None, bound: float, severe: bool) -> Finding | None:
    return Finding(value, f"below {bound:g}", severe) if value is not None and value < bound else None


def _above(value: float | None, bound: float, severe: bool) -> Finding | None:
    return Finding(value, f"above {bound:.3g}", severe) if bound and value is not None and value > bound else None


def _at(record: Mapping[str, Any]) -> str:
    return f"step {record['step']}: " if "step" in record else ""

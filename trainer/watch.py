"""The learner's watch over its own run: it feeds the alarms, says what is only a warning, and ends what is lost."""

from __future__ import annotations

import logging
from pathlib import Path

from async_rl.buffer_config import keeps_history
from async_rl.config import Config, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.run.metrics import Record, read_metrics, steps_of
from async_rl.trainer_config import peak_rate, rate_key
from trainer.alarms import Alarms, Remedies, not_finite_text
from trainer.checkpoint import find_latest

log = logging.getLogger("learner")


class RunAlarm(AsyncRLError):
    """The run is over; the message says what was measured, over how many steps, and what to do."""


class Watch:
    """`metrics` is the run's metrics.jsonl, from which a run that is resumed learns what its steps were like before.
    Raises MetricsError when it cannot be read."""

    def __init__(self, config: Config, checkpoints: Path, metrics: Path) -> None:
        self._remedies = remedies_of(config)
        self._knobs = f"trainer.{rate_key(config.trainer)} or {_shorter(config.trainer)}"
        self._alarms = Alarms(config.algorithm.alarms, self._remedies, harder=keeps_history(config.buffer))
        self._stops = config.algorithm.alarms.action == "stop"
        self._checkpoints = checkpoints
        self._lasting: set[str] = set()  # rules whose alarm has been said, and still holds
        for record in steps_of(read_metrics(metrics)) if metrics.is_file() else []:
            self._alarms.observe(record)
        self._alarms.resume()

    def heed(self, record: Record) -> None:
        """One more step. Raises RunAlarm when it was one too many, unless alarms only warn."""
        alarms = self._alarms.observe(record)
        stops = [alarm for alarm in alarms if alarm.level == "stop"]
        if stops and self._stops:
            raise RunAlarm(f"alarm: {stops[0].text}. {self._way_on()}")
        for alarm in alarms:
            if alarm.rule not in self._lasting:
                log.warning("%s: %s", "alarm" if alarm.level == "stop" else "warning", alarm.text)
        self._lasting = {alarm.rule for alarm in stops}

    def not_finite(self, version: int, error: FloatingPointError) -> RunAlarm:
        """What to raise for a step that could not be taken."""
        text = not_finite_text(str(error), self._remedies)
        return RunAlarm(f"alarm: the step from version {version}, {text}. {self._way_on()}")

    def _way_on(self) -> str:
        found = find_latest(self._checkpoints)
        if found is None:
            return "There is no checkpoint yet: start again with other settings"
        return (
            f"The last checkpoint is of version {found.version}: --resume goes on from it with another "
            f"{self._knobs}; the other remedies need a new run"
        )


def remedies_of(config: Config) -> Remedies:
    """With what the settings are now."""
    general, trainer = Remedies(), config.trainer
    algorithm = config.algorithm
    correction = f"preset {algorithm.preset!r}" if algorithm.preset else f"treatment {algorithm.treatment!r}"
    return Remedies(
        f"lower trainer.{rate_key(trainer)} (now {peak_rate(trainer):g})",
        _shorter(trainer),
        f"{general.fresher} (now {config.buffer.max_staleness})",
        f"{general.corrected} (now {correction})",
    )


def _shorter(trainer: TrainerConfig) -> str:
    """The key by which single steps are shortened: a sketch's gradients have no norm to clip."""
    return "trainer.step_control" if trainer.kind == "sketch" else Remedies().shorter

"""The learner's watch: what it says, when it ends the run, and what it remembers of a run that is resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from async_rl.alarm_config import AlarmConfig
from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import BufferConfig, Config, TrainerConfig
from async_rl.run.metrics import MetricsWriter
from trainer.checkpoint import write_checkpoint
from trainer.watch import RunAlarm, Watch


def watch(folder: Path, **alarms: Any) -> Watch:
    config = Config(
        trainer=TrainerConfig(learning_rate=0.04),
        buffer=BufferConfig(max_staleness=7),
        algorithm=AlgorithmConfig(alarms=AlarmConfig(**alarms)),
    )
    return Watch(config, folder / "checkpoints", folder / "metrics.jsonl")


def step(number: int, k3: float = 0.02) -> dict[str, Any]:
    return {"step": number, "reward": 0.5, "k3": k3}


def test_the_last_of_too_many_bad_steps_raises_with_the_settings_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(tmp_path, steps=2)
    watching.heed(step(0))
    with caplog.at_level(logging.WARNING, "learner"):
        watching.heed(step(1, k3=5.0))
    assert "k3 is 5, above 1" in caplog.text
    with pytest.raises(RunAlarm) as raised:
        watching.heed(step(2, k3=6.0))
    for part in (
        "alarm: step 2: k3 was 5 to 6 over the last 2 steps, above 1",
        "lower trainer.learning_rate (now 0.04), lower buffer.max_staleness (now 7)",
        "(now treatment 'truncate')",
        "There is no checkpoint yet: start again",
    ):
        assert part in str(raised.value)


def test_where_there_is_a_checkpoint_the_alarm_says_which(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 6, lambda folder: (folder / "weights").write_bytes(b"w") and None, {})
    with pytest.raises(RunAlarm, match=r"The last checkpoint is of version 6: --resume goes on from it"):
        watch(tmp_path, steps=1).heed(step(8, k3=5.0))


def test_alarms_that_only_warn_never_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(tmp_path, action="warn", steps=2)
    with caplog.at_level(logging.WARNING, "learner"):
        for number in range(6):
            watching.heed(step(number, k3=5.0))
    assert "alarm: step 1: k3 was 5 to 5 over the last 2 steps" in caplog.text
    assert len(caplog.records) == 2  # the warning before it, and the alarm: not once more at every step


def test_a_resumed_run_knows_what_its_steps_were_like_before(tmp_path: Path) -> None:
    with_history = MetricsWriter(tmp_path / "metrics.jsonl")
    for number in range(2):
        with_history.write(step(number, k3=5.0))
    with_history.close()
    with pytest.raises(RunAlarm, match="step 2: k3 was 5 to 5 over the last 3 steps"):
        watch(tmp_path).heed(step(2, k3=5.0))
    (tmp_path / "metrics.jsonl").unlink()
    watch(tmp_path).heed(step(2, k3=5.0))


def test_a_step_that_could_not_be_taken_is_an_alarm_too(tmp_path: Path) -> None:
    error = watch(tmp_path).not_finite(9, FloatingPointError("after 9 optimiser steps: loss nan, gradient norm nan"))
    assert "alarm: the step from version 9, after 9 optimiser steps: loss nan, gradient norm nan" in str(error)
    assert "lower trainer.learning_rate (now 0.04), or trainer.max_grad_norm" in str(error)

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
    with pytest.raises(RunAlarm, match=r"The last checkpoint is of version 6: --resume goes on from it") as raised:
        watch(tmp_path, steps=1).heed(step(8, k3=5.0))
    assert "with another trainer.learning_rate or trainer.max_grad_norm; the other remedies need" in str(raised.value)


def test_alarms_that_only_warn_never_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(tmp_path, action="warn", steps=2)
    with caplog.at_level(logging.WARNING, "learner"):
        for number in range(6):
            watching.heed(step(number, k3=5.0))
    assert "alarm: step 1: k3 was 5 to 5 over the last 2 steps" in caplog.text
    assert len(caplog.records) == 2  # the warning before it, and the alarm: not once more at every step


def past(folder: Path, records: list[dict[str, Any]]) -> None:
    writer = MetricsWriter(folder / "metrics.jsonl")
    for record in records:
        writer.write(record)
    writer.close()


def test_the_steps_that_ended_a_run_do_not_end_it_again_when_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    past(tmp_path, [step(number, k3=5.0) for number in range(3)])
    watching = watch(tmp_path)
    with caplog.at_level(logging.WARNING, "learner"):
        watching.heed(step(2, k3=5.0))  # the batch of the last step, offered again
    assert "k3 is 5, above 1" in caplog.text
    watching.heed(step(3, k3=5.0))
    with pytest.raises(RunAlarm, match="step 4: k3 was 5 to 5 over the last 3 steps"):
        watching.heed(step(4, k3=5.0))


def test_a_policy_that_has_recovered_goes_on_though_its_last_rewards_before_were_bad(tmp_path: Path) -> None:
    good, bad = ([{**step(number), "reward": reward, "reward_min": 0.0} for number in range(12)] for reward in (0.9, 0))
    past(tmp_path, [*good, *({**record, "step": 12 + place} for place, record in enumerate(bad))])
    watching = watch(tmp_path)
    for number in range(12, 40):
        watching.heed({**step(number), "reward": 0.85})


def test_a_resumed_run_knows_what_its_steps_were_like_before(tmp_path: Path) -> None:
    past(tmp_path, [{**step(number), "reward": 0.9, "reward_min": 0.0, "grad_norm": 0.4} for number in range(12)])
    with pytest.raises(RunAlarm, match=r"grad_norm was 80 at the last step, above 40"):
        watch(tmp_path, steps=1).heed({**step(12), "grad_norm": 80.0})
    fallen = watch(tmp_path)
    for number in range(12, 19):
        fallen.heed({**step(number), "reward": 0.0})
    with pytest.raises(RunAlarm, match=r"reward was 0 over the last 8 steps, below .*, having been at 0\.9"):
        fallen.heed({**step(19), "reward": 0.0})


@pytest.mark.parametrize("history", [{"retire_above": 0.9}, {"difficulty": "weighted"}])
def test_a_reward_that_falls_is_a_warning_where_past_rewards_decide_what_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, history: dict[str, Any]
) -> None:
    watching = Watch(Config(buffer=BufferConfig(**history)), tmp_path / "checkpoints", tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING, "learner"):
        for number in range(40):
            watching.heed({**step(number), "reward": 0.9 if number < 20 else 0.0, "reward_min": 0.0})
    assert "warning: step" in caplog.text
    assert "chosen by their past rewards" in caplog.text


def test_a_step_that_could_not_be_taken_is_an_alarm_too(tmp_path: Path) -> None:
    error = watch(tmp_path).not_finite(9, FloatingPointError("after 9 optimiser steps: loss nan, gradient norm nan"))
    assert "alarm: the step from version 9, after 9 optimiser steps: loss nan, gradient norm nan" in str(error)
    assert "lower trainer.learning_rate (now 0.04), or trainer.max_grad_norm" in str(error)


def test_a_sketch_is_told_of_its_own_settings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 6, lambda folder: (folder / "weights").write_bytes(b"w") and None, {})
    config = Config(trainer=TrainerConfig(kind="sketch", update_ratio=3e-3))
    watching = Watch(config, tmp_path / "checkpoints", tmp_path / "metrics.jsonl")
    error = str(watching.not_finite(7, FloatingPointError("loss nan")))
    assert "lower trainer.update_ratio (now 0.003), or trainer.step_control" in error
    assert "with another trainer.update_ratio or trainer.step_control; the other" in error
    assert "learning_rate" not in error

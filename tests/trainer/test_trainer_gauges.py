"""What the trainer tells Prometheus, from records as the learner writes them, through a real scrape."""

from __future__ import annotations

from pathlib import Path

import pytest
from scraping import scrape, targets

from async_rl.run.exporter import Exporter
from trainer.gauges import GAUGES, TOTALS, TrainerGauges


class End:
    bytes_sent, bytes_received = 10, 20


def step(version: int, step_s: float) -> dict[str, float]:
    measured = dict.fromkeys(GAUGES, 0.5) | dict.fromkeys(TOTALS, 2.0)
    return {**measured, "step": version - 1, "version": version, "reward": 0.1 * version, "step_s": step_s}


def test_gauges_are_of_the_last_step_and_counters_of_all(tmp_path: Path) -> None:
    exporter = Exporter()
    gauges = TrainerGauges(exporter, {"buffer": End()})
    with exporter.serve(tmp_path, "trainer", {}):
        hard = {"set": "hard", "version": 2, "reward": 0.4, "interval": [0.3, 0.5], "n": 16, "cancelled": 1,
                "pass": {"1": {"value": 0.2}, "4": {"value": None}}}  # fmt: skip
        old = {"version": 1, "reward": 0.7, "n": 8}
        for record in (step(1, 0.3), {"pools": {}}, step(2, 4.0), {"eval": old}, {"eval": hard}):
            gauges.write(record)
        samples = scrape(targets(tmp_path)["trainer"]["address"])
    assert samples["async_rl_trainer_version"] == 2
    assert samples["async_rl_trainer_reward"] == pytest.approx(0.2)
    evaluation = {name.removeprefix("async_rl_trainer_evaluation_"): value for name, value in samples.items()}
    expected = {
        'reward{set="eval"}': 0.7, 'version{set="eval"}': 1, 'samples{set="eval"}': 8, 'reward{set="hard"}': 0.4,
        'version{set="hard"}': 2, 'reward_low{set="hard"}': 0.3, 'cancelled_samples{set="hard"}': 1,
        'pass_ratio{pass="hard@1"}': 0.2,
    }  # fmt: skip
    assert expected.items() <= evaluation.items()
    assert 'pass_ratio{pass="hard@4"}' not in evaluation
    assert samples["async_rl_trainer_draw_wait_seconds_total"] == 4.0
    assert samples["async_rl_trainer_step_seconds_count"] == 2
    assert samples["async_rl_trainer_step_seconds_sum"] == pytest.approx(4.3)
    assert samples['async_rl_link_sent_bytes_total{link="buffer"}'] == 10


def test_a_step_without_a_reward_shows_none(tmp_path: Path) -> None:
    exporter = Exporter()
    with exporter.serve(tmp_path, "trainer", {}):
        TrainerGauges(exporter, {}).write({**step(1, 0.3), "reward": None})
        samples = scrape(targets(tmp_path)["trainer"]["address"])
    assert "async_rl_trainer_reward" not in samples
    assert samples["async_rl_trainer_loss"] == 0.5

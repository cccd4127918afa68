"""Alarms: what stops a run, what is only said, and what is nobody's business."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.alarm_config import AlarmConfig
from trainer.alarms import Alarm, Alarms, Remedies

HEALTHY = {"learning_fraction": 0.92, "ess": 0.99, "k3": 0.02, "grad_norm": 0.4, "reward_min": 0.0, "skipped": False}
# metric, key that turns it off, a value beyond the bound
BAD = [
    ("learning_fraction", "learning_low", 0.04),
    ("ess", "ess_low", 0.01),
    ("k3", "k3_high", 3.0),
    ("grad_norm", "grad_norm_factor", 80.0),
]


def healthy(step: int) -> dict[str, Any]:
    """A run that learns, with the noise of 256 attempts a step."""
    noise = np.random.default_rng(step).normal(0, 0.04)
    return {"step": step, "reward": min(0.25 + 0.003 * step, 0.9) + noise, **HEALTHY}


def fed(alarms: Alarms, records: list[dict[str, Any]]) -> list[Alarm]:
    return [alarm for record in records for alarm in alarms.observe(record)]


def after_a_while(config: AlarmConfig | None = None) -> Alarms:
    alarms = Alarms(config or AlarmConfig(), Remedies(slower="lower trainer.learning_rate (now 0.04)"))
    assert fed(alarms, [healthy(step) for step in range(30)]) == []
    return alarms


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), start=st.floats(-5, 5), scale=st.floats(1e-3, 100))
def test_a_healthy_run_hears_nothing_whatever_the_scale_of_its_rewards(seed: int, start: float, scale: float) -> None:
    generator = np.random.default_rng(seed)
    alarms = Alarms(AlarmConfig(), Remedies())
    for step in range(150):
        solved = generator.random(64) < 0.2 + 0.004 * step
        rewards = start + scale * solved
        record = {"step": step, "reward": float(rewards.mean()), "reward_min": float(rewards.min())}
        assert alarms.observe(HEALTHY | record) == []


@pytest.mark.parametrize(("metric", "key", "value"), BAD)
def test_three_bad_steps_in_a_row_stop_the_run_with_what_was_measured_and_what_to_do(
    metric: str, key: str, value: float
) -> None:
    alarms = after_a_while()
    heard = [alarms.observe({**healthy(step), metric: value}) for step in range(30, 33)]
    assert [alarm.level for said in heard[:2] for alarm in said] == ["warning"]  # said once, not at every step
    (stop,) = heard[2]
    assert stop.level == "stop"
    for part in (
        "step 32",
        metric,
        f"{value:.3g}",
        "last 3 steps",
        "What to do: lower trainer.learning_rate (now 0.04)",
        f"algorithm.alarms.{key} = 0",
    ):
        assert part in stop.text


@pytest.mark.parametrize(("metric", "key", "value"), BAD)
def test_one_good_step_between_begins_the_count_again(metric: str, key: str, value: float) -> None:
    alarms = after_a_while()
    pattern = [value] * 2 + [HEALTHY[metric]] + [value] * 2
    heard = fed(alarms, [{**healthy(30 + index), metric: each} for index, each in enumerate(pattern)])
    assert [alarm.level for alarm in heard] == ["warning"]


@pytest.mark.parametrize(("metric", "key", "value"), BAD)
def test_a_bound_of_zero_turns_its_alarm_off(metric: str, key: str, value: float) -> None:
    config = msgspec.structs.replace(AlarmConfig(ess_warn=0.0, k3_warn=0.0), **{key: 0.0})
    alarms = after_a_while(config)
    assert fed(alarms, [{**healthy(step), metric: value} for step in range(30, 50)]) == []


def test_a_value_between_the_two_bounds_is_a_warning_however_long_it_lasts() -> None:
    alarms = after_a_while()
    heard = fed(alarms, [{**healthy(step), "k3": 0.3} for step in range(30, 60)])
    assert [alarm.level for alarm in heard] == ["warning"]
    assert "k3 is 0.3, above 0.1" in heard[0].text
    fed(alarms, [healthy(step) for step in range(60, 66)])
    assert [alarm.level for alarm in alarms.observe({**healthy(66), "k3": 0.3})] == [
        "warning"
    ]  # after a recovery, again


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (-1.0, 1.0), (10.0, 11.0), (-3.0, -1.0)])
def test_a_reward_that_falls_stops_the_run_whatever_its_scale(lowest: float, highest: float) -> None:
    alarms, generator = Alarms(AlarmConfig(), Remedies()), np.random.default_rng(0)

    def step(number: int, solved: float) -> list[Alarm]:
        mean = lowest + (highest - lowest) * (solved + generator.normal(0, 0.02))
        return alarms.observe({**HEALTHY, "step": number, "reward": mean, "reward_min": lowest})

    assert [step(number, 0.3) for number in range(20)] == [[]] * 20
    assert [step(20 + number, 0.25) for number in range(20)] == [[]] * 20  # a bad patch
    heard = [step(40 + number, 0.02) for number in range(8)]
    stop = next(alarm for said in heard for alarm in said)
    assert stop.level == "stop"
    assert "the policy has lost what it could do" in stop.text


def test_a_noisy_reward_of_few_attempts_is_not_a_collapse() -> None:
    """One group of 8 a step at a pass rate of 0.3: whole runs of zeros are luck."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        alarms = Alarms(AlarmConfig(), Remedies())
        for step in range(200):
            reward = float((generator.random(8) < generator.choice([0.0, 0.6])).mean())
            assert alarms.observe({**HEALTHY, "step": step, "reward": reward}) == []


def test_what_is_not_finite_stops_at_once_and_is_named() -> None:
    (stop,) = after_a_while().observe({**healthy(30), "grad_norm": math.nan, "k3": math.inf})
    assert stop.level == "stop"
    assert "k3 inf, grad_norm nan" in stop.text
    assert "trainer.learning_rate" in stop.text


@settings(max_examples=150)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                name: st.one_of(st.none(), st.floats(0, 1e300), st.booleans())
                for name in ("learning_fraction", "ess", "k3", "grad_norm", "reward", "reward_min", "skipped")
            },
        ),
        max_size=30,
    )
)
def test_records_with_anything_missing_or_huge_are_judged_without_an_error(records: list[dict[str, Any]]) -> None:
    assert all(alarm.text for alarm in fed(Alarms(AlarmConfig(steps=2), Remedies()), records))


def test_rewards_at_the_end_of_the_scale_are_judged_without_an_error() -> None:
    alarms = Alarms(AlarmConfig(), Remedies())
    assert fed(alarms, [{"step": step, "reward": 1.7e308 * (-1) ** step} for step in range(40)]) == []
    assert fed(Alarms(AlarmConfig(), Remedies()), [{"step": step, "reward": 1e300} for step in range(40)]) == []

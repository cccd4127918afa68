"""A two-turn task with a tool, on real pools: it is learned, and what trained is what was sampled, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kept_runs import TOLERANCE, Kept, largest_difference
from real_runs import Shell, records, summary

from async_rl.config import load_config
from async_rl.run.model_cache import model_path
from async_rl.trajectory import segment_arrays

STEPS = 20
CONFIG = f"""
[run]
name = "tool"
steps = {STEPS}

[model.tiny]
seed = 0
accuracy_low = 0.2
accuracy_high = 0.3

[task]
kind = "calculator"
digits = 2
max_turns = 3
shown_calls = 0.5

[buffer]
max_staleness = 2
groups_per_step = 16
group_size = 8
heartbeat = 0.5

[inference]
nodes = 1
slots = 64
max_new_tokens = 24
max_context = 72

[inference.episodes]
max_tokens = 72

[trainer]
learning_rate = 2e-3
warmup_steps = 3
checkpoint_every = 1000

[algorithm]
ratio_level = "token"
treatment = "clip"
ratio_low = 0.8
ratio_high = 1.28
surrogate = "ppo"

[algorithm.alarms]
action = "warn"  # of so few answers a step
"""


@pytest.mark.tasks
@pytest.mark.timeout(750)
def test_a_two_turn_tool_task_is_learned_and_every_trained_token_is_as_it_was_sampled(
    shell: Shell, tmp_path: Path
) -> None:
    config, run = tmp_path / "tool.toml", tmp_path / "run"
    config.write_text(CONFIG)
    kept = Kept(run, tmp_path)
    process = shell.start("run", str(config), "--out", str(run))
    kept.watch(process, 240)

    rewards = [record["reward"] for record in records(run)]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-6:]) > 1.25 * np.mean(rewards[:3]), str(rewards)
    assert summary(run)["staleness"]["max"] <= 2

    trained = kept.trained()
    assert len(trained) >= (STEPS - 2) * 128  # the last batches may have come after the last look
    turns = [sum(arrays.mask[1:] < arrays.mask[:-1]) for each in trained for arrays in segment_arrays(each)]
    asks = [float(np.mean(np.array(part) == 2)) for part in (turns[: 3 * 128], turns[-6 * 128 :])]
    assert asks[1] > asks[0] + 0.15, "it has found out that asking pays"
    worst = largest_difference(model_path(load_config(str(config))), kept, trained)
    print(f"rewards {rewards[:3]} -> {rewards[-6:]}, asks {asks}; {len(trained)} attempts, |Δμ| up to {worst:.2e} nats")
    assert worst <= TOLERANCE

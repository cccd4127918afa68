"""GSM8K end to end: a real chat model of 135 million parameters on CPUs, its own chat template, a reward of parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import real_runs
from smollm2 import smollm2

from async_rl.bundle import trajectories_of
from async_rl.config import load_config
from async_rl.tasks.registry import load_task
from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import instance_of
from async_rl.trajectory import MaskReason, segment_arrays
from buffer.recorder import recorded_batches
from inference.tokenizer import load_tokenizer

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.long, pytest.mark.timeout(1000)]

STEPS, GROUPS, SAMPLES = 2, 2, 4
CONFIG = f"""
[run]
name = "gsm8k"
steps = {STEPS}
eval_every = 0

[model]
path = "MODEL"

[task]
kind = "gsm8k"
path = "DATA"

[[task.reward]]
kind = "math"

[[task.reward]]
kind = "format"
pattern = '[0-9]+\\s*[-+*/x×=]\\s*\\$?[0-9]+'
weight = 0.25
name = "calculates"

[buffer]
groups_per_step = {GROUPS}
group_size = {SAMPLES}
zero_variance = "keep"

[inference]
slots = 8
max_new_tokens = 64
max_context = 384

[trainer]
learning_rate = 1e-4

[algorithm]
ratio_level = "token"
treatment = "clip"
ratio_low = 0.8
ratio_high = 1.28
surrogate = "ppo"
"""


def test_a_chat_model_takes_two_steps_on_gsm8k_with_a_reward_of_parts(shell: real_runs.Shell) -> None:
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {GSM8K}")
    model = smollm2()
    path = shell.folder / "gsm8k.toml"
    path.write_text(CONFIG.replace("MODEL", str(model)).replace("DATA", str(GSM8K)))
    run = shell.folder / "run"
    code, output = shell.run("run", str(path), "--out", str(run), timeout=750)
    assert code == 0, output
    ended = real_runs.summary(run)
    assert ended["steps"] == STEPS
    assert ended["ledger"]["trained"] == STEPS * GROUPS * SAMPLES

    config = load_config(str(run / "config.toml"))
    task, tokenizer = load_task(config.task), load_tokenizer(model)
    run_id = json.loads((run / "run.json").read_text())["run"]
    batches = recorded_batches(run / "journal", run_id, 0)
    assert len(batches) == STEPS
    rewards = []
    for lent in batches.values():
        instances = [group.instance for group in lent.groups for _ in range(group.size)]
        attempts = [trajectory for payload in lent.payloads for trajectory in trajectories_of(payload)]
        for number, trajectory in zip(instances, attempts, strict=True):
            (arrays,) = segment_arrays(trajectory)
            instance = instance_of(task, "train", number)
            assert list(arrays.tokens[arrays.mask == MaskReason.PROMPT]) == render(instance, tokenizer)
            said = arrays.tokens[arrays.mask == MaskReason.SAMPLED]
            assert 1 <= len(said) <= 64
            assert task.score(instance, decode(said, tokenizer)) == (trajectory.reward, trajectory.components)
            assert set(trajectory.components) == {"math", "math.answered", "math.timed_out", "calculates"}
            rewards.append(trajectory.reward)
    assert len(rewards) == STEPS * GROUPS * SAMPLES
    steps = real_runs.records(run)
    assert np.isclose(np.mean([each["reward"] for each in steps]), np.mean(rewards))
    parts = np.mean([each["component.math"] + 0.25 * each["component.calculates"] for each in steps])
    assert np.isclose(parts, np.mean(rewards)), "what it is made of is in the metrics, by name"
    assert (run / "adapters" / "final" / "adapter_model.safetensors").is_file()

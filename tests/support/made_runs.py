"""Run directories as a run leaves them, made in a moment: two nodes, one a step a second, numbers that are easy to
predict. The records are written by the project's own writer, with the keys of trainer/records.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from async_rl.config import BufferConfig, Config, ModelConfig, RunConfig
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import MetricsWriter, Record, read_metrics

BOUND = 4
GROUPS, SIZE = 4, 8
ATTEMPTS = GROUPS * SIZE  # of a step
TOKENS = 320  # of a step
STEP_S, WAIT_S, TRAIN_S = 1.0, 0.25, 0.5
BUSY = {"node-0": 0.5, "node-1": 1.0}  # shares of their time


def make_directory(path: Path, steps: int = 20, name: str = "made", model: Path | None = None) -> RunDirectory:
    """A run that has just begun: a config, and nothing recorded."""
    config = Config(
        run=RunConfig(name=name, steps=steps, eval_every=10),
        model=ModelConfig(path=str(model or "/nowhere")),
        task={"kind": "digit_sort", "digits": 8},
        buffer=BufferConfig(max_staleness=BOUND, groups_per_step=GROUPS, group_size=SIZE),
    )
    return RunDirectory.create(path, config)


def make_run(directory: RunDirectory, steps: int = 20) -> None:
    """Record that many steps, with the buffer's view at each, an evaluation every ten and some trajectories."""
    with MetricsWriter(directory.metrics_path) as metrics, MetricsWriter(directory.samples_path) as samples:
        metrics.write(pools_record(0))
        metrics.write(eval_record(0))
        for step in range(steps):
            metrics.write(step_record(step))
            metrics.write(pools_record(step + 1))
            if (step + 1) % 10 == 0:
                metrics.write(eval_record(step + 1))
            for ticket in range(3):
                samples.write(sample_record(step, ticket))


def finish_run(directory: RunDirectory) -> None:
    """With summary.json, as the trainer does it."""
    from async_rl.run.report.run_data import pools_of, read_run, summary_so_far

    records = read_metrics(directory.metrics_path)
    run = read_run(directory)
    summary = summary_so_far(records, pools_of(records), run.config, run.seconds)
    directory.summary_path.write_text(json.dumps(summary))


def step_record(step: int, **changes: Any) -> Record:
    """A step that takes a second: it waits for a quarter of it and trains for half of it."""
    age = min(step, BOUND)
    tokens = [0] * age + [TOKENS]
    reward = 0.2 + 0.6 * step / (step + 10)
    record: Record = {
        "step": step, "version": step + 1, "time_s": (step + 1) * STEP_S, "reward": reward,
        "staleness_max": age, "staleness_mean": float(age), "staleness_tokens": tokens, "trained": ATTEMPTS,
        "dropped": 0, "nodes": {"node-0": ATTEMPTS}, "batch_tokens": TOKENS * 2, "tokens": float(TOKENS),
        "train_tokens_per_s": TOKENS / TRAIN_S, "upload_ms": 5.0, "draw_wait_s": WAIT_S, "train_s": TRAIN_S,
        "cycle_s": TRAIN_S + 0.125, "step_s": STEP_S, "queued_s": 0.1, "sampling_s": 0.3, "scoring_s": 0.01,
        "held_s": 0.6, "rollout_s": 0.5, "in_flight_ages": [0] * (age // 2) + [ATTEMPTS],
        "in_queue_ages": [0] * (age - age // 2) + [ATTEMPTS], "length_quantiles": list(range(33)), "skipped": False,
        "loss": -0.01, "grad_norm": 0.3, "learning_rate": 1e-3, "ratio_mean": 1.0, "ratio_max": 1.5, "ess": 0.99,
        "kept_fraction": 0.9, "k3": 0.01, "mismatch_mean": 0.02, "mismatch_max": 0.5, "entropy_proxy": 0.4,
        f"age_k3/{age}": 0.01 * age, f"age_kept/{age}": 0.9,
    }  # fmt: skip
    return {**record, **changes}


def control_record(step: int) -> Record:
    """A step of a run with step control: its budget falls, and what it does strays from what was predicted."""
    budget = 2e-4 / (1 + step / 5)
    realised = budget * (1 + 0.3 * math.sin(step))
    scale = 0.5 + step / 40
    return step_record(step) | {
        "predicted_kl": budget / scale**2, "applied_kl": budget, "realised_kl": realised, "step_scale": scale,
        "kl_budget": budget, "mismatch": 1e-6 if step else 0.0,
    }  # fmt: skip


def eval_record(version: int) -> Record:
    return {
        "time_s": version * STEP_S + 0.1,
        "eval": {"version": version, "reward": 0.3 + version / 100, "n": 100, "cancelled": 0},
    }


def pools_record(seconds: int, **changes: Any) -> Record:
    """The buffer's view when so many steps are done."""
    ledger = {
        "issued": ATTEMPTS * (seconds + 4), "leased": ATTEMPTS, "ready": 2 * ATTEMPTS, "batched": ATTEMPTS,
        "dropped.stale": 0, "dropped.cancelled": 0, "trained": ATTEMPTS * seconds,
    }  # fmt: skip
    view: Record = {
        "uptime_s": seconds + 3.0, "confirmed": seconds, "ready_groups": GROUPS, "ready_bytes": 1000,
        "reserved_bytes": 0, "waiting": f"the trainer waits for ticket {seconds}", "ledger": ledger,
        "push_ms": [20.0, 40.0] if seconds else [],
        "nodes": [node_view(name, seconds) for name in BUSY],
    }  # fmt: skip
    return {"time_s": seconds * STEP_S, "pools": {**view, **changes}}


def node_view(name: str, seconds: float, **changes: Any) -> Record:
    """A node that began with the run."""
    view: Record = {
        "name": name, "state": "ready", "slots": 8, "version": int(seconds), "leased": 4,
        "busy_s": seconds * BUSY[name], "alive_s": float(seconds), "sampled_tokens": int(seconds * 200),
        "decode_steps": int(seconds * 10),
    }  # fmt: skip
    return {**view, **changes}


def sample_record(step: int, ticket: int, **changes: Any) -> Record:
    """A trajectory whose policy changed in its midst."""
    old = max(0, step - min(step, BOUND))
    segment = {
        "finish": "stop", "tokens": [5, 6, 7, 8, 9], "versions": [None, None, old, old, min(step, old + 1)],
        "logprobs": [0.0, 0.0, -0.5, -1.25, -0.125], "omitted": 0,
    }  # fmt: skip
    record: Record = {
        "step": step, "ticket": ticket, "lease": 1, "sample": 0, "node": "node-0", "reward": 1.0,
        "components": {"positions": 0.5}, "segments": [segment],
    }  # fmt: skip
    return {**record, **changes}

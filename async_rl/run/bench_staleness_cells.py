"""What the staleness benchmark runs, and what comes out: the messages between its three kinds of process."""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.wire.messages import Lease


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How large every run is; evaluations are at `evaluated_at`. `config` is the one whose model, task and trainer are
    used."""

    config: str = "quickstart"
    updates: int = 60
    groups: int = 16
    group_size: int = 8
    eval_every: int = 10
    eval_samples: int = 512


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `settings` are the config's keys, `section.key`, that make the correction. Every batch is sampled `lag`
    versions before the update that first uses it (fewer while there are no such versions), and trains `reuse` times."""

    correction: str
    settings: dict[str, Any]
    lag: int
    reuse: int
    learning_rate: float
    seed: int


class Outcome(msgspec.Struct, kw_only=True):
    """`evals` are (version, held-out reward), `rewards` the mean sampled reward of each update's batch, `metrics` means
    over the updates at full lag. `alarm` is what would have ended a real run, at update `alarm_at`: here it goes
    on. With `error` it ended there."""

    evals: list[tuple[int, float]] = []
    rewards: list[float] = []
    metrics: dict[str, float] = {}
    skipped: int = 0
    attempts: int = 0
    train_cpu_s: float = 0.0
    sample_cpu_s: float = 0.0
    alarm: str = ""
    alarm_at: int | None = None
    error: str = ""


class Task(msgspec.Struct, kw_only=True):
    """To the process that trains."""

    scale: Scale
    cell: Cell


class SampleOrder(msgspec.Struct, kw_only=True):
    """To the process that samples: serve this policy, then work off the leases."""

    version: int
    digest: str
    adapter: str
    leases: list[Lease]


class Sampled(msgspec.Struct, kw_only=True):
    """Encoded trajectories in the order of the leases and their samples."""

    trajectories: list[msgspec.Raw]
    cpu_s: float


def evaluated_at(scale: Scale) -> list[int]:
    """The versions that are evaluated, rising, the first and the last included. The last three are half as far apart:
    their mean is a run's result."""
    every = max(1, min(scale.eval_every, scale.updates))
    last = (scale.updates - every, scale.updates - every // 2, scale.updates)
    return sorted({0, *range(0, last[0], every), *last})


def overrides_of(scale: Scale, cell: Cell) -> list[str]:
    """The cell as `--set` arguments of the config. The rate is constant; the bound is what the oldest token needs. The
    sketch's rate is its update ratio."""
    rate = "update_ratio" if cell.settings.get("trainer.kind") == "sketch" else "learning_rate"
    settings: dict[str, Any] = {
        "run.seed": cell.seed,
        "buffer.groups_per_step": scale.groups,
        "buffer.group_size": scale.group_size,
        "buffer.max_staleness": cell.lag + cell.reuse - 1,
        f"trainer.{rate}": cell.learning_rate,
        "trainer.warmup_steps": 0,
        "trainer.final_learning_rate": 1.0,
        **cell.settings,
    }
    return [f"{key}={_toml(value)}" for key, value in settings.items()]


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()

"""Which runs make up the staleness benchmark, the most telling ones first."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from async_rl.algorithm_config import shipped_presets
from async_rl.errors import AsyncRLError
from async_rl.run.bench_staleness_cells import Cell

Settings = Mapping[str, Any]


# Equal for all, whatever a preset says of them: what is compared is the correction.
COMMON: Settings = {"algorithm.advantage": "grpo", "algorithm.aggregation": "token_mean"}


def _parts(surrogate: str, level: str, treatment: str, low: float, high: float) -> Settings:
    values = (surrogate, level, treatment, low, high)
    keys = ("surrogate", "ratio_level", "treatment", "ratio_low", "ratio_high")
    return {f"algorithm.{key}": value for key, value in zip(keys, values, strict=True)}


def _preset(name: str) -> Settings:
    """Its keys as well as its name, so that a run says what it was even after the preset has changed."""
    keys = tomllib.loads(shipped_presets()[name].read_text())
    return {"algorithm.preset": name, **{f"algorithm.{key}": value for key, value in keys.items()}, **COMMON}


UNCORRECTED = "uncorrected"
PRESETS = (
    "gspo", "topr", "icepop", "cispo", "dppo", "decoupled_ppo_log_linear", "flash_reinforce", "age_clip",
    "age_clip_wide", "age_topr",
)  # fmt: skip

CORRECTIONS: Mapping[str, Settings] = {
    UNCORRECTED: _parts("policy_gradient", "token", "uncorrected", 0.0, 2.0),
    "token, truncated at 2": _parts("policy_gradient", "token", "truncate", 0.0, 2.0),
    "sequence, truncated at 2": _parts("policy_gradient", "sequence", "truncate", 0.0, 2.0),
    "PPO clip, token, 0.8 to 1.28": _parts("ppo", "token", "clip", 0.8, 1.28),
    "PPO clip, sequence, 0.8 to 1.28": _parts("ppo", "sequence", "clip", 0.8, 1.28),
    **{name: _preset(name) for name in PRESETS},
}  # fmt: skip
"""By name, a preset by its own: the config's keys. At lag 0 every ratio is 1, and all are the plain policy gradient."""

FEW = (
    UNCORRECTED, "token, truncated at 2", "sequence, truncated at 2", "PPO clip, token, 0.8 to 1.28", "gspo", "topr",
    "age_topr",
)  # fmt: skip
"""Those that other learning rates are tried with."""

REUSED = ("sequence, truncated at 2", "PPO clip, token, 0.8 to 1.28")
"""Those that reuse is tried with."""


class Grid(NamedTuple):
    """`rates[0]` is the one at which everything is tried; the others only at the largest lag and on-policy."""

    lags: Sequence[int] = (16, 4)
    rates: Sequence[float] = (5e-4, 2e-3, 1e-4)
    reuses: Sequence[int] = (2, 4)
    corrections: Sequence[str] = tuple(CORRECTIONS)
    seeds: Sequence[int] = (0, 1, 2)


def plan(grid: Grid) -> list[Cell]:
    """Every run of the grid once. Raises AsyncRLError for a correction that there is not."""
    for name in grid.corrections:
        if name not in CORRECTIONS:
            near = difflib.get_close_matches(name, CORRECTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {'; '.join(CORRECTIONS)}"
            raise AsyncRLError(f"--corrections: there is no {name!r}; {hint}")
    return list({_key(cell): cell for cell in _cells(grid)}.values())


def _cells(grid: Grid) -> Iterator[Cell]:
    main, *others = grid.rates
    farthest = sorted(grid.lags)[-1:]
    for seed in grid.seeds:
        yield _cell(UNCORRECTED, 0, 1, main, seed)
        yield from (_cell(name, lag, 1, main, seed) for lag in farthest for name in grid.corrections)
    for seed in grid.seeds:
        for reuse in grid.reuses:
            yield from (_cell(name, 0, reuse, main, seed) for name in REUSED if name in grid.corrections)
    for lag in grid.lags:
        for seed in grid.seeds:
            yield from (_cell(name, lag, 1, main, seed) for name in grid.corrections)
    for rate in others:
        for seed in grid.seeds:
            yield _cell(UNCORRECTED, 0, 1, rate, seed)
            few = [name for name in FEW if name in grid.corrections]
            yield from (_cell(name, lag, 1, rate, seed) for lag in farthest for name in few)


def _cell(name: str, lag: int, reuse: int, rate: float, seed: int) -> Cell:
    settings = dict(CORRECTIONS[name])
    return Cell(correction=name, settings=settings, lag=lag, reuse=reuse, learning_rate=rate, seed=seed)


def _key(cell: Cell) -> tuple[Any, ...]:
    return (cell.correction, cell.lag, cell.reuse, cell.learning_rate, cell.seed)

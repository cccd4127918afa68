"""The section [algorithm]: the parts of the loss by name, and which of them go together.

A preset is a file of configs/presets with some of these keys; what a config says itself goes before it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from async_rl.schema import ConfigError, NonNegative, PositiveFloat, Section

PRESETS = Path(__file__).resolve().parent.parent / "configs" / "presets"


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    preset: str = ""
    """A file of configs/presets, whose keys count where this section does not set its own."""
    advantage: Literal["grpo"] = "grpo"
    ratio_level: Literal["token", "sequence"] = "sequence"
    treatment: Literal["truncate", "clip", "uncorrected"] = "truncate"
    """truncate: weight by min(ratio, ratio_high). clip: ratio into [ratio_low, ratio_high]. uncorrected: no ratio."""
    ratio_low: NonNegative = 0.0
    ratio_high: PositiveFloat = 2.0
    surrogate: Literal["policy_gradient", "ppo"] = "policy_gradient"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"


def check_algorithm(algorithm: AlgorithmConfig, *, group_size: int) -> None:
    """Refuse parts that do not go together, or not with the rest of the config. Raises ConfigError."""
    if algorithm.advantage == "grpo" and group_size < 2:
        raise ConfigError('[algorithm] advantage = "grpo" compares within a group: [buffer] group_size must be ≥ 2')
    if algorithm.ratio_low > algorithm.ratio_high:
        raise ConfigError("[algorithm] ratio_low is above ratio_high")
    if algorithm.surrogate == "ppo" and algorithm.treatment != "clip":
        raise ConfigError(
            f'[algorithm] surrogate = "ppo" is itself a function of the ratio, so treatment = '
            f'"{algorithm.treatment}" would count it twice or not at all: set treatment = "clip"'
        )


def shipped_presets() -> dict[str, Path]:
    """Presets that come with the package, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.toml"))}


def with_preset(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of [algorithm] with those of its preset where it has none of its own. Raises ConfigError for a preset
    that does not exist."""
    name = section.get("preset", "")
    if not isinstance(name, str) or not name:
        return dict(section)
    presets = shipped_presets()
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(presets)}"
        raise ConfigError(f"{where}: [algorithm] preset = {name!r}: no such preset; {hint}")
    return tomllib.loads(presets[name].read_text()) | dict(section)

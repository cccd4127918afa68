"""The parts of [algorithm]: what goes together, and what a preset gives."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl.algorithm_config import check_algorithm, shipped_presets
from async_rl.config import Config, ConfigError, config_from_table, config_table, load_config

PPO = {"surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8}
LEAST: dict[str, Any] = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}}


def made(**changes: Any) -> Config:
    return config_from_table(LEAST | changes, "test.toml")


BROKEN = {
    "group_size must be ≥ 2": {"buffer": {"group_size": 1}},
    "ratio_low is above ratio_high": {"algorithm": {"ratio_low": 2.5}},
    'set treatment = "clip"': {"algorithm": PPO | {"treatment": "truncate"}},
}
# Each as near as one can come to the rule above it without breaking it.
WHOLE = [
    {"buffer": {"group_size": 2}},
    {"algorithm": {"ratio_low": 2.0}},
    {"algorithm": PPO},
]


@pytest.mark.parametrize("says", BROKEN)
def test_every_rule_of_the_algorithm_refuses_what_breaks_it(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**BROKEN[says])


def test_every_rule_of_the_algorithm_has_its_example_here() -> None:
    assert inspect.getsource(check_algorithm).count("raise ConfigError") == len(BROKEN)


@pytest.mark.parametrize("sections", WHOLE, ids=str)
def test_parts_that_just_go_together_pass(sections: dict[str, Any]) -> None:
    made(**sections)


@pytest.mark.parametrize("name", shipped_presets())
def test_a_preset_gives_its_keys_and_the_config_its_own(name: str) -> None:
    keys = tomllib.loads(shipped_presets()[name].read_text())
    algorithm = made(algorithm={"preset": name}).algorithm
    assert {key: getattr(algorithm, key) for key in keys} == keys
    assert made(algorithm={"preset": name, "aggregation": "token_mean"}).algorithm.aggregation == "token_mean"


def test_an_unknown_preset_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"test\.toml: \[algorithm\] preset = 'dappo': .*did you mean 'dapo'"):
        made(algorithm={"preset": "dappo"})
    with pytest.raises(ConfigError, match=r"there are: .*grpo"):
        made(algorithm={"preset": "zzz"})
    with pytest.raises(ConfigError, match=r"`algorithm\.preset`"):
        made(algorithm={"preset": 3})


def test_a_run_directory_keeps_the_resolved_keys_of_a_preset() -> None:
    config = made(algorithm={"preset": "dapo", "ratio_high": 1.5})
    written = tomllib.loads(tomli_w.dumps(config_table(config)))
    assert (written["algorithm"]["ratio_low"], written["algorithm"]["ratio_high"]) == (0.8, 1.5)
    assert config_from_table(written, "config.toml") == config


def test_a_preset_on_the_command_line_takes_the_place_of_the_files_section(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(LEAST | {"algorithm": {"ratio_level": "sequence", "ratio_high": 9.0}}))
    algorithm = load_config(str(file), ["algorithm.preset=dapo", "algorithm.ratio_low=0.7"]).algorithm
    assert (algorithm.ratio_level, algorithm.ratio_low, algorithm.ratio_high) == ("token", 0.7, 1.28)

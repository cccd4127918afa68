"""The parts of [algorithm]: what goes together, and what a preset gives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl import algorithm_config
from async_rl.algorithm_config import describe, shipped_presets
from async_rl.config import Config, ConfigError, config_from_table, config_table, load_config

PPO = {"surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8}
LEAST: dict[str, Any] = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}}
SEVERAL = {"updates_per_batch": 4}  # where a preset has need of it
DISCARD = {"handover": "discard"}  # likewise


def made(**changes: Any) -> Config:
    return config_from_table(LEAST | changes, "test.toml")


CLIP = {"clip_low": 0.8, "clip_high": 1.2}
CENTRED = {"center_scores": 8, "treatment": "uncorrected"}
TV = {"gate": "tv", "gate_bound": 0.1}
BROKEN = {
    "ratio_low is above ratio_high": {"algorithm": {"ratio_low": 2.5}},
    "loss = 'mine': expected": {"algorithm": {"loss": "mine"}},
    "loss = 'mine:own' takes the place of surrogate": {"algorithm": PPO | {"loss": "mine:own"}},
    "age_power = -0.5 makes bounds around 1": {"algorithm": {"ratio_low": 1.5, "age_power": -0.5}},
    "age_power = inf makes bounds around 1": {"algorithm": {"age_power": float("inf")}},
    "age_power has no meaning with": {"algorithm": {"treatment": "uncorrected", "age_power": -0.5}},
    'set treatment = "clip"': {"algorithm": PPO | {"treatment": "truncate"}},
    'surrogate = "topr" weights failures': {"algorithm": {"surrogate": "topr", "treatment": "uncorrected"}},
    "dual_clip = 1 limits a clipped ratio": {"algorithm": PPO | {"dual_clip": 1.0}},
    "dual_clip = 3 limits a clipped ratio": {"algorithm": {"dual_clip": 3.0}},
    'clip_low has a meaning with surrogate = "decoupled_ppo" alone': {"algorithm": {"clip_low": 0.8}},
    'clip_high has a meaning with surrogate = "decoupled_ppo" alone': {"algorithm": PPO | {"clip_high": 1.2}},
    "must lie between clip_low = 1.1 and clip_high = 1.2": {
        "algorithm": {"surrogate": "decoupled_ppo", "clip_low": 1.1, "clip_high": 1.2},
        "trainer": {"updates_per_batch": 2},
    },
    "must lie between clip_low = 0 and clip_high = 0": {
        "algorithm": {"surrogate": "decoupled_ppo"},
        "trainer": {"updates_per_batch": 2},
    },
    "1 must lie between ratio_low = 1.1 and ratio_high = 2": {"algorithm": PPO | {"ratio_low": 1.1}},
    "with one of them there is nothing to clip": {"algorithm": {"surrogate": "decoupled_ppo"} | CLIP},
    "center_scores = 8 takes the place of the ratio": {"algorithm": {"center_scores": 8}},
    "veto chooses among tokens": {"algorithm": CENTRED | {"veto": 0.1}},
    'gate_bound has no meaning with gate = "none"': {"algorithm": {"gate_bound": 0.1}},
    'gate_side has no meaning with gate = "none"': {"algorithm": {"gate_side": "away"}},
    "age_decay_of has no meaning with age_decay = 0": {"algorithm": {"age_decay_of": "failures"}},
    'gate = "tv" needs a gate_bound above 0': {"algorithm": {"gate": "tv"}},
    'router_replay = "trainer" keeps the experts of the pass before': {"algorithm": {"router_replay": "trainer"}},
    'gate_side = "away" judges single tokens': {"algorithm": TV | {"gate_side": "away", "gate_level": "sequence"}},
}
# Each as near as one can come to the rule above it without breaking it.
WHOLE = [
    {"algorithm": {"ratio_low": 2.0}},
    {"algorithm": PPO},
    {"algorithm": {"loss": "a.b:c", "treatment": "uncorrected"}},
    {"algorithm": PPO | {"dual_clip": 1.01, "ratio_high": 1.0, "age_power": -0.5}},
    {"algorithm": {"surrogate": "decoupled_ppo", "proximal": "log_linear"} | CLIP},
    {"algorithm": {"surrogate": "topr", "treatment": "mask"}},
    {
        "algorithm": {"surrogate": "decoupled_ppo", "clip_low": 1.0, "clip_high": 1.0, "treatment": "uncorrected"},
        "trainer": {"updates_per_batch": 2},
    },
    {"algorithm": CENTRED | {"age_decay": 0.5}, "inference": DISCARD},
    {"algorithm": TV | {"gate_side": "away"}},
    {"algorithm": {"age_decay": 0.1, "age_decay_of": "failures"}},
    {"algorithm": {"router_replay": "trainer"}, "trainer": {"updates_per_batch": 2}},
    {"algorithm": TV | {"gate_level": "sequence"}},
]


@pytest.mark.parametrize("says", BROKEN)
def test_every_rule_of_the_algorithm_refuses_what_breaks_it(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**BROKEN[says])


def test_every_rule_of_the_algorithm_has_its_example_here() -> None:
    """Every line of the module that refuses is one that an example runs into; that of presets has its own below."""
    source = Path(algorithm_config.__file__).read_text().splitlines()
    refusals = {number for number, line in enumerate(source, 1) if line.strip().startswith("raise ConfigError")}
    reached = set()
    for sections in [*BROKEN.values(), {"algorithm": {"preset": "zzz"}}]:
        with pytest.raises(ConfigError) as caught:
            made(**sections)
        reached.add(caught.traceback[-1].lineno + 1)
    assert refusals == reached


@pytest.mark.parametrize("sections", WHOLE, ids=str)
def test_parts_that_just_go_together_pass(sections: dict[str, Any]) -> None:
    made(**sections)


@pytest.mark.parametrize("name", shipped_presets())
def test_a_preset_gives_its_keys_and_the_config_its_own(name: str) -> None:
    keys = tomllib.loads(shipped_presets()[name].read_text())
    algorithm = made(algorithm={"preset": name}, trainer=SEVERAL, inference=DISCARD).algorithm
    assert {key: getattr(algorithm, key) for key in keys} == keys
    assert (
        made(
            algorithm={"preset": name, "aggregation": "token_mean"}, trainer=SEVERAL, inference=DISCARD
        ).algorithm.aggregation
        == "token_mean"
    )


def test_an_unknown_preset_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"test\.toml: \[algorithm\] preset = 'cisspo': .*did you mean 'cispo'"):
        made(algorithm={"preset": "cisspo"})
    with pytest.raises(ConfigError, match=r"there are: .*grpo"):
        made(algorithm={"preset": "zzz"})
    with pytest.raises(ConfigError, match=r"`algorithm\.preset`"):
        made(algorithm={"preset": 3})


def test_a_run_directory_keeps_the_resolved_keys_of_a_preset() -> None:
    config = made(algorithm={"preset": "dapo", "ratio_high": 1.5})
    written = tomllib.loads(tomli_w.dumps(config_table(config)))
    assert (written["algorithm"]["ratio_low"], written["algorithm"]["ratio_high"]) == (0.8, 1.5)
    assert config_from_table(written, "config.toml") == config


def test_a_preset_on_the_command_line_takes_the_place_of_the_files_correction(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    own = {
        "surrogate": "topr",
        "ratio_high": 9.0,
        "age_decay": 1.0,
        "advantage": "rloo",
        "aggregation": "sequence_mean",
        "alarms": {"steps": 5},
    }
    file.write_text(tomli_w.dumps(LEAST | {"algorithm": own}))
    algorithm = load_config(str(file), ["algorithm.preset=dapo", "algorithm.ratio_low=0.7"]).algorithm
    assert (algorithm.ratio_level, algorithm.ratio_low, algorithm.ratio_high) == ("token", 0.7, 1.28)
    assert (algorithm.surrogate, algorithm.age_decay, algorithm.aggregation) == ("ppo", 0.0, "token_mean")
    assert algorithm.advantage == "rloo"  # which dapo leaves open
    assert algorithm.alarms.steps == 5
    with pytest.raises(ConfigError, match="no such preset; did you mean 'dapo'"):
        load_config(str(file), ["algorithm.preset=dap"])


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "grpo, policy_gradient, sequence-level truncate 0 … 2, token_mean"),
        ({"preset": "dapo"}, "dapo: grpo, ppo, token-level clip 0.8 … 1.28, token_mean"),
        ({"treatment": "uncorrected", "veto": 1e-4}, "grpo, policy_gradient, uncorrected, veto 0.0001, token_mean"),
        (
            {"preset": "dppo", "age_power": -1, "advantage": "rloo"},
            "dppo: rloo, policy_gradient, token-level truncate 0 … 5 by age^-1, token-level tv at most 0.2, token_mean",
        ),
        (
            {"preset": "score_centering"},
            "score_centering: grpo, policy_gradient, uncorrected, scores centred by 32 tokens, token_mean",
        ),
        ({"loss": "mine:own"}, "grpo, loss mine:own, sequence-level truncate 0 … 2, token_mean"),
    ],
)
def test_a_composition_is_said_in_a_line(keys: dict[str, Any], line: str) -> None:
    assert describe(made(algorithm=keys, inference=DISCARD).algorithm) == line

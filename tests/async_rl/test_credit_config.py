"""The keys that say what an answer is worth: what makes no sense together is one error that names the remedy."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from async_rl import credit_config
from async_rl.config import Config, ConfigError, config_from_table
from async_rl.credit_config import NEED_GROUPS


def made(group_size: int = 8, **algorithm: Any) -> Config:
    table = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}, "buffer": {"group_size": group_size}}
    return config_from_table(table | {"inference": {"max_new_tokens": 20}, "algorithm": algorithm}, "test.toml")


BROKEN: dict[str, dict[str, Any]] = {
    "group_size must be ≥ 2": {"group_size": 1, "advantage": "rloo"},
    "normalised over the batch already": {"advantage": "reinforce_pp", "advantage_normalisation": "batch"},
    "even an empty answer would be too long": {"overlong_buffer": 21},
    "may make rewards negative": {"advantage": "maxrl", "overlong_buffer": 4},
    "aggregation_length has no meaning": {"aggregation_length": 100},
    "overlong_penalty has no meaning with overlong_buffer = 0": {"overlong_penalty": 2.0},
    "reference_kl_ratio has no meaning without reference_kl": {"reference_kl_ratio": True},
    "is not the gradient of the divergence": {"reference_kl": "k3", "reference_kl_place": "reward"},
    "only adds noise: set reference_kl_ratio = true": {"reference_kl": "k1"},
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_combination_that_makes_no_sense_is_refused_with_the_remedy(says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        made(**BROKEN[says])


def test_every_rule_has_its_example_here() -> None:
    assert inspect.getsource(credit_config).count("raise ConfigError") == len(BROKEN)


@pytest.mark.parametrize(
    ("key", "value"), [("reference_kl_weight", 0.5), ("reference_kl_weight", 0), ("reference_kl_place", "reward")]
)
def test_without_a_reference_nothing_about_one_is_accepted(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no meaning without reference_kl"):
        made(**{key: value})


@pytest.mark.parametrize("advantage", sorted(NEED_GROUPS))
def test_what_compares_within_a_group_needs_one(advantage: str) -> None:
    with pytest.raises(ConfigError, match=f'"{advantage}" compares within a group'):
        made(group_size=1, advantage=advantage)
    made(group_size=2, advantage=advantage)


@pytest.mark.parametrize(
    "parts",
    [
        {"group_size": 1, "advantage": "batch_mean", "advantage_normalisation": "batch"},
        {"group_size": 1, "advantage": "reinforce_pp"},
        {"overlong_buffer": 20, "truncated": "mask"},
        {"aggregation": "constant", "aggregation_length": 100},
        {"reference_kl": "k1", "reference_kl_place": "reward"},
        {"reference_kl": "k1", "reference_kl_ratio": True},
        {"reference_kl": "k2"},
        {"reference_kl": "k3", "reference_kl_ratio": True, "reference_kl_weight": 0},
    ],
    ids=str,
)
def test_what_makes_sense_passes(parts: dict[str, Any]) -> None:
    made(**parts)

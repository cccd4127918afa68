"""The section [launch]: what goes together, and what each process asks Ray for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from async_rl.config import Config, config_from_table, config_table
from async_rl.launch_config import bundle, describe_launch, place_of, ray_of
from async_rl.schema import ConfigError


def made(launch: dict[str, Any], **inference: Any) -> Config:
    table = {"model": {"path": "x"}, "task": {"kind": "digit_sort"}, "launch": launch, "inference": inference}
    return config_from_table(table, "test.toml")


GROUPS = [{"name": "small"}, {"name": "large", "nodes": 2}]
FULL = {
    "kind": "ray",
    "ray": {
        "address": "10.0.0.1:6379",
        "inference": {"num_gpus": 1, "runtime_env": {"pip": ["vllm"], "env_vars": {"A": "b"}}},
        "group": [{"name": "large", "num_gpus": 4, "resources": {"fast": 1}}],
    },
    "autoscale": {"max_nodes": 4, "group": "large"},
}


def test_a_table_comes_back_as_it_went() -> None:
    config = made(FULL, group=GROUPS)
    assert config_from_table(config_table(config), "again") == config
    plain = made({})
    assert "ray" not in config_table(plain)["launch"]
    assert config_from_table(config_table(plain), "again") == plain


def test_each_pool_asks_for_its_own_and_a_group_for_all_of_its() -> None:
    ray = ray_of(made(FULL, group=GROUPS).launch)
    assert bundle(place_of(ray, "buffer.service", "")) == {"CPU": 0.5}
    assert bundle(place_of(ray, "trainer.learner", "")) == {"CPU": 1.0}
    assert bundle(place_of(ray, "inference.node", "small")) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle(place_of(ray, "inference.node", "large")) == {"CPU": 1.0, "GPU": 4.0, "fast": 1.0}
    assert place_of(ray, "inference.node", "small").runtime_env["pip"] == ["vllm"]


def test_on_a_cluster_that_is_started_here_cores_are_no_limit_to_shards_ranks_and_nodes() -> None:
    launch = {"kind": "ray", "ray": {**FULL["ray"], "address": ""}}
    ray = ray_of(made(launch, group=GROUPS).launch)
    assert [bundle(place_of(ray, module, "")) for module in ("buffer.service", "trainer.learner")] == [{}, {}]
    assert bundle(place_of(ray, "inference.node", "large")) == {"GPU": 4.0, "fast": 1.0}
    assert "services nothing each" in describe_launch(made({"kind": "ray"}).launch)


def test_what_it_means_is_told_in_a_line() -> None:
    assert describe_launch(made({}).launch) == "on this machine"
    words = describe_launch(made(FULL, group=GROUPS).launch)
    assert words.startswith("on the Ray cluster 10.0.0.1:6379: services 0.5 CPU each; trainer 1 CPU each")
    assert "nodes 1 CPU, 1 GPU, in an environment of their own each; large 1 CPU, 4 GPU, 1 fast each" in words
    assert words.endswith("1 to 4 nodes as needed")


@pytest.mark.parametrize(
    ("launch", "inference", "says"),
    [
        ({"ray": {}}, {}, '[launch.ray] has no meaning with kind = "local"'),
        ({"kind": "ray", "pin": True}, {}, "[launch] pin = true has no meaning"),
        ({"kind": "ray", "ray": {"address": "ray://h:1"}}, {}, 'address = "auto"'),
        ({"kind": "ray", "ray": {"address": "host"}}, {}, 'expected host:port, or "auto"'),
        ({"kind": "ray", "ray": {"group": [{"name": "x"}]}}, {}, "there is no [[inference.group]]"),
        ({"kind": "ray", "ray": {"group": [{"name": "small"}] * 2}}, {"group": GROUPS}, "is there 2 times"),
        ({"kind": "ray", "ray": {"inference": {"resources": {"a": 0}}}}, {}, "resources"),
        ({"kind": "ray", "ray": {"infrence": {}}}, {}, "did you mean `inference`"),
        ({"kind": "ray", "ray": {"spread_ranks": True}}, {}, "spread_ranks = true has no meaning with one rank"),
        ({"autoscale": {"max_nodes": 2, "min_nodes": 3}}, {}, "min_nodes = 3 is above max_nodes = 2"),
        ({"autoscale": {"max_nodes": 2}}, {"nodes": 3}, "begins with 3"),
        ({"autoscale": {"max_nodes": 2}}, {"group": GROUPS}, "choose one of small, large"),
        ({"autoscale": {"max_nodes": 2, "group": "x"}}, {}, "there is no [[inference.group]]"),
        ({"autoscale": {}}, {}, "max_nodes"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(launch: dict[str, Any], inference: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(launch, **inference)

"""What docs/ray.md and docs/kuberay.md tell people to write is something that async-rl, and Kubernetes, can read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config import Config, config_from_table, load_config
from async_rl.launch_config import bundle, ray_of
from async_rl.run.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line.split("  #")[0] for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("async-rl ")]


@pytest.mark.parametrize("page", ["ray.md", "two-machines.md"])
def test_every_command_is_understood_and_its_config_is_valid(page: str) -> None:
    assert len(commands(page)) >= 2
    for _, *words in commands(page):
        options = _parser().parse_args(words)
        if "config" in options:
            load_config(options.config, options.overrides)


def made(text: str) -> Config:
    table: dict[str, Any] = {"model": {"path": "x"}, "task": {"kind": "digit_sort"}, "inference": {"nodes": 2}}
    return config_from_table(table | tomllib.loads(text), "the page")


@pytest.mark.parametrize("text", blocks("ray.md", "toml"))
def test_every_table_is_one_that_a_config_may_have(text: str) -> None:
    made(text)


def test_the_job_is_read_its_parts_name_each_other_and_its_workers_offer_what_is_asked_for() -> None:
    (text,) = blocks("kuberay.md", "yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    _, *words = shlex.split(job["spec"]["entrypoint"])
    options = _parser().parse_args(words)
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    head, workers = cluster["headGroupSpec"], {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
    mounts = {name: mounted(group) for name, group in {"head": head, **workers}.items()}

    (toml,) = blocks("kuberay.md", "toml")
    config = made(toml)
    ray = ray_of(config.launch)
    scale, rollout = config.launch.autoscale, workers["rollout"]
    assert scale is not None
    assert (scale.min_nodes, scale.max_nodes) == (rollout["minReplicas"], rollout["maxReplicas"])
    for name, place in (("trainer", ray.trainer), ("rollout", ray.inference)):
        assert missing(bundle(place), workers[name]) == {}
    assert missing({"CPU": 2 * ray.services.num_cpus}, head) == {}
    assert config.buffer.keys in mounts["head"] & mounts["trainer"]
    assert str(options.out.parent) in mounts["head"] & mounts["trainer"]
    assert str(Path(options.config).parent) in mounts["head"]
    assert str(Path(config.model.path).parent) in mounts["head"] & mounts["trainer"] & mounts["rollout"]


def mounted(group: dict[str, Any]) -> set[str]:
    """Where volumes lie in a pod; each has to be one of the pod's."""
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    return {mount["mountPath"] for mount in container["volumeMounts"]}


def missing(wanted: dict[str, float], group: dict[str, Any]) -> dict[str, float]:
    """What a pod of the group has too little of; Ray counts a pod's limits, and what it is started with."""
    (container,) = group["template"]["spec"]["containers"]
    limits, parameters = container["resources"]["limits"], group["rayStartParams"]
    offers = {"CPU": float(parameters.get("num-cpus", limits["cpu"])), "GPU": float(limits.get("nvidia.com/gpu", 0))}
    offers |= json.loads(json.loads(parameters.get("resources", '"{}"')))
    return {name: size for name, size in wanted.items() if offers.get(name, 0) < size}

"""Which processes a run consists of, and whether what they need is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.inference_config import node_groups
from async_rl.run import checks
from async_rl.run.checks import check_engines
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import ProcessSpec
from async_rl.run.plans import plan_run, plan_services


def made(**inference: Any) -> Config:
    table = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}, "inference": inference}
    return config_from_table(table, "test.toml")


def nodes(config: Config) -> list[ProcessSpec]:
    directory = RunDirectory(Path("/run"), {"endpoint": "ipc://b"})
    specs = plan_run(node_groups(config.inference), Path("/run/config.toml"), directory, "--debug")
    assert [spec.name for spec in specs[:3]] == ["store", "buffer", "trainer"]
    return specs[3:]


def test_the_nodes_of_a_run_without_groups_are_numbered() -> None:
    specs = nodes(made(nodes=2))
    assert [(spec.name, spec.module, spec.python, spec.again) for spec in specs] == [
        ("node-0", "inference.node", "", ()), ("node-1", "inference.node", "", ()),
    ]  # fmt: skip
    assert all(spec.expendable and "--group" not in spec.arguments and "--debug" in spec.arguments for spec in specs)


def test_only_the_services_of_a_whole_run_know_its_nodes_to_be_all() -> None:
    directory, path = RunDirectory(Path("/run"), {"endpoint": "ipc://b"}), Path("/run/config.toml")
    assert not any("--together" in spec.arguments for spec in plan_services(path, directory))
    services = plan_run(node_groups(made().inference), path, directory)[:2]
    assert all("--together" in spec.arguments for spec in services)


def test_a_node_is_named_after_its_group_and_lives_where_its_engine_does() -> None:
    """SGLang's node lives in this environment, and its server elsewhere."""
    config = made(
        group=[
            {"name": "here", "nodes": 2},
            {"name": "there", "engine": "vllm", "engine_python": "/v/bin/python"},
            {"name": "served", "engine": "sglang", "engine_python": "/s/bin/python"},
        ]
    )
    specs = nodes(config)
    assert [(spec.name, spec.python) for spec in specs] == [
        ("here-0", ""), ("here-1", ""), ("there-0", "/v/bin/python"), ("served-0", ""),
    ]  # fmt: skip
    for spec, group in zip(specs, ("here", "here", "there", "served"), strict=True):
        assert spec.arguments[spec.arguments.index("--group") + 1] == group


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Of an environment with this one's packages, and with an engine's name for each engine."""
    for name in ("vllm", "sglang"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def check(**inference: Any) -> None:
    config = made(**inference)
    check_engines(node_groups(config.inference), config.task)


def test_an_interpreter_that_has_the_engine_passes(interpreter: Path) -> None:
    check()
    check(engine="vllm", engine_python=str(interpreter))
    check(engine="sglang", engine_python=str(interpreter))
    check(engine="sglang", sglang={"endpoint": "http://127.0.0.1:30000"})
    check(group=[{"name": "a"}, {"name": "b", "engine": "vllm", "engine_python": str(interpreter)}])


@pytest.mark.parametrize(
    ("inference", "says"),
    [
        (
            {"engine": "vllm"},
            r"needs vllm, not installed here: .*'\.\[vllm\]', or set \[inference\] engine_python to an",
        ),
        (
            {"engine": "vllm", "engine_python": sys.executable},
            r"that environment lacks vllm: .* -m pip install '\.\[vll",
        ),
        (
            {"engine": "sglang"},
            r"that environment lacks sglang: .* -m pip install 'sglang', or `make engines` for CPUs",
        ),
        ({"engine": "sglang", "engine_python": "/nowhere/python"}, r"'/nowhere/python': cannot be run: No such file"),
        ({"engine": "vllm", "engine_python": "/bin/false"}, r"this one exits with 1: nothing"),
        ({"engine": "vllm", "engine_python": "/bin/true"}, r"this is none: it does not run what it is given"),
    ],
)
def test_an_engine_that_is_not_there_is_one_message_that_says_where_to_put_it(
    inference: dict[str, Any], says: str
) -> None:
    with pytest.raises(AsyncRLError, match=re.escape(f'[inference] engine = "{inference["engine"]}"')) as caught:
        check(**inference)
    assert re.search(says, str(caught.value))


def test_the_task_is_looked_for_where_the_node_runs(interpreter: Path, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(
        "from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig\n"
        "class Game(DigitSort):\n    Config = DigitSortConfig\n"
    )
    groups = node_groups(made(engine="vllm", engine_python=str(interpreter)).inference)
    check_engines(groups, {"kind": "games:Game", "digits": 3})  # it is importable there alone
    with pytest.raises(AsyncRLError, match=r"in that environment, in which the node runs, \[task\] cannot be loaded"):
        check_engines(groups, {"kind": "toys:Game"})


def test_a_node_of_sglang_needs_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "aiohttp" else object())
    with pytest.raises(
        AsyncRLError, match=r"needs aiohttp, not installed here: in the checkout, pip install '\.\[sgla"
    ):
        check(engine="sglang", sglang={"endpoint": "http://127.0.0.1:30000"})


def test_an_interpreter_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PROBE_S", 0.3)
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    with pytest.raises(AsyncRLError, match=r"says nothing for 0\.3 s: run it by hand"):
        check(engine="vllm", engine_python=str(slow))

"""How many nodes a run has while it goes on: the rule, and the launcher's answers, with real processes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import Config, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.inference_config import NodeGroup
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import ProcessSpec
from async_rl.run.pools import Pools
from async_rl.run.scale import parse_size, scale
from async_rl.run.scaling import Requests, ScaleAnswer, ScaleError, ScaleRequest, Sizes, change, write_message


@given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 100))
def test_a_change_leads_to_the_wanted_number_and_the_newest_leave(there: int, wanted: int, gone: int) -> None:
    present = [f"node-{gone + index}" for index in range(there)]
    start, dismiss = change(present, wanted, "node", gone + there)
    left = [name for name in present if name not in dismiss]
    assert len(left) + len(start) == wanted
    assert not (start and dismiss)
    assert left == present[: len(left)]
    assert not set(start) & {f"node-{index}" for index in range(gone + there)}


@given(st.lists(st.integers(1, 6), max_size=8))
def test_no_two_nodes_of_a_run_ever_have_one_name(sizes: list[int]) -> None:
    pools = Bench(["node-0", "node-1"])
    made = Sizes(pools, config(nodes=2), lambda name, _group: ProcessSpec(name, "x", expendable=True))  # type: ignore[arg-type]
    for size in sizes:
        made.resize("", size)
        assert len(pools.present()) == size
    assert len(pools.ever) == len(set(pools.ever))


class Bench:
    """Where nodes sit: what `Sizes` needs of the pools."""

    goes_on = True

    def __init__(self, names: list[str]) -> None:
        self.ever = list(names)
        self.there = list(names)

    def present(self) -> list[str]:
        return list(self.there)

    def add(self, spec: ProcessSpec) -> None:
        self.ever.append(spec.name)
        self.there.append(spec.name)

    def dismiss(self, name: str) -> None:
        self.there.remove(name)


def config(**inference: Any) -> Config:
    table = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}, "inference": inference}
    return config_from_table(table, "test.toml")


SLEEP = ("-n", "1", "-r", "1", "import time; time.sleep(600)")


def sleeper(name: str, _group: NodeGroup) -> ProcessSpec:
    """Ends on SIGTERM."""
    return ProcessSpec(name, "timeit", SLEEP, expendable=True, again=())


@contextmanager
def run_of(made: Config, tmp_path: Path) -> Iterator[tuple[Pools, Sizes, RunDirectory]]:
    """A launcher with sleeping nodes, asked in its directory, as a run's is."""
    directory = RunDirectory.create(tmp_path / "run", made)
    trainer = ProcessSpec("trainer", "timeit", SLEEP, ends_run=True)
    nodes = [sleeper(f"node-{index}", NodeGroup("", made.inference)) for index in range(made.inference.nodes)]
    try:
        with directory.hold(), Pools([trainer, *nodes], directory.logs, 60.0, 3) as pools:
            yield pools, Sizes(pools, made, sleeper), directory
            pools.end_all()
    finally:
        directory.remove_sockets()


def until(pools: Pools, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        pools._look()
        time.sleep(0.05)


def test_a_pool_grows_and_shrinks_and_who_was_dismissed_is_no_failure_and_not_started_again(tmp_path: Path) -> None:
    with run_of(config(nodes=1), tmp_path) as (pools, sizes, directory):
        assert sizes.resize("", 3) == ScaleAnswer(before=1, started=("node-1", "node-2"))
        assert pools.present() == ["node-0", "node-1", "node-2"]
        assert sizes.resize("", 1) == ScaleAnswer(before=3, dismissed=("node-2", "node-1"))
        assert pools.present() == ["node-0"]
        until(pools, lambda: len(pools.specs) == 2)
        assert sizes.resize("", 2).started == ("node-3",)
        assert pools._failures() == []
        said = (directory.logs / "launcher.log").read_text()
        assert "node-2 is dismissed" in said
        assert "started again" not in said


def test_what_a_run_cannot_be_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    served = {"engine": "sglang", "sglang": {"endpoint": "http://127.0.0.1:1"}}
    with run_of(config(nodes=1, **served), tmp_path) as (pools, sizes, _):
        for group, nodes, says in (
            ("", 0, "at least 1"),
            ("small", 2, "has no [[inference.group]]: inference=N"),
            ("", 2, "nodes"),
        ):
            with pytest.raises(ScaleError, match=re.escape(says)):
                sizes.resize(group, nodes)
        assert pools.present() == ["node-0"]


def test_groups_are_named_when_one_is_asked_for_that_is_not_there() -> None:
    made = config(group=[{"name": "small", "nodes": 1}, {"name": "large", "nodes": 2}])
    pools = Bench(["small-0", "large-0", "large-1"])
    sizes = Sizes(pools, made, lambda name, _group: ProcessSpec(name, "x", expendable=True))  # type: ignore[arg-type]
    assert sizes.resize("large", 3).started == ("large-2",)
    assert sizes.present("small") == ["small-0"]
    with pytest.raises(ScaleError, match=r"of different groups: inference\.small=N or inference\.large=N"):
        sizes.resize("", 2)
    with pytest.raises(ScaleError, match="no group 'middle'"):
        sizes.resize("middle", 2)


def test_a_launcher_answers_each_request_once_and_broken_ones_with_what_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    pools = Bench(["node-0"])
    sizes = Sizes(pools, config(nodes=1), lambda name, _group: ProcessSpec(name, "x", expendable=True))  # type: ignore[arg-type]
    requests = Requests(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    write_message(folder / "a.request", ScaleRequest("", 2))
    (folder / "b.request").write_text("{")
    (folder / "c.request").write_text('{"group": "", "nodes": "many"}')
    requests.serve(sizes)
    requests.serve(sizes)
    answers = {name: msgspec.json.decode((folder / f"{name}.answer").read_bytes(), type=ScaleAnswer) for name in "abc"}
    assert answers["a"] == ScaleAnswer(before=1, started=("node-1",))
    assert "truncated" in answers["b"].error
    assert "nodes" in answers["c"].error
    assert (folder / "a.answer").stat().st_mode & 0o777 == 0o600
    requests.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "text", ["3", "inference", "inference=", "inference=-1", "inference=x", "trainer=2", "inference.=1"]
)
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ScaleError, match="expected inference=N"):
        parse_size(text)


def test_a_size_names_its_group() -> None:
    assert parse_size("inference=3") == ScaleRequest("", 3)
    assert parse_size("inference.large=12") == ScaleRequest("large", 12)


def test_where_nobody_can_be_asked_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.run.scale.ANSWER_S", 0.3)
    directory = RunDirectory.create(tmp_path / "run", config())
    try:
        with pytest.raises(ScaleError, match="not going on"):
            scale(directory.path, ScaleRequest("", 2), 1, print)
        with directory.hold():
            with pytest.raises(ScaleError, match="async-rl infer"):
                scale(directory.path, ScaleRequest("", 2), 1, print)
            requests = Requests(directory.requests)
            with pytest.raises(ScaleError, match="does not answer"):
                scale(directory.path, ScaleRequest("", 2), 1, print)
            requests.close()
    finally:
        directory.remove_sockets()
    with pytest.raises(AsyncRLError, match="not a run directory"):
        scale(tmp_path / "nowhere", ScaleRequest("", 2), 1, print)


def test_a_node_that_does_not_come_in_time_is_named_with_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.run.view.STATUS_TIMEOUT", 0.2)  # no buffer listens here
    directory = RunDirectory.create(tmp_path / "run", config())
    pools = Bench(["node-0"])
    sizes = Sizes(pools, config(nodes=1), lambda name, _group: ProcessSpec(name, "x", expendable=True))  # type: ignore[arg-type]
    (directory.logs / "node-1.log").write_text("error: no model here\n")
    over = threading.Event()
    requests = Requests(directory.requests)

    def launcher() -> None:
        while not over.wait(0.05):
            requests.serve(sizes)

    thread = threading.Thread(target=launcher)
    thread.start()
    said: list[str] = []
    try:
        with directory.hold(), pytest.raises(ScaleError, match=r"node-1 is unknown.*no model here"):
            scale(directory.path, ScaleRequest("", 2), 0.5, said.append)
        with directory.hold():
            scale(directory.path, ScaleRequest("", 2), 0.5, said.append)
    finally:
        over.set()
        thread.join(5)
        directory.remove_sockets()
    assert said == ["started: node-1", "there are 2 nodes already"]

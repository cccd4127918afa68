"""`async-rl status` against real buffers, and directories in every state that a run can leave them in."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from buffer_house import FINGERPRINT, PATIENCE_S, RUN, TOKEN, V0, V1, House, confirm, deliver, receive, take_leases

from async_rl.config import Config, ModelConfig, RunConfig
from async_rl.run import status as status_module
from async_rl.run.cli import main
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import MetricsWriter
from async_rl.run.status import NodeState, RunState, ask_store, state_of, store_text
from async_rl.run.status_text import NONE, state_text
from async_rl.run.view import Address, fetch_whole_status
from async_rl.wire.link import Server
from async_rl.wire.messages import Batch, Draw, NodeReady, NodeServing, NodeWants, StatusRequest, StoreStatus
from async_rl.wire.security import write_token


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers may be slow to: the machine is busy."""
    monkeypatch.setattr(status_module, "STATUS_TIMEOUT", PATIENCE_S)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


@pytest.fixture
def directory(house: House, tmp_path: Path) -> Path:
    """The run directory of the house."""
    return as_directory(tmp_path / "run", house.endpoint)


def as_directory(path: Path, endpoint: str, run: str = RUN, token: str = TOKEN) -> Path:
    path.mkdir()
    run_json = {"run": run, "endpoint": endpoint, "store_endpoint": f"ipc://{path.parent / 'store'}"}
    (path / "run.json").write_text(json.dumps(run_json))
    write_token(path / "token", token)
    return path


def work_one_step(house: House) -> None:
    """One batch trained, version 1 published; node "fast" serves it, node "slow" still version 0."""
    trainer, fast = house.trainer(), house.node("fast")
    slow = house.client("node", "slow")
    slow.send(NodeReady("torch", 8, FINGERPRINT))
    slow.send(NodeServing(V0, 3, 1.0))
    slow.flush(PATIENCE_S)
    trainer.send(Draw(0))
    deliver(fast, take_leases(fast, 4))
    confirm(trainer, receive(trainer, Batch).message, V1)
    trainer.flush(PATIENCE_S)
    fast.send(NodeServing(V1, 3, 1.0))
    fast.send(NodeWants(6, busy_s=3.0, alive_s=4.0, sampled_tokens=1000, decode_steps=9, limit=5))
    take_leases(fast, 2)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command printed; on its one error line when `code` is 1."""
    assert main(["status", *arguments]) == code
    out, err = capsys.readouterr()
    assert (out if code else err) == ""
    assert not code or err.count("\n") == 1
    return err if code else out


def test_a_running_buffer_says_who_is_there_and_how_far_behind(house: House, directory: Path) -> None:
    work_one_step(house)
    state = state_of(str(directory))
    assert (state.phase, state.confirmed, state.steps, state.trainer) == ("running", 1, 2, "trainer")
    assert (state.newest, state.store) == (V1.short(), "does not listen")
    fast, slow = sorted(state.nodes, key=lambda node: node.name)
    assert (fast.state, fast.engine, fast.policy, fast.behind) == ("ready", "torch", V1.short(), 0)
    assert (fast.leased, fast.slots, fast.limit, fast.busy, fast.tokens_per_second) == (2, 8, 5, 0.75, 250.0)
    assert (slow.behind, slow.leased, slow.busy) == (1, 0, 0.0)
    assert state.ledger_balances
    assert (state.ledger or {})["trained"] == 4
    assert state.push_ms["count"] == 1
    assert state.staleness["bound"] == 1
    assert state.waiting


def test_the_text_shows_every_subject_with_the_nodes_as_a_table(
    house: House, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work_one_step(house)
    with MetricsWriter(directory / "metrics.jsonl") as writer:
        writer.write({"step": 0, "version": 1, "reward": 0.25, "staleness_max": 1, "staleness_mean": 0.5})
    store = Server(f"ipc://{directory.parent / 'store'}", run=RUN, token=TOKEN, name="store")
    try:
        lines = told(capsys, str(directory)).splitlines()
    finally:
        store.close()
    by_label = {line.split()[0]: line for line in lines if line[0] != " "}
    assert "1/2, reward 0.250" in by_label["steps"]
    assert by_label["store"].endswith("listens")
    assert "balances: 6 issued = 2 leased + 0 ready + 0 batched + 4 trained + 0 dropped" in by_label["ledger"]
    assert "max 1, mean 0.50 in the last step, bound 1" in by_label["staleness"]
    assert by_label["push"].endswith("of 1")
    table = lines[lines.index(by_label["nodes"]) :][:3]
    assert " ".join(table[0].split()[1:]) == "name state engine policy behind leased slots busy tokens/s"
    assert table[1].split() == ["fast", "ready", "torch", V1.short(), "0", "2", "5/8", "75%", "250"]
    assert table[2].split() == ["slow", "ready", "torch", V0.short(), "1", "0", "8", "0%", "0"]
    assert len({len(row) for row in table}) == 1


def test_a_node_that_serves_another_policy_is_shown_with_the_cause_and_every_mismatch() -> None:
    def node(name: str, state: str, mismatch: float | None, reason: str) -> NodeState:
        return NodeState(
            name=name, state=state, engine="torch", policy=None, behind=None, leased=0, slots=8, busy=0.0,
            tokens_per_second=0.0, mismatch=mismatch, reason=reason,
        )  # fmt: skip

    nodes = [
        node("good", "ready", 1e-4, ""),
        node("bad", "quarantined", 1.0, "main 1-d1: it differs"),
        node("new", "syncing", None, ""),
    ]
    state = RunState(phase="running", run="r", steps=2, confirmed=1, reward=None, nodes=nodes)
    lines = state_text(state).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("nodes"))
    assert [line.split()[-1] for line in lines[first : first + 4]] == ["mismatch", "1.0e-04", "1.0e+00", NONE]
    assert lines[first + 4].split(maxsplit=2) == ["set", "aside", "bad, main 1-d1: it differs"]


def test_json_is_the_same_state_whole(house: House, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work_one_step(house)
    shown = json.loads(told(capsys, str(directory), "--json"))
    assert shown["nodes"][0] | {"tokens_per_second": 0} == {
        "name": "fast", "state": "ready", "engine": "torch", "policy": V1.short(), "behind": 0, "leased": 2,
        "slots": 8, "busy": 0.75, "tokens_per_second": 0, "mismatch": None, "reason": "",
        "bound": 0.0, "canary": None, "first": None, "first_version": None, "limit": 5,
    }  # fmt: skip
    assert set(shown) == set(RunState.__struct_fields__)


def test_an_endpoint_is_asked_with_a_token_and_the_run_beside_it_or_named(
    house: House, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work_one_step(house)
    assert f"{house.endpoint}, run {RUN}" in told(capsys, house.endpoint, "--token", str(directory / "token"))
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    shutil.copy(directory / "token", alone / "token")
    assert "add --token FILE" in told(capsys, house.endpoint, code=1)
    assert "name it with --run ID" in told(capsys, house.endpoint, "--token", str(alone / "token"), code=1)
    assert "1/2" in told(capsys, house.endpoint, "--token", str(alone / "token"), "--run", RUN)


def test_a_wrong_token_and_a_wrong_run_are_named_and_no_token_is_printed(
    house: House, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong-token"
    write_token(wrong, "f" * 64)
    error = told(capsys, house.endpoint, "--token", str(wrong), "--run", RUN, code=1)
    assert "does not accept the token" in error
    assert str(wrong) in error
    assert "f" * 64 not in error
    error = told(capsys, house.endpoint, "--token", str(directory / "token"), "--run", "r2", code=1)
    assert "serves run 'r1'" in error
    assert "'r2'" in error


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all", "tcp://127.0.0.1:{free}"])
def test_where_nobody_listens_the_error_comes_at_once(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = endpoint.format(free=probe.getsockname()[1])
    write_token(tmp_path / "token", TOKEN)
    start = time.monotonic()
    error = told(capsys, endpoint, "--token", str(tmp_path / "token"), "--run", RUN, code=1)
    assert f"nobody listens at {endpoint}" in error
    assert time.monotonic() - start < status_module.STATUS_TIMEOUT


@pytest.mark.timeout(180)
def test_one_who_listens_and_says_nothing_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_token(tmp_path / "token", TOKEN)
    named = ["--token", str(tmp_path / "token"), "--run", RUN]
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setattr(status_module, "STATUS_TIMEOUT", 0.5)
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert "waited 0.5 s for a welcome" in told(capsys, endpoint, *named, code=1)
    # It welcomes, however slowly; only the answer is not waited for so long.
    monkeypatch.setattr(status_module, "fetch_whole_status", lambda clients, _: fetch_whole_status(clients, 0.5))
    store, over = Server(f"ipc://{tmp_path / 'store'}", run=RUN, token=TOKEN, name="store"), threading.Event()

    def serve() -> None:  # it knows no request for a status
        while not over.is_set():
            store.poll(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        error = told(capsys, store.endpoint, *named, code=1)
    finally:
        over.set()
        thread.join()
        store.close()
    assert "for the buffer's status" in error
    assert "the buffer's endpoint is needed" in error


# --- runs that are over ----------------------------------------------------------------------------------------------

LEDGER = {"issued": 64, "leased": 8, "ready": 8, "batched": 0, "trained": 48, "dropped.stale": 0}
NODE = {
    "name": "node-0", "state": "ready", "slots": 8, "version": 2, "leased": 8, "busy_s": 2.0, "alive_s": 8.0,
    "sampled_tokens": 4000, "decode_steps": 40,
}  # fmt: skip
POOLS = {
    "uptime_s": 9.0, "confirmed": 3, "ready_groups": 1, "ready_bytes": 4096, "reserved_bytes": 0,
    "waiting": "the trainer waits for ticket 7", "ledger": LEDGER, "push_ms": [10.0, 30.0], "nodes": [NODE],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """A run directory whose processes are gone, after some steps of ten."""

    def make(steps: int) -> RunDirectory:
        config = Config(run=RunConfig(steps=10), task={"kind": "digit_sort"}, model=ModelConfig(path="unused"))
        directory = RunDirectory.create(tmp_path / "over", config)
        directory.remove_sockets()
        with MetricsWriter(directory.metrics_path) as writer:
            for step in range(steps):
                reward = {"reward": 0.5, "staleness_max": 2, "staleness_mean": 1.5}
                writer.write({"step": step, "version": step + 1, "time_s": 1.0 * step, **reward})
            if steps:
                writer.write({"time_s": 9.0, "pools": POOLS})
        return directory

    return make


def test_a_failed_run_says_why_where_it_stands_and_how_to_go_on(
    run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(steps=3)
    for version in ("v00000001", "v00000002", ".partial-v00000003"):
        (directory.checkpoints / version).mkdir()
    (directory.logs / "trainer.log").write_text("12:00 INFO learner: error: not this\nerror: the buffer is gone\n\n")
    (directory.logs / "buffer.log").write_text("error: long ago\n12:00 INFO buffer: began again\n")
    state = state_of(str(directory.path))
    assert (state.phase, state.confirmed, state.steps, state.checkpoint) == ("failed", 3, 10, 2)
    assert state.last_words == ["trainer: the buffer is gone"]
    assert state.push_ms == {"p50": 10.0, "p99": 30.0, "count": 2}
    assert [(node.policy, node.behind, node.busy, node.tokens_per_second) for node in state.nodes] == [
        ("2", 1, 0.25, 500.0)
    ]
    text = told(capsys, str(directory.path))
    for words in (
        "failed", "trainer: the buffer is gone", "3/10", "balances: 64 issued", "max 2, mean 1.50", "version 2",
        "when it was last recorded: the trainer waits for ticket 7",
        f"async-rl run {directory.config_path} --out {directory.path} --resume",
    ):  # fmt: skip
        assert words in text, words


def test_a_run_that_was_stopped_is_no_failure_and_one_that_never_began_can_begin(
    run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(steps=0)
    (directory.logs / "trainer.log").write_text("12:00 INFO learner: stopped at version 0; go on with --resume\n")
    state = state_of(str(directory.path))
    assert (state.phase, state.last_words, state.nodes, state.ledger) == ("stopped", [], [], None)
    text = told(capsys, str(directory.path))
    assert "nothing was recorded" in text
    assert "--resume" in text


def test_a_ledger_that_does_not_balance_is_said_aloud(run: Callable[..., RunDirectory]) -> None:
    directory = run(steps=1)
    with MetricsWriter(directory.metrics_path) as writer:
        writer.write({"pools": {**POOLS, "ledger": {**LEDGER, "leased": 7}}})
    assert "DOES NOT BALANCE: 64 issued = 7 leased" in state_text(state_of(str(directory.path)))


def test_what_trained_again_is_shown_beside_the_ledger(run: Callable[..., RunDirectory]) -> None:
    directory = run(steps=1)
    with MetricsWriter(directory.metrics_path) as writer:
        writer.write({"pools": {**POOLS, "reused": {"trained": 1200, "refused": 0, "short_batches": 1}}})
    assert "reused    1,200 trained, 1 short_batches\n" in state_text(state_of(str(directory.path)))


SUMMARY = {
    "steps": 10, "wall_seconds": 61.0, "reward": {"first": 0.25, "last": 0.5}, "eval": {"first": None, "last": None},
    "staleness": {"max": 2, "mean": 1.5, "bound": 4}, "tokens_per_second": {"rollout": 2000.0, "train": 1000.0},
    "idle_fraction": {"inference": 0.5, "trainer": 0.1}, "push_ms": {"p50": 10.0, "p99": 30.0},
    "ledger": {**{key: LEDGER[key] for key in ("issued", "trained")}, "dropped": {}}, "ledger_balances": True,
}  # fmt: skip


def test_a_finished_run_shows_its_summary_and_its_nodes(
    run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(steps=10)
    directory.summary_path.write_text(json.dumps(SUMMARY))
    text = told(capsys, str(directory.path))
    assert text.startswith("finished")
    assert "0.250 → 0.500" in text
    assert "node-0" in text
    assert "--resume" not in text
    assert state_of(str(directory.path)).summary == SUMMARY


def test_a_finished_run_that_was_resumed_for_more_steps_is_not_finished(run: Callable[..., RunDirectory]) -> None:
    directory = run(steps=10)
    directory.summary_path.write_text(json.dumps(SUMMARY))
    longer = Config(run=RunConfig(steps=20), task={"kind": "digit_sort"}, model=ModelConfig(path="unused"))
    directory.write_config(longer)
    assert (state_of(str(directory.path)).phase, state_of(str(directory.path)).steps) == ("stopped", 20)


def test_a_run_that_a_process_holds_while_no_buffer_listens_is_starting_or_ending(
    run: Callable[..., RunDirectory],
) -> None:
    directory = run(steps=0)
    with directory.hold():
        state = state_of(str(directory.path))
    assert state.phase == "starting or ending"
    assert state.go_on is None


def test_the_port_of_a_run_that_is_over_may_serve_another_run_by_now(
    run: Callable[..., RunDirectory], house: House
) -> None:
    directory = run(steps=3)
    run_json = json.loads((directory.path / "run.json").read_text())
    (directory.path / "run.json").write_text(json.dumps({**run_json, "endpoint": house.endpoint}))
    assert state_of(str(directory.path)).phase == "stopped"


def test_a_broken_summary_is_named(run: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(steps=10)
    directory.summary_path.write_text("{")
    assert f"{directory.summary_path} is broken" in told(capsys, str(directory.path), code=1)


def test_of_a_store_with_relays_it_is_told_what_they_have_sent_and_who_was_bypassed() -> None:
    assert store_text(StoreStatus(5_000_000)) == "listens"
    told = store_text(StoreStatus(48_000_000, 208_000_000, ("a", "b"), {"silent": 2, "damaged": 3}, ("c",)))
    assert told == (
        "listens; has sent 48.0 MB; 2 relays 208.0 MB; bypassed: 3 × damaged, 2 × silent; sent wrong bytes, and are "
        "not used: c"
    )


def test_a_store_that_answers_is_asked_for_its_account(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "STORE_TIMEOUT", PATIENCE_S)
    store, over = Server(f"ipc://{directory.parent / 'store'}", run=RUN, token=TOKEN, name="store"), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for event in store.poll(0.05):
                if isinstance(getattr(event, "message", None), StatusRequest):
                    store.send(event.peer, StoreStatus(1_000_000, 3_000_000, ("a",)))
        store.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        answer = ask_store(Address.of_store(RunDirectory.open(directory)))
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert answer == StoreStatus(1_000_000, 3_000_000, ("a",))

"""No wait without an end: what blocks takes a time-out, and docs/waits.md has a line for every module that waits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_rl", "buffer", "inference", "trainer")
TABLE = ROOT / "docs" / "waits.md"

# With so many positional arguments a call is one with a time-out, or something else: `thread.join(1)`, `",".join(x)`.
ENOUGH = {"get": 1, "wait": 1, "join": 1, "result": 1, "acquire": 1, "accept": 1, "term": 1}
ENOUGH |= {"wait_for": 2, "communicate": 2}
RECEIVES = ("recv", "recv_multipart", "recv_string", "recv_json", "recv_bytes", "recv_into")
RUNS = ("run", "call", "check_call", "check_output")

# What the names above cannot tell apart, with the reason why it does not block.
HARMLESS = {
    ("async_rl/wire/client.py", "self._lock.acquire()"): "nobody waits for anything while holding it",
    ("async_rl/wire/dealer.py", "self._heard.recv(4096)"): "a socket that does not block",
    ("async_rl/wire/client.py", "self._context.term()"): "its only socket is closed, with a linger",
    ("async_rl/wire/server.py", "self._context.term()"): "its only socket is closed, with a linger",
    ("async_rl/sandbox/box.py", "self._orders.recv(1)"): "the socket has a time-out",
    ("async_rl/sandbox/box.py", "verdict.recv(READ_BYTES)"): "who could write to it has ended",
    ("async_rl/sandbox/cell.py", "self.word.recv(READ_BYTES)"): "something is in it, or it is closed",
    ("async_rl/sandbox/channel.py", "self._socket.recv(min(count - len(data), 1 << 16))"): "the cell is killed in time",
    ("async_rl/sandbox/warden.py", "ours.recv(1)"): "a keeper's first step, or its end",
    ("async_rl/sandbox/warden.py", "warden.recv(1)"): "the warden's next step, or its end",
    ("inference/compiled_build.py", "fcntl.flock(lock, fcntl.LOCK_EX)"): "who wants it built kills it after its limit",
    ("inference/bench_push_arms.py", "listener.accept()"): "the listener has a time-out",
    ("inference/bench_push_receiver.py", "pipe.recv_bytes()"): "it dies with the benchmark, which waits with a limit",
    ("inference/bench_push_receiver.py", "self._socket.recv_into(into[received:])"): "the socket has a time-out",
    ("inference/bench_flips_house.py", "self._pipe.recv_bytes()"): "poll with a limit found something in it",
    ("inference/agent_process.py", "process.wait()"): "asyncio's, within a wait that has a limit",
    ("inference/orphan_guard.py", "parent.join()"): "a daemon's only work: to wait for its parent's end",
    ("inference/sglang_engine.py", "self._open.wait()"): "weights are changed, by questions that have limits",
    ("async_rl/tasks/verifiers_env.py", "self._ready.wait()"): "within a reset, which ends after step_timeout",
    ("async_rl/tasks/verifiers_env.py", "self._calls.get()"): "within a reset or a step, as above",
    ("async_rl/tasks/verifiers_env.py", "asked.result()"): "it is done",
    ("async_rl/tasks/verifiers_env.py", "self._episode.result()"): "it is done",
    ("async_rl/tasks/verifiers_env.py", "self._serves.result()"): "it is done",
    ("async_rl/tasks/verifiers_env.py", "asyncio.Event().wait()"): "to stay up until the worker's loop ends",
    ("inference/environment_worker.py", "ended.wait()"): "a child's only work: what it is asked, until the input ends",
    ("inference/flights.py", "event.wait()"): "within a wait_for that has a limit",
    ("trainer/megatron/collect.py", "dist.recv(buffer, rank)"): "the process group has a time-out",
    ("trainer/bench_process.py", "ours.recv_bytes()"): "poll with a limit found something in it",
    ("trainer/megatron/sketching.py", "dist.recv(buffer, rank)"): "the process group has a time-out",
    ("trainer/megatron/hf_weights.py", "dist.recv(value, src=rank)"): "the group of the ranks has a time-out",
    ("trainer/megatron/passes.py", "work.wait()"): "the group of the ranks has a time-out",
    ("buffer/bench_transport_arms.py", "endpoint.get()"): "something is in it",
    ("buffer/bench_transport_arms.py", "socket.recv()"): "its crew, which waits with a limit, kills it",
    ("buffer/bench_transport_arms.py", "queue.get()"): "its crew, which waits with a limit, kills it",
}


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def may_wait_for_ever(call: ast.Call) -> bool:
    """Whether a call can block with no limit, as far as its name and arguments tell."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    name, owner = function.attr, ast.unparse(function.value)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if keywords.get("timeout", "None") != "None" or keywords.get("block", keywords.get("blocking")) == "False":
        return False
    if owner == "subprocess":
        return name in RUNS
    if owner == "fcntl":
        return name in ("flock", "lockf") and "LOCK_NB" not in ast.unparse(call) and "LOCK_EX" in ast.unparse(call)
    if owner == "select":
        return name == "select" and len(call.args) < 4
    if name == "poll":
        return not call.args and ("socket" in owner or "poll" in owner)  # Popen's and the link's own do not wait
    if name in RECEIVES:
        return not any("NOBLOCK" in ast.unparse(argument) for argument in call.args)
    return len(call.args) < ENOUGH.get(name, 0)


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_call_that_blocks_takes_a_time_out() -> None:
    found = {
        (str(path.relative_to(ROOT)), ast.unparse(call)): call.lineno
        for path in modules()
        for call in calls(path)
        if may_wait_for_ever(call)
    }
    assert found.keys() - HARMLESS.keys() == set()
    assert HARMLESS.keys() - found.keys() == set(), "no such call any more"


def test_the_check_knows_a_wait_when_it_sees_one() -> None:
    for text in (
        "q.get()", "q.get(block=True)", "q.get(timeout=None)", "e.wait()", "t.join()", "lock.acquire()", "f.result()",
        "c.wait_for(ready)", "p.communicate()", "p.communicate(data)", "socket.recv()", "listener.accept()",
        "subprocess.run(x)", "subprocess.check_output(x, text=True)", "fcntl.flock(f, fcntl.LOCK_EX)",
        "select.select(a, b, c)", "socket.poll()",
    ):  # fmt: skip
        assert may_wait_for_ever(call_in(text)), text
    for text in (
        "q.get(timeout=1)", "q.get(block=False)", "d.get(key)", "e.wait(1)", "t.join(timeout=1)", "', '.join(x)",
        "lock.acquire(blocking=False)", "f.result(3)", "socket.recv(NOBLOCK)", "subprocess.run(x, timeout=3)",
        "subprocess.Popen(x)", "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)", "process.poll()", "socket.poll(10)",
    ):  # fmt: skip
        assert not may_wait_for_ever(call_in(text)), text


def call_in(text: str) -> ast.Call:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def test_the_table_has_every_module_that_waits() -> None:
    """A module waits if it gives something a time-out; benchmarks are tools of their own, with limits of their own."""
    named = set(re.findall(r"`((?:async_rl|buffer|inference|trainer)/[\w/]+\.py)`", TABLE.read_text()))
    waiting = {
        str(path.relative_to(ROOT))
        for path in modules()
        if not path.name.startswith("bench") and any(takes_time(call) for call in calls(path))
    }
    assert waiting - named == set()
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def takes_time(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    timed = any(keyword.arg in ("timeout", "timeout_s") for keyword in call.keywords)
    named = call.func.attr in ("wait", "wait_for", "receive", "flush", "poll", "_receive")
    return timed or (named and bool(call.args))

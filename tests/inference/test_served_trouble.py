"""An engine over a server that does not what it should: what that means, and what becomes of the requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_server import SimulatedServer
from sketched_policies import SketchedPolicies
from small_disk import small_disk

from async_rl.version import VersionRun
from inference import served_calls, served_policies
from inference.engine import Completion, EngineError, Prefix
from inference.served_engine import ServedEngine
from inference.server import Call, EngineDied, Piece

Make = Callable[..., ServedEngine]


@pytest.fixture
def make(qwen: Any) -> Iterator[Make]:
    """An engine; with adapters it holds the policies 0, which serves, and 1."""
    made: list[ServedEngine] = []

    def make(server: SimulatedServer, **options: Any) -> ServedEngine:
        options = {"slots": 4, "max_context": 48, "max_resident": 3, "stop_tokens": ()} | options
        engine = ServedEngine(server, qwen.path, **options)
        made.append(engine)
        if not server.whole:
            for version in (0, 1):
                engine.install(*qwen.policy(version))
            engine.flip(qwen.policy(0)[0], "finish")
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on a server has 0.3 s for everything that is asked of it."""

    def hurry() -> None:
        monkeypatch.setattr(served_calls, "CALL_S", 0.3)
        for name in ("run", "must"):
            monkeypatch.setattr(getattr(served_calls.ServerCalls, name), "__defaults__", (0.3,))

    return hurry


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where policies lie as files, a place for this test alone."""
    monkeypatch.setattr(served_policies, "MEMORY", tmp_path)
    return tmp_path


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.01)


def finish(engine: ServedEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    deadline = time.monotonic() + 60
    while engine.active:
        done |= {completion.key[1]: completion for completion in engine.step()}
        assert time.monotonic() < deadline
    return done


# --- no answer, and a wrong one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["load", "unload", "score"])
def test_a_server_that_never_answers_counts_as_dead_as_nobody_knows_what_it_did(make, qwen, hurry, what):
    server = SimulatedServer()
    engine = make(server)
    server.hangs = {what}
    hurry()
    ask = {
        "load": lambda: engine.install(*qwen.policy(2)),
        "unload": lambda: engine.evict(qwen.policy(1)[0]),
        "score": lambda: engine.score(qwen.policy(0)[0], [np.arange(4, dtype=np.int32)]),
    }
    with pytest.raises(EngineDied, match=r"took more than 0\.3 s"):
        ask[what]()
    with pytest.raises(EngineDied):
        engine.step()


def test_a_server_that_is_slow_lives_as_long_as_tokens_come(make, qwen):
    server = SimulatedServer()
    engine = make(server, stall_timeout_s=3.0)
    server.token_s = 0.2
    engine.submit(qwen.request(0, new=20))
    assert finish(engine)[0].finish == "length"
    engine.submit(qwen.request(1, new=20))
    until(lambda: engine.step() or server.calls)
    server.hangs = {"generate"}
    with pytest.raises(EngineDied, match=r"sampled nothing for 3 s .*engine_timeout"):
        until(lambda: engine.step() and False)
    assert engine.active == 1


def test_an_adapter_that_the_server_refuses_is_refused_and_nothing_of_it_is_left(make, qwen, in_memory):
    server = SimulatedServer()
    engine = make(server)
    before = folders(in_memory)
    server.raises = {"load": EngineError("no such module")}
    with pytest.raises(EngineError, match="no such module") as refused:
        engine.install(*qwen.policy(2))
    assert not isinstance(refused.value, EngineDied)
    assert folders(in_memory) == before
    engine.submit(qwen.request(1))
    assert finish(engine)[1].finish == "length"


def test_a_server_that_will_not_unload_has_another_state_than_is_known_and_counts_as_dead(make, qwen):
    server = SimulatedServer()
    engine = make(server)
    server.raises = {"unload": EngineError("it is used by a call")}
    with pytest.raises(EngineDied, match=r"unloading 1-.*it is used by a call"):
        engine.evict(qwen.policy(1)[0])
    with pytest.raises(EngineDied):
        engine.step()


def test_one_that_does_not_end_a_request_counts_as_dead_and_keeps_what_that_uses(make, qwen, hurry):
    server = SimulatedServer()
    engine = make(server)
    server.allowed = 10
    engine.submit(qwen.request(0, new=40, policy=qwen.policy(1)[0]))
    engine.step()
    server.hangs = {"abort"}
    hurry()
    server.raises = {"unload": AssertionError("it was unloaded")}
    engine.take_out((7, 0))
    with pytest.raises(EngineDied, match="did not end a request"):
        engine.evict(qwen.policy(1)[0])


class Contradicting(SimulatedServer):
    """Its second piece for the first request contradicts itself."""

    def __init__(self, second: Piece, whole: bool = False) -> None:
        super().__init__(whole=whole)
        self.second = second

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        count = 0
        async for piece in super().generate(call):
            count += 1
            yield self.second if count == 2 and call.name.startswith("7-0-") else piece


@pytest.mark.parametrize("second", [Piece([1, 2], [-1.0]), Piece([1] * 8, [-1.0] * 8, None, "length")])
def test_a_piece_that_contradicts_itself_or_is_too_long_fails_its_request_alone(make, qwen, second):
    engine = make(Contradicting(second))
    for sample in range(3):
        engine.submit(qwen.request(sample))
    done = finish(engine)
    assert [(done[sample].finish, len(done[sample].tokens)) for sample in range(3)] == [
        ("abort", 1), ("length", 8), ("length", 8)
    ]  # fmt: skip
    assert set(engine.resident.values()) == {0}


@pytest.mark.parametrize("labels", [None, [], [("default", 1)], [("0-" + 64 * "a", 2)]])
def test_so_does_one_that_attests_no_policy_or_not_all_of_its_tokens(make, qwen, tmp_path, labels):
    engine = make(Contradicting(Piece([1], [-1.0], labels), whole=True), storage="float32")
    serve_base(engine, SketchedPolicies(qwen.path, tmp_path))
    for sample in range(2):
        engine.submit(qwen.request(sample))
    done = finish(engine)
    assert [(done[sample].finish, len(done[sample].tokens)) for sample in range(2)] == [("abort", 1), ("length", 8)]


def test_an_answer_that_nobody_foresaw_does_not_end_the_watch(make, qwen):
    server = SimulatedServer()
    engine = make(server)
    server.raises = {"signals": KeyError("loads")}
    time.sleep(2.5 * served_calls.SIGNALS_S)
    server.raises = {}
    seen = engine.signals
    until(lambda: engine.signals is not seen)
    server.raises = {"check": EngineDied("it is gone")}
    with pytest.raises(EngineDied, match="it is gone"):
        until(lambda: engine.step() and False)


# --- weights of the whole model --------------------------------------------------------------------------------------


def serve_base(engine: ServedEngine, policies: SketchedPolicies) -> None:
    base = policies.main[0]
    engine.install(base.policy, base.path)
    engine.flip(base.policy, "recompute")


@pytest.mark.parametrize("way", ["recompute", "continue"])
def test_a_flip_that_failed_half_way_is_the_end_of_the_engine_and_loses_no_request(make, qwen, tmp_path, way):
    server = SimulatedServer("recompute", "continue", whole=True)
    engine, policies = make(server, storage="float32"), SketchedPolicies(qwen.path, tmp_path)
    serve_base(engine, policies)
    server.allowed = 10
    for sample in range(6):  # two more than run
        engine.submit(qwen.request(sample, new=40))
    until(lambda: engine.step() or len(server.held) == 4)
    new = policies.step()
    engine.install(new.policy, new.path)
    server.raises = {"reload": EngineError("it refuses the checkpoint")}
    with pytest.raises(EngineDied, match=r"applied in part.*it refuses the checkpoint"):
        engine.flip(new.policy, way)
    with pytest.raises(EngineDied):
        engine.step()
    assert engine.finished() == []
    assert engine.active == 6
    prefixes = [engine.take_out((7, sample)) for sample in range(6)]
    assert [prefix is not None for prefix in prefixes] == [True] * 4 + [False] * 2
    base = policies.main[0].policy
    for prefix in prefixes[:4]:
        (run,) = prefix.versions
        assert run.digest == base.digest
        assert run.count == len(prefix.tokens) == len(prefix.logprobs) > 5
    assert engine.active == 0
    assert set(engine.resident.values()) == {0}


# --- no room ---------------------------------------------------------------------------------------------------------


def folders(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def test_no_room_for_an_adapter_is_a_refusal_and_leaves_no_folder(make, qwen, in_memory):
    engine = make(SimulatedServer())
    before = folders(in_memory)
    assert len(before) == 2
    with small_disk(), pytest.raises(EngineError, match="no room for it in") as refused:
        engine.install(*qwen.policy(2))
    assert not isinstance(refused.value, EngineDied)
    assert folders(in_memory) == before
    engine.submit(qwen.request(1))
    assert finish(engine)[1].finish == "length"


def test_no_room_for_a_checkpoint_ends_the_engine_and_leaves_no_folder(make, qwen, tmp_path, in_memory):
    engine = make(SimulatedServer("recompute", whole=True), storage="float32")
    base = SketchedPolicies(qwen.path, tmp_path).main[0]
    engine.install(base.policy, base.path)
    with small_disk(), pytest.raises(EngineDied, match="no room for a checkpoint"):
        engine.flip(base.policy, "recompute")
    assert folders(in_memory) == []


# --- what is finished, and what waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("died", [False, True])
def test_answers_that_are_done_are_there_for_who_leaves(make, qwen, died):
    """They lie in the queue; a step is not needed, and of a dead server there is none."""
    server = SimulatedServer()
    engine = make(server)
    server.allowed = 0
    engine.submit(qwen.request(0, new=3))
    engine.submit(qwen.request(1, new=40))
    engine.step()
    server.allowed = 10
    until(lambda: server.done == len(server.held) == 1)
    if died:
        server.raises = {"check": EngineDied("it is gone"), "generate": EngineDied("it is gone")}
        time.sleep(2.5 * served_calls.SIGNALS_S)
    (done,) = engine.finished()
    assert (done.key, done.finish, done.tokens.tolist()) == ((7, 0), "length", [1, 1, 1])
    assert engine.finished() == []
    assert engine.take_out((7, 0)) is None
    prefix = engine.take_out((7, 1))
    assert len(prefix.tokens) > 0
    assert engine.active == 0


def test_who_steps_at_a_dead_server_is_first_given_what_is_done(make, qwen):
    server = SimulatedServer()
    engine = make(server)
    server.allowed = 0
    engine.submit(qwen.request(0, new=3))
    engine.step()
    server.allowed = 3
    until(lambda: server.done == 1)
    server.raises = {"check": EngineDied("it is gone")}
    time.sleep(2.5 * served_calls.SIGNALS_S)
    (done,) = engine.step()
    assert done.finish == "length"
    with pytest.raises(EngineDied):
        until(lambda: engine.step() and False)


def test_the_time_that_a_request_waited_is_part_of_what_is_taken_out(make, qwen):
    server = SimulatedServer()
    server.token_s = 0.3
    engine = make(server, slots=1)
    engine.submit(qwen.request(0, new=20))
    engine.step()
    policy = qwen.policy(0)[0]
    runs = (VersionRun(policy.version, policy.digest, 1),)
    begun = Prefix(np.array([1], np.int32), np.array([-1.0], np.float32), runs, queued_s=2.0, sampling_s=1.0)
    before = time.monotonic()
    engine.submit(qwen.request(1, new=5)._replace(prefix=begun))
    time.sleep(0.4)
    out = engine.take_out((7, 1))
    assert 0.4 <= out.queued_s - begun.queued_s <= time.monotonic() - before
    assert (out.sampling_s, out.tokens.tolist(), out.versions) == (begun.sampling_s, [1], begun.versions)
    assert out.resumed == 1

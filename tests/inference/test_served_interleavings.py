"""An engine over a server, in whatever order things happen: each token is what it says it is, and nothing is lost. The
server is a simulated one whose tokens tell under which weights, and at which place, each was sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_server import TellingServer
from sketched_policies import SketchedPolicies

from async_rl.version import PolicyId, VersionRun
from inference import served_calls, served_engine
from inference.engine import Completion, EngineError, InFlight, Prefix, Request
from inference.served_engine import ServedEngine
from inference.server import EngineDied

MOVES = 250
SLOTS, ACTIVE, RESIDENT = 6, 10, 3
VERSIONS = 5  # of adapters: they come again
WAYS = ("finish", "recompute", "continue")

Key = tuple[int, int]


class Adapters:
    """Policies for an engine that has several, by `qwen`."""

    whole = False

    def __init__(self, qwen: Any) -> None:
        self._files = [qwen.policy(version) for version in range(VERSIONS)]
        self._at = -1

    def next(self) -> tuple[PolicyId, Path]:
        self._at = (self._at + 1) % VERSIONS
        return self._files[self._at]


class Weights:
    """Policies that are weights of the whole model: each a small change of the one before."""

    whole = True

    def __init__(self, qwen: Any, folder: Path) -> None:
        self._made = SketchedPolicies(qwen.path, folder)
        self._begun = False

    def next(self) -> tuple[PolicyId, Path]:
        file = self._made.step() if self._begun else self._made.main[0]
        self._begun = True
        return file.policy, file.path


class Play:
    """Moves at random with an engine, and looks at all that comes of it."""

    def __init__(
        self, qwen: Any, policies: Adapters | Weights, way: InFlight, seed: int
    ) -> None:
        self.qwen, self.policies, self.way = qwen, policies, way
        self.rng = random.Random(seed)
        ways: list[InFlight] = ["continue", "recompute"] if policies.whole else ["finish", "recompute"]
        self.server = TellingServer(random.Random(seed + 1), *{*ways, way}, whole=policies.whole)
        storage: Any = {"storage": "float32"} if policies.whole else {}
        options = {"slots": SLOTS, "max_context": 64, "max_resident": RESIDENT, "stall_timeout_s": 60.0} | storage
        self.engine = ServedEngine(self.server, qwen.path, stop_tokens=(), **options)
        self.open: dict[Key, Request] = {}
        self.known: dict[tuple[int, str], PolicyId] = {}
        self.old: list[PolicyId] = []  # beside the serving one
        self.waits: PolicyId | None = None  # for its flip
        self.samples = self.finished = self.resumed = self.flips = 0
        try:
            self.flip()
        except BaseException:
            self.engine.close()
            raise

    def moves(self, count: int) -> None:
        for _ in range(count):
            chance = self.rng.random()
            if chance < 0.4 and self.engine.active < ACTIVE:
                self.submit()
            elif chance < 0.46:
                self.with_one(self.engine.abort)
            elif chance < 0.56:
                self.with_one(self.take_out)
            elif chance < 0.59 and self.old:
                self.engine.rebind(self.rng.choice(self.old))
            elif chance < 0.66:
                self.flip()
            self.step()

    def submit(self) -> None:
        self.samples += 1
        length, new = self.rng.randint(2, 8), self.rng.randint(1, 14)
        request = self.qwen.request(
            self.samples, length, new, policy=self.any_policy(nones=6 if self.policies.whole else 2)
        )
        self.open[request.key] = request
        self.engine.submit(request)

    def any_policy(self, nones: int) -> PolicyId | None:
        """Of those under which a request may begin; or none, as if it were so many of them. What is pinned keeps
        weights of the whole model from their flip."""
        policies = [self.engine.serving] if self.policies.whole else [*self.engine.resident]
        return self.rng.choice([None] * nones + policies)

    def with_one(self, do: Any) -> None:
        if self.open:
            do(self.rng.choice(list(self.open)))

    def take_out(self, key: Key, resume: bool = True) -> None:
        """And go on with it at once, as if it had come back, under any policy."""
        before = self.engine.active
        prefix = self.engine.take_out(key)
        if self.engine.active == before:
            return  # it is done, and comes by the next step
        request = self.open.pop(key)
        if prefix is None:
            assert request.prefix is None
            prefix = Prefix(np.zeros(0, np.int32), np.zeros(0, np.float32), ())
        self.check(request, prefix.tokens, prefix.logprobs, prefix.versions, prefix.resumed)
        assert len(prefix.tokens) < request.sampling.max_new_tokens, "it is done"
        if resume and len(prefix.tokens):
            self.resumed += 1
            self.open[key] = request._replace(prefix=prefix._replace(policy=self.any_policy(nones=1)), policy=None)
            self.engine.submit(self.open[key])

    def flip(self) -> None:
        """Install the next policy, if there is room, and flip to it, if nothing is pinned to one that would end."""
        if self.waits is None and not self.install():
            return
        serving, new = self.engine.serving, self.waits
        assert new is not None
        pinned = self.policies.whole and any(each.policy == serving for each in self.open.values())
        try:
            self.engine.flip(new, self.way)
        except EngineError as error:
            if isinstance(error, EngineDied) or not pinned or "pinned" not in str(error):
                raise
            return
        self.waits, self.flips = None, self.flips + 1
        assert self.engine.serving == new
        if self.policies.whole:
            assert list(self.engine.resident) == [new]
        elif serving is not None:
            self.old.append(serving)

    def install(self) -> bool:
        for policy in self.old if len(self.engine.resident) == RESIDENT else ():
            if not self.engine.resident[policy]:
                self.old.remove(policy)
                self.engine.evict(policy)
                assert self.engine.first_token(policy) is None
                break
        if len(self.engine.resident) == RESIDENT:
            return False
        policy, path = self.policies.next()
        if policy in self.engine.resident:
            return False
        self.known[policy.version, policy.digest] = policy
        self.engine.install(policy, path)
        self.waits = policy
        return True

    def step(self) -> None:
        for completion in self.engine.step():
            self.take(completion)
        loaded = set(self.server.folders)
        assert self.policies.whole or loaded == {policy.short() for policy in self.engine.resident}

    def take(self, completion: Completion) -> None:
        request = self.open.pop(completion.key)
        self.check(request, completion.tokens, completion.logprobs, completion.versions, completion.resumed)
        if completion.finish == "length":
            self.finished += 1
            assert len(completion.tokens) == request.sampling.max_new_tokens
        else:
            assert completion.finish == "abort"

    def check(self, request: Request, tokens: Any, logprobs: Any, runs: Sequence[VersionRun], resumed: int) -> None:
        """Each token is of the version that it is said to be of, at the place where it is, after what is before it."""
        each = [(run.version, run.digest) for run in runs for _ in range(run.count)]
        assert tokens.tolist() == [version for version, _ in each], request
        assert set(each) <= self.known.keys()
        assert (-logprobs).tolist() == [len(request.prompt) + index for index in range(len(tokens))], request
        assert resumed == (len(request.prefix.tokens) if request.prefix else 0)
        if request.policy is not None:
            assert set(each[resumed:]) <= {(request.policy.version, request.policy.digest)}, "it was pinned"
        whole = request.prompt.tolist() + tokens.tolist()
        for ids in self.server.asked.pop(request.key, ()):
            assert ids == whole[: len(ids)], "what a call was to go on from"

    def all_out(self) -> None:
        """Who leaves has all that was begun: finished answers, and what was sampled of the others."""
        for completion in self.engine.finished():
            self.take(completion)
        for key in list(self.open):
            self.take_out(key, resume=False)

    def end(self) -> None:
        assert self.open == {}
        assert self.engine.active == 0
        assert set(self.engine.resident.values()) == {0}
        assert self.server.wrong == []


def drain(play: Play) -> None:
    while play.engine.active:
        play.step()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_with_adapters_each_token_is_what_it_says_and_nothing_is_lost(qwen, way, seed):
    play = Play(qwen, Adapters(qwen), way, seed)
    try:
        play.moves(MOVES)
        drain(play)
        play.end()
        assert min(play.finished, play.resumed, play.flips) > 3
    finally:
        play.engine.close()
    assert not any(folder.exists() for folder in play.server.folders.values())


@pytest.mark.parametrize("way", ["recompute", "continue"])
def test_with_weights_of_the_whole_model_too(qwen, tmp_path, way):
    play = Play(qwen, Weights(qwen, tmp_path), way, seed=3)
    try:
        play.moves(MOVES)
        drain(play)
        play.end()
        assert min(play.finished, play.resumed, play.flips) > 3
    finally:
        play.engine.close()


@pytest.mark.parametrize("how", ["died", "silent"])
@pytest.mark.parametrize(("way", "whole"), [*((way, False) for way in WAYS), ("recompute", True), ("continue", True)])
def test_of_a_server_that_dies_all_that_was_begun_is_there(qwen, tmp_path, monkeypatch, way, whole, how):
    play = Play(qwen, Weights(qwen, tmp_path) if whole else Adapters(qwen), way, seed=11)
    try:
        play.moves(play.rng.randint(20, 60))
        monkeypatch.setattr(served_calls, "CALL_S", 0.4)
        monkeypatch.setattr(served_engine, "RELOAD_S", 0.4)
        for name in ("run", "must"):
            monkeypatch.setattr(getattr(served_calls.ServerCalls, name), "__defaults__", (0.4,))
        play.engine._calls._stall_timeout_s = 1.0  # not before: a busy machine may stall for as long
        play.server.end(how)
        with pytest.raises(EngineDied):
            play.moves(10 * MOVES)
        play.all_out()
        play.end()
    finally:
        play.engine.close()

"""A node's engine under a thousand pushes, starts and aborts in any order: no use of a policy is lost count of.

Everything is the real engine on a tiny model; the pushes are faster than requests end, so flips wait for slots, time
out, and move requests.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from async_rl.version import PolicyId, token_versions
from inference.engine import Completion, EngineError, InFlight, Request
from inference.policies import PolicyFetched
from inference.serving import Serving

EVENTS = 1000
POLICIES = 6
FLIP_TIMEOUT_S = 3.0
TOLERANCE = 1e-4


class Churn:
    def __init__(self, tiny: Any, folder: Path, in_flight: InFlight, max_resident: int, seed: int) -> None:
        self.tiny, self.folder = tiny, folder
        self.engine = tiny.engine(versions=(), slots=4, max_resident=max_resident)
        self.asked: list[PolicyId] = []
        self.serving = Serving(
            self.engine, in_flight, FLIP_TIMEOUT_S, self.asked.append, self._fail,
            lambda request, why: self._fail(request.policy, why), lambda installed: None,
        )  # fmt: skip
        self.random = random.Random(seed)
        self.now = 0.0
        self.order = 0
        self.requests: dict[tuple[int, int], Request] = {}
        self.open: set[tuple[int, int]] = set()
        self.done: list[Completion] = []
        self.identity: dict[str, int] = {tiny.policy(version)[0].digest: version for version in range(POLICIES)}

    def _fail(self, policy: Any, why: str) -> None:
        raise AssertionError(f"{policy}: {why}")

    def push(self) -> None:
        """A new version of one of a few adapters: the version says when it came, the digest which weights it has."""
        self.order += 1
        self._fetched(self.tiny.policy(self.order % POLICIES), self.order, self.order)

    def bring(self) -> None:
        """What evaluation asked for comes."""
        if self.asked:
            wanted = self.asked.pop(0)
            self._fetched(self.tiny.policy(self.identity[wanted.digest]), wanted.version, 0)

    def _fetched(self, made: tuple[PolicyId, Path], version: int, order: int) -> None:
        path = Path(shutil.copy(made[1], self.folder / f"{version}-{self.random.random()}"))
        self.serving.fetched(PolicyFetched(PolicyId("main", version, made[0].digest), path, order, 1.0), self.now)

    def start(self, pinned: bool) -> None:
        number = len(self.requests)
        version = max(0, self.order - self.random.randrange(3))
        policy = PolicyId("main", version, self.tiny.policy(version % POLICIES)[0].digest) if pinned else None
        request = self.tiny.request(number, new=self.random.choice([1, 3, 12, 30]), policy=policy)
        self.requests[request.key] = request
        self.open.add(request.key)
        self.serving.submit(request)

    def abort(self) -> None:
        if self.open:
            key = self.random.choice(sorted(self.open))
            self.open.discard(key)
            self.engine.abort(key)
            self.serving.forget(key)

    def step(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 4.0])
        self.serving.advance(self.now)
        for completion in self.engine.step():
            self.open.discard(completion.key)
            self.done.append(completion)

    def check(self) -> None:
        assert len(self.engine.resident) <= self.engine.capabilities.resident_versions
        assert all(users >= 0 for users in self.engine.resident.values())
        assert self.engine.serving is None or self.engine.serving in self.engine.resident

    def check_served(self, completion: Completion) -> None:
        """Its tokens are of the policies that they are stamped with, by the oracle's word: never of the base."""
        request = self.requests[completion.key]
        stamped = set(completion.versions)
        assert all(run.digest == self.tiny.policy(run.version % POLICIES)[0].digest for run in stamped)
        assert request.policy is None or {run.version for run in stamped} <= {request.policy.version}
        for version in {run.version for run in stamped}:
            oracle = self.tiny.logprobs(version % POLICIES, request.prompt, completion.tokens, 1.0)
            places = token_versions(completion.versions) == version
            assert np.abs(oracle[places] - completion.logprobs[places]).max() < TOLERANCE


@pytest.mark.parametrize("max_resident", [2, 3])
@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_counts_return_to_zero_and_no_token_is_of_another_policy_than_its_stamp(
    qwen: Any, tmp_path: Path, in_flight: InFlight, max_resident: int
) -> None:
    churn = Churn(qwen, tmp_path, in_flight, max_resident, seed=max_resident)
    churn.push()
    pins = max_resident > 2  # evaluation under `finish` takes a slot of its own
    for _ in range(EVENTS):
        event = churn.random.random()
        if event < 0.15:
            churn.push()
        elif event < 0.3:
            churn.start(pinned=pins and churn.random.random() < 0.2)
        elif event < 0.45:
            churn.abort()
        elif event < 0.5:
            churn.bring()
        else:
            churn.step()
        churn.check()
    for key in sorted(churn.open)[::2]:
        churn.engine.abort(key)
        churn.serving.forget(key)
        churn.open.discard(key)
    for _ in range(200):
        churn.bring()
        churn.step()
        churn.check()
    assert churn.open == set()
    assert set(churn.engine.resident.values()) == {0}
    assert churn.order > 100
    assert len(churn.done) > 50
    kept_cache = in_flight == "continue"  # after such a flip no single policy can say what a token's probability was
    sampled = [each for each in churn.done if len(each.tokens) and not (kept_cache and len(each.versions) > 1)]
    for completion in sampled[:: max(1, len(sampled) // 40)]:
        churn.check_served(completion)


def test_a_policy_that_is_not_resident_is_an_error_and_not_the_base(qwen: Any) -> None:
    engine = qwen.engine(versions=(0,))
    with pytest.raises(EngineError, match="not resident"):
        engine.submit(qwen.request(1, policy=qwen.policy(1)[0]))
    with pytest.raises(EngineError, match="not resident"):
        engine.score(qwen.policy(1)[0], [qwen.prompt(0, 5)])

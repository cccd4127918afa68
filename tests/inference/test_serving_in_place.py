"""When a node whose engine has one copy of the weights flips: not while something is pinned to what it would end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from sketched_policies import SketchedPolicies
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.engine import Completion, EngineError, Request
from inference.policies import TRIES, PolicyFetched
from inference.serving import PARTING_S, Serving
from inference.torch_engine import TorchEngine


class House:
    """A serving with a clock of its own, and files of versions 0, 1, 2, …, each of which only follows on the last."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen3", vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, intermediate_size=24, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        self.folder = folder
        self.policies = SketchedPolicies(folder / "model", folder)
        self.engine = TorchEngine(
            folder / "model", slots=4, max_context=48, max_resident=2, device="cpu", dtype="float32",
            storage="float32", compile_mode="never",
        )  # fmt: skip
        self.pinned: set[PolicyId] = set()
        self.unstarted: list[tuple[int, str]] = []
        self.failed: list[str] = []
        self.asked: list[PolicyId] = []
        self.done: dict[int, Completion] = {}
        self.worked: list[str] = []
        self.comes_again = False
        self.now = 100.0
        self.serving = Serving(
            self.engine, "continue", 10.0, self.asked.append, lambda _, error: self.failed.append(error),
            lambda request, why: self.unstarted.append((request.key[1], why)), lambda _: None, lambda: self.pinned,
            again=lambda _: self.comes_again, working=self._work,
        )  # fmt: skip
        self.fetch()
        assert self.advance() == 0

    @contextmanager
    def _work(self, what: str) -> Iterator[None]:
        before = set(self.engine.resident), self.engine.serving
        yield
        self.worked.append(what)
        assert (set(self.engine.resident), self.engine.serving) != before

    def fetch(self, version: int | None = None) -> Path:
        """The next version comes, or one that was asked for: as a way from what serves."""
        if self.engine.serving is not None and version is None:
            self.policies.step()
        first = 0 if self.engine.serving is None else self.engine.serving.version + 1
        files = self.policies.main[first : None if version is None else version + 1]
        path = self.folder / f"way-{files[-1].policy.version}"
        path.mkdir()
        for number, file in enumerate(files):
            shutil.copy(file.path, path / f"{number:06}.safetensors")
        policy = files[-1].policy
        self.serving.fetched(PolicyFetched(policy, path, policy.version + 1 if version is None else 0, 5.0), self.now)
        return path

    def advance(self, seconds: float = 0.0) -> int | None:
        self.now += seconds
        flipped = self.serving.advance(self.now)
        return None if flipped is None else flipped.installed.policy.version

    def policy(self, version: int) -> PolicyId:
        return self.policies.main[version].policy

    def request(self, sample: int, pinned: int | None = None) -> Request:
        prompt = np.arange(5, dtype=np.int32)
        policy = None if pinned is None else self.policy(pinned)
        return Request((7, sample), prompt, SamplingParams(1.0, 8), sample, policy)

    def run(self) -> None:
        while self.engine.active:
            self.done |= {completion.key[1]: completion for completion in self.engine.step()}

    def versions(self, sample: int) -> list[int]:
        return [run.version for run in self.done[sample].versions]


@pytest.fixture
def house(tmp_path: Path) -> Callable[[], House]:
    return lambda: House(tmp_path)


def test_a_flip_waits_until_the_leases_pinned_to_what_serves_are_closed_and_a_moment_longer(
    house: Callable[[], House],
) -> None:
    """A lease is open while its answer is scored; when the buffer has the result it has the next one to give."""
    one = house()
    one.pinned = {one.policy(0)}
    one.serving.submit(one.request(1, pinned=0))
    path = one.fetch()
    assert one.advance() is None
    one.run()
    assert one.advance(5.0) is None  # it is scored
    one.pinned = set()
    assert one.advance(PARTING_S / 2) is None
    one.pinned = {one.policy(0)}  # the next lease
    one.serving.submit(one.request(2, pinned=0))
    assert one.advance(PARTING_S) is None
    one.run()
    one.pinned = set()
    assert one.advance(PARTING_S / 2) is None
    assert path.exists()
    assert one.advance(PARTING_S) == 1
    assert not path.exists()
    assert one.versions(1) == one.versions(2) == [0]
    assert one.failed == one.asked == []


def test_leases_pinned_to_anything_else_hold_up_no_flip(house: Callable[[], House]) -> None:
    one = house()
    one.fetch()
    one.pinned = {one.policy(1)}
    assert one.advance() == 1


def test_while_the_flip_waits_the_newest_replaces_what_waited_and_leads_from_what_serves(
    house: Callable[[], House],
) -> None:
    one = house()
    one.pinned = {one.policy(0)}
    paths = [one.fetch() for _ in range(3)]
    assert one.advance() is None
    assert [path.exists() for path in paths] == [False, False, True]
    one.pinned = set()
    assert one.advance(2 * PARTING_S) == 3
    assert one.failed == []


def test_a_request_pinned_to_what_waits_for_its_flip_starts_then(house: Callable[[], House]) -> None:
    one = house()
    one.pinned = {one.policy(0)}
    one.advance()
    one.fetch()
    one.serving.submit(one.request(1, pinned=1))
    assert one.engine.active == 0
    one.pinned = set()
    assert one.advance(2 * PARTING_S) == 1
    one.run()
    assert one.versions(1) == [1]


def test_a_policy_that_a_request_waits_for_has_its_turn_before_newer_ones(house: Callable[[], House]) -> None:
    """Evaluation of 2 while 0 serves: 1 is skipped, and 3 waits."""
    one = house()
    one.policies.step(), one.policies.step()
    one.serving.submit(one.request(1, pinned=2))
    one.pinned = {one.policy(2)}
    assert one.asked == [one.policy(2)]
    one.fetch()
    assert one.advance(9.0) is None  # the evaluated one is still on its way
    one.fetch(2)
    assert one.advance() == 2
    assert one.advance() is None
    one.run()
    assert one.versions(1) == [2]
    one.pinned = set()
    assert one.advance(PARTING_S / 2) is None
    assert one.advance(PARTING_S) == 3
    assert one.failed == one.unstarted == []


def test_a_policy_that_a_request_waits_for_is_not_replaced_by_a_newer_one(house: Callable[[], House]) -> None:
    one = house()
    one.fetch()
    one.serving.submit(one.request(1, pinned=1))
    one.fetch()
    assert one.advance() == 1
    one.run()
    assert one.advance() == 2
    assert one.versions(1) == [1]
    assert one.asked == one.failed == one.unstarted == []


def test_what_nobody_waits_for_any_more_is_let_go_of(house: Callable[[], House]) -> None:
    one = house()
    one.policies.step()
    one.serving.submit(one.request(1, pinned=1))
    one.serving.forget((7, 1))
    path = one.fetch(1)
    one.fetch()
    assert one.advance() == 2
    assert not path.exists()
    assert one.failed == one.unstarted == []


def test_a_policy_that_does_not_come_holds_up_nothing_and_its_requests_cannot_start(
    house: Callable[[], House],
) -> None:
    one = house()
    one.policies.step()
    one.serving.submit(one.request(1, pinned=1))
    one.fetch()
    assert one.advance() is None
    one.serving.fetch_failed(one.policy(1), "it is gone")
    assert one.advance() == 2
    assert one.unstarted == [(1, "it is gone")]


def test_a_request_pinned_to_a_policy_that_was_passed_fails_and_says_what_serves(
    house: Callable[[], House],
) -> None:
    one = house()
    one.fetch()
    assert one.advance() == 1
    with pytest.raises(EngineError, match=r"0-.* is gone, 1-.* serves"):
        one.serving.submit(one.request(1, pinned=0))
    assert one.asked == []


def test_a_request_in_flight_goes_on_under_the_new_weights(house: Callable[[], House]) -> None:
    one = house()
    one.serving.submit(one.request(1))
    for _ in range(3):
        one.engine.step()
    one.fetch()
    assert one.advance() == 1
    one.run()
    assert one.versions(1) == [0, 1]


def test_what_may_take_long_is_announced_as_work_so_that_a_slow_disk_does_not_end_the_node(
    house: Callable[[], House],
) -> None:
    one = house()
    assert one.worked == [f"{what} policy {one.policy(0).short()}" for what in ("installs", "flips to")]
    one.fetch()
    one.advance()
    assert one.worked[2:] == [f"{what} policy {one.policy(1).short()}" for what in ("installs", "flips to")]


def leads_from_1(one: House, order: int) -> PolicyFetched:
    """Version 2, as what changes version 1."""
    path = one.folder / "way-from-1"
    shutil.copy(one.policies.main[2].path, path)
    return PolicyFetched(one.policy(2), path, order, 5.0)


@pytest.mark.parametrize("comes_again", [True, False])
def test_a_way_from_weights_that_were_left_costs_no_request_that_waits_for_it_its_policy(
    house: Callable[[], House], comes_again: bool
) -> None:
    """Unless it was asked for too often; nor is it told as refused, which would be the end of this node's leases."""
    one = house()
    one.comes_again = comes_again
    one.policies.step(), one.policies.step()
    one.serving.submit(one.request(1, pinned=2))
    one.serving.fetched(leads_from_1(one, order=3), one.now)
    assert one.advance() is None
    assert one.asked == [one.policy(2)] * (2 if comes_again else 1)
    assert one.failed == []
    assert len(one.unstarted) == (0 if comes_again else 1)
    if comes_again:
        one.fetch(2)
        assert one.advance() == 2
        one.run()
        assert one.versions(1) == [2]


def test_what_requests_wait_for_is_asked_for_however_often_the_base_moves_up_to_a_bound(
    house: Callable[[], House],
) -> None:
    one = house()
    one.policies.step(), one.policies.step()
    one.serving.submit(one.request(1, pinned=2))
    for tries in range(1, TRIES + 1):
        assert one.asked == [one.policy(2)] * tries
        one.serving.fetched(leads_from_1(one, order=0), one.now)
        assert one.advance() is None
    assert one.asked == [one.policy(2)] * TRIES
    assert [sample for sample, _ in one.unstarted] == [1]
    assert one.failed == []
    one.serving.submit(one.request(2, pinned=2))
    one.serving.fetched(leads_from_1(one, order=0), one.now)
    assert one.advance() is None  # and it is counted anew
    one.fetch(2)
    assert one.advance() == 2
    assert [sample for sample, _ in one.unstarted] == [1]

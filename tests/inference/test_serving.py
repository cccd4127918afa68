"""Which policy a node serves, on a real engine: when a policy is installed, flipped to, waited for and evicted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from async_rl.policy.adapter import CONFIG_KEY, read_adapter
from async_rl.proof import CANARY
from async_rl.version import PolicyId, VersionRun
from inference.engine import Completion, InFlight, Installed, Request
from inference.policies import PolicyFetched
from inference.serving import Serving

TIMEOUT_S = 10.0
SLOTS = 4
LONG = 36  # tokens; such a request of the tests below is far from done when the others have started


class House:
    """A serving on an engine that serves nothing yet, with a clock of its own, and what it said to its node."""

    def __init__(self, tiny: Any, folder: Path, in_flight: InFlight = "finish", **options: Any) -> None:
        self.tiny, self.folder = tiny, folder
        self.engine = tiny.engine(versions=(), slots=SLOTS, **options)
        self.asked: list[PolicyId] = []
        self.failed: list[tuple[PolicyId, str]] = []
        self.unstarted: list[tuple[int, str]] = []
        self.held: list[Installed] = []
        self.done: dict[int, Completion] = {}
        self.now = 100.0
        self.serving = Serving(
            self.engine,
            in_flight,
            TIMEOUT_S,
            self.asked.append,
            lambda policy, error: self.failed.append((policy, error)),
            lambda request, why: self.unstarted.append((request.key[1], why)),
            self.held.append,
        )
        self._files = 0

    def policy(self, version: int) -> PolicyId:
        return self.tiny.policy(version)[0]

    def fetch(self, version: int, order: int | None = None) -> Path:
        """The puller hands over a policy; it is announced after all versions before it unless an order is given."""
        self._files += 1
        path = Path(shutil.copy(self.tiny.policy(version)[1], self.folder / f"{self._files}.safetensors"))
        fetched = PolicyFetched(self.policy(version), path, version + 1 if order is None else order, 5.0)
        self.serving.fetched(fetched, self.now)
        return path

    def advance(self, seconds: float = 0.0) -> int | None:
        """The version flipped to, if one was; at most `max_resident` policies are on the engine before and after."""
        self.now += seconds
        flipped = self.serving.advance(self.now)
        assert len(self.engine.resident) <= self.engine.capabilities.resident_versions
        return None if flipped is None else flipped.installed.policy.version

    def serve(self, *versions: int) -> None:
        for version in versions:
            self.fetch(version)
            assert self.advance() == version

    def start(self, sample: int, new: int = LONG, pinned: int | None = None) -> Request:
        """Submit a request and let it begin, unless its policy is not here."""
        policy = None if pinned is None else self.policy(pinned)
        request: Request = self.tiny.request(sample, new=new, policy=policy)
        self.serving.submit(request)
        for _ in range(SLOTS):  # the engine may let one request wait that long, to admit several at once
            self.step()
        return request

    def step(self) -> None:
        self.done |= {completion.key[1]: completion for completion in self.engine.step()}

    def fill(self, *versions: int) -> None:
        """Serve each version in turn and leave a long request under it, numbered like the version."""
        for version in versions:
            self.serve(version)
            self.start(version)

    def run(self, *samples: int) -> list[Completion]:
        """Advance and step as a node does, until these requests are done."""
        for _ in range(200):
            if self.done.keys() >= set(samples):
                return [self.done[sample] for sample in samples]
            self.advance()
            self.step()
        raise AssertionError(f"only {sorted(self.done)} are done")

    @property
    def resident(self) -> list[int]:
        return sorted(policy.version for policy in self.engine.resident)


@pytest.fixture
def house(qwen: Any, tmp_path: Path) -> Callable[..., House]:
    return lambda *arguments, **options: House(qwen, tmp_path, *arguments, **options)


def versions(completions: list[Completion]) -> list[list[int]]:
    """The versions that each was sampled under, in order."""
    return [[run.version for run in completion.versions] for completion in completions]


# --- in order --------------------------------------------------------------------------------------------------------


def test_nothing_is_served_before_the_first_policy_came(house: Callable[..., House]) -> None:
    one = house()
    one.start(0, new=3)
    assert one.advance() is None
    assert one.engine.serving is None
    one.serve(4)
    assert versions(one.run(0)) == [[4]]


def test_policies_are_served_in_the_order_of_their_announcement_and_their_files_go(house: Callable[..., House]) -> None:
    one = house()
    for version in (0, 1, 2, 3, 4):
        path = one.fetch(version)
        one.now += 2.0
        flipped = one.serving.advance(one.now)
        assert flipped is not None
        assert one.engine.serving == flipped.installed.policy == one.policy(version)
        assert len(flipped.installed.matched_modules) == len(one.tiny.linears)
        assert flipped.load_ms == pytest.approx(2005.0)
        assert not path.exists()
    assert one.resident == [2, 3, 4]


def test_what_was_announced_earlier_is_never_flipped_back_to_whatever_its_version(house: Callable[..., House]) -> None:
    one = house()
    one.fetch(3, order=5)
    assert one.advance() == 3
    one.fetch(4, order=4)
    assert one.advance() is None
    assert one.engine.serving == one.policy(3)
    one.fetch(1, order=6)  # announced later with a lower version: a trainer that went back to a checkpoint
    assert one.advance() == 1


def test_a_policy_that_is_resident_already_is_served_when_it_is_announced_again(house: Callable[..., House]) -> None:
    one = house()
    one.serve(0, 1)
    path = one.fetch(0, order=9)
    assert one.advance() == 0
    assert not path.exists()


# --- pinned requests -------------------------------------------------------------------------------------------------


def test_pinned_requests_wait_for_their_policy_which_is_asked_for_once_and_never_served(
    house: Callable[..., House],
) -> None:
    one = house()
    one.serve(3)
    for sample in (10, 11):
        one.start(sample, new=4, pinned=1)
    one.start(12, new=4)
    assert one.asked == [one.policy(1)]
    one.run(12)
    assert (set(one.done), one.engine.active) == ({12}, 0)
    one.fetch(1, order=0)
    assert one.advance() is None
    assert one.engine.serving == one.policy(3)
    for completion in one.run(10, 11):
        assert completion.versions == (VersionRun(1, one.policy(1).digest, 4),)
    one.start(13, new=2, pinned=1)  # it is here now
    assert one.asked == [one.policy(1)]
    assert versions(one.run(13)) == [[1]]


def test_a_pinned_policy_that_is_on_its_way_to_a_slot_is_not_asked_for(house: Callable[..., House]) -> None:
    one = house()
    one.fetch(0)
    one.start(10, new=2, pinned=0)
    assert one.asked == []
    assert versions(one.run(10)) == [[0]]


def test_a_cancelled_request_does_not_start_when_its_policy_comes(house: Callable[..., House]) -> None:
    one = house()
    one.serve(3)
    requests = [one.start(sample, new=2, pinned=1) for sample in (10, 11)]
    one.serving.forget(requests[0].key)
    one.fetch(1, order=0)
    one.run(11)
    assert (set(one.done), one.engine.active) == ({11}, 0)


def test_when_a_pinned_policy_cannot_be_had_its_requests_are_reported_and_no_others(
    house: Callable[..., House],
) -> None:
    one = house()
    one.serve(3)
    for sample, version in [(10, 1), (11, 1), (12, 0)]:
        one.start(sample, new=2, pinned=version)
    one.serving.fetch_failed(one.policy(1), "the store has it no longer")
    assert one.unstarted == [(10, "the store has it no longer"), (11, "the store has it no longer")]
    one.fetch(0, order=0)
    assert versions(one.run(12)) == [[0]]
    one.start(13, new=2, pinned=1)
    assert one.asked == [one.policy(1), one.policy(0), one.policy(1)]


def test_a_pinned_request_that_the_engine_refuses_is_reported_and_the_node_goes_on(house: Callable[..., House]) -> None:
    one = house()
    one.serve(3)
    one.serving.submit(one.tiny.request(10, length=48, policy=one.policy(1)))
    one.start(11, new=2, pinned=1)
    one.fetch(1, order=0)
    one.run(11)
    ((sample, why),) = one.unstarted
    assert sample == 10
    assert "leaves no room" in why


# --- broken files ----------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def unreadable(path: Path) -> None:
    path.write_bytes(b"no safetensors file")


def without_rank(path: Path) -> None:
    tensors, _ = read_adapter(path)
    save_file(tensors, path, metadata={CONFIG_KEY: "{}"})


@pytest.mark.parametrize("damage", [cut, unreadable, without_rank, Path.unlink])
def test_a_broken_file_leaves_the_old_policy_serving_and_is_reported(
    house: Callable[..., House], damage: Callable[[Path], None]
) -> None:
    one = house()
    one.serve(0)
    one.start(20, new=6)
    path = one.fetch(1)
    damage(path)
    assert one.advance() is None
    ((policy, error),) = one.failed
    assert policy == one.policy(1)
    assert policy.short() in error
    assert not path.exists()
    assert one.resident == [0]
    assert versions(one.run(20)) == [[0]]
    one.serve(2)


def test_another_policys_file_is_not_installed_under_this_ones_name(house: Callable[..., House]) -> None:
    one = house()
    one.serve(0)
    shutil.copy(one.tiny.policy(2)[1], one.fetch(1))
    assert one.advance() is None
    assert [policy for policy, _ in one.failed] == [one.policy(1)]
    assert "is not the announced" in one.failed[0][1]


def test_requests_pinned_to_a_broken_policy_are_reported_and_the_node_goes_on(house: Callable[..., House]) -> None:
    one = house()
    one.serve(3)
    one.start(10, new=2, pinned=1)
    cut(one.fetch(1, order=0))
    assert one.advance() is None
    assert [sample for sample, _ in one.unstarted] == [10]
    assert [policy for policy, _ in one.failed] == [one.policy(1)]
    one.serve(4)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_while_every_slot_is_used_the_newest_waits_and_takes_the_first_that_is_free(
    house: Callable[..., House],
) -> None:
    one = house()
    one.fill(0)
    one.serve(1)
    one.start(1, new=12)
    one.serve(2)
    path = one.fetch(3)
    for _ in range(3):
        assert one.advance() is None  # 2 serves, 0 and 1 are used
        one.step()
    assert path.exists()
    assert one.resident == [0, 1, 2]
    assert versions(one.run(1)) == [[1]]
    assert one.advance() == 3
    assert one.resident == [0, 2, 3]
    assert versions(one.run(0)) == [[0]]


def test_after_flip_timeout_the_oldest_policys_requests_go_on_under_the_serving_one_and_it_is_evicted(
    house: Callable[..., House],
) -> None:
    one = house()
    one.fill(0, 1, 2)
    one.fetch(3)
    assert one.advance(TIMEOUT_S - 0.1) is None
    assert one.resident == [0, 1, 2]
    assert one.advance(0.2) == 3
    assert one.resident == [1, 2, 3]
    done = one.run(0, 1, 2)
    assert versions(done) == [[0, 2], [1], [2]]
    assert [len(completion.tokens) for completion in done] == [LONG] * 3
    assert one.serving.recomputed == 1


def test_pinned_requests_are_never_recomputed_so_the_next_oldest_policy_goes(house: Callable[..., House]) -> None:
    one = house()
    one.serve(0)
    one.start(10, pinned=0)
    one.fill(1, 2)
    one.fetch(3)
    assert one.advance() is None
    assert one.advance(TIMEOUT_S) == 3
    assert one.resident == [0, 2, 3]
    assert versions(one.run(10, 1, 2)) == [[0], [1, 2], [2]]


def test_a_policy_that_pinned_requests_share_with_others_is_not_freed_by_recomputing_those(
    house: Callable[..., House],
) -> None:
    one = house()
    one.fill(0)
    one.start(10, pinned=0)
    one.fill(1)
    one.serve(2)
    one.fetch(3)
    assert one.advance(TIMEOUT_S) == 3
    assert one.resident == [0, 2, 3]
    assert versions(one.run(0, 10, 1)) == [[0, 2], [0], [1, 2]]


def test_when_only_pinned_requests_hold_the_other_slots_the_newest_waits_for_them(house: Callable[..., House]) -> None:
    one = house()
    for version, new in [(0, 16), (1, LONG)]:
        one.serve(version)
        one.start(10 + version, new=new, pinned=version)
    one.serve(2)
    one.fetch(3)
    assert one.advance(10 * TIMEOUT_S) is None
    assert versions(one.run(10)) == [[0]]
    assert one.engine.serving == one.policy(2)
    assert one.advance() == 3
    assert one.resident == [1, 2, 3]
    assert versions(one.run(11)) == [[1]]


def test_a_newer_policy_replaces_one_that_waits(house: Callable[..., House]) -> None:
    one = house()
    one.fill(0, 1, 2)
    overtaken = one.fetch(3)
    assert one.advance() is None
    path = one.fetch(4)
    assert not overtaken.exists()
    assert path.exists()
    assert one.advance(TIMEOUT_S) == 4
    assert one.resident == [1, 2, 4]
    assert one.failed == []


def test_the_newest_inherits_the_patience_of_those_it_replaced(house: Callable[..., House]) -> None:
    """Of a trainer that publishes faster than flip_timeout, something is served all the same."""
    one = house()
    one.fill(0, 1, 2)
    for version in (3, 4, 5):
        one.fetch(version)
        assert one.advance(0.3 * TIMEOUT_S) is None
    one.fetch(6)
    one.now += 0.1 * TIMEOUT_S
    flipped = one.serving.advance(one.now)
    assert flipped is not None
    assert flipped.installed.policy == one.policy(6)
    assert flipped.load_ms == pytest.approx(5.0 + 0.1 * TIMEOUT_S * 1e3)  # its own, not its predecessors'


def test_requests_pinned_to_a_policy_that_was_overtaken_in_the_queue_get_it_all_the_same(
    house: Callable[..., House],
) -> None:
    one = house()
    one.fill(0, 1, 2)
    one.fetch(3)
    one.start(10, new=2, pinned=3)
    assert one.asked == []
    one.fetch(4)
    assert one.asked == [one.policy(3)]
    assert one.advance(TIMEOUT_S) == 4
    one.fetch(3, order=0)
    assert one.advance(TIMEOUT_S) is None
    assert versions(one.run(10)) == [[3]]
    assert one.engine.serving == one.policy(4)


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_requests_that_follow_every_flip_hold_no_slot(house: Callable[..., House], in_flight: InFlight) -> None:
    one = house(in_flight, max_resident=2)
    one.fill(0, 1, 2, 3)
    assert one.resident == [2, 3]
    assert versions(one.run(0, 1, 2, 3)) == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]


def test_a_canary_is_shown_before_the_first_policy_and_taken_off_again_and_never_serves(
    house: Callable[..., House],
) -> None:
    one = house(max_resident=2)
    policy, path = one.tiny.policy(4)
    canary = PolicyId(CANARY, 0, policy.digest)
    one.serving.fetched(PolicyFetched(canary, Path(shutil.copy(path, one.folder / "canary")), 0, 1.0), one.now)
    one.fetch(0)
    assert one.advance() == 0
    assert [installed.policy for installed in one.held] == [canary]
    assert one.held[0].matched_modules == tuple(sorted(one.tiny.linears))
    assert one.engine.serving == one.policy(0)
    assert one.resident == [0]


def test_a_policy_that_evaluation_pins_is_shown_too_before_its_first_token(house: Callable[..., House]) -> None:
    one = house()
    one.serve(0)
    one.start(5, new=2, pinned=3)
    one.fetch(3, order=0)
    one.advance()
    assert [installed.policy for installed in one.held] == [one.policy(3)]
    assert not one.done
    assert versions(one.run(5)) == [[3]]

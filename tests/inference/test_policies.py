"""Policies on their way to a node: the puller against the real store, over a real link."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from store_house import House, data_of, policy, upload_of, wait_for

from async_rl.errors import AsyncRLError
from async_rl.proof import CANARY
from async_rl.version import PolicyId
from async_rl.wire.link import LinkRefused
from async_rl.wire.messages import CHUNK_BYTES, Pull, Stop
from inference import policies
from inference.engine import PolicyContent
from inference.policies import PolicyFetchFailed

PATIENCE_S = 60.0


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


# --- the newest ------------------------------------------------------------------------------------------------------


def test_a_policy_of_several_megabytes_comes_in_chunks_and_is_the_same_to_the_byte(house: House) -> None:
    node = house.node()
    size = 6 * CHUNK_BYTES + 12345
    data = house.upload(1, data_of(1, size))
    fetched = node.expect(1, data)
    assert fetched.order == 1
    assert fetched.fetch_ms > 0
    assert [(pull.offset, pull.count) for pull in house.store.pulls] == [
        (start, CHUNK_BYTES) for start in range(0, size, CHUNK_BYTES)
    ]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_sizes_at_the_edge_of_a_chunk_come_whole(house: House, size: int) -> None:
    node = house.node()
    node.expect(1, house.upload(1, data_of(1, size)))
    assert len(house.store.pulls) == max(1, -(-size // CHUNK_BYTES))


def test_policies_come_one_after_another_with_rising_order(house: House) -> None:
    node = house.node()
    orders = [node.expect(version, house.upload(version, data_of(version))).order for version in (0, 1, 2)]
    assert orders == [1, 2, 3]


def test_a_late_joiner_hears_of_the_newest_and_of_no_other(house: House) -> None:
    for version in (0, 1):
        house.upload(version, data_of(version))
    node = house.node()
    assert node.expect(1, data_of(1)).order == 2
    node.expect(2, house.upload(2, data_of(2)))


def test_of_several_announcements_that_came_together_only_the_newest_is_fetched(house: House) -> None:
    link = house.link("node", "node")
    for version in (1, 2, 3):
        house.upload(version, data_of(version))
    wait_for(lambda: link._arrived.qsize() >= 3, "the announcements")
    node = house.node(link)
    assert node.expect(3, data_of(3)).order == 3
    assert {pull.policy for pull in house.store.pulls} == {policy(3)}


def test_what_is_overtaken_while_another_comes_in_is_skipped(house: House) -> None:
    """2, 3 and 4 are stored between two chunks of 1, and 0 is asked for; then 1 is complete, and 4 is next."""

    def overtake(pull: Pull) -> None:
        house.store.before_pull = overtake if pull.offset == 0 else None
        if pull.offset:
            node.puller.ask(policy(0))
            for version in (2, 3, 4):
                house.store._on_upload("trainer", upload_of(version, data_of(version)), [memoryview(data_of(version))])

    for version in (0, 1):
        house.pin(version)
    house.upload(0, data_of(0))
    node = house.node()
    node.expect(0, data_of(0))
    house.store.before_pull = overtake
    node.expect(1, house.upload(1, data_of(1, 3 * CHUNK_BYTES)))
    assert node.expect(4, data_of(4)).order == 5
    assert node.expect(0, data_of(0)).order == 0
    assert {pull.policy for pull in house.store.pulls} == {policy(0), policy(1), policy(4)}


# --- older ones ------------------------------------------------------------------------------------------------------


def test_an_older_policy_that_is_pinned_comes_when_it_is_asked_for(house: House) -> None:
    old = house.upload(0, data_of(0, CHUNK_BYTES + 5))
    house.pin(0)
    for version in range(1, 6):
        house.upload(version, data_of(version))
    node = house.node()
    node.expect(5, data_of(5))
    node.puller.ask(policy(0))
    assert node.expect(0, old).order == 0
    node.expect(6, house.upload(6, data_of(6)))


def test_of_what_the_store_has_dropped_the_node_hears_that_and_the_next_policy_comes(house: House) -> None:
    for version in range(5):
        house.upload(version, data_of(version))
    node = house.node()
    node.expect(4, data_of(4))
    node.puller.ask(policy(1))
    assert "the store does not have it" in node.expect_failure(1)
    node.puller.ask(policy(77))
    assert "the store does not have it" in node.expect_failure(77)
    node.expect(5, house.upload(5, data_of(5)))


def test_a_policy_that_is_dropped_while_it_comes_in_fails_and_the_newest_comes(house: House) -> None:
    def overtake(pull: Pull) -> None:
        if pull.offset == 2 * CHUNK_BYTES:
            house.store.before_pull = None
            house.store._on_upload("trainer", upload_of(9, data_of(9)), [memoryview(data_of(9))])

    house.store.before_pull = overtake
    node = house.node()
    house.upload(1, data_of(1, 8 * CHUNK_BYTES))
    assert "the store does not have it" in node.expect_failure(1)
    node.expect(9, data_of(9))


# --- damage ----------------------------------------------------------------------------------------------------------


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "says"), [(flip_a_byte, "arrived damaged"), (cut_off_the_end, "the store sent")])
def test_a_file_that_was_damaged_on_the_stores_disk_is_not_handed_over(
    house: House, damage: Callable[[Path], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 60.0)
    house.upload(1, data_of(1, 3 * CHUNK_BYTES))
    damage(house.file(1))
    node = house.node()
    assert says in node.expect_failure(1)
    node.expect(2, house.upload(2, data_of(2)))


def test_a_failed_policy_may_be_asked_for_again_and_chunks_of_the_first_try_do_no_harm(house: House) -> None:
    """When the second chunk is found to be short, three more have been asked for, and are answered with nothing."""
    data = house.upload(1, data_of(1, 6 * CHUNK_BYTES))
    path = house.file(1)
    path.write_bytes(data[: 3 * CHUNK_BYTES // 2])

    def repair(pull: Pull) -> None:
        if pull.offset == 0 and house.store.pulls:
            path.write_bytes(data)

    house.store.before_pull = repair
    node = house.node()
    node.expect_failure(1)
    node.puller.ask(policy(1))
    node.expect(1, data)


def test_a_disk_that_takes_no_more_is_a_failure_of_that_policy_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 60.0)
    shutil.rmtree(house.scratch)
    node = house.node()
    house.upload(1, data_of(1))
    assert "No such file or directory" in node.expect_failure(1)
    house.scratch.mkdir()
    node.expect(2, house.upload(2, data_of(2)))


def test_the_newest_is_asked_for_again_when_it_did_not_come_and_keeps_its_order(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing newer need ever come to a node whose disk was full for a moment."""
    monkeypatch.setattr(policies, "RETRY_S", 0.05)
    node = house.node()
    before = node.expect(1, house.upload(1, data_of(1)))
    shutil.rmtree(house.scratch)
    data = house.upload(2, data_of(2))
    node.expect_failure(2)
    house.scratch.mkdir()
    fetched = node.next()
    while isinstance(fetched, PolicyFetchFailed):
        fetched = node.next()
    assert (fetched.policy, fetched.path.read_bytes()) == (policy(2), data)
    assert fetched.order == before.order + 1


def test_what_stays_damaged_is_asked_for_a_few_times_and_then_no_more(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 0.02)
    house.upload(1, data_of(1))
    flip_a_byte(house.file(1))
    node = house.node()
    for number in range(policies.TRIES):
        failed = node.next()
        assert "arrived damaged" in failed.error
        assert failed.again == (number < policies.TRIES - 1)
    asked = len(house.store.pulls)
    time.sleep(0.5)
    assert len(house.store.pulls) == asked
    assert node.inbox.empty()
    node.expect(2, house.upload(2, data_of(2)))


def test_what_the_disk_does_not_take_is_asked_for_until_it_does_at_ever_longer_intervals(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 0.02)
    monkeypatch.setattr(policies, "LONGEST_RETRY_S", 0.16)
    begun, fetch = [], policies.PolicyPuller._fetch

    def noted(puller: policies.PolicyPuller, attempt: Any) -> Any:
        begun.append(time.monotonic())
        return fetch(puller, attempt)

    monkeypatch.setattr(policies.PolicyPuller, "_fetch", noted)
    shutil.rmtree(house.scratch)
    node = house.node()
    data = house.upload(1, data_of(1))
    for _ in range(policies.TRIES + 1):
        assert node.next().again
    waited = [later - earlier for earlier, later in pairwise(begun[: policies.TRIES + 1])]
    assert all(wait > 0.9 * least for wait, least in zip(waited, (0.02, 0.04, 0.08, 0.16, 0.16), strict=True))
    house.scratch.mkdir()
    failed = node.next()
    while isinstance(failed, PolicyFetchFailed):
        failed = node.next()
    assert (failed.path.read_bytes(), failed.tries) == (data, 1)


def test_one_who_waits_for_the_newest_that_did_not_come_hears_nothing_until_it_has(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 60.0)
    monkeypatch.setattr(policies, "LONGEST_RETRY_S", 60.0)
    shutil.rmtree(house.scratch)
    node = house.node()
    data = house.upload(1, data_of(1))
    node.expect_failure(1)
    node.puller.ask(policy(1))
    wait_for(lambda: node.puller._again is not None and node.puller._again.asked, "the puller to see who waits")
    house.scratch.mkdir()
    node.puller._again = node.puller._again._replace(due=0.0)
    assert node.expect(1, data).order == 1
    time.sleep(0.3)
    assert node.inbox.empty()


def test_one_who_waits_for_the_newest_that_did_not_come_gets_it_after_a_newer_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 60.0)
    monkeypatch.setattr(policies, "LONGEST_RETRY_S", 60.0)
    shutil.rmtree(house.scratch)
    node = house.node()
    data = house.upload(1, data_of(1))
    node.expect_failure(1)
    node.puller.ask(policy(1))
    wait_for(lambda: node.puller._again is not None and node.puller._again.asked, "the puller to see who waits")
    house.scratch.mkdir()
    node.expect(2, house.upload(2, data_of(2)))
    assert node.expect(1, data).order == 0


def test_of_what_is_asked_for_again_a_newer_one_takes_the_place(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "RETRY_S", 60.0)
    house.upload(1, data_of(1))
    flip_a_byte(house.file(1))
    node = house.node()
    node.expect_failure(1)
    fetched = node.expect(2, house.upload(2, data_of(2)))
    monkeypatch.setattr(policies, "RETRY_S", 0.3)
    assert not node.puller.again(fetched._replace(tries=policies.TRIES))
    assert not node.puller.again(fetched._replace(order=0))
    assert node.puller.again(fetched._replace(order=1))  # overtaken: nobody asks
    time.sleep(0.6)
    assert node.inbox.empty()
    assert node.puller.again(fetched)
    again = node.expect(2, data_of(2))
    assert (again.order, again.tries) == (fetched.order, 2)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_link_that_ends_is_the_last_that_the_node_hears_and_no_half_file_stays(house: House) -> None:
    def send_away(pull: Pull) -> None:
        if pull.offset == CHUNK_BYTES:
            house.server.disconnect("node", "the run goes on without you")

    house.store.before_pull = send_away
    node = house.node()
    house.upload(1, data_of(1, 3 * CHUNK_BYTES))
    ended = node.next()
    assert isinstance(ended, LinkRefused)
    assert "without you" in str(ended)
    assert list(house.scratch.iterdir()) == []
    assert node.inbox.empty()


def test_what_a_store_that_was_started_again_announces_is_newer_than_all_before(house: House) -> None:
    """It counts its announcements from 1 again, and so does one that has only forgotten this node."""
    node = house.node()
    house.upload(1, data_of(1))
    before = node.next()
    house.kill()
    house.open()
    data = house.upload(1, data_of(1))
    again = node.next()
    assert (again.policy, again.path.read_bytes()) == (policy(1), data)
    assert again.order > before.order


def test_a_puller_that_is_closed_says_nothing_more_and_does_so_at_once(house: House) -> None:
    node = house.node()
    node.expect(1, house.upload(1, data_of(1)))
    node.puller.close(PATIENCE_S)
    assert not node.puller._thread.is_alive()
    house.upload(2, data_of(2))
    assert node.inbox.empty()


def test_a_puller_that_has_the_engine_read_a_large_policy_holds_up_the_end_no_longer_than_it_may(house: House) -> None:
    """A node that is killed, as its grace is over, leaves a folder as large as the model."""
    reading, go_on = threading.Event(), threading.Event()

    def read(policy: PolicyId, path: Path) -> PolicyContent:
        reading.set()
        go_on.wait(PATIENCE_S)
        return PolicyContent()

    node = house.node(read=read)
    house.upload(1, data_of(1))
    assert reading.wait(PATIENCE_S)
    node.puller.close(0.2)
    assert node.puller._thread.is_alive()  # in `read`, and nobody waits for it
    shutil.rmtree(house.scratch)
    go_on.set()
    node.puller._thread.join(PATIENCE_S)
    assert not node.puller._thread.is_alive()
    assert not house.scratch.exists()


def test_a_puller_that_is_closed_neither_has_a_policy_read_nor_begins_another_file(house: House) -> None:
    read: list[PolicyId] = []

    def note(policy: PolicyId, path: Path) -> PolicyContent:
        read.append(policy)
        return PolicyContent()

    def close(pull: Pull) -> None:
        node.puller._closing.set()
        node.puller._closed.set()

    node = house.node(read=note)
    house.store.before_pull = close
    house.upload(1, data_of(1))
    node.puller._thread.join(PATIENCE_S)
    assert not node.puller._thread.is_alive()
    with pytest.raises(AsyncRLError, match="the node ends before"):
        node.puller._files.pull(policy(1), house.scratch / "late")
    assert read == list(house.scratch.iterdir()) == []


def test_a_puller_that_hears_of_the_runs_end_completes_what_it_has_begun_and_ends(house: House) -> None:
    def end(pull: Pull) -> None:
        if pull.offset == CHUNK_BYTES:
            house.server.send("node", Stop("the run is over"))

    house.store.before_pull = end
    node = house.node()
    node.expect(1, house.upload(1, data_of(1, 3 * CHUNK_BYTES)))
    house.upload(2, data_of(2))
    node.puller._thread.join(PATIENCE_S)
    assert not node.puller._thread.is_alive()
    assert node.inbox.empty()


# --- the canary ------------------------------------------------------------------------------------------------------


def test_the_canary_comes_before_any_policy_whenever_a_node_joins_and_once(house: House) -> None:
    canary, data = PolicyId(CANARY, 0, "c" * 64), data_of(99)
    early = house.node()
    house.upload_as(canary, data)
    house.upload(0, data_of(0))
    for name in ("node", "late"):
        node = early if name == "node" else house.node(house.link("node", name))
        fetched = node.next()
        assert (fetched.policy, fetched.order, fetched.path.read_bytes()) == (canary, 0, data)
        assert node.expect(0, data_of(0)).order == 1
    house.upload_as(canary, data)  # by a trainer that was started again
    house.upload(1, data_of(1))
    assert early.expect(1, data_of(1)).order == 2


def test_a_canary_that_did_not_come_is_asked_for_again_and_nothing_else_before(house: House) -> None:
    canary = PolicyId(CANARY, 0, "c" * 64)
    house.upload_as(canary, data_of(99))
    house.upload(0, data_of(0))
    (path,) = house.files.glob("0-cccc*.policy")
    hidden = path.rename(path.with_suffix(".hidden"))
    node = house.node()
    failed = node.next()
    assert isinstance(failed, PolicyFetchFailed)
    assert failed.policy == canary
    hidden.rename(path)
    fetched = node.next()
    while isinstance(fetched, PolicyFetchFailed):
        fetched = node.next()
    assert fetched.policy == canary
    node.expect(0, data_of(0))

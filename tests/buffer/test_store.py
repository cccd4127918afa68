"""What the policy store keeps, and that what it announces is whole and durable."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import PolicyId
from async_rl.wire.messages import Upload
from buffer.policy_files import PolicyFiles
from buffer.routes import StoredPolicy, expired


def policy(version: int, mark: str = "a") -> PolicyId:
    return PolicyId("main", version, (mark * 64)[:64])


def upload(identity: PolicyId, data: bytes) -> Upload:
    return Upload(identity, "lora", len(data), hashlib.sha256(data).hexdigest())


@given(
    versions=st.lists(st.integers(0, 30), min_size=1, unique=True),
    pins=st.sets(st.integers(0, 30)),
    bound=st.integers(0, 6),
)
def test_nothing_that_a_trajectory_within_the_bound_or_an_evaluation_needs_is_let_go(versions, pins, bound):
    stored = [StoredPolicy(policy(v), "lora", 1, "", order) for order, v in enumerate(versions, start=1)]
    gone = {entry.policy.version for entry in expired(stored, [policy(v) for v in pins], bound)}
    newest = versions[-1]
    kept = set(versions) - gone
    assert newest in kept
    assert {v for v in versions if v >= newest - bound - 1} <= kept
    assert pins & set(versions) <= kept
    assert all(v < newest - bound - 1 for v in gone)


def test_a_stored_policy_is_on_disk_whole_and_in_the_index_before_add_returns(tmp_path):
    files = PolicyFiles(tmp_path / "store", "run1", 4)
    data = bytes(range(256)) * 100
    entry = files.add(upload(policy(3), data), memoryview(data))
    assert files.newest == entry
    assert files.read(policy(3), 0, 1 << 20) == data
    assert files.read(policy(3), 10, 5) == data[10:15]
    line = json.loads((tmp_path / "store" / "index.jsonl").read_text())
    assert line == ["run1", ["main", 3, "a" * 64], "lora", len(data), entry.sha256, entry.order, None]
    assert list((tmp_path / "store").glob("*.part")) == []


def test_bytes_that_are_not_those_announced_are_refused_and_nothing_changes(tmp_path):
    files = PolicyFiles(tmp_path, "run1", 4)
    data = b"adapter"
    with pytest.raises(ValueError, match="not those announced"):
        files.add(upload(policy(1), data), memoryview(b"adaptor"))
    with pytest.raises(ValueError, match="more than the 6 bytes announced"):
        files.add(upload(policy(1), data[:-1]), memoryview(data))
    assert files.newest is None
    assert list(tmp_path.iterdir()) == []


def test_old_versions_leave_the_disk_and_pinned_ones_stay(tmp_path):
    files = PolicyFiles(tmp_path, "run1", 1)
    for version in range(6):
        data = str(version).encode()
        files.add(upload(policy(version), data), memoryview(data))
        if version == 1:
            files.pin(policy(1), True)
    assert {int(path.name.split("-")[0]) for path in tmp_path.glob("*.policy")} == {1, 3, 4, 5}
    files.pin(policy(1), False)
    assert {int(path.name.split("-")[0]) for path in tmp_path.glob("*.policy")} == {3, 4, 5}
    assert files.read(policy(1), 0, 10) is None


def test_a_policy_written_over_an_expired_one_is_whole_whichever_is_longer(tmp_path):
    files = PolicyFiles(tmp_path, "run1", 0)
    sizes = (5000, 20000, 100, 0, 30000, 7, 4096)
    for version, size in enumerate(sizes):
        data = bytes([version + 1]) * size
        files.add(upload(policy(version), data), memoryview(data))
        assert files.read(policy(version), 0, 1 << 20) == data
        if version:
            assert files.read(policy(version - 1), 0, 1 << 20) == bytes([version]) * sizes[version - 1]
    kept = {f"{version}-{'a' * 64}-main.policy" for version in (5, 6)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"index.jsonl", "expired.part"}


def test_a_refused_upload_leaves_what_is_served_as_it_was(tmp_path):
    files = PolicyFiles(tmp_path, "run1", 0)
    for version in range(3):
        data = str(version).encode() * 100
        files.add(upload(policy(version), data), memoryview(data))
    with pytest.raises(ValueError, match="not those announced"):
        files.add(upload(policy(3), b"3" * 100), memoryview(b"4" * 100))
    assert files.newest is not None
    assert files.newest.policy == policy(2)
    assert [files.read(policy(version), 0, 1000) for version in range(4)] == [None, b"1" * 100, b"2" * 100, None]
    assert list(tmp_path.glob("*.part")) == []


def test_a_store_that_starts_again_serves_nothing_of_an_earlier_session(tmp_path: Path):
    data = b"x"
    PolicyFiles(tmp_path, "run1", 1).add(upload(policy(7), data), memoryview(data))
    again = PolicyFiles(tmp_path, "run1", 1)
    assert again.newest is None
    assert list(tmp_path.glob("*.policy")) == []


def test_the_same_policy_again_is_stored_and_announced_once(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    first = files.add(upload(policy(3), b"x"), memoryview(b"x"))
    assert files.add(upload(policy(3), b"x"), memoryview(b"x")) == first
    assert files.newest_order == 1
    again = PolicyFiles(tmp_path, "run1", 4, keep=True)
    assert again.newest == first
    assert list(again.sizes) == [policy(3)]
    assert again.newest_order == 1


def test_what_was_stored_again_is_the_last_also_for_a_store_that_starts_again(tmp_path: Path) -> None:
    """A trainer that has gone back to version 1 begins another past there, and nobody pins it any more."""
    files = PolicyFiles(tmp_path, "run1", 0)
    files.pin(policy(1), True)
    for version in (0, 1, 2, 3, 4, 1):
        files.add(upload(policy(version), b"x"), memoryview(b"x"))
    for each in (PolicyFiles(tmp_path, "run1", 0, keep=True), files):
        assert [identity.version for identity in each.sizes] == [3, 4, 1]
        assert each.newest is not None
        assert each.newest.policy == policy(4)
        each.pin(policy(1), False)
        assert each.read(policy(1), 0, 9) == b"x"


def test_a_version_trained_again_is_kept_and_not_announced_until_its_version_passes_the_highest(
    tmp_path: Path,
) -> None:
    """A trainer goes back from 12 to 10, and comes out with other digests: nodes serve the old 12 until the 13."""
    files = PolicyFiles(tmp_path, "run1", 4)
    for version in (10, 11, 12):
        files.add(upload(policy(version), b"old"), memoryview(b"old"))
    orders = [files.add(upload(policy(version, "b"), b"new"), memoryview(b"new")).order for version in (10, 11, 12, 13)]
    assert orders == [0, 0, 0, 4]
    assert files.newest is not None
    assert files.newest.policy == policy(13, "b")
    assert files.read(policy(11, "b"), 0, 9) == b"new"
    assert files.read(policy(11), 0, 9) == b"old"


@settings(max_examples=30)
@given(versions=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ab")), max_size=20))
def test_what_is_announced_later_has_the_higher_version(
    versions: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = PolicyFiles(tmp_path_factory.mktemp("store"), "run1", 3)
    announced: dict[int, int] = {}
    for version, mark in versions:
        data = f"{version}{mark}".encode()
        entry = files.add(upload(policy(version, mark), data), memoryview(data))
        if entry.order:
            announced[entry.order] = version
    rising = [announced[order] for order in sorted(announced)]
    assert rising == sorted(set(rising))


def test_the_canary_is_kept_for_good_and_is_never_the_newest(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 0)
    canary = PolicyId("canary", 0, "c" * 64)
    files.add(Upload(canary, "canary", 1, hashlib.sha256(b"c").hexdigest()), memoryview(b"c"))
    assert files.newest is None
    for version in range(5):
        files.add(upload(policy(version), b"x"), memoryview(b"x"))
    assert files.newest is not None
    assert files.newest.policy == policy(4)
    assert files.canary is not None
    assert files.canary.policy == canary
    assert files.read(canary, 0, 9) == b"c"


def test_none_of_several_pins_is_lost_while_they_are_told_again_one_by_one(tmp_path: Path) -> None:
    """A trainer does so when it, or the store, has been started again."""
    files = PolicyFiles(tmp_path, "run1", 0)
    files.pin(policy(1), True)
    files.pin(policy(2), True)
    for version in range(6):
        files.add(upload(policy(version), b"x"), memoryview(b"x"))
    files.forget_pins()
    for version in (1, 2):
        files.pin(policy(version), True)
    for version in (6, 7):
        files.add(upload(policy(version), b"x"), memoryview(b"x"))
    assert [files.get(policy(version)) is not None for version in range(8)] == [v in (1, 2, 6, 7) for v in range(8)]


def test_what_only_a_trainer_that_is_gone_has_pinned_is_let_go(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 0)
    files.pin(policy(0), True)
    for version in range(3):
        files.add(upload(policy(version), b"x"), memoryview(b"x"))
    files.forget_pins()
    files.add(upload(policy(3), b"x"), memoryview(b"x"))
    assert files.get(policy(0)) is not None  # the trainer may pin it too, and the link have sent this before
    files.add(upload(policy(4), b"x"), memoryview(b"x"))
    assert files.get(policy(0)) is None

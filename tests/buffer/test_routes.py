"""Which files lead to a policy, compared with all ways there are; and that what is let go of is not on any of them."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import PolicyId
from async_rl.wire.messages import BASE, FACTORS, SNAPSHOT, Upload
from buffer.policy_files import PolicyFiles
from buffer.routes import Routes, StoredPolicy, expired, weights

SMALL, LARGE, NOTHING = 10, 200, 1


def main(version: int, mark: str = "a") -> PolicyId:
    return PolicyId("main", version, mark * 64)


def snapshot(version: int, mark: str = "a") -> PolicyId:
    return PolicyId(SNAPSHOT, version, mark * 64)


def update(version: int, mark: str = "a", parent: PolicyId | None = None, size: int = SMALL) -> StoredPolicy:
    return StoredPolicy(main(version, mark), FACTORS, size, "", version, parent or main(version - 1, mark))


def base() -> StoredPolicy:
    return StoredPolicy(main(0), BASE, NOTHING, "", 1)


def whole(version: int, mark: str = "a") -> StoredPolicy:
    return StoredPolicy(snapshot(version, mark), SNAPSHOT, LARGE, "", 0)


def versions(route: tuple[StoredPolicy, ...] | None) -> list[str] | None:
    return None if route is None else [f"{entry.policy.name[0]}{entry.policy.version}" for entry in route]


CHAIN = [base(), *(update(version) for version in range(1, 31)), whole(10), whole(20)]


@pytest.mark.parametrize(
    ("have", "target", "way"),
    [
        (28, 30, ["m29", "m30"]),
        (30, 30, []),
        (None, 30, ["s20", *(f"m{version}" for version in range(21, 31))]),  # 300 bytes; from the base it is 301
        (None, 12, ["m0", *(f"m{version}" for version in range(1, 13))]),
        (3, 30, [f"m{version}" for version in range(4, 31)]),  # 270 bytes: fewer than with a snapshot
        (25, 22, ["s20", "m21", "m22"]),  # the past is no way back
        (None, 0, ["m0"]),
        (None, 31, None),
    ],
)
def test_the_way_with_the_fewest_bytes(have: int | None, target: int, way: list[str] | None) -> None:
    assert versions(Routes(CHAIN).to(main(target), None if have is None else main(have))) == way


def test_a_snapshot_has_the_weights_of_the_policy_of_its_version_and_digest() -> None:
    assert versions(Routes([whole(20), update(21)]).to(main(20), None)) == ["s20"]
    assert versions(Routes([whole(20), update(21)]).to(main(21), snapshot(20))) == ["m21"]


def test_an_adapter_is_its_own_way_and_whoever_has_it_needs_nothing() -> None:
    routes = Routes([StoredPolicy(main(version), "lora", 5, "", version) for version in (1, 2)])
    assert versions(routes.to(main(2), main(1))) == ["m2"]
    assert versions(routes.to(main(2), main(2))) == []


def test_the_updates_of_a_lineage_that_was_given_up_lead_nowhere_else() -> None:
    """The trainer went back from 53 to 50, and comes out with other digests."""
    old = [whole(50), *(update(version) for version in (51, 52, 53))]
    new = [update(51, "b", main(50)), *(update(version, "b") for version in (52, 53, 54))]
    routes = Routes(old + new)
    assert versions(routes.to(main(54, "b"), main(53))) == ["s50", "m51", "m52", "m53", "m54"]
    assert all(entry.policy.digest[0] == "b" for entry in routes.to(main(54, "b"), main(53))[1:])
    assert versions(routes.to(main(54, "b"), main(50))) == ["m51", "m52", "m53", "m54"]
    assert versions(routes.to(main(54), main(53))) is None


# --- against all ways there are --------------------------------------------------------------------------------------


@st.composite
def stores(draw: st.DrawFn) -> list[StoredPolicy]:
    """Files in the order in which they were stored: a lineage that is gone on with, or left at an earlier version."""
    rng = draw(st.randoms(use_true_random=False))
    stored, announced, heads = [base()], 1, {0: main(0)}
    digests = iter("bcdefghijklmnopqrstuvwxyz")
    version, mark = 0, "a"
    for _ in range(draw(st.integers(0, 25))):
        if rng.random() < 0.15 and version:
            version = rng.randrange(version)
            mark = next(digests, mark)
            stored.append(
                StoredPolicy(PolicyId(SNAPSHOT, *weights(heads[version])), SNAPSHOT, rng.randrange(150), "", 0)
            )
        elif rng.random() < 0.2:
            stored.append(
                StoredPolicy(PolicyId(SNAPSHOT, *weights(heads[version])), SNAPSHOT, rng.randrange(150), "", 0)
            )
        else:
            parent = heads[version]
            version += 1
            heads[version] = main(version, mark)
            order = 0
            if version > max(entry.policy.version for entry in stored if entry.order):
                announced += 1
                order = announced
            stored.append(StoredPolicy(heads[version], FACTORS, rng.randrange(60), "", order, parent))
    return stored


def once(stored: list[StoredPolicy]) -> list[StoredPolicy]:
    """As the store keeps them: what was stored again is the last."""
    kept: dict[PolicyId, StoredPolicy] = {}
    for entry in stored:
        kept.pop(entry.policy, None)
        kept[entry.policy] = entry
    return list(kept.values())


def all_ways(
    stored: list[StoredPolicy], target: PolicyId, have: PolicyId | None
) -> Iterator[tuple[int, list[StoredPolicy]]]:
    """Breadth first over weights, without a thought of what is short."""
    states: list[tuple[tuple[int, str] | None, list[StoredPolicy]]] = [(weights(have) if have else None, [])]
    states += [(weights(entry.policy), [entry]) for entry in stored if entry.kind != FACTORS]
    while states:
        at, files = states.pop()
        if at == weights(target):
            yield sum(entry.size for entry in files), files
        for entry in stored:
            if entry.parent is not None and weights(entry.parent) == at:
                states.append((weights(entry.policy), [*files, entry]))


@settings(max_examples=150, derandomize=True)
@given(stores(), st.randoms(use_true_random=False))
def test_the_way_is_the_cheapest_of_all_that_there_are(stored: list[StoredPolicy], rng: random.Random) -> None:
    stored = once(stored)
    routes = Routes(stored)
    for entry, other in itertools.product(rng.sample(stored, min(4, len(stored))), [None, *rng.sample(stored, 1)]):
        have = other.policy if other else None
        found = routes.to(entry.policy, have)
        ways = list(all_ways(stored, entry.policy, have))
        assert (found is None) == (not ways)
        if found is not None:
            assert sum(each.size for each in found) == min(size for size, _ in ways)
            assert list(found) in [files for _, files in ways]


@settings(max_examples=150, derandomize=True)
@given(stores(), st.integers(0, 4), st.sets(st.integers(0, 25), max_size=3))
def test_sweeping_after_every_upload_never_cuts_the_way_to_what_must_be_reachable(
    stored: list[StoredPolicy], bound: int, pinned: set[int]
) -> None:
    kept: list[StoredPolicy] = []
    pins: list[PolicyId] = []
    for index, entry in enumerate(stored):
        kept = once([*kept, entry])
        pins += [entry.policy] if entry.policy.version in pinned and entry.order else []
        gone = expired(kept, pins, bound)
        kept = [each for each in kept if each not in gone]
        newest = max(kept, key=lambda each: each.order)
        window = newest.policy.version - bound - 1
        for policy in (newest.policy, entry.policy, *pins):
            assert Routes(kept).to(policy, None) is not None
        held = {each.policy for each in kept}
        assert all(Routes(kept).to(each.policy, None) for each in kept if each.policy.version >= window)
        assert {each.policy for each in stored[: index + 1] if each.policy.version >= window} <= held


def steady_run(steps: int, every: int = 10) -> Iterator[tuple[int, list[StoredPolicy]]]:
    """Each version, and what is kept once it is stored."""
    kept: list[StoredPolicy] = [base()]
    for version in range(1, steps):
        for entry in (*([whole(version)] if version % every == 0 else []), update(version)):
            kept.append(entry)
            gone = set(expired(kept, [], 2))
            kept = [entry for entry in kept if entry not in gone]
        yield version, kept


def test_a_steady_run_keeps_the_last_two_snapshots_and_what_came_after_them() -> None:
    for _, kept in steady_run(200):
        assert len(kept) <= 22
    tens = ["s180", *(f"m{version}" for version in range(181, 190))]
    assert versions(tuple(kept)) == [*tens, "s190", *(f"m{version}" for version in range(190, 200))]


def test_a_way_that_is_being_pulled_when_a_snapshot_comes_is_there_until_the_next_one() -> None:
    pulled: dict[int, tuple[StoredPolicy, ...]] = {}
    for version, kept in steady_run(200, every=25):
        pulled[version] = Routes(kept).to(main(version), None) or ()
        began = max(1, version // 25 * 25 - 1)  # right before the last snapshot
        assert pulled[began]
        assert set(pulled[began]) <= set(kept)


# --- in the store ----------------------------------------------------------------------------------------------------


def add(files: PolicyFiles, policy: PolicyId, kind: str, data: bytes, parent: PolicyId | None = None) -> StoredPolicy:
    return files.add(Upload(policy, kind, len(data), hashlib.sha256(data).hexdigest(), parent), memoryview(data))


def test_a_store_that_starts_again_has_the_same_routes(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 2)
    add(files, main(0), BASE, b"0")
    for version in range(1, 13):
        if version % 5 == 0:
            add(files, snapshot(version), SNAPSHOT, b"s" * 30)
        add(files, main(version), FACTORS, b"u" * 10, main(version - 1))
    asked = [(main(target), have) for target in (9, 11, 12) for have in (None, main(10), main(3))]
    before = [files.route(*each) for each in asked]
    again = PolicyFiles(tmp_path, "run1", 2, keep=True)
    assert [again.route(*each) for each in asked] == before
    assert versions(before[-3]) == ["s10", "m11", "m12"]
    assert again.newest is not None
    assert again.newest.policy == main(12)


def test_a_snapshot_lies_beside_the_policy_of_its_version_and_digest_and_is_not_announced(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 2)
    add(files, main(0), BASE, b"0")
    assert add(files, snapshot(1), SNAPSHOT, b"all").order == 0
    assert files.newest is not None
    assert files.newest.policy == main(0)
    assert add(files, main(1), FACTORS, b"change", main(0)).order == 2
    assert files.read(snapshot(1), 0, 99) == b"all"
    assert files.read(main(1), 0, 99) == b"change"


def test_factors_without_a_parent_of_a_lower_version_are_refused(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 2)
    for parent in (None, main(1), main(2)):
        with pytest.raises(ValueError, match="a lower version"):
            add(files, main(1), FACTORS, b"change", parent)


def test_the_newest_stored_again_in_another_form_stays_the_newest(tmp_path: Path) -> None:
    """A trainer that goes on from a checkpoint has the weights, and not the last change of them."""
    files = PolicyFiles(tmp_path, "run1", 2)
    add(files, main(0), BASE, b"0")
    order = add(files, main(1), FACTORS, b"change", main(0)).order
    assert add(files, main(1), SNAPSHOT, b"all of it").order == order
    assert files.newest is not None
    assert (files.newest.policy, files.newest.kind) == (main(1), SNAPSHOT)
    again = PolicyFiles(tmp_path, "run1", 2, keep=True)
    assert again.newest == files.newest

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.version import PolicyId, VersionRun, is_stale, oldest_version, staleness, token_versions

DIGEST = "0123456789abcdef" * 4
runs = st.lists(st.builds(VersionRun, st.integers(0, 1000), st.just(DIGEST), st.integers(1, 20)), min_size=1)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 100))
def test_a_token_is_stale_exactly_when_it_is_older_than_the_bound(for_version: int, token: int, bound: int) -> None:
    assert is_stale(for_version, token, bound) == (token < for_version - bound)


def test_at_the_bound_a_token_still_trains() -> None:
    assert staleness(9, 5) == 4
    assert not is_stale(9, 5, max_staleness=4)
    assert is_stale(9, 4, max_staleness=4)
    assert not is_stale(9, 9, max_staleness=0)
    assert is_stale(9, 8, max_staleness=0)


@given(runs)
def test_every_sampled_token_gets_the_version_of_its_run(some: list[VersionRun]) -> None:
    versions = token_versions(some)
    assert versions.dtype == np.int32
    assert versions.tolist() == [run.version for run in some for _ in range(run.count)]
    assert oldest_version(some) == versions.min()


def test_of_nothing_sampled_there_is_no_oldest_version() -> None:
    assert token_versions([]).tolist() == []
    with pytest.raises(ValueError, match="empty"):
        oldest_version([])


@pytest.mark.parametrize(
    ("name", "version", "digest"),
    [
        ("../main", 1, DIGEST),
        ("a/b", 1, DIGEST),
        ("", 1, DIGEST),
        ("main", -1, DIGEST),
        ("main", 1, DIGEST[:-1]),
        ("main", 1, DIGEST[:-1] + "/"),
        ("main", 1, DIGEST.upper()),
    ],
)
def test_a_policy_that_cannot_name_a_file_is_not_decoded(name: str, version: int, digest: str) -> None:
    data = msgspec.msgpack.encode([name, version, digest])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=PolicyId)


def test_a_policy_comes_back_as_it_was_and_is_short_in_logs() -> None:
    policy = PolicyId("main", 7, DIGEST)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=PolicyId) == policy
    assert policy.short() == "7-01234567"

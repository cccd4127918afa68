"""The journal's files: what was appended is read again, and nothing that was not."""

from __future__ import annotations

import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.journal import Journal, JournalError, Torn, cut, read_segment, segment_numbers, segment_path

anything = settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def written(folder: Path, payloads: list[bytes], number: int = 0) -> Path:
    """A segment with these records after a first one, `base`."""
    journal = Journal(folder, "never")
    journal.begin(number, b"base")
    for payload in payloads:
        journal.append(bytearray(payload))
    journal.close()
    return segment_path(folder, number)


def read(folder: Path, number: int = 0) -> tuple[list[bytes], Torn | None]:
    found = list(read_segment(folder, number))
    torn = found.pop() if found and isinstance(found[-1], Torn) else None
    return [bytes(payload) for payload in found], torn


@anything
@given(st.lists(st.binary(max_size=2000), max_size=8))
def test_what_was_appended_is_read_again_in_order(tmp_path, payloads):
    written(tmp_path, payloads)
    assert read(tmp_path) == ([b"base", *payloads], None)


@anything
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.data())
def test_a_file_cut_anywhere_gives_the_records_before_the_cut_and_goes_on_after_it_is_mended(tmp_path, payloads, data):
    path = written(tmp_path, payloads)
    whole = path.read_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:length])
    got, torn = read(tmp_path)
    assert got == [b"base", *payloads][: len(got)]
    assert (torn is None) == (sum(12 + len(payload) for payload in got) + 16 == length)
    if torn is None:
        return
    assert torn.offset + torn.nbytes == length
    cut(torn)
    assert path.exists() == (torn.offset > 0)
    if path.exists():
        assert read(tmp_path) == (got, None)


@anything
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_is_never_read_as_a_record(tmp_path, payloads, data):
    path = written(tmp_path, payloads)
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(16, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    got, torn = read(tmp_path)
    assert torn is not None
    assert torn.offset <= place
    assert got == [b"base", *payloads][: len(got)]


def test_a_segment_under_another_number_or_of_another_kind_is_refused(tmp_path):
    written(tmp_path, [b"a"]).rename(segment_path(tmp_path, 7))
    with pytest.raises(JournalError, match="not segment 7 of a journal"):
        list(read_segment(tmp_path, 7))
    segment_path(tmp_path, 8).write_bytes(b"something else that is long enough")
    with pytest.raises(JournalError, match="not segment 8"):
        list(read_segment(tmp_path, 8))


def test_segments_and_their_folder_are_their_owners_alone(tmp_path):
    path = written(tmp_path / "journal", [b"a"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert segment_numbers(path.parent) == [0]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 4 kB: a write that passes it fails half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path, small_disk):
    journal = Journal(tmp_path, "never")
    journal.begin(0, b"base")
    journal.append(bytearray(3000))
    with pytest.raises(JournalError, match=r"cannot be written: .*make room.*--resume"):
        journal.append(bytearray(3000))
    journal.append(bytearray(b"small"))
    journal.close()
    assert read(tmp_path) == ([b"base", bytes(3000), b"small"], None)


@pytest.mark.parametrize("fsync", ["never", "interval", "always"])
def test_every_way_of_syncing_writes_the_same(tmp_path, fsync):
    journal = Journal(tmp_path, fsync)
    journal.begin(0, b"base")
    journal.append(bytearray(b"one"))
    journal.begin(1, b"next")
    journal.append(bytearray(b"two"))
    journal.close()
    assert [read(tmp_path, number) for number in (0, 1)] == [([b"base", b"one"], None), ([b"next", b"two"], None)]

"""The journal's files: what was appended is read again, and nothing that was not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_disk import small_disk

from buffer.journal import (
    END_MARK,
    MAX_PARTS,
    Journal,
    JournalError,
    Torn,
    cut,
    read_segment,
    segment_numbers,
    segment_path,
)

anything = settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


some = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def written_over(folder: Path, before: list[bytes], payloads: list[bytes]) -> tuple[Journal, Path]:
    """Segment 1 with these records, in the file that was segment 0's, as a process leaves it that is killed."""
    journal = Journal(folder, "never")
    journal.begin(0, b"base")
    for payload in before:
        journal.append(payload)
    file = segment_path(folder, 0).stat().st_ino
    journal.begin(1, b"another")
    journal.delete(0)
    journal.begin(2, b"base")
    assert segment_path(folder, 2).stat().st_ino == file
    for payload in payloads:
        journal.append(payload)
    return journal, segment_path(folder, 2)


@anything
@given(some, some)
def test_of_a_file_that_was_written_over_only_the_new_records_are_read_and_the_rest_is_not_torn(
    tmp_path_factory, before, payloads
):
    folder = tmp_path_factory.mktemp("journal")
    journal, path = written_over(folder, before, payloads)
    assert read(folder, 2) == ([b"base", *payloads], None)
    journal.close()
    assert path.stat().st_size == journal.size
    assert read(folder, 2) == ([b"base", *payloads], None)


@anything
@given(some, some, st.binary(max_size=200), st.data())
def test_a_record_half_written_over_what_was_there_is_torn(tmp_path_factory, before, payloads, last, data):
    folder = tmp_path_factory.mktemp("journal")
    journal, path = written_over(folder, before, payloads)
    old, place = path.read_bytes(), journal.size
    journal.append(last)
    new = path.read_bytes()[: journal.size]
    done = data.draw(st.integers(place, len(new) - 1))
    path.write_bytes(new[:done] + old[done:])
    got, torn = read(folder, 2)
    whole = path.read_bytes()[: len(new)] == new  # what was there may happen to be the rest
    begun = path.read_bytes()[place : place + len(END_MARK)] != END_MARK
    assert got == [b"base", *payloads, *([last] if whole else [])]
    assert (torn is not None and torn.offset == place) == (begun and not whole)


def test_at_most_two_files_wait_to_be_written_over_and_none_that_this_process_has_read(tmp_path):
    journal = Journal(tmp_path, "interval")
    for number in range(6):
        journal.begin(number, b"base")
    journal.read_until = 1
    for number in range(5):
        journal.delete(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002.spare", "00000003.spare", "00000005.seg"]
    again = Journal(tmp_path, "never")  # after a kill
    again.begin(6, b"base")
    assert len(list(tmp_path.iterdir())) == 3
    journal.close()
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005.seg", "00000006.seg"]


def test_a_record_of_more_parts_than_one_write_takes_is_written_whole(tmp_path):
    parts = [bytes([number % 256]) * (number % 7) for number in range(3 * MAX_PARTS)]
    journal = Journal(tmp_path, "never")
    journal.begin(0, b"base")
    journal.append(*parts)
    journal.append(b"after")
    assert read(tmp_path) == ([b"base", b"".join(parts), b"after"], None)
    journal.close()


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


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path):
    journal = Journal(tmp_path, "never")
    journal.begin(0, b"base")
    journal.append(bytearray(3000))
    with small_disk(), pytest.raises(JournalError, match=r"cannot be written: .*make room.*--resume"):
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

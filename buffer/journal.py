"""The journal's files: records appended one after another, checksummed, in segments that are deleted when done with.

    journal/00000000.seg   "arljrnl1" | segment number u64 | record | record | ... | end of the file, or an end mark
    record                 xxh3-64 of what follows, seeded with the segment's number, u64 | bytes u32 | payload
    end mark               12 zeros, where the next record would begin; anything may follow

All numbers are little-endian. What `append` has returned from survives the death of the process; with `fsync` always
the loss of power too, with interval all but the last second. (With never, a journal that has lost power may have to be
moved away.) A record that was being written when its process died is torn: reading stops before it, and it is cut off
when the journal is opened again.

The file of a deleted segment is kept, and written over by a later one: a page of a new file costs half as much again as
one that is there (measured: 22 and 14 µs for 73 kB). So behind the newest record lies what the file held before. Each
record is written together with the end mark behind it, so that this is never taken for a torn record, nor a torn record
for this.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import xxhash

from async_rl.errors import AsyncRLError

Fsync = Literal["never", "interval", "always"]
Bytes = bytes | bytearray | memoryview | msgspec.Raw

MAGIC = b"arljrnl1"
FILE_HEAD = struct.Struct("<8sQ")
RECORD_HEAD = struct.Struct("<QI")
LENGTH = struct.Struct("<I")
END_MARK = bytes(RECORD_HEAD.size)
SYNC_S = 1.0  # between two syncs with fsync = interval
SPARES = 2  # files of deleted segments that wait to be written over
SPARE_BYTES = 512 << 20  # the most that is kept of one
MAX_PARTS = os.sysconf("SC_IOV_MAX")  # of one write


class JournalError(AsyncRLError):
    """The journal cannot be written or read; the message names the file."""


class Torn(NamedTuple):
    """What lies behind the last whole record of a segment: the place, and how many bytes."""

    path: Path
    offset: int
    nbytes: int


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def segment_numbers(folder: Path) -> list[int]:
    """Rising."""
    return sorted(int(path.stem) for path in folder.glob("*.seg") if path.stem.isdecimal())


def record_head(parts: Sequence[Bytes], nbytes: int, number: int) -> bytes:
    """Of a record whose payload are these parts, `nbytes` together. The checksum is of the length too, and seeded: a
    record that was moved to another segment does not pass."""
    digest = xxhash.xxh3_64(LENGTH.pack(nbytes), seed=number)
    for part in parts:
        digest.update(part)
    return RECORD_HEAD.pack(digest.intdigest(), nbytes)


def read_segment(folder: Path, number: int) -> Iterator[memoryview | Torn]:
    """The payloads of a segment's records in order, as views of the mapped file; last, if there is neither the end of
    the file nor an end mark behind the last whole record, where that ends. Raises JournalError for a file that is no
    segment."""
    path = segment_path(folder, number)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
    except OSError as error:
        raise JournalError(f"the journal's file {path} cannot be read: {error.strerror}") from error
    if size < FILE_HEAD.size:
        yield Torn(path, 0, size)
        return
    if FILE_HEAD.unpack_from(data) != (MAGIC, number):
        raise JournalError(f"{path} is not segment {number} of a journal: move it away, or restore the right file")
    offset = FILE_HEAD.size
    while offset < size and data[offset : offset + len(END_MARK)] != END_MARK:
        payload = _record(data, offset, number)
        if payload is None:
            yield Torn(path, offset, size - offset)
            return
        yield payload
        offset += RECORD_HEAD.size + len(payload)


def _record(data: memoryview, offset: int, number: int) -> memoryview | None:
    """The payload of the record at `offset`; None when it is not whole."""
    start = offset + RECORD_HEAD.size
    if start > len(data):
        return None
    length = RECORD_HEAD.unpack_from(data, offset)[1]
    payload = data[start : start + length]
    if len(payload) < length or record_head((payload,), length, number) != data[offset:start]:
        return None
    return payload


def cut(torn: Torn) -> None:
    """Take off what is behind the last whole record, so that the file ends there; one without a head goes."""
    if torn.offset == 0:
        torn.path.unlink()
    else:
        os.truncate(torn.path, torn.offset)


class Journal:
    """The writing end: one segment at a time. Use `begin` before the first `append`, and whenever `size` has become
    too large. Not thread-safe, except that syncing goes on beside it."""

    def __init__(self, folder: Path, fsync: Fsync) -> None:
        self.folder = folder
        self.number = -1
        self.size = 0
        self.read_until = -1
        """The last segment that this process has read: what came of that are views of the files up to this one, so
        these are never written over."""
        self._fsync = fsync
        self._file = -1
        self._syncer = _Syncer() if fsync == "interval" else None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"cannot make the journal's folder {folder}: {error.strerror}") from error
        self._spares = sorted(folder.glob("*.spare"))  # of a process that was killed, perhaps

    def begin(self, number: int, payload: bytes) -> None:
        """A new segment, with its first record. It takes its name when it is whole, so that the newest segment always
        has a first record, and when the one before it ends with its last. Raises JournalError; the segment before then
        stays the one that is written to."""
        path = segment_path(self.folder, number)
        partial = path.with_suffix(".part")
        parts = (FILE_HEAD.pack(MAGIC, number), record_head((payload,), len(payload), number), payload, END_MARK)
        size = sum(map(len, parts))
        file = -1
        try:
            self._take_spare(partial)
            file = os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600)
            _write_all(file, parts, size, 0)
            if self._fsync != "never":
                os.fsync(file)
            if self._file >= 0:
                os.ftruncate(self._file, self.size)
                if self._fsync == "interval":  # the next one says how long this one is
                    os.fdatasync(self._file)
            partial.replace(path)
            self._sync_names()
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise self._failed(error) from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self.number, self.size = file, number, size - len(END_MARK)
        if self._syncer:
            self._syncer.follow(file)

    def append(self, *parts: Bytes) -> None:
        """One record, whose payload are these parts, one after another. Raises JournalError, and then nothing of it is
        there."""
        nbytes = sum(map(len, parts))
        record = (record_head(parts, nbytes, self.number), *parts, END_MARK)
        if self._syncer and self._syncer.error:
            raise self._failed(self._syncer.error)
        try:
            _write_all(self._file, record, RECORD_HEAD.size + nbytes + len(END_MARK), self.size)
            if self._fsync == "always":
                os.fdatasync(self._file)
        except OSError as error:
            os.truncate(segment_path(self.folder, self.number), self.size)
            raise self._failed(error) from error
        self.size += RECORD_HEAD.size + nbytes

    def delete(self, number: int) -> None:
        """The segment is not there any more; its file may be."""
        path = segment_path(self.folder, number)
        try:
            if number <= self.read_until or len(self._spares) >= SPARES or not path.exists():
                path.unlink(missing_ok=True)
                return
            spare = path.with_suffix(".spare")
            path.replace(spare)
            self._spares.append(spare)
            if spare.stat().st_size > SPARE_BYTES:
                os.truncate(spare, SPARE_BYTES)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        if self._file >= 0:
            os.ftruncate(self._file, self.size)
        if self._syncer:
            self._syncer.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        while self._spares:
            self._spares.pop().unlink(missing_ok=True)

    def _take_spare(self, path: Path) -> None:
        """Whatever the machine loses, no file is written over while it may still be found under its old name."""
        path.unlink(missing_ok=True)
        if self._spares:
            self._spares.pop().replace(path)
            self._sync_names()

    def _sync_names(self) -> None:
        if self._fsync == "never":
            return
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(
            f"the journal in {self.folder} cannot be written: {error.strerror}: nothing that was acknowledged is lost; "
            "make room (or mend the disk), then go on with --resume"
        )


class _Syncer:
    """A thread that syncs the segment that is written to, once a second. `error`: why it could not."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._file = -1
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal sync", daemon=True)
        self._thread.start()

    def follow(self, file: int) -> None:
        """The segment before this one was closed, and owes the disk nothing."""
        fresh = os.dup(file)
        with self._lock:
            before, self._file = self._file, fresh
        if before >= 0:
            os.close(before)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        while not self._closing.wait(SYNC_S):
            self._sync()
        self._sync()

    def _sync(self) -> None:
        with self._lock:
            try:
                if self._file >= 0:
                    os.fdatasync(self._file)
            except OSError as error:
                self.error = error


def _write_all(file: int, parts: Sequence[Bytes], nbytes: int, offset: int) -> None:
    """The parts, `nbytes` together, one after another from `offset` on."""
    written = os.pwritev(file, parts[:MAX_PARTS], offset)
    while written < nbytes:
        parts, nbytes, offset = _behind(parts, written), nbytes - written, offset + written
        written = os.pwritev(file, parts[:MAX_PARTS], offset)


def _behind(parts: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """What is left of the parts without their first `nbytes`."""
    left: list[Bytes] = []
    for part in parts:
        if nbytes < len(part):
            left.append(memoryview(part)[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left

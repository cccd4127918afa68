"""The journal's files: records appended one after another, checksummed, in segments that are deleted when done with.

    journal/00000000.seg   "arljrnl1" | segment number u64 | record | record | ...
    record                 xxh3-64 of what follows, seeded with the segment's number, u64 | bytes u32 | payload

All numbers are little-endian. What `append` has returned from survives the death of the process; with `fsync` always
the loss of power too, with interval all but the last second. A record that was being written when its process died is
torn: reading stops before it, and it is cut off when the journal is opened again.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from async_rl.errors import AsyncRLError

Fsync = Literal["never", "interval", "always"]

MAGIC = b"arljrnl1"
FILE_HEAD = struct.Struct("<8sQ")
RECORD_HEAD = struct.Struct("<QI")
LENGTH = struct.Struct("<I")
SYNC_S = 1.0  # between two syncs with fsync = interval


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


def checksum(payload: bytes | bytearray | memoryview, number: int) -> int:
    """Of a record's length and payload: one that was moved to another segment does not pass."""
    digest = xxhash.xxh3_64(LENGTH.pack(len(payload)), seed=number)
    digest.update(payload)
    return digest.intdigest()


def read_segment(folder: Path, number: int) -> Iterator[memoryview | Torn]:
    """The payloads of a segment's records in order, as views of the mapped file; last, if there is something behind the
    last whole record, where that begins. Raises JournalError for a file that is no segment."""
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
    while offset < size:
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
    expected, length = RECORD_HEAD.unpack_from(data, offset)
    payload = data[start : start + length]
    return payload if len(payload) == length and checksum(payload, number) == expected else None


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
        self._fsync = fsync
        self._file = -1
        self._head = bytearray(RECORD_HEAD.size)
        self._syncer = _Syncer() if fsync == "interval" else None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"cannot make the journal's folder {folder}: {error.strerror}") from error

    def begin(self, number: int, payload: bytes) -> None:
        """A new segment, with its first record. It takes its name when it is whole, so that the newest segment always
        has a first record. Raises JournalError; the segment before then stays the one that is written to."""
        path = segment_path(self.folder, number)
        partial = path.with_suffix(".part")
        head = FILE_HEAD.pack(MAGIC, number) + RECORD_HEAD.pack(checksum(payload, number), len(payload))
        file = -1
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            _write_all(file, head)
            _write_all(file, payload)
            os.fsync(file)
            partial.replace(path)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise self._failed(error) from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self.number, self.size = file, number, len(head) + len(payload)
        if self._syncer:
            self._syncer.follow(file)

    def append(self, payload: bytearray) -> None:
        """One record. Raises JournalError, and then nothing of it is there."""
        RECORD_HEAD.pack_into(self._head, 0, checksum(payload, self.number), len(payload))
        try:
            written = os.writev(self._file, (self._head, payload))
            if written < RECORD_HEAD.size + len(payload):
                _write_all(self._file, memoryview(bytes(self._head) + payload)[written:])
            if self._fsync == "always":
                os.fdatasync(self._file)
        except OSError as error:
            os.truncate(segment_path(self.folder, self.number), self.size)
            raise self._failed(error) from error
        self.size += RECORD_HEAD.size + len(payload)

    def delete(self, number: int) -> None:
        segment_path(self.folder, number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._syncer:
            self._syncer.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(
            f"the journal in {self.folder} cannot be written: {error.strerror}: nothing that was acknowledged is lost; "
            "make room (or mend the disk), then go on with --resume"
        )


class _Syncer:
    """A thread that syncs the segment that is written to, once a second; only who begins a segment waits for it."""

    def __init__(self) -> None:
        self._file = -1
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal sync", daemon=True)
        self._thread.start()

    def follow(self, file: int) -> None:
        """The segment before this one was closed: what it still owes the disk is paid first."""
        fresh = os.dup(file)
        with self._lock:
            before, self._file = self._file, fresh
            if before >= 0:
                os.fdatasync(before)
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
            if self._file >= 0:
                os.fdatasync(self._file)


def _write_all(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

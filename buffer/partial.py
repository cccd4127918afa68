"""A policy file on its way into the store, in parts: written and hashed as they come, and never held whole.

part at 0 ── part at 1 MiB ── … ── last part: durable, and its SHA-256 is the one that was announced
          └─ anything else: what is there is given up, and the trainer begins again at 0
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from async_rl.wire.messages import CHUNK_BYTES, Upload

SYNC_BYTES = 64 << 20  # written, and not yet on the disk: what the last part may have to wait for, and peers with it
WORK_TIMEOUT_S = 600.0  # for a part's hash and its share of the disk's work, which wait for nobody


class PartialFile:
    """Begun with the first part's message; `path` may have bytes of an older file, which are written over. Writing and
    hashing take about as long, so a thread hashes a part while the next is received and written. With `hash_chunks` it
    takes the digest of every CHUNK_BYTES, too. Methods raise ValueError for what does not belong to the file; then
    `give_up` is all that is left to do."""

    def __init__(self, upload: Upload, path: Path, hash_chunks: bool = False) -> None:
        self.path = path
        self._upload = upload
        self._received = self._unsynced = 0
        self._digest = hashlib.sha256()
        self._chunks: list[bytes] = []
        self._chunk = hashlib.sha256() if hash_chunks else None
        self._chunk_bytes = 0
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")  # noqa: SIM115
        self._thread = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None

    @property
    def chunks(self) -> bytes:
        """The SHA-256 of every CHUNK_BYTES, once it is whole; empty when they were not taken."""
        return b"".join(self._chunks)

    def take(self, upload: Upload, part: memoryview) -> bool:
        """The next part; True when it was the last. The one before is done with when this returns."""
        self._check(upload, part)
        self._join()
        self._unsynced += part.nbytes
        sync = self._unsynced >= SYNC_BYTES
        self._work = self._thread.submit(self._process, part, sync)
        self._file.write(part)
        self._received += part.nbytes
        if sync:
            self._unsynced = 0
        return self._received == self._upload.size

    def finish(self, sha256: str) -> None:
        """Durable when it returns."""
        self._file.truncate()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._join()
        self._close()
        if self._chunk is not None and self._chunk_bytes:
            self._chunks.append(self._chunk.digest())
        if self._digest.hexdigest() != sha256:
            raise ValueError(f"policy {self._upload.policy.short()}: the bytes received are not those announced")

    def give_up(self) -> None:
        """Nothing of it is left."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _check(self, upload: Upload, part: memoryview) -> None:
        first = self._upload
        name = f"policy {upload.policy.short()}"
        if (upload.policy, upload.kind, upload.size, upload.parent) != (
            first.policy, first.kind, first.size, first.parent
        ):  # fmt: skip
            raise ValueError(f"{name}: a part of it came amid those of policy {first.policy.short()}")
        if upload.offset != self._received:
            raise ValueError(f"{name}: a part at byte {upload.offset} came, and should at {self._received}")
        if part.nbytes > upload.size - self._received:
            raise ValueError(f"{name}: more than the {upload.size} bytes announced")
        if not part.nbytes and upload.size:
            raise ValueError(f"{name}: an empty part came, with {self._received} of {upload.size} bytes here")

    def _process(self, part: memoryview, sync: bool) -> None:
        self._digest.update(part)
        if self._chunk is not None:
            self._hash_chunks(part)
        if sync:
            os.fsync(self._file.fileno())

    def _hash_chunks(self, part: memoryview) -> None:
        """Parts may be of any size."""
        part = part.cast("B")
        while part.nbytes and self._chunk is not None:
            piece = part[: CHUNK_BYTES - self._chunk_bytes]
            self._chunk.update(piece)
            self._chunk_bytes += piece.nbytes
            part = part[piece.nbytes :]
            if self._chunk_bytes == CHUNK_BYTES:
                self._chunks.append(self._chunk.digest())
                self._chunk, self._chunk_bytes = hashlib.sha256(), 0

    def _join(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.result(WORK_TIMEOUT_S)

    def _close(self) -> None:
        self._thread.shutdown()
        self._file.close()

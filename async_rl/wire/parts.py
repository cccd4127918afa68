"""A policy file in the parts in which it is sent to the store: read and hashed on the way, never held whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.wire.messages import Upload

PART_BYTES = 1 << 20  # an eighth of a link's window: some are under way while one is written


def parts_of(path: Path, upload: Upload) -> Iterator[tuple[Upload, bytes]]:
    """Each part's message and its bytes; an empty file is one part. `upload` is what they have in common, its SHA-256
    empty: the last part names it. Raises AsyncRLError when the file has become shorter, OSError when it cannot be
    read."""
    digest = hashlib.sha256()
    offset = 0
    with path.open("rb") as file:
        while True:
            part = file.read(min(PART_BYTES, upload.size - offset))
            if not part and offset < upload.size:
                raise AsyncRLError(f"{path} has {offset} bytes, and had {upload.size} before: who else writes to it?")
            digest.update(part)
            is_last = offset + len(part) == upload.size
            yield msgspec.structs.replace(upload, offset=offset, sha256=digest.hexdigest() if is_last else ""), part
            if is_last:
                return
            offset += len(part)

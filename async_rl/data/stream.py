"""Rows of a stream, which has no random access: read forward, the last few blocks of rows kept.

A run asks rows block after block (async_rl.data.order), in each in any order, so a reader moves forward, and while one
block is used a thread reads the next: whoever asks has other things to do than to wait for a file or a network. A block
that was asked before those that are kept, at the start of the next epoch or after a lease that was taken back late, has
the stream opened anew and read up to there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from async_rl.errors import AsyncRLError

KEPT_BLOCKS = 5  # the last four, and the one that was read ahead


class ForwardRows:
    """`open_stream` begins the stream anew. Row numbers below `size` are asked for in any order; a stream that ends
    before is an error, since other machines count on `size` rows."""

    def __init__(self, open_stream: Callable[[], Iterator[dict[str, Any]]], size: int, block: int, where: str) -> None:
        self.size = size
        self._open = open_stream
        self._block = block
        self._where = where
        self._stream: Iterator[dict[str, Any]] = iter(())
        self._next = -1  # the block that the stream goes on with; none before it was opened
        self._kept: dict[int, list[dict[str, Any]]] = {}  # in the order in which they were read
        self._reading = threading.Lock()  # around all that touches the stream
        self._ahead: threading.Thread | None = None
        self.opened = 0
        """How often the stream was begun."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Raises AsyncRLError when the stream is shorter than it was said to be."""
        block, place = divmod(number, self._block)
        rows = self._kept.get(block)
        if rows is None:
            with self._reading:
                rows = self._kept.get(block) or self._read_up_to(block)
        self._look_ahead(block + 1)
        return rows[place]

    def _look_ahead(self, block: int) -> None:
        """Have a thread read this block if it is what the stream goes on with."""
        busy = self._ahead is not None and self._ahead.is_alive()
        if not busy and self._next == block and block * self._block < self.size:
            self._ahead = threading.Thread(target=self._read_ahead, args=(block,), name="read ahead", daemon=True)
            self._ahead.start()

    def _read_ahead(self, block: int) -> None:
        with self._reading, contextlib.suppress(Exception):  # whoever asks for the block meets the error again
            if self._next == block:
                self._read_up_to(block)

    def _read_up_to(self, block: int) -> list[dict[str, Any]]:
        if self._next < 0 or block < self._next:
            self._stream, self._next, self.opened = self._open(), 0, self.opened + 1
        # Until this has been read: a stream that failed is over, and has to be begun again.
        first, self._next = self._next, -1
        passed = sum(1 for _ in itertools.islice(self._stream, (block - first) * self._block))
        rows = list(itertools.islice(self._stream, self._block))
        there = first * self._block + passed + len(rows)
        if there < min((block + 1) * self._block, self.size):
            raise AsyncRLError(
                f"{self._where}: the stream ends after {there} rows, and it should have {self.size}: set `size` (or "
                "`eval_rows`) to what there is, on every machine"
            )
        while len(self._kept) >= KEPT_BLOCKS:
            del self._kept[next(iter(self._kept))]
        self._kept[block] = rows
        self._next = block + 1
        return rows

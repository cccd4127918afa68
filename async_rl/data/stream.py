"""Rows of a stream, which has no random access: read forward, the last few blocks of rows kept.

A run asks rows block after block (async_rl.data.order), in each in any order, so a reader moves forward; a block that
was asked before those that are kept, at the start of the next epoch or after a lease that was taken back late, has the
stream opened anew and read up to there.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from async_rl.errors import AsyncRLError

KEPT_BLOCKS = 4


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
        self._kept: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()
        self.opened = 0
        """How often the stream was begun."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Raises AsyncRLError when the stream is shorter than it was said to be."""
        block, place = divmod(number, self._block)
        if block not in self._kept:
            self._read_up_to(block)
        self._kept.move_to_end(block)
        return self._kept[block][place]

    def _read_up_to(self, block: int) -> None:
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
        self._next = block + 1
        self._kept[block] = rows
        while len(self._kept) > KEPT_BLOCKS:
            self._kept.popitem(last=False)

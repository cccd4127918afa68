"""The buffers of running requests: tokens, log-probabilities, likeliest tokens, stamps and random numbers, all on the
host.

A request keeps its seat from start to end, while its row in the batch changes as others end. All seats are arrays, so
that what a step sampled for all rows is written down at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.top_tokens import TopTokens
from inference.engine import Request
from inference.rows import IntArray, policy_ranges
from inference.sampling import request_uniforms


class Taken(NamedTuple):
    """What a seat holds of a request's answer: tokens int32[m], logprobs float32[m], stamps int64[m], and the likeliest
    tokens [m, k] where they are kept."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stamps: IntArray
    top: TopTokens | None


class Seats:
    """`seats` requests of at most `positions` tokens each, prompt included, with the `top` likeliest at each."""

    def __init__(self, seats: int, positions: int, top: int = 0) -> None:
        self._free = list(range(seats))
        self._sequences = np.zeros((seats, positions), dtype=np.int32)
        self._logprobs = np.zeros((seats, positions), dtype=np.float32)
        self._top = TopTokens(
            np.zeros((seats, positions, top), dtype=np.int32), np.zeros((seats, positions, top), dtype=np.float32)
        )
        self._stamps = np.zeros((seats, positions), dtype=np.int64)
        self._uniforms = np.zeros((seats, positions), dtype=np.float64)

    def take(self, request: Request, limit: int, stamps: IntArray) -> int:
        """A free seat, now of this request of at most `limit` new tokens, those of its prefix included; `stamps` are
        theirs."""
        seat, length = self._free.pop(), len(request.prompt)
        self._sequences[seat, :length] = request.prompt
        if request.prefix is not None:
            count = len(request.prefix.tokens)
            self._sequences[seat, length : length + count] = request.prefix.tokens
            self._logprobs[seat, :count] = request.prefix.logprobs
            self._stamps[seat, :count] = stamps
        if request.sampling.temperature:
            self._uniforms[seat, :limit] = request_uniforms(request.seed, limit)
        return seat

    def leave(self, seat: int, length: int, produced: int) -> Taken:
        """Free a seat that holds `length` tokens, the last `produced` of them new; returns copies of what is new."""
        self._free.append(seat)
        return Taken(
            self._sequences[seat, length - produced : length].copy(),
            self._logprobs[seat, :produced].copy(),
            self._stamps[seat, :produced].copy(),
            TopTokens(*(values[seat, :produced].copy() for values in self._top)) if self._top.ids.size else None,
        )

    def sequence(self, seat: int, length: int) -> npt.NDArray[np.int32]:
        """Prompt and answer so far, a view."""
        return self._sequences[seat, :length]

    def numbers(self, rows: np.ndarray[Any, np.dtype[np.void]]) -> set[int]:
        """The policies' numbers that `rows` (records of ROW_DTYPE, ended ones too) or the answers under way carry."""
        found = {*rows["policy"].tolist(), *rows["prompt_policy"].tolist()}
        under_way = rows[rows["alive"] == 1]
        for seat, produced in zip(under_way["seat"].tolist(), under_way["produced"].tolist(), strict=True):
            found.update(serial for serial, _, _ in policy_ranges(self._stamps[seat, :produced]))
        return found

    def uniforms(self, seats: IntArray, produced: IntArray) -> npt.NDArray[np.float64]:
        """The random number for new token `produced` of each seat."""
        numbers: npt.NDArray[np.float64] = self._uniforms[seats, produced]
        return numbers

    def record(self, rows: np.ndarray[Any, np.dtype[np.void]], sampled: npt.NDArray[np.float64]) -> None:
        """Write down one new token for each of `rows` (records of ROW_DTYPE, as they were before it), stamped with
        the policy whose forward made it; `sampled` is float64[2 + 2·top, n] as inference.decode_step.sampled."""
        seats, produced = rows["seat"], rows["produced"]
        self._sequences[seats, rows["length"]] = sampled[0]
        self._logprobs[seats, produced] = sampled[1]
        if len(sampled) > 2:
            self._top.ids[seats, produced], self._top.logprobs[seats, produced] = np.split(sampled[2:].T, 2, axis=1)
        self._stamps[seats, produced] = rows["policy"]

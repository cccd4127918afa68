"""The token-exact record of one attempt over many calls of the model.

A call is a prompt and what was sampled after it. A call whose prompt begins with all that a segment holds, prompts and
samples, goes on in that segment: only what stands between is new, and was not written by the model. Any other begins a
segment of its own: the first call; one whose history was rewritten (a template that drops earlier thinking); one of a
conversation beside, or of two that were asked at once after the same tokens.

    call 1   [P P P S S]                    segment 0: P P P S S
    call 2   [P P P S S E E S S S]          segment 0: P P P S S E E S S S
    call 3   [P P' E S S]                   segment 1: P P P S S

So no token is sampled twice in a record, and every one stands after exactly the tokens that it was sampled after. A
token's text never decides: nothing here is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.routes import route_extras
from async_rl.top_tokens import TOP_IDS, TOP_LOGPROBS, TopTokens
from async_rl.trajectory import Finish, MaskReason, PositionReward, Segment
from async_rl.version import VersionRun
from inference.engine import Completion

Ids = npt.NDArray[np.int32]


class TranscriptError(AsyncRLError):
    """A call that contradicts itself."""


class Place(NamedTuple):
    """The last token that a call sampled: in which segment, and at which position within it."""

    segment: int
    position: int


class _Piece(NamedTuple):
    """What one call added to a segment: tokens int32[n], logprobs float32[n], mask uint8[n]."""

    tokens: Ids
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]


class _Record:
    """A segment while it grows."""

    def __init__(self) -> None:
        self.tokens: Ids = np.zeros(0, np.int32)
        self.pieces: list[_Piece] = []
        self.versions: list[VersionRun] = []
        self.finish: Finish = "stop"
        self.tops: list[tuple[int, TopTokens]] = []
        self.routes: npt.NDArray[np.integer[Any]] | None = None

    def is_prefix_of(self, prompt: Ids) -> bool:
        n = len(self.tokens)
        return n <= len(prompt) and bool(np.array_equal(self.tokens, prompt[:n]))


class Transcript:
    """`sampled` records a call; `segments` are what a trajectory is packed of. Not for several threads at once."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._rewards: list[PositionReward] = []
        self.calls = 0
        self.queued_s = 0.0
        self.sampling_s = 0.0

    @property
    def n_tokens(self) -> int:
        """Of all segments, what the model did not write included."""
        return sum(len(record.tokens) for record in self._records)

    @property
    def n_segments(self) -> int:
        return len(self._records)

    @property
    def n_sampled(self) -> int:
        return sum(run.count for record in self._records for run in record.versions)

    def grows_by(self, prompt: Ids) -> int:
        """How many tokens a call with this prompt adds before its first sampled one."""
        record = self._longest_prefix(prompt)
        return len(prompt) - (len(record.tokens) if record else 0)

    def continues(self, prompt: Ids) -> int | None:
        """The segment in which a call with this prompt would go on; None where it begins one."""
        record = self._longest_prefix(prompt)
        return None if record is None else self._records.index(record)

    def sampled(
        self,
        prompt: Ids,
        completion: Completion,
        reasons: npt.NDArray[np.uint8] | None = None,
    ) -> Place:
        """Record a call: `prompt` int32[p], all of it; what `completion` holds was sampled after that. `reasons`
        uint8[p] says of each prompt token why it does not train (MaskReason), and counts for those that are new in
        their segment; None is ENVIRONMENT in a segment that goes on. What a segment begins with is PROMPT. Raises
        TranscriptError for a call without a prompt or a sampled token, or reasons that say one was sampled."""
        if not len(prompt) or not len(completion.tokens):
            raise TranscriptError(
                "a call of the model without a prompt, or without a sampled token, cannot be recorded"
            )
        if reasons is not None and (len(reasons) != len(prompt) or (reasons == MaskReason.SAMPLED).any()):
            raise TranscriptError("a prompt needs a reason for each of its tokens, and none of them was sampled")
        record = self._longest_prefix(prompt)
        if record is None:
            record = _Record()
            self._records.append(record)
            between = np.full(len(prompt), MaskReason.PROMPT, np.uint8)
        elif reasons is None:
            between = np.full(len(prompt) - len(record.tokens), MaskReason.ENVIRONMENT, np.uint8)
        else:
            between = np.asarray(reasons[len(record.tokens) :], np.uint8)
        _extend(record, prompt, completion, between)
        self.calls += 1
        self.queued_s += completion.queued_s
        self.sampling_s += completion.sampling_s
        return Place(self._records.index(record), len(record.tokens) - 1)

    def rewarded(self, place: Place, value: float) -> None:
        """What the environment gave for the turn that ended at `place`."""
        self._rewards.append(PositionReward(place.segment, place.position, float(value)))

    @property
    def position_rewards(self) -> tuple[PositionReward, ...]:
        return tuple(self._rewards)

    def segments(self, *, cut: bool = False, trains: bool = True) -> list[Segment]:
        """The attempt's segments, in the order in which they began. `cut`: a limit ended it, so it finished by its
        length. `trains`: with what only training reads (likeliest tokens, routes)."""
        out = [_segment(record, trains) for record in self._records]
        if cut and out:
            out[-1] = msgspec.structs.replace(out[-1], finish="length")
        return out

    def _longest_prefix(self, prompt: Ids) -> _Record | None:
        matches = [record for record in self._records if record.is_prefix_of(prompt)]
        return max(matches, key=lambda record: len(record.tokens), default=None)


def _extend(record: _Record, prompt: Ids, completion: Completion, between: npt.NDArray[np.uint8]) -> None:
    known, m = len(record.tokens), len(completion.tokens)
    added = np.concatenate([prompt[known:], completion.tokens]).astype(np.int32)
    logprobs = np.concatenate([np.zeros(len(between), np.float32), completion.logprobs]).astype(np.float32)
    mask = np.concatenate([between, np.full(m, MaskReason.SAMPLED, np.uint8)])
    record.pieces.append(_Piece(added, logprobs, mask))
    if completion.top is not None:
        record.tops.append((len(prompt), completion.top))
    if completion.routes is not None:
        # A position that was computed again keeps the experts under which the token after it was sampled.
        kept = record.routes if record.routes is not None else completion.routes[:0]
        record.routes = np.concatenate([kept, completion.routes[len(kept) :]])
    record.tokens = np.concatenate([record.tokens, added])
    record.versions = merged([*record.versions, *completion.versions])
    record.finish = completion.finish


def merged(runs: Sequence[VersionRun]) -> list[VersionRun]:
    """The same runs, neighbours of one policy as one."""
    out: list[VersionRun] = []
    for run in runs:
        if out and (out[-1].version, out[-1].digest) == (run.version, run.digest):
            out[-1] = VersionRun(run.version, run.digest, out[-1].count + run.count)
        else:
            out.append(run)
    return out


def _segment(record: _Record, trains: bool) -> Segment:
    tokens, logprobs, mask = (np.concatenate(arrays) for arrays in zip(*record.pieces, strict=True))
    extras: dict[str, npt.NDArray[Any]] = {}
    if trains and record.tops:
        extras |= _top(record.tops, len(tokens))
    if trains and record.routes is not None:
        extras |= route_extras(record.routes, len(tokens))
    return Segment(tokens, logprobs, mask, tuple(record.versions), record.finish, extras)


def _top(tops: Sequence[tuple[int, TopTokens]], n_tokens: int) -> dict[str, npt.NDArray[Any]]:
    k = tops[0][1].ids.shape[1]
    ids, logprobs = np.zeros((n_tokens, k), np.int32), np.zeros((n_tokens, k), np.float32)
    for start, top in tops:
        ids[start : start + len(top.ids)] = top.ids
        logprobs[start : start + len(top.ids)] = top.logprobs
    return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}

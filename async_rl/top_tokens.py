"""The sampler's likeliest tokens at each place, as they travel: two extras of a segment, for score centring.

`top_ids` int32 [n, k] and `top_logprobs` float32 [n, k], likeliest first: token ids and their log-probabilities in the
distribution that the token at this place was sampled from; zeros where nothing was sampled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.trajectory import MaskReason, SegmentArrays, TrajectoryError

TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"
LARGEST_MASS = 1 + 1e-3  # of k probabilities in float32, whose sum may come out above 1


class TopTokens(NamedTuple):
    """ids int32 [n, k] and logprobs float32 [n, k] (natural log) of n places."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


def top_extras(top: TopTokens, n_before: int) -> dict[str, npt.NDArray[Any]]:
    """The extras of a segment of `n_before` tokens that were not sampled, and then the tokens of `top`."""
    before = ((n_before, 0), (0, 0))
    return {TOP_IDS: np.pad(top.ids, before), TOP_LOGPROBS: np.pad(top.logprobs, before)}


def top_of(arrays: SegmentArrays) -> TopTokens:
    """A segment's likeliest tokens: views [n, k], after `check_top`."""
    return TopTokens(arrays.extras[TOP_IDS], arrays.extras[TOP_LOGPROBS])


def check_top(arrays: SegmentArrays, k: int, vocabulary_size: int, what: str) -> None:
    """Raises TrajectoryError, naming `what` the segment is of, when its likeliest tokens, k at each of its n places,
    are missing, of another shape or dtype, or, at a sampled token, outside the vocabulary, twice there, not finite, or
    of more than all probability."""
    shape = (len(arrays.tokens), k)
    for name, dtype in ((TOP_IDS, "<i4"), (TOP_LOGPROBS, "<f4")):
        array = arrays.extras.get(name)
        if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
            has = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise TrajectoryError(
                f"{what}: {name} is {has}, and [algorithm] center_scores = {k} needs {np.dtype(dtype)} {list(shape)}"
            )
    sampled = arrays.mask == MaskReason.SAMPLED
    top = top_of(arrays)
    if problem := _problem(top.ids[sampled], top.logprobs[sampled], vocabulary_size):
        raise TrajectoryError(f"{what}: {problem}")


def _problem(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], vocabulary_size: int) -> str:
    if not ids.size:
        return ""
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        return f"{TOP_IDS} from {ids.min()} to {ids.max()} are not all in the vocabulary of {vocabulary_size}"
    if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        return f"{TOP_IDS} has a token twice at one place"
    if not np.isfinite(logprobs).all():
        return f"{TOP_LOGPROBS} is not finite"
    mass = np.exp(logprobs.astype(np.float64).clip(max=1.0)).sum(axis=1).max()
    if mass > LARGEST_MASS:
        return f"the probabilities of {TOP_LOGPROBS} add up to {mass:.6g} at one place"
    return ""

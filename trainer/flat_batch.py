"""From samples to flat tensors of their trained tokens, which is what a loss is made of, and back."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.errors import AsyncRLError
from async_rl.trajectory import MaskReason
from trainer.algorithm.loss import batch_coefficients
from trainer.algorithm.tokens import TokenData
from trainer.backend import Sample
from trainer.head import Mixture


class Batch(NamedTuple):
    """A batch's trained tokens. `rows` are the samples that have any, `wanted` the places of their trained tokens,
    `start` where each row's tokens begin in the flat `data` and `coefficients` (sample order), and in `top`, the
    sampler's likeliest tokens with their probabilities, where scores are centred. `reference` [n] are the tokens'
    log-probabilities under the reference policy, where they are known already."""

    rows: list[int]
    wanted: list[npt.NDArray[np.intp]]
    start: npt.NDArray[np.int64]
    data: TokenData
    coefficients: torch.Tensor
    top: Mixture | None = None
    reference: torch.Tensor | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.start[-1])

    def places_of(self, samples: Sequence[int]) -> torch.Tensor:
        """Where the trained tokens of these samples lie in `data`, one sample after the other: int64 [m]."""
        first = {index: row for row, index in enumerate(self.rows)}
        found = [np.arange(*self.start[first[index] : first[index] + 2]) for index in samples if index in first]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *found])).to(self.data.behaviour.device)


def flatten(
    samples: Sequence[Sample],
    algorithm: AlgorithmConfig,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    divided: bool = True,
) -> Batch:
    """Floating values in `dtype`. `divided`: of several ranks each is given its part of the batch. Raises AsyncRLError
    and FloatingPointError for a sample that cannot be trained, naming its attempt."""
    rows, wanted = [], []
    for index, sample in enumerate(samples):
        places = np.flatnonzero(np.asarray(sample.mask) == MaskReason.SAMPLED)
        if places.size:
            _check(sample, places, vocabulary)
            rows.append(index)
            wanted.append(places)
    counts = np.array([places.size for places in wanted], dtype=np.int64)

    def flat(values: Sequence[float] | npt.NDArray[np.generic], kind: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=kind, device=device)

    behaviour = [samples[row].behaviour[places] for row, places in zip(rows, wanted, strict=True)]
    ages = [samples[row].ages[places] for row, places in zip(rows, wanted, strict=True)]
    attempt, group = (
        flat(np.repeat(np.array([of(samples[row]) for row in rows], dtype=np.int64), counts), torch.int64)
        for of in (attrgetter("attempt"), attrgetter("group"))
    )
    data = TokenData(
        behaviour=flat(np.concatenate([np.zeros(0, np.float32), *behaviour]), dtype),
        advantage=flat(np.repeat(np.array([samples[row].advantage for row in rows], np.float64), counts), dtype),
        attempt=attempt,
        age=flat(np.concatenate([np.zeros(0, np.int32), *ages]), torch.int64),
    )
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    k = algorithm.center_scores
    top = _top([samples[row] for row in rows], wanted, k, dtype, device) if k else None
    return Batch(rows, wanted, start, data, batch_coefficients(attempt, group, algorithm, divided=divided), top)


def _top(
    samples: Sequence[Sample], wanted: Sequence[npt.NDArray[np.intp]], k: int, dtype: torch.dtype, device: torch.device
) -> Mixture:
    """The sampler's likeliest tokens at every trained one, and their probabilities."""
    ids, logprobs = [np.zeros((0, k), np.int64)], [np.zeros((0, k), np.float32)]
    for sample, places in zip(samples, wanted, strict=True):
        if sample.top is None or sample.top.ids.shape != (len(sample.tokens), k):
            raise AsyncRLError(f"attempt {sample.attempt} of the batch: no {k} likeliest tokens at each place")
        ids.append(sample.top.ids[places].astype(np.int64))
        logprobs.append(sample.top.logprobs[places])
    probabilities = torch.from_numpy(np.concatenate(logprobs)).to(device, dtype).exp()
    return Mixture(torch.from_numpy(np.concatenate(ids)).to(device), probabilities)


def _check(sample: Sample, places: npt.NDArray[np.intp], vocabulary: int) -> None:
    """Refuse what cannot be trained. Raises AsyncRLError and FloatingPointError naming the attempt."""
    name = f"attempt {sample.attempt} of the batch"
    if places[0] == 0:
        raise AsyncRLError(f"{name}: its first token is marked as sampled, but there is no prompt token before it")
    if sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
        raise AsyncRLError(f"{name}: a token id outside the model's vocabulary of {vocabulary}")
    if not np.isfinite(sample.behaviour[places]).all():
        raise FloatingPointError(f"{name}: a behaviour log-probability is not finite")


def unflatten(samples: Sequence[Sample], batch: Batch, flat: torch.Tensor) -> list[npt.NDArray[np.float32]]:
    """Each sample's log-probabilities, float32[n], 0 where a token does not train."""
    out = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in samples]
    values = flat.float().cpu().numpy()
    for index, (row, places) in enumerate(zip(batch.rows, batch.wanted, strict=True)):
        out[row][places] = values[batch.start[index] : batch.start[index + 1]]
    return out

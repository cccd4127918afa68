"""What the loss knows of each trained token, besides its log-probability under the policy that is trained."""

from __future__ import annotations

from typing import NamedTuple

import torch

LOWEST_LOGPROB = -1e4
"""Nats. Far below what any token has that can be told from impossible, and finite: 0 times it is 0."""


def floored(logprob: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probabilities [n], at least LOWEST_LOGPROB, with no gradient below: -inf would make a loss NaN
    even where its token does not train. NaN stays."""
    return logprob.clamp(min=LOWEST_LOGPROB)


class TokenData(NamedTuple):
    """Trained tokens, flat: behaviour log-probability [n] and advantage [n] (floating), attempt int64 [n] and age int64
    [n] in versions (that from which the step starts, less the token's). `proximal` is the log-probability before the
    batch's first step [n], None where that is the current one. `expected` is Σ_j μ_j log π_θ(j) over the sampler's
    likeliest tokens at each place [n], with its gradient, where scores are centred. An attempt is whole: all its
    trained tokens are here."""

    behaviour: torch.Tensor
    advantage: torch.Tensor
    attempt: torch.Tensor
    age: torch.Tensor
    proximal: torch.Tensor | None = None
    expected: torch.Tensor | None = None

    def at(self, where: torch.Tensor) -> TokenData:
        """Some of the tokens, by their places (int64) or a mask (bool)."""
        return TokenData(*(None if values is None else values[where] for values in self))

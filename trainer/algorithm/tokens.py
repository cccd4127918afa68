"""What the loss knows of each trained token, besides its log-probability under the policy that is trained."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenData(NamedTuple):
    """Trained tokens, flat: behaviour log-probability [n] and advantage [n] (floating), attempt int64 [n] and age int64
    [n] in versions (that from which the step starts, less the token's). `proximal` is the log-probability before the
    batch's first step [n], None where that is the current one. An attempt is whole: all its trained tokens are here."""

    behaviour: torch.Tensor
    advantage: torch.Tensor
    attempt: torch.Tensor
    age: torch.Tensor
    proximal: torch.Tensor | None = None

    def at(self, where: torch.Tensor) -> TokenData:
        """Some of the tokens, by their places (int64) or a mask (bool)."""
        return TokenData(*(None if values is None else values[where] for values in self))

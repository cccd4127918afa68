"""What the loss knows of each trained token, besides its log-probability under the policy that is trained."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenData(NamedTuple):
    """Trained tokens, flat: behaviour log-probability [n] and advantage [n] (floating), attempt int64 [n] and age int64
    [n] in versions (that from which the step starts, less the token's). An attempt is whole: all its trained tokens are
    here."""

    behaviour: torch.Tensor
    advantage: torch.Tensor
    attempt: torch.Tensor
    age: torch.Tensor

"""The oracle's batches as the tensors that the loss takes."""

from __future__ import annotations

import torch
from loss_oracle import Tokens, case

from trainer.algorithm.tokens import TokenData


def data_of(tokens: Tokens, dtype: torch.dtype = torch.float64) -> TokenData:
    behaviour, advantage = (torch.tensor(values, dtype=dtype) for values in tokens[:2])
    attempt, age = (torch.tensor(values, dtype=torch.int64) for values in tokens[2:4])
    proximal = None if tokens.proximal is None else torch.tensor(tokens.proximal, dtype=dtype)
    return TokenData(behaviour, advantage, attempt, age, proximal)


def tensors_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, TokenData]:
    current, tokens = case(name)
    return torch.tensor(current, dtype=dtype), data_of(tokens, dtype)

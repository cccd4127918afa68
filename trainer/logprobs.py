"""Log-probabilities of given tokens under a causal language model, computed only where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from async_rl.errors import AsyncRLError

PAD = 0  # any valid id: padding is on the right, where causal attention keeps real tokens from seeing it


class Rows(NamedTuple):
    """A padded micro-batch on the device: ids int64 [rows, longest], and for each wanted token its predecessor's
    place in the flattened ids (`position`) and its id (`target`): int64 [n] each, row after row."""

    ids: torch.Tensor
    position: torch.Tensor
    target: torch.Tensor


def make_rows(
    tokens: Sequence[npt.NDArray[np.int32]], wanted: Sequence[npt.NDArray[np.intp]], device: torch.device
) -> Rows:
    """`wanted` are the indices (≥ 1, rising, at least one) of the tokens of each row whose log-probability is needed.
    What comes after the predecessor of the last wanted one is not computed at all."""
    lengths = [int(indices[-1]) for indices in wanted]
    ids = np.full((len(tokens), max(lengths)), PAD, dtype=np.int64)
    for row, (sequence, length) in enumerate(zip(tokens, lengths, strict=True)):
        ids[row, :length] = sequence[:length]
    position = np.concatenate([row * ids.shape[1] + indices - 1 for row, indices in enumerate(wanted)])
    target = np.concatenate([sequence[indices] for sequence, indices in zip(tokens, wanted, strict=True)])
    on_device = (torch.from_numpy(array.astype(np.int64, copy=False)).to(device) for array in (ids, position, target))
    return Rows(*on_device)


def token_logprobs(model: nn.Module, rows: Rows, temperature: float) -> torch.Tensor:
    """Log-probability of each wanted token, [n], at `temperature`, in float32 (or wider if the model is): logits are
    divided by the temperature and normalised in that dtype. Differentiable unless under no_grad."""

    # The head costs rows × longest × vocabulary; gathering its input first leaves n × vocabulary. A hook, instead of
    # calling the head ourselves, keeps what a model does to its logits afterwards (scaling, soft caps).
    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden.reshape(1, -1, hidden.shape[-1])[:, rows.position], *args[1:])

    handle = output_head(model).register_forward_pre_hook(gather)
    try:
        # No attention mask: with padding on the right, the causal one is enough (and the fast path of SDPA).
        logits = model(input_ids=rows.ids, use_cache=False).logits
    finally:
        handle.remove()
    logits = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
    return -nn.functional.cross_entropy(logits / temperature, rows.target, reduction="none")


def output_head(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise AsyncRLError(f"model {type(model).__name__}: no output head (lm_head), so it is not a language model")
    return head

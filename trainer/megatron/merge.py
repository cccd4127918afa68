"""A whole model with the adapter in its weights, made of the parts where they lie: no rank ever holds all of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.errors import AsyncRLError
from trainer.megatron import hf_weights
from trainer.megatron.lora import Adapters
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import Piece
from trainer.ranks import agreement
from trainer.whole_model import COMPANIONS


def write_merged(model: ShardedModel, adapters: Adapters, folder: Path, base: str) -> None:
    """W + scale·B·A in Hugging Face layout, summed in the adapter's dtype and rounded once to the model's, with the
    companions of the model at `base`. Called on all ranks at once; rank 0 writes. Raises AsyncRLError on all."""

    def merged(piece: Piece) -> torch.Tensor:
        change = adapters.weight_change(piece.name.removesuffix(".weight"))
        if change is None:
            return hf_weights.held(piece)
        weight = piece.local.reshape(piece.size)
        return (weight.to(change.dtype) + change).to(weight.dtype)

    _write(model, folder, base, merged)


def write_whole(model: ShardedModel, folder: Path, base: str) -> None:
    """The same of a model whose own weights learned."""
    _write(model, folder, base, hf_weights.held)


def _write(model: ShardedModel, folder: Path, base: str, value_of: Callable[[Piece], torch.Tensor]) -> None:
    part = folder.with_name(f"{folder.name}.partial")  # renamed when it is whole

    def finish() -> str:
        try:
            for pattern in COMPANIONS:
                for path in sorted(Path(base).glob(pattern)):
                    shutil.copy2(path, part / path.name)
            shutil.rmtree(folder, ignore_errors=True)  # what a run wrote at its end, before it went on
            part.rename(folder)
        except OSError as error:
            raise AsyncRLError(f"{folder} cannot be written: {error}") from error
        return ""

    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # of one that was killed
    try:
        hf_weights.write(model, part, value_of)
        agreement.on_rank_0(finish, f"writing {folder}", model.device)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)

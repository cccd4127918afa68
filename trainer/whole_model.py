"""A whole Hugging Face checkpoint, from a model whose own weights were trained."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

# What belongs to a model beside weights and config: copied, so that the folder is complete.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


def write_whole(
    folder: Path, model: PreTrainedModel, base: str | Path, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """The folder that `AutoModelForCausalLM.from_pretrained` reads, with the companions of the model it was made of.
    `tensors` are its parameters by name, where the model itself has them in parts."""
    model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
    for pattern in COMPANIONS:
        for path in sorted(Path(base).glob(pattern)):
            shutil.copy2(path, folder / path.name)


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by name, sorted; tied ones once."""
    return dict(sorted(model.named_parameters()))


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the parameters of these names, which they all have."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])

"""The base model that a trainer loads, and the device it goes to."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from async_rl.errors import AsyncRLError


def load_model(path: str | Path, dtype: str) -> PreTrainedModel:
    """A causal language model from a directory in Hugging Face layout, never from the network; `dtype` is torch's name
    for one, or "auto" for the checkpoint's own. Raises AsyncRLError."""
    if not Path(path).is_dir():
        raise AsyncRLError(
            f"[model] path = {str(path)!r}: no such directory (a model in Hugging Face layout is needed)"
        )
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        # Soft-capped attention scores (Gemma 2) exist only in the eager attention function.
        capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            **({"attn_implementation": "eager"} if capped else {}),
        )
    except (OSError, ValueError, KeyError) as error:
        raise AsyncRLError(f"[model] path = {str(path)!r}: not a causal language model: {error}") from error
    return model


def resolve_device(device: str | torch.device) -> torch.device:
    """A GPU for "auto" where torch sees one; a device as it is. Raises AsyncRLError for "cuda" where it sees none."""
    if isinstance(device, torch.device):
        return device
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise AsyncRLError('[model] device = "cuda": torch sees no GPU here; set device = "cpu" or "auto"')
    return torch.device(("cuda" if available else "cpu") if device == "auto" else device)

"""Loading a Hugging Face causal language model for the embedded engine, and refusing what it cannot run right."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from inference.engine import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL, SLIDING = "full_attention", "sliding_attention"


def pick_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises EngineError for a device that this machine lacks."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(f"device {device!r}: torch {torch.__version__} finds no CUDA device; set [model] device")
    return torch.device(device)


def load_model(path: Path, device: torch.device, dtype: str) -> PreTrainedModel:
    """The model in evaluation mode, without gradients; dtype "auto" is the checkpoint's. Raises EngineError when the
    folder is missing or holds no model, or the model needs what this engine has not."""
    if dtype != "auto" and dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r}: choose auto, {', '.join(DTYPES)}")
    if not (path / "config.json").is_file():
        raise EngineError(f"no model at {path}: expected a Hugging Face folder with config.json; see [model] path")
    try:
        config = AutoConfig.from_pretrained(path)
        # Soft-capped attention scores (Gemma 2) exist only in the eager attention function.
        capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES.get(dtype, "auto"), **({"attn_implementation": "eager"} if capped else {})
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"model at {path}: cannot be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def layer_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Window (or None) of each kind of attention layer. Raises EngineError for layers that keep anything but plain
    keys and values, or whose mask is not causal."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise EngineError(f"model type {config.model_type}: attention is not causal")
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"model type {config.model_type}: encoder-decoder models are not supported")
    windows: dict[str, int | None] = {}
    for kind, kwargs in zip(*get_layer_types_and_kwargs(config), strict=True):
        if kind not in (FULL, SLIDING):
            raise EngineError(
                f"model type {config.model_type}: layers of type {kind!r} are not supported by the torch engine "
                f'(only {FULL} and {SLIDING}); use engine = "vllm" or "sglang"'
            )
        window = kwargs.get("sliding_window")
        if windows.setdefault(kind, window) != window:
            raise EngineError(f"model type {config.model_type}: {kind} layers of different windows")
    return windows


def end_tokens(configs: Iterable[Any]) -> tuple[int, ...]:
    """A model's end-of-sequence ids: of the first of its configs that names any, which the generation config should
    be; empty when none does."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def stop_table(model: PreTrainedModel, vocab: int, stop_tokens: Collection[int] | None) -> npt.NDArray[np.bool_]:
    """For each token whether it ends a request: bool[vocab]; None: the model's own end tokens."""
    table = np.zeros(vocab, dtype=bool)
    own = (model.generation_config, model.config.get_text_config(decoder=True))
    for token in end_tokens(own) if stop_tokens is None else stop_tokens:
        if not 0 <= token < vocab:
            raise EngineError(f"stop token {token} is outside the model's vocabulary of {vocab}")
        table[token] = True
    return table


def forward_parameters(model: PreTrainedModel) -> tuple[str, bool]:
    """The name of the cache argument (transformers 5.24 renamed `past_key_values` to `cache`), and whether logits can
    be had for chosen positions only."""
    names = inspect.signature(type(model).forward).parameters
    return ("cache" if "cache" in names else "past_key_values"), "logits_to_keep" in names

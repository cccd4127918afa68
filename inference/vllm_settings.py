"""What vLLM is started with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.inference_config import NOT_FOR_VLLM
from inference.engine import EngineError

RANK = 64  # of the largest adapter, unless configured; vLLM computes as if every one had this
SCORING = 8  # requests beside those that sample: a served policy is scored while all slots are taken
STEP = 2048  # tokens that are read in one step on a CPU, if the contexts are not longer
BLOCK = 128  # tokens; the largest unit in which vLLM deals out its KV cache
PIECE = 8  # tokens that come at once of a request, so that the loop is not woken for each


def engine_arguments(
    model_path: Path, config: Any, *, slots: int, max_context: int, adapters: int, device: str, dtype: str,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of AsyncEngineArgs, for a model with a `config` of transformers. Raises EngineError."""
    if taken := sorted(NOT_FOR_VLLM & arguments.keys()):
        raise EngineError(f"[inference.vllm] arguments: {', '.join(taken)} is set by the node itself; leave it out")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    # One more than the contexts, as a sequence is scored by a request that samples one token after it.
    settings: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "seed": 0,
        "max_model_len": min(max_context + 1, longest) if longest else max_context + 1,
        "max_num_seqs": slots + SCORING,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "stream_interval": PIECE,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if adapters:
        settings |= {
            "enable_lora": True,
            "max_loras": adapters,
            "max_cpu_loras": adapters,
            "max_lora_rank": RANK,
            "worker_extension_cls": "inference.vllm_worker.WorkerExtension",
        }
    if device == "cpu":
        # A prompt is read in one step: a request with a seed that is stopped in its prompt ends vLLM's worker, which
        # turns back the random numbers in a way that they have on a GPU alone.
        settings |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(STEP, settings["max_model_len"]),
            "kv_cache_memory_bytes": _kv_bytes(config, slots + SCORING, max_context, dtype),
        }
    return settings | dict(arguments)


def device_of(device: str) -> str:
    """What "auto" is on this machine."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def largest_rank(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("max_lora_rank", 0))


def read_rank(folder: Path) -> int:
    """The rank of an adapter in PEFT's layout. Raises EngineError."""
    path = folder / "adapter_config.json"
    try:
        return int(json.loads(path.read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no adapter's configuration: {error!r}") from error


def read_config(model_path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_path} holds no model: {error}") from error


def _kv_bytes(config: Any, requests: int, context: int, dtype: str) -> int:
    """So much that all requests fit at their longest: on a CPU vLLM would take nearly all memory there is."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = requests * -(-(context + 1) // BLOCK) + 1
    token = 2 * text.num_hidden_layers * heads * head * (4 if dtype == "float32" else 2)
    return int(max(blocks * BLOCK * token, 1 << 24))

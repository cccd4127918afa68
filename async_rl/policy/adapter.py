"""The adapter file: what the trainer uploads and the nodes load, and its digest.

One safetensors file. Tensor names are PEFT's (`base_model.model.<module>.lora_A.weight`, float32 or the model's
dtype); the canonical adapter config is JSON under the key "adapter_config" of the file's metadata. So a policy is one
opaque blob for the store, and PEFT's folder is the same tensors with the config beside them.

The digest says *which policy*, independently of file layout: SHA-256 over, for each tensor sorted by name, its name,
dtype, shape and bytes, and the canonical config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from async_rl.errors import AsyncRLError
from async_rl.policy.tensor_file import hash_tensors

CONFIG_KEY = "adapter_config"
TENSOR_PREFIX = "base_model.model."


class AdapterError(AsyncRLError):
    """An adapter file that is broken, or is not the policy it is said to be."""


def canonical_config(config: Mapping[str, Any]) -> str:
    """The part of a PEFT config that decides what the tensors mean, as JSON with sorted keys: rank, alpha, targets.
    Paths and notes do not belong to a policy's identity."""
    kept = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": int(config["r"]),
        "lora_alpha": int(config["lora_alpha"]),
        "target_modules": sorted(config["target_modules"]),
        "use_rslora": bool(config.get("use_rslora", False)),
        "bias": "none",
    }
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def policy_digest(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    """SHA-256 in hex over sorted (name, dtype, shape, bytes) and the canonical config."""
    digest = hashlib.sha256()
    hash_tensors(digest, tensors)
    digest.update(canonical_config(config).encode())
    return digest.hexdigest()


def write_adapter(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    """Write the file whole (temporary name, then rename) and return the policy's digest."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    partial = path.with_suffix(path.suffix + ".part")
    save_file(kept, partial, metadata={CONFIG_KEY: canonical_config(config)})
    partial.replace(path)
    return policy_digest(kept, config)


def read_adapter(path: Path, expected_digest: str | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and config of an adapter file. Raises AdapterError when the file is cut or broken, has no
    config, or is not the policy whose digest was expected."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        # Not the open file's get_tensor: that of safetensors 0.8 leaks two integers a tensor, for ever.
        tensors = load(path.read_bytes())
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter file {path}: cannot be read: {error}") from error
    if CONFIG_KEY not in metadata:
        raise AdapterError(f"adapter file {path}: no {CONFIG_KEY!r} in its metadata")
    try:
        config = json.loads(metadata[CONFIG_KEY])
        digest = policy_digest(tensors, config)
        if config["r"] < 1:
            raise ValueError(f"rank {config['r']}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise AdapterError(f"adapter file {path}: {CONFIG_KEY!r} in its metadata is broken: {error!r}") from error
    if expected_digest is not None and digest != expected_digest:
        raise AdapterError(f"adapter file {path}: digest {digest[:16]}… is not the announced {expected_digest[:16]}…")
    return tensors, config

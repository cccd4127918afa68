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
import math
import re
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
_TENSOR = re.compile(rf"{re.escape(TENSOR_PREFIX)}(.+)\.lora_([AB])\.weight", re.DOTALL)


class AdapterError(AsyncRLError):
    """An adapter file that is broken, or is not the policy it is said to be."""


def tensor_name(module: str, part: str) -> str:
    """Of a module's factor, "A" [r, in] or "B" [out, r]."""
    return f"{TENSOR_PREFIX}{module}.lora_{part}.weight"


def split_tensor_name(name: str) -> tuple[str, str]:
    """`base_model.model.<module>.lora_A.weight` -> (module, "A"). Raises AdapterError for a name of another form."""
    found = _TENSOR.fullmatch(name)
    if found is None:
        raise AdapterError(f"adapter tensor {name!r} is not named {tensor_name('<module>', 'A')} or …lora_B.weight")
    return found[1], found[2]


def shared_name(module: str) -> str:
    """Of an expert's projection, the name that all experts' has: without the expert's number."""
    return re.sub(r"(^|\.)experts\.\d+\.", r"\1experts.", module)


def means(target: str, module: str) -> bool:
    """Whether an entry of target_modules means the module of this path: peft's rule for a list of them."""
    return module == target or module.endswith(f".{target}")


def lora_scale(config: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / √r with rank-stabilised LoRA (arXiv:2312.03732)."""
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


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

"""What must be equal in every pool of a run: model, tokenizer, task, algorithm, group size, seed and sampling.

A fingerprint maps each part to a short hash, so that a refusal can name the part and both values. Paths, devices,
dtypes, slots and steps may differ between machines. Of the weights the safetensors *headers* are hashed (names,
shapes, offsets): reading 100 GB at every start would cost minutes. `path` and `eval_path` in [task] are
paths too: that the data there are the same is for who copies them to see.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.eval_config import eval_tasks
from async_rl.inference_config import InferenceConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
PATHS = ("path", "eval_path")
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


def fingerprint(config: Config, model_path: Path) -> dict[str, str]:
    """Part -> 16 hex digits. Raises AsyncRLError when the model directory has no config.json or no weights."""
    config_file = model_path / "config.json"
    weights = sorted(model_path.glob("*.safetensors"))
    if not config_file.is_file() or not weights:
        raise AsyncRLError(
            f"[model] path = {str(model_path)!r}: no config.json and *.safetensors there; it must be a model "
            "directory in Hugging Face layout"
        )
    tokenizer = [model_path / name for name in TOKENIZER_FILES if (model_path / name).is_file()]
    generation = model_path / "generation_config.json"
    template = model_path / "chat_template.jinja"
    return {
        # Engines take the tokens at which an answer ends from the generation config.
        "model config": _hash(config_file.read_bytes(), generation.read_bytes() if generation.is_file() else b""),
        "weights": _hash(*(_safetensors_header(path) for path in weights)),
        "tokenizer": _hash(*(path.read_bytes() for path in tokenizer)),
        "chat template": _hash(template.read_bytes() if template.is_file() else b""),
        "[task]": _hash(_canonical(_without_paths(config.task))),
        "[[run.eval]]": _hash(_canonical({name: _without_paths(task) for name, task in eval_tasks(config).items()})),
        "[algorithm]": _hash(_canonical(_what_trains(config.algorithm))),
        "group size": str(config.buffer.group_size),
        # The shapes of what nodes compute, where these decide the last bits.
        "run.deterministic": f"max_context {config.inference.max_context}" if config.run.deterministic else "false",
        # The tokens by which a served policy is compared with the trainer's come from it (async_rl.proof).
        "run.seed": str(config.run.seed),
        "sampling": _sampling(config.inference),
    }


def pacing(config: Config) -> dict[str, str]:
    """What buffer and trainer must agree on beyond the fingerprint, since both count batches."""
    run, buffer = config.run, config.buffer
    return {
        "run.steps": str(run.steps),
        "buffer.max_staleness": str(buffer.max_staleness),
        "buffer.on_stale": buffer.on_stale,
        "buffer.groups_per_step": str(buffer.groups_per_step),
        "buffer.group_size": str(buffer.group_size),
        "buffer.shards": str(buffer.shards),
    }


def difference(reference: Mapping[str, str], other: Mapping[str, str], whose: str = "the trainer") -> str:
    """Every differing part with both values, as one sentence; empty when they agree. `reference` is `whose`."""
    parts = [
        f"{part}: {whose} has {reference.get(part, 'nothing')}, it has {other.get(part, 'nothing')}"
        for part in dict.fromkeys((*reference, *other))
        if reference.get(part) != other.get(part)
    ]
    return "; ".join(parts)


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise AsyncRLError(f"{path}: not a safetensors file (header of {length} bytes)")
        return file.read(length)


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _what_trains(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """All of the section but the alarms, which decide nothing that is computed: a resumed run may have others."""
    return {field: getattr(algorithm, field) for field in algorithm.__struct_fields__ if field != "alarms"}


def _without_paths(value: Any) -> Any:
    """A table of [task] without the keys of PATHS, wherever they are in it; but whether there is an eval_path is in it,
    as the same rows have other numbers where some are kept for evaluation."""
    if isinstance(value, Mapping):
        apart = {"eval_path": True} if value.get("eval_path") else {}
        return apart | {key: _without_paths(inner) for key, inner in value.items() if key not in PATHS}
    return [_without_paths(each) for each in value] if isinstance(value, list | tuple) else value


def _sampling(inference: InferenceConfig) -> str:
    several = f", {inference.episodes.max_tokens} tokens in an attempt" if inference.episodes.max_tokens else ""
    return f"temperature {inference.temperature}, max_new_tokens {inference.max_new_tokens}{several}"


def _canonical(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, default=str).encode()

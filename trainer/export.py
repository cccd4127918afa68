"""`python -m trainer.export SOURCE FOLDER`: a trained policy as a PEFT folder, or merged into a whole model.

SOURCE is an adapter file, a PEFT folder, a checkpoint, or a run directory (then its newest valid checkpoint, or
`adapters/final` when it has none).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import canonical_config, read_adapter
from trainer.checkpoint import check_checkpoint, find_latest
from trainer.lora import write_peft_folder
from trainer.model_loading import load_model
from trainer.optimizer_state import ADAPTER_FILE, COUNTERS_FILE, read_counters

CHECKPOINTS = "checkpoints"
FINAL = Path("adapters") / "final"
# What belongs to a model beside weights and config: copied, so that a merged model is complete.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


class Policy(NamedTuple):
    """A trained adapter: tensors by PEFT name, canonical config, the path of its base model ("" when not recorded)."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    base_model: str


def export(source: Path, folder: Path, *, merged: bool = False, model: str = "") -> str:
    """Write the policy of `source` to the new or empty `folder`: a PEFT folder, or with `merged` a whole model in the
    base's dtype. `model` replaces the recorded path of the base. Returns the line of Python that loads the result.
    Raises AsyncRLError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AsyncRLError(f"export: {folder} exists and is not an empty folder; name a new one")
    policy = read_policy(source)
    base = model or policy.base_model
    if not base:
        raise AsyncRLError(f"export: {source} does not record its base model; name it with --model")
    if not merged:
        write_peft_folder(folder, policy.tensors, policy.config, base)
        return peft_line(base, folder)
    with tempfile.TemporaryDirectory() as adapter:
        write_peft_folder(Path(adapter), policy.tensors, policy.config, base)
        _merge(base, Path(adapter), folder)
    return f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def peft_line(base_model: str, folder: Path) -> str:
    """The line of Python that loads a PEFT folder on its base."""
    base = f"transformers.AutoModelForCausalLM.from_pretrained({base_model!r})"
    return f"model = peft.PeftModel.from_pretrained({base}, {str(folder)!r})"


def read_policy(source: Path) -> Policy:
    """The policy that `source` holds. Raises AsyncRLError when it holds none or a broken one."""
    if source.is_file():
        tensors, config = read_adapter(source)
        return Policy(tensors, config, "")
    if (source / "adapter_config.json").is_file():
        return _read_peft_folder(source)
    if (source / COUNTERS_FILE).is_file():
        check_checkpoint(source)
        counters = read_counters(source)
        tensors, config = read_adapter(source / ADAPTER_FILE, counters.digest)
        return Policy(tensors, config, counters.model_path)
    found = find_latest(source / CHECKPOINTS)
    if found is not None:
        return read_policy(found.folder)
    if (source / FINAL).is_dir():
        return read_policy(source / FINAL)
    raise AsyncRLError(
        f"export: {source} is no adapter file, PEFT folder or checkpoint, and as a run directory it has neither "
        f"{CHECKPOINTS}/ nor {FINAL}/"
    )


def _read_peft_folder(folder: Path) -> Policy:
    try:
        table = json.loads((folder / "adapter_config.json").read_text())
        config = json.loads(canonical_config(table))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise AsyncRLError(f"PEFT folder {folder}: cannot be read: {error}") from error
    return Policy(tensors, config, table.get("base_model_name_or_path") or "")


def _merge(base: str, adapter: Path, folder: Path) -> None:
    """W + scale·B·A in float32, rounded once to the base's dtype."""
    model = load_model(base, "auto")
    dtype = next(model.parameters()).dtype
    whole = PeftModel.from_pretrained(model.float(), str(adapter)).merge_and_unload().to(dtype)
    whole.save_pretrained(folder)
    for pattern in COMPANIONS:
        for path in sorted(Path(base).glob(pattern)):
            shutil.copy2(path, folder / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; prints the line that loads what it made, or one message on error."""
    parser = argparse.ArgumentParser(prog="async-rl export", description="Export a trained policy.")
    parser.add_argument("source", type=Path, help="run directory, checkpoint, PEFT folder or adapter file")
    parser.add_argument("folder", type=Path, help="where to write; new or empty")
    parser.add_argument("--merged", action="store_true", help="a whole model instead of an adapter")
    parser.add_argument("--model", default="", help="path of the base model, when it is not the recorded one")
    parser.add_argument("--debug", action="store_true", help="show a traceback on error")
    options = parser.parse_args(arguments)
    try:
        line = export(options.source, options.folder, merged=options.merged, model=options.model)
    except AsyncRLError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder} written; load it with:\n  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

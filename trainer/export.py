"""`python -m trainer.export SOURCE FOLDER`: a trained policy as a PEFT folder, or as a whole model.

SOURCE is an adapter file, a PEFT folder, a checkpoint, or a run directory (then its newest valid checkpoint, or
`adapters/final` when it has none). What trained the model's own weights (trainer.kind "sketch" or "full") is a whole
model in any case.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import canonical_config, read_adapter
from async_rl.policy.update_file import read_snapshot
from async_rl.run.exit_code import exit_code
from trainer.checkpoint import check_checkpoint, find_latest
from trainer.lora import write_peft_folder
from trainer.merging import merge_adapter
from trainer.model_loading import load_model
from trainer.optimizer_state import ADAPTER_FILE, COUNTERS_FILE, WEIGHTS_FILE, read_counters
from trainer.peft_layout import from_peft
from trainer.whole_model import all_parameters, fill, write_whole

CHECKPOINTS = "checkpoints"
FINAL = Path("adapters") / "final"
PEFT_FILE, MODEL_FILE = "adapter_config.json", "config.json"


class Policy(NamedTuple):
    """A trained adapter: tensors by PEFT name, canonical config, the path of its base model ("" when not recorded)."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    base_model: str


def export(source: Path, folder: Path, *, merged: bool = False, model: str = "") -> str:
    """Write the policy of `source` to the new or empty `folder`: a PEFT folder, or with `merged` a whole model in the
    base's dtype; of a policy that is whole weights, a whole model in theirs. `model` replaces the recorded path of the
    base. Returns the line of Python that loads the result. Raises AsyncRLError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AsyncRLError(f"export: {folder} exists and is not an empty folder; name a new one")
    place = locate(source)
    if (place / COUNTERS_FILE).is_file() and read_counters(place).kind != "lora":
        return _export_weights(place, folder, model)
    if (place / MODEL_FILE).is_file():  # adapters/final of a policy that is whole weights
        shutil.copytree(place, folder, dirs_exist_ok=True)
        return whole_line(folder)
    policy = read_policy(place)
    base = model or policy.base_model
    if not base:
        raise AsyncRLError(f"export: {source} does not record its base model; name it with --model")
    if not merged:
        write_peft_folder(folder, policy.tensors, policy.config, base)
        return peft_line(base, folder)
    whole = load_model(base, "auto")
    merge_adapter(whole, policy.tensors, policy.config)
    write_whole(folder, whole, base)
    return whole_line(folder)


def whole_line(folder: Path) -> str:
    """The line of Python that loads a whole model."""
    return f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def peft_line(base_model: str, folder: Path) -> str:
    """The line of Python that loads a PEFT folder on its base."""
    base = f"transformers.AutoModelForCausalLM.from_pretrained({base_model!r})"
    return f"model = peft.PeftModel.from_pretrained({base}, {str(folder)!r})"


def locate(source: Path) -> Path:
    """The file or folder that holds the policy: of a run directory, its newest valid checkpoint or `adapters/final`.
    Raises AsyncRLError when there is none."""
    if source.is_file() or any((source / name).is_file() for name in (PEFT_FILE, COUNTERS_FILE, MODEL_FILE)):
        return source
    found = find_latest(source / CHECKPOINTS)
    if found is not None:
        return found.folder
    if (source / FINAL).is_dir():
        return source / FINAL
    raise AsyncRLError(
        f"export: {source} is no adapter file, PEFT folder or checkpoint, and as a run directory it has neither "
        f"{CHECKPOINTS}/ nor {FINAL}/"
    )


def read_policy(place: Path) -> Policy:
    """The adapter that is there. Raises AsyncRLError when there is none, or a broken one."""
    if place.is_file():
        tensors, config = read_adapter(place)
        return Policy(tensors, config, "")
    if (place / COUNTERS_FILE).is_file():
        check_checkpoint(place)
        counters = read_counters(place)
        if (place / ADAPTER_FILE).is_file():
            tensors, config = read_adapter(place / ADAPTER_FILE, counters.digest)
        else:
            from trainer.megatron.saved import read_whole  # the files of backend megatron, which it is not needed for

            tensors, config = read_whole(place, counters)
        return Policy(tensors, config, counters.model_path)
    return _read_peft_folder(place)


def _export_weights(checkpoint: Path, folder: Path, model: str) -> str:
    """A checkpoint's whole weights, on the model they were trained from."""
    check_checkpoint(checkpoint)
    counters = read_counters(checkpoint)
    tensors = _read_weights(checkpoint, counters.digest)
    base = model or counters.model_path
    whole = load_model(base, str(next(iter(tensors.values())).dtype).removeprefix("torch."))
    parameters = all_parameters(whole)
    if {name: tensor.shape for name, tensor in tensors.items()} != {
        name: parameter.shape for name, parameter in parameters.items()
    }:
        raise AsyncRLError(f"export: {checkpoint} has the weights of another model than {base}: name its with --model")
    fill(whole, tensors)
    write_whole(folder, whole, base)
    return whole_line(folder)


def _read_weights(checkpoint: Path, digest: str) -> dict[str, torch.Tensor]:
    """Of one process, or put together from the files of several ranks."""
    if (checkpoint / WEIGHTS_FILE).is_file():
        return dict(read_snapshot(checkpoint / WEIGHTS_FILE, digest).tensors)
    from trainer.fsdp import saved

    return saved.read_weights(checkpoint, digest)


def _read_peft_folder(folder: Path) -> Policy:
    try:
        table = json.loads((folder / PEFT_FILE).read_text())
        tensors, found = from_peft(load_file(folder / "adapter_model.safetensors"), table)
        config = json.loads(canonical_config(found))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise AsyncRLError(f"PEFT folder {folder}: cannot be read: {error}") from error
    return Policy(tensors, config, table.get("base_model_name_or_path") or "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; prints the line that loads what it made, or one message on error."""
    parser = argparse.ArgumentParser(prog="async-rl export", description="Export a trained policy.")
    parser.add_argument("source", type=Path, help="run directory, checkpoint, PEFT folder or adapter file")
    parser.add_argument("folder", type=Path, help="where to write; new or empty")
    parser.add_argument("--merged", action="store_true", help="a whole model, also of an adapter")
    parser.add_argument("--model", default="", help="path of the base model, when it is not the recorded one")
    parser.add_argument("--debug", action="store_true", help="show a traceback on error")
    options = parser.parse_args(arguments)

    def run() -> None:
        line = export(options.source, options.folder, merged=options.merged, model=options.model)
        print(f"{options.folder} written; load it with:\n  {line}")

    return exit_code(run, options.debug)


if __name__ == "__main__":
    sys.exit(main())

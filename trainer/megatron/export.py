"""`torchrun --nproc-per-node N -m trainer.megatron.export CONFIG CHECKPOINT FOLDER`: a whole model with the adapter of
CHECKPOINT in its weights, of a model that no single process holds (else: `async-rl export --merged`). CONFIG is the
run's config.toml, with the layout to be used here, which need not be the run's: its [trainer.parallel] has N ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.model_cache import model_path
from trainer.backends import rank_device
from trainer.checkpoint import check_checkpoint
from trainer.export import whole_line
from trainer.ranks.place import check_world, torchrun_place


def export_merged(config: Config, checkpoint: Path, folder: Path, device: torch.device) -> None:
    """On all ranks at once, whose process group is up; `folder` is new or empty. Raises AsyncRLError."""
    from trainer.megatron import groups
    from trainer.megatron.learnable import LoraShards
    from trainer.megatron.model import build

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AsyncRLError(f"export: {folder} exists and is not an empty folder; name a new one")
    trainer, path = config.trainer, model_path(config)
    groups.begin(trainer.parallel, device)
    try:
        model = build(path, trainer.parallel, dtype=getattr(torch, config.model.dtype), device=device, recompute=False)
        learnable = LoraShards(model, trainer, config.run.seed, str(path))
        learnable.load(checkpoint)
        learnable.export_merged(folder)
    finally:
        groups.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; rank 0 prints the line that loads what was made, or one message on error."""
    parser = argparse.ArgumentParser(prog="trainer.megatron.export", description="Merge an adapter, on many ranks.")
    parser.add_argument("config", help="the run's config, with the layout to use")
    parser.add_argument("checkpoint", type=Path, help="the run's checkpoints/v…")
    parser.add_argument("folder", type=Path, help="where to write; new or empty, and seen by all ranks")
    options = parser.parse_args(arguments)
    place = torchrun_place()
    try:
        if place is None:
            raise AsyncRLError("export: start it with torchrun, one process for each rank of [trainer.parallel]")
        config = load_config(options.config)
        if config.trainer.kind != "lora":
            raise AsyncRLError(
                f'export: [trainer] kind = "{config.trainer.kind}" has no adapter to merge: its checkpoints hold the '
                "whole model, which `async-rl export` writes on any machine"
            )
        check_world(place, config.trainer.parallel)
        check_checkpoint(options.checkpoint, contents=place.rank == 0)
        device = rank_device(config, place)
        work = timedelta(seconds=config.run.work_timeout)
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, init_method="env://", timeout=work)
        export_merged(config, options.checkpoint, options.folder, device)
    except AsyncRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if place.rank == 0:
        print(f"{options.folder} written; load it with:\n  {whole_line(options.folder)}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

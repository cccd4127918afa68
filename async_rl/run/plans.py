"""Which processes a run consists of: the specs that the launcher starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from async_rl.inference_config import NodeGroup, interpreter, lives_elsewhere
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import LaunchError, ProcessSpec
from async_rl.shards import shard_name


def plan_run(
    groups: Sequence[NodeGroup], config_path: Path, directory: RunDirectory, *flags: str, ranks: int = 1
) -> list[ProcessSpec]:
    """The processes of a whole run, services first; `flags` (--debug, --resume) go to all. With `ranks` each of the
    trainer's is one; else the trainer starts its ranks itself, where it is."""
    return [
        *plan_services(config_path, directory, *flags, "--together"),
        *plan_ranks(config_path, directory, *flags, ranks=ranks),
        *(
            plan_node(name, config_path, directory, *flags, group=group)
            for group in groups
            for name in group.node_names
        ),
    ]


def pinned(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """The same processes, with the inference nodes on the first half of the cores and all others on the second.
    Raises LaunchError where that cannot be done."""
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError("[launch] pin = true needs Linux: no other system lets a process choose its cores")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise LaunchError("[launch] pin = true needs two cores or more, and this process may use one")
    first, second = tuple(cores[: len(cores) // 2]), tuple(cores[len(cores) // 2 :])
    return [replace(spec, cpus=first if spec.module == "inference.node" else second) for spec in specs]


def plan_services(config_path: Path, directory: RunDirectory, *flags: str) -> list[ProcessSpec]:
    store = plan_pool("store", "buffer.store", config_path, directory, *flags)
    shards = [
        plan_pool(shard_name(shard), "buffer.service", config_path, directory, "--shard", str(shard), *flags)
        for shard in range(len(directory.endpoints))
    ]
    return [replace(store, again=()), *(replace(shard, again=()) for shard in shards)]


def plan_trainer(name: str, config_path: Path, directory: RunDirectory, *flags: str) -> ProcessSpec:
    """Started again it goes on from its newest checkpoint."""
    again = () if "--resume" in flags else ("--resume",)
    return replace(plan_pool(name, "trainer.learner", config_path, directory, *flags, ends_run=True), again=again)


def plan_ranks(config_path: Path, directory: RunDirectory, *flags: str, ranks: int) -> list[ProcessSpec]:
    """Rank 0 is the trainer that buffer and store know, and the one whose end is the run's."""
    names = ["trainer", *(f"trainer-rank{rank}" for rank in range(1, ranks))]
    plans = [plan_trainer(name, config_path, directory, *flags) for name in names]
    return [replace(plan, rank=rank, world=ranks, ends_run=rank == 0) for rank, plan in enumerate(plans)]


def plan_node(name: str, config_path: Path, directory: RunDirectory, *flags: str, group: NodeGroup) -> ProcessSpec:
    """Of a group: it looks itself up in the config, and lives in the interpreter that has its engine."""
    own = ("--group", group.name) if group.name else ()
    plan = plan_pool(name, "inference.node", config_path, directory, *flags, *own)
    elsewhere = interpreter(group.inference) if lives_elsewhere(group.inference) else ""
    return replace(plan, expendable=True, again=(), python=elsewhere)


def plan_pool(
    name: str, module: str, config_path: Path, directory: RunDirectory, *flags: str, ends_run: bool = False
) -> ProcessSpec:
    arguments = ("--config", str(config_path), "--dir", str(directory.path), "--name", name, *flags)
    return ProcessSpec(name, module, arguments, ends_run)

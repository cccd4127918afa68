"""Which of several ranks this process is, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig


class Place(NamedTuple):
    """`meeting` is a file of the run's own on this machine by which its ranks find each other; without one, they do at
    the address that torchrun put into the environment. `local` counts on the machine: its device."""

    rank: int
    world: int
    local: int
    meeting: Path | None = None


def torchrun_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What torchrun says; None when it did not start this process."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    rank = int(environment["RANK"])
    return Place(rank, int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", rank)))


def first_place(ranks: int, meeting: Path, environment: Mapping[str, str] = os.environ) -> Place:
    """Of rank 0: torchrun's word, or else the first of `ranks` on this machine. A world of one is nobody's word:
    clusters leave it in the environment of every process."""
    place = torchrun_place(environment)
    return place if place is not None and place.world > 1 else Place(0, ranks, 0, meeting)


def check_world(place: Place, parallel: ParallelConfig) -> None:
    """Raises AsyncRLError where torchrun started another number of processes than the layout has."""
    if place.world != parallel.ranks:
        raise AsyncRLError(
            f"torchrun started {place.world} processes, and [trainer.parallel] tensor × pipeline × data = "
            f"{parallel.tensor} × {parallel.pipeline} × {parallel.data} needs {parallel.ranks}: change one of them"
        )


def check_devices(place: Place, devices: int) -> None:
    """Raises AsyncRLError where this machine has fewer devices than ranks, of which torchrun may have started some
    elsewhere: two on one would wait for each other, or fill its memory."""
    here = place.world if place.meeting is not None else place.local + 1
    if here > devices:
        gpus = f"{devices} GPU{'s' * (devices != 1)}"
        raise AsyncRLError(
            f"[trainer.parallel] {here} ranks on this machine, which has {gpus}: each needs one of its own: "
            "change the layout, or start ranks on several machines (docs/megatron.md)"
        )

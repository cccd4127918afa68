"""What the test of the pool of ranks runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def sum_of_ranks(payload: int) -> dict[str, Any]:
    total = torch.tensor(float(dist.get_rank() + payload))
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": float(total), "megatron": "megatron.core" in sys.modules}


def fail(payload: int) -> None:
    """Rank `payload` raises, while the others wait for it."""
    if dist.get_rank() == payload:
        raise ValueError("as it was told")
    dist.barrier()


def die(payload: int) -> None:
    if dist.get_rank() == payload:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(payload: int) -> None:
    if dist.get_rank() == payload:
        time.sleep(600)

"""What ranks tell one another of how a part of their work went, so that all of them go on, or none does.

Every function is called on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from async_rl.errors import AsyncRLError

Result = TypeVar("Result")


def ranks_that(is_so: bool, device: torch.device) -> list[int]:
    """Those on which it is so, on every rank."""
    bits = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    bits[dist.get_rank()] = int(is_so)
    dist.all_reduce(bits)
    return bits.nonzero().flatten().tolist()


def agree(error: Exception | None, what: str, device: torch.device) -> None:
    """Raises on every rank when there is an error on one: its own where it is, else AsyncRLError that says which rank
    was the first to have one, and which. `what` says what was tried."""
    ranks = dist.get_world_size()
    first = torch.full((1,), ranks if error is None else dist.get_rank(), dtype=torch.int64, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    rank = int(first)
    if rank == ranks:
        return
    said = from_rank(rank, str(error).encode(), device).decode(errors="replace")
    if error is not None:
        raise error
    raise AsyncRLError(f"{what} failed on rank {rank}: {said}")


def everywhere(work: Callable[[], Result], what: str, device: torch.device) -> Result:
    """What `work` gives on this rank, once it went well on all of them; it must not wait for the others. Raises as
    `agree` does."""
    error, result = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    agree(error, what, device)
    return result  # type: ignore[return-value]


def from_rank(rank: int, message: bytes, device: torch.device) -> bytes:
    """The message that this rank has, on every rank."""
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, rank)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == rank and message:
        data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(data, rank)
    return data.cpu().numpy().tobytes()


def on_rank_0(make: Callable[[], str], what: str, device: torch.device) -> str:
    """What `make` returns on rank 0, on every rank. Raises on all when it raises there."""
    digest, error = "", None
    if dist.get_rank() == 0:
        try:
            digest = make()
        except Exception as raised:
            error = raised
    agree(error, what, device)
    return from_rank(0, digest.encode(), device).decode()

"""The process group of a trainer's ranks, and what rank 0 tells the others by it.

Calls and what became of them go over a gloo group of their own, whose ranks may wait for the next call as long as rank
0 may wait for a batch. What is computed together has the default group, whose time-out is that of work, and groups
that the backend makes with the same one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from trainer.ranks.place import Place

Result = TypeVar("Result")

LOOPBACK = "lo"
FAILED = "failed"  # the key under which a rank leaves what it failed of, should the others wait for it in vain
LOOK_TIMEOUT_S = 1.0  # for a look at that key, which may go away meanwhile
IDLE_EXTRA_S = 600.0  # for what has a limit of its own between two calls: publishing, status, results


class RankFailed(AsyncRLError):
    """Another rank failed; the message names it, and says of what."""


class Failure(msgspec.Struct):
    """What a rank failed of: the error's type, and which of those that callers look for it is."""

    rank: int
    name: str
    text: str
    kind: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> Failure:
        kinds = [kind.__name__ for kind in (FloatingPointError, AsyncRLError) if isinstance(error, kind)]
        return cls(rank, type(error).__name__, str(error), kinds[0] if kinds else "")

    def words(self) -> str:
        return f"rank {self.rank} of the trainer failed: {'' if self.kind else self.name + ': '}{self.text}"

    def error(self) -> Exception:
        return FloatingPointError(self.words()) if self.kind == "FloatingPointError" else RankFailed(self.words())


class Lost(Exception):
    """A rank does not answer any more: it is gone, or a time-out is over."""


class Channel:
    """Of this rank; to be made on all of them at once. Raises Lost when not all came within the connection's limit."""

    def __init__(self, place: Place, config: Config) -> None:
        self.rank, self.world = place.rank, place.world
        if place.meeting is not None and any(name == LOOPBACK for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # nobody else has anything to say in it
        work = timedelta(seconds=config.run.work_timeout)
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            if place.meeting is not None:
                self.store: dist.Store = dist.FileStore(str(place.meeting), place.world)
                dist.init_process_group(kind, store=self.store, rank=self.rank, world_size=self.world, timeout=work)
            else:
                dist.init_process_group(kind, init_method="env://", timeout=work)
                self.store = dist.distributed_c10d._get_default_store()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=idle_limit_s(config)))
        except RuntimeError as error:
            raise Lost(f"not all of the {self.world} ranks came together: {error}") from error

    def tell(self, message: bytes) -> None:
        """Rank 0: to all others, who `hear` it. Raises Lost."""
        self._broadcast(torch.tensor([len(message)]))
        self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def hear(self) -> bytes:
        """The next message of rank 0. Raises Lost."""
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        message = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(message)
        return message.numpy().tobytes()

    def together(self, work: Callable[[], Result]) -> Result:
        """Do `work`, as all ranks do at once, and return what it gives when it went well everywhere. Raises what it
        raises here, or else what it raised on the first rank where it did: a FloatingPointError, or RankFailed. Raises
        Lost when a rank does not come back from it."""
        failure, own = None, None
        try:
            result = work()
        except Exception as error:
            own, failure = error, Failure.of(self.rank, error)
            self.store.set(FAILED, msgspec.json.encode(failure))
        failures = self._gather(failure)
        if failures and self.rank == 0:
            self.store.delete_key(FAILED)
        if own is not None:
            raise own
        if failures:
            raise failures[0].error()
        return result

    def store_to_watch(self) -> dist.Store:
        """For `failure_in`, from another thread."""
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=LOOK_TIMEOUT_S))
        return store

    def close(self) -> None:
        dist.destroy_process_group()

    def _gather(self, failure: Failure | None) -> list[Failure]:
        message = b"" if failure is None else msgspec.json.encode(failure)
        lengths = self._all_gather(torch.tensor([len(message)]))
        longest = max(map(int, lengths))
        if not longest:
            return []
        padded = self._all_gather(torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8))
        texts = [text.numpy().tobytes().strip() for text in padded]
        return [msgspec.json.decode(text, type=Failure) for text in texts if text]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(tensor) for _ in range(self.world)]
        try:
            dist.all_gather(out, tensor, group=self._group)
        except RuntimeError as error:
            raise Lost(str(error)) from error
        return out

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, 0, group=self._group)
        except RuntimeError as error:
            raise Lost(str(error)) from error


def failure_in(store: dist.Store) -> Failure | None:
    """What some rank failed of in a call that has not ended yet. None as well where the store does not say: the call
    may end, and the key go, between two looks; and a store that is gone is for others to notice."""
    try:
        return msgspec.json.decode(store.get(FAILED), type=Failure) if store.check([FAILED]) else None
    except (RuntimeError, msgspec.DecodeError):
        return None


def idle_limit_s(config: Config) -> float:
    """How long a rank may wait for rank 0's next call: all that rank 0 itself may wait for in between."""
    run = config.run
    return (
        run.connect_timeout + run.draw_timeout + run.eval_timeout + run.work_timeout + config.buffer.trainer_timeout
        + IDLE_EXTRA_S
    )  # fmt: skip

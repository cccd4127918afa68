"""Functions run on several ranks at once, over gloo on this machine.

Ranks are forked from a server that has imported torch, megatron-core (if it is there) and our backends once (some ten
seconds, for a whole test run); each rank is then there in a tenth of a second. Put many cases into one call all the
same: groups cost time too.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch.distributed",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "trainer.megatron.learnable",
    "trainer.megatron.passes",
    "trainer.fsdp.backend",
)
# Compiling is nothing for models this small; each rank would start compilers of its own. On the network of this
# machine alone, whatever its host name resolves to.
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


DIED = "died without a word"
TOLD_S = 5.0  # how long it may take until a dead rank's pipe says so, once another rank has said what that did to it


class RankFailed(Exception):
    """A rank raised, died or ran out of time; the message names it, and has its traceback if there is one."""


def run_ranks(world: int, target: str, payload: Any, timeout: float = 280.0) -> list[Any]:
    """Call `target` ("module:function") with `payload` on `world` ranks of one process group, and return what each
    returned, by rank. Payload and results are plain data and arrays. A rank that raises or dies, or `timeout` seconds,
    end all of them: RankFailed."""
    context = _server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, world, str(Path(folder) / "store"), timeout, target, pickle.dumps(payload), theirs)
            process = context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], deadline - time.monotonic())
        if not ready:
            raise RankFailed(f"rank {', '.join(map(str, missing))}: no result after {timeout:g} s")
        for rank in missing:
            if pipes[rank] in ready:
                try:
                    results[rank] = _result(pipes[rank], rank)
                except RankFailed as failure:
                    others = {pipes[other]: other for other in missing if other != rank and other not in results}
                    raise _cause(failure, others) from None
    return [results[rank] for rank in range(len(pipes))]


def _cause(failure: RankFailed, others: dict[Connection, int]) -> RankFailed:
    """`failure`, or the death that made a collective of the rank that failed break: what the survivor says may be read
    first."""
    deadline = time.monotonic() + TOLD_S
    while others and DIED not in str(failure):
        ready = [pipe for pipe in wait(list(others), max(0.0, deadline - time.monotonic())) if pipe in others]
        if not ready:
            break
        for pipe in ready:
            rank = others.pop(pipe)
            try:
                pipe.recv_bytes()
            except EOFError:
                return RankFailed(f"rank {rank}: {DIED}")
    return failure


def _result(pipe: Connection, rank: int) -> Any:
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank}: {DIED}") from None
    if not ok:
        raise RankFailed(f"rank {rank}:\n{value}")
    return value


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        ensure_running()
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value
    return context


def _rank(rank: int, world: int, store: str, timeout: float, target: str, payload: bytes, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        module, _, name = target.partition(":")
        answer = True, getattr(importlib.import_module(module), name)(pickle.loads(payload))
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    signal.pause()  # until it is killed: a rank that left early would fail the others' last collectives

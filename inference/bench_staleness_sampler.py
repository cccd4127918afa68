"""The sampling half of `async-rl bench staleness`: the node's engine, rollout book and verifier, and no network.

A process of its own: `trainer` and `inference` never import each other. It answers each SampleOrder when all its leases
are worked off, so it and the trainer take turns, and which policy samples what is decided by the orders alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench_staleness_cells import Sampled, SampleOrder
from async_rl.run.model_cache import model_path
from async_rl.run.pipes import take_over_pipes
from async_rl.run.process import follow_parent
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Task, instance_of
from async_rl.trajectory import Packed
from async_rl.version import PolicyId
from async_rl.wire.messages import Lease
from inference.engine import Engine
from inference.engines import make_engine
from inference.rollout import RolloutBook, ToScore

Key = tuple[int, int]


class Sampler:
    """An engine with one policy at a time. `tokenizer` is the model's."""

    def __init__(self, engine: Engine, task: Task, tokenizer: Any) -> None:
        self._engine, self._task = engine, task
        self._book = RolloutBook(task, tokenizer, "bench", "torch")

    def work_off(self, order: SampleOrder) -> Sampled:
        """Raises AsyncRLError when an attempt could not be sampled or scored."""
        began = time.process_time()
        self._serve(PolicyId("main", order.version, order.digest), Path(order.adapter))
        instances = {lease.lease: instance_of(self._task, lease.split, lease.instance) for lease in order.leases}
        for lease in order.leases:
            for request in self._book.open(lease):
                self._engine.submit(request)
        done: dict[Key, Packed] = {}
        while self._engine.active:
            for completion in self._engine.step():
                asked = self._book.sampled(completion)
                if not isinstance(asked, ToScore):
                    raise AsyncRLError(f"attempt {completion.key}: the engine aborted it")
                score = self._task.score(instances[asked.key[0]], asked.completion)
                trajectory = self._book.scored(asked.key, score.reward, score.components, 0.0, "")
                if trajectory is not None:
                    done[asked.key] = trajectory
        return Sampled(trajectories=in_order(done, order.leases), cpu_s=time.process_time() - began)

    def _serve(self, policy: PolicyId, adapter: Path) -> None:
        self._engine.install(policy, adapter)
        # Nothing is in flight, so it is all the same; but an engine with one copy of the weights does not offer finish.
        self._engine.flip(policy, "recompute")
        for other, uses in list(self._engine.resident.items()):
            if other != policy and not uses:
                self._engine.evict(other)


def in_order(done: Mapping[Key, Packed], leases: list[Lease]) -> list[msgspec.Raw]:
    return [msgspec.Raw(done[lease.lease, sample].joined()) for lease in leases for sample in lease.samples]


def make_sampler(config: Config) -> Sampler:
    path = model_path(config)
    return Sampler(make_engine(config, path), load_task(config.task), AutoTokenizer.from_pretrained(path))


def main(config: str, *overrides: str) -> None:
    follow_parent()
    torch.set_num_threads(1)
    orders, answer = take_over_pipes()
    try:
        sampler = make_sampler(load_config(config, overrides))
        decoder = msgspec.msgpack.Decoder(SampleOrder)
        for body in orders:
            answer(sampler.work_off(decoder.decode(body)))
    except AsyncRLError as error:
        print(f"error: sampling: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

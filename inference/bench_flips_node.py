"""The node of the benchmark of flips: the engine of the config, kept full, and policies served as a node serves them.

A process of its own, in the interpreter that a node would have. It has no buffer: it gives itself the prompts of the
config's task, a few more than run at once, as a node with leases has them, and it scores nothing. What it has to tell
goes into a pipe: which policy it serves since when, and how many tokens it has sampled.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.process import check_house, follow_parent
from async_rl.run.scratch import Scratch
from async_rl.tasks.registry import load_task
from async_rl.version import PolicyId
from async_rl.wire.link import Client
from async_rl.wire.messages import SamplingParams
from inference.bench_load import GROUP, Group, Load, groups
from inference.engine import Engine, Installed, Request
from inference.engines import make_engine
from inference.policies import PolicyFetched, PolicyFetchFailed, PolicyPuller
from inference.serving import Serving

TELL_S = 0.02  # how often it says how much it has sampled
IDLE_S = 0.05
CONNECT_S = 60.0


class Word(msgspec.Struct, array_like=True, tag=True):
    """Base of what the node says. Times are of the monotonic clock, which all processes of a machine share."""


class Ready(Word, array_like=True, tag=True):
    """The engine runs, and waits for its first policy. `describe` is the engine's own, as text."""

    engine: str
    describe: dict[str, str]


class Flip(Word, array_like=True, tag=True):
    """A version was there in full, its content read, at `fetched`; new requests start under it since `flipped`; the
    first token was sampled under it at `first_token`."""

    version: int
    fetched: float
    flipped: float
    first_token: float


class Sampled(Word, array_like=True, tag=True):
    """`tokens` in all, of requests that were done at `at`; `limit` is the engine's own."""

    at: float
    tokens: int
    limit: int


class Failed(Word, array_like=True, tag=True):
    error: str


AnyWord = Ready | Flip | Sampled | Failed


class FlipNode:
    """`work` returns never; it raises AsyncRLError when a policy does not come, or the engine or the store is gone."""

    def __init__(
        self, config: Config, engine: Engine, puller: PolicyPuller, inbox: queue.SimpleQueue[object],
        supply: Iterator[Group], pipe: Connection,
    ) -> None:  # fmt: skip
        inference = config.inference
        self._engine, self._puller, self._inbox = engine, puller, inbox
        self._supply, self._pipe, self._temperature = supply, pipe, inference.temperature
        self._serving = Serving(
            engine, inference.in_flight, inference.flip_timeout, puller.ask, self._refused, self._not_started,
            self._ignore, again=puller.again,
        )  # fmt: skip
        self._ahead = inference.slots + max(GROUP, inference.slots // 4)  # see inference.node
        self._fetched: dict[PolicyId, float] = {}
        self._flipped: dict[PolicyId, float] = {}  # that have sampled nothing yet
        self._tokens, self._told = 0, Sampled(0.0, 0, 0)

    def work(self) -> None:
        while True:
            self._read_inbox(0.0 if self._engine.serving is not None else IDLE_S)
            flipped = self._serving.advance(time.monotonic())
            if flipped is not None:
                policy = flipped.installed.policy
                self._puller.serves(policy)
                self._flipped[policy] = time.monotonic()
            if self._engine.serving is not None:
                self._fill()
                self._tokens += sum(len(completion.tokens) for completion in self._engine.step())
                self._tell()

    def _read_inbox(self, timeout_s: float) -> None:
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, PolicyFetched):
            self._fetched[item.policy] = time.monotonic()
            self._serving.fetched(item, time.monotonic())
        elif isinstance(item, PolicyFetchFailed):
            raise AsyncRLError(f"policy {item.policy.short()} did not come: {item.error}")
        elif isinstance(item, Exception):
            raise item

    def _fill(self) -> None:
        while self._engine.active + GROUP <= self._ahead:
            group = next(self._supply)
            prompt = np.array(group.prompt, dtype=np.int32)
            for sample, length in enumerate(group.lengths):
                sampling = SamplingParams(self._temperature, length)
                self._engine.submit(Request((group.number, sample), prompt, sampling, group.number * GROUP + sample))

    def _tell(self) -> None:
        for policy, flipped in list(self._flipped.items()):
            first = self._engine.first_token(policy)
            if first is not None:
                del self._flipped[policy]
                self._say(Flip(policy.version, self._fetched.pop(policy), flipped, first))
        now = time.monotonic()
        if self._tokens > self._told.tokens and now - self._told.at > TELL_S:
            self._told = Sampled(now, self._tokens, self._engine.limit)
            self._say(self._told)

    def _say(self, word: AnyWord) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(word))

    def _refused(self, policy: PolicyId, error: str) -> None:
        raise AsyncRLError(f"the engine refuses policy {policy.short()}: {error}")

    def _not_started(self, request: Request, error: str) -> None:
        raise AsyncRLError(f"request {request.key} cannot start: {error}")

    def _ignore(self, _installed: Installed) -> None:
        """No policy comes that is not to be served."""


def load_of(config: Config) -> Load:
    """As many at a time as there are slots, of a quarter of the longest answer to all of it: of answers that are all
    as long, all would end together."""
    longest = config.inference.max_new_tokens
    return Load(config.inference.slots, max(1, longest // 4), longest)


def work(config: Config, directory: RunDirectory, pipe: Connection) -> None:
    from transformers import AutoTokenizer  # here, since it takes a second to import

    model = Path(config.model.path)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    engine, scratch = make_engine(config, model, directory.logs / "engine.log"), Scratch()
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    try:
        store = Client(
            directory.store_endpoint, run=directory.run_id, token=directory.token, role="node", name="node-0",
            peer="store",
        )  # fmt: skip
        store.connect(CONNECT_S)
        puller = PolicyPuller(store, scratch.path, inbox, engine.capabilities.in_place, engine.read)
        try:
            described = {key: str(value) for key, value in engine.describe().items()}
            pipe.send_bytes(msgspec.msgpack.encode(Ready(engine.capabilities.name, described)))
            supply = groups(load_of(config), load_task(config.task), tokenizer)
            FlipNode(config, engine, puller, inbox, supply, pipe).work()
        finally:
            puller.close()
            store.close()
    finally:
        engine.close()
        scratch.remove()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -P -m inference.bench_flips_node", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--pipe", required=True, type=int, help="the descriptor of the pipe's end for writing")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    follow_parent()
    pipe = Connection(options.pipe, readable=False)
    os.set_inheritable(options.pipe, False)  # the engine's own processes need not hold it
    try:
        check_house(["inference"])
        work(load_config(options.config), RunDirectory.open(options.dir), pipe)
    except AsyncRLError as error:
        logging.error("%s", error)
        pipe.send_bytes(msgspec.msgpack.encode(Failed(str(error))))
        sys.exit(1)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)


if __name__ == "__main__":
    main()

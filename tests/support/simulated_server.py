"""Servers (inference.server) that are simulated in this process: one that does what it is told at once, and one whose
tokens tell under which weights, and after how many others, each was sampled."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inference.engine import Capabilities, InFlight
from inference.server import Call, EngineDied, Piece, Signals

VOCABULARY = 29
Key = tuple[int, int]


class SimulatedServer:
    """Samples token 1 every `token_s`, and does what else it is told at once: in `hangs` are the names of those of its
    methods that never return, in `raises` what others raise instead of that.

    `allowed` tokens of each call are sampled, and no more until that is raised: so a test can look at what is half
    done, however long it takes to. `held` are the calls that wait so, `done` counts those whose last piece is taken."""

    def __init__(self, *in_flight: InFlight, whole: bool = False) -> None:
        ways = frozenset(in_flight or ("finish", "recompute"))
        attests = "span" if whole or "continue" in ways else "name"
        self.capabilities = Capabilities("simulated", ways, 4, attests, 1e-4, in_place=whole)  # type: ignore[arg-type]
        self.vocabulary_size = VOCABULARY
        self.whole, self.token_s = whole, 0.004
        self.hangs: set[str] = set()
        self.raises: dict[str, Exception] = {}
        self.calls: dict[str, Call] = {}
        self.allowed = math.inf
        self.held: set[str] = set()
        self.done = 0
        self.label = ""  # of all weights, or of the adapter that is flipped under `continue`

    async def may(self, what: str) -> None:
        if what in self.hangs:
            await asyncio.sleep(1e6)
        if what in self.raises:
            raise self.raises[what]

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def check(self) -> None:
        await self.may("check")

    async def load(self, adapter: str, folder: Path) -> None:
        await self.may("load")

    async def unload(self, adapter: str) -> None:
        await self.may("unload")

    async def swap(self, adapter: str, folder: Path, label: str) -> None:
        await self.may("swap")
        self.label = label

    async def reload(self, folder: Path, label: str) -> None:
        await self.may("reload")
        self.label = label

    async def abort(self, name: str) -> None:
        await self.may("abort")
        self.calls.pop(name, None)

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        self.calls[call.name] = call
        for index in range(call.most):
            await asyncio.sleep(self.token_s)
            while index >= self.allowed:
                self.held.add(call.name)
                await self.may("generate")
                await asyncio.sleep(0.001)
            self.held.discard(call.name)
            await self.may("generate")
            last = index + 1 == call.most
            if last:
                self.calls.pop(call.name, None)
            labels = [(self.label, 1)] if self.whole else None
            yield Piece([1], [-1.0], labels, finish="length" if last else None)
        self.done += 1

    async def score(self, adapter: str | None, sequences: Sequence[Any]) -> list[Any]:
        await self.may("score")
        return [np.zeros(max(0, len(sequence) - 1), np.float32) for sequence in sequences]

    async def signals(self) -> Signals:
        await self.may("signals")
        return Signals(0.5, len(self.calls), 0, 0)

    def describe(self) -> dict[str, Any]:
        return {}


class TellingServer(SimulatedServer):
    """A token is the version of the weights that sampled it; its log-probability is minus the number of tokens before
    it, prompt included. Pieces are of one to three tokens, which a flip may part. It does everything in a random time
    of milliseconds, and writes down what no engine may ask of it (`wrong`). `end` makes it die, or fall silent."""

    def __init__(self, rng: random.Random, *in_flight: InFlight, whole: bool = False) -> None:
        super().__init__(*in_flight, whole=whole)
        self.rng, self.dead = rng, ""
        self.wrong: list[str] = []
        self.folders: dict[str, Path] = {}
        self.users: Counter[str | None] = Counter()
        self.names: set[str] = set()
        self.aborted: set[str] = set()
        self.asked: defaultdict[Key, list[list[int]]] = defaultdict(list)  # the ids of the calls for each request

    def end(self, how: str) -> None:
        """`how`: died, silent."""
        self.dead = how

    async def may(self, what: str) -> None:
        await asyncio.sleep(self.rng.random() * 0.003)
        if self.dead == "silent":
            await asyncio.sleep(1e6)
        if self.dead:
            raise EngineDied("the server is gone")

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    async def load(self, adapter: str, folder: Path) -> None:
        await self.may("load")
        self.expect(adapter not in self.folders, f"{adapter} is loaded twice")
        self.expect(folder not in self.folders.values(), f"{folder} is used twice")
        self.folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        self.expect(not self.users[adapter], f"{adapter} is unloaded while {self.users[adapter]} calls use it")
        await self.may("unload")
        self.expect(not self.users[adapter], f"{adapter} was used while it was unloaded")
        self.expect(self.folders.pop(adapter).is_dir(), f"the folder of {adapter} is gone before it is unloaded")

    async def swap(self, adapter: str, folder: Path, label: str) -> None:
        self.expect(folder.is_dir(), f"{folder} is not there")
        await super().swap(adapter, folder, label)

    async def reload(self, folder: Path, label: str) -> None:
        self.expect((folder / "config.json").is_file(), f"{folder} is no checkpoint")
        await super().reload(folder, label)

    async def abort(self, name: str) -> None:
        await self.may("abort")
        self.aborted.add(name)
        while name in self.calls and not self.dead:
            await asyncio.sleep(0.001)

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        stamped = self.whole or call.adapter == "live"
        self.expect(call.name not in self.names, f"{call.name} is the name of two calls")
        self.expect(call.most > 0, f"{call.name} may have no token")
        self.expect(stamped or call.adapter in self.folders, f"{call.adapter} is not loaded")
        self.names.add(call.name)
        first, second, _ = call.name.split("-")
        self.asked[int(first), int(second)].append(call.ids.tolist())
        self.calls[call.name] = call
        self.users[call.adapter] += 1
        try:
            async for piece in self._pieces(call, stamped):
                yield piece
        finally:
            del self.calls[call.name]
            self.users[call.adapter] -= 1

    async def _pieces(self, call: Call, stamped: bool) -> AsyncIterator[Piece]:
        done = 0
        while done < call.most:
            labels: list[str] = []
            for _ in range(min(self.rng.randint(1, 3), call.most - done)):
                await self.may("generate")
                labels.append(self.label if stamped else str(call.adapter))
            if call.name in self.aborted:
                yield Piece((), (), () if stamped else None, "abort")
                return
            tokens = [int(label.split("-")[0]) for label in labels]
            logprobs = [-float(len(call.ids) + done + index) for index in range(len(labels))]
            done += len(labels)
            runs = [(label, 1) for label in labels] if stamped else None
            yield Piece(tokens, logprobs, runs, "length" if done == call.most else None)

"""SGLang as a Server (inference.server): a child of this process, or one that is there already, spoken to over HTTP.

What it needs to be kept from:
  - it aborts every request whose name begins with the one it is given: the names sent are of one length;
  - an abort that comes before a request has reached its scheduler is lost, and no second one is accepted;
  - to unload an adapter that a request uses makes it wait, with every later load behind it;
  - a request for an adapter that was unloaded loads it again, from where it was;
  - an id outside the vocabulary ends it;
  - it stops at the model's own end tokens, or, told not to, at no token at all.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.run.scratch import Scratch
from inference.engine import Capabilities, EngineError
from inference.flights import Flight, wait, wait_for_calls
from inference.proof import LOGPROB_BOUNDS
from inference.request_checks import check_ids
from inference.server import Call, EngineDied, Piece, Signals
from inference.sglang_adapters import check_adapter, is_whole, write_whole
from inference.sglang_answers import Answer, Model, read_model
from inference.sglang_child import Child, default_flags, merge_flags
from inference.sglang_client import KEY_VARIABLE, Client, Stream

START_S = 900.0  # a large model comes from a slow disk
CHECK_S = 10.0
CONTROL_S = 60.0  # for what the server does between two steps
WEIGHTS_S = 900.0
POLL_S = 0.1
REACH_S = 0.25  # an abort waits so long for a sign that its request has reached the scheduler
ABORT_S = 5.0  # then its connection is closed
MOST_KEPT = 4096
"""Where only the likeliest tokens are sampled, they are taken from this many at most: SGLang's own limit."""


class _Flight(Flight):
    """`begun` once something came of it."""

    def __init__(self, adapter: str | None) -> None:
        super().__init__(adapter)
        self.rid = uuid.uuid4().hex
        self.sent: float | None = None
        self.begun = asyncio.Event()
        self.stopped = False
        self.stream: Stream | None = None


class SglangServer:
    """`python` is the interpreter whose environment has SGLang; `endpoint` is the URL of a server that somebody else
    started on this machine for this node alone, with LoRA and room for `max_adapters` (its key is in SGLANG_API_KEY);
    `arguments` are flags of the server. `whole`: all weights change (`reload`), and there are no adapters. `routes`:
    the experts of each token come with the last piece. `feed_forward`: adapters may be on more than attention, also on
    experts. Raises EngineError for what cannot be."""

    def __init__(
        self,
        model_path: Path,
        *,
        slots: int,
        max_context: int,
        max_adapters: int,
        device: str,
        dtype: str,
        whole: bool,
        python: str,
        endpoint: str,
        arguments: Mapping[str, Any],
        log: Path | None,
        routes: bool = False,
        feed_forward: bool = True,
    ) -> None:
        self._model_path = model_path.resolve()
        self._model: Model = read_model(self._model_path)
        if routes and self._model.routes is None:
            raise EngineError(f"{model_path}: routes are asked for, but the model has no experts")
        device = _device() if device == "auto" else device
        defaults = default_flags(
            slots=slots, max_context=max_context, max_adapters=max_adapters, device=device, dtype=dtype,
            whole=whole, feed_forward=feed_forward, routes=routes,
        )  # fmt: skip
        self._device, self._flags = device, merge_flags(defaults, arguments)
        self._python, self._log = python, log
        self._endpoint = endpoint
        self._whole, self._routes, self._max_adapters = whole, routes, max_adapters
        self._max_context, self._dtype = max_context, dtype
        self._child: Child | None = None
        self._client: Client | None = None
        self._closing = False
        self._version = ""
        self._flights: dict[str, _Flight] = {}
        self._adapters: set[str] = set()
        self._scratch: Scratch | None = None  # of adapters that had to be completed
        self._retracted = 0
        self._open = asyncio.Event()  # not while weights are changed
        self._open.set()
        self._one_reload = asyncio.Lock()
        self._reloads = 0
        self._label = ""  # the server's, of its weights

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="sglang",
            in_flight=frozenset(("continue", "recompute") if self._whole else ("finish", "recompute")),
            resident_versions=1 if self._whole else self._max_adapters,
            attests="span" if self._whole else "name",
            logprob_bound=LOGPROB_BOUNDS[self._dtype],
            in_place=self._whole,
            top_p=True,
            routes=self._routes,
            experts=not self._whole,
        )

    @property
    def vocabulary_size(self) -> int:
        return self._model.vocabulary

    async def start(self) -> None:
        key = os.environ.get(KEY_VARIABLE, "") if self._endpoint else secrets.token_hex(32)
        if self._endpoint:
            url = self._endpoint
        else:
            self._child = Child(self._python, self._model_path, self._flags, key, self._log)
            url = f"http://127.0.0.1:{self._child.port}"
        self._client = Client(url, key, self._why)
        await self._ready()
        if self._child is not None:
            self._child.note_files()
        facts = await self._client.ask("/server_info", timeout_s=CONTROL_S)
        self._version, self._label = str(facts.get("version", "")), str(facts.get("weight_version", ""))
        self._check_flags(facts)
        if self._endpoint and not self._whole:
            await self._client.unload_all(timeout_s=CONTROL_S)
        await self.score(None, [np.zeros(2, np.int32)])  # what is compiled at the first request is there when it is up

    async def load(self, adapter: str, folder: Path) -> None:
        check_adapter(adapter, folder, self._device)
        if not is_whole(folder):
            self._scratch = self._scratch or Scratch()
            whole = self._scratch.path / adapter
            write_whole(folder, self._model_path, whole)
            folder = whole
        try:
            await self._control("/load_lora_adapter", {"lora_name": adapter, "lora_path": str(folder)})
        except EngineError:
            self._forget(adapter)
            raise
        self._adapters.add(adapter)

    async def unload(self, adapter: str) -> None:
        if adapter not in self._adapters:
            return
        await wait_for_calls(self._flights, adapter)  # SGLang would load nothing until they have ended
        self._adapters.discard(adapter)
        await self._control("/unload_lora_adapter", {"lora_name": adapter})
        self._forget(adapter)

    async def swap(self, adapter: str, folder: Path, label: str) -> None:
        raise EngineError(f"adapter {adapter}: SGLang binds a request to an adapter; it cannot go on under another")

    async def reload(self, folder: Path, label: str) -> None:
        async with self._one_reload:
            self._open.clear()
            try:
                await self._control("/pause_generation", {"mode": "in_place"})
                try:
                    body = {"model_path": str(folder), "weight_version": label, "flush_cache": False}
                    self._reloads += 1
                    await self._control("/update_weights_from_disk", body, WEIGHTS_S)
                    self._label = label
                finally:
                    await self._control("/continue_generation", {})
            finally:
                self._open.set()

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        check_ids(f"call {call.name}", call.ids, self._model.vocabulary)
        self._check_loaded(call.adapter)
        self._body(call)  # refuses at once
        flight = self._flights[call.name] = _Flight(call.adapter)
        try:
            await self._open.wait()
            if not flight.stopped:
                answer = Answer(call, self._model, label=self._label if self._whole else None, routed=self._routes)
                flight.stream = self._connected.stream("/generate", {**self._body(call), "rid": flight.rid})
                flight.sent = asyncio.get_running_loop().time()
                async with aclosing(aiter(flight.stream)) as events:  # type: ignore[type-var]
                    async for event in events:
                        flight.begun.set()
                        before = answer.retracted
                        piece = answer.read(event, flight.stopped)
                        self._retracted += answer.retracted - before
                        yield piece
                        if piece.finish is not None:
                            return
            if not flight.stopped:
                raise EngineDied(f"call {call.name}: the answer ends in the middle; {await self._why()}")
            yield Piece((), (), () if self._whole else None, "abort")
        finally:
            flight.ended.set()
            del self._flights[call.name]

    async def abort(self, name: str) -> None:
        flight = self._flights.get(name)
        if flight is None or flight.stopped:
            return
        flight.stopped = True
        if flight.sent is None:
            return
        await self._open.wait()
        reached = flight.sent + REACH_S - asyncio.get_running_loop().time()
        await wait(flight.begun, reached)
        await self._connected.ask("/abort_request", {"rid": flight.rid}, timeout_s=CONTROL_S)
        await wait(flight.ended, ABORT_S)
        if not flight.ended.is_set() and flight.stream is not None:
            flight.stream.close()

    async def score(
        self, adapter: str | None, sequences: Sequence[npt.NDArray[np.int32]]
    ) -> list[npt.NDArray[np.float32]]:
        for number, ids in enumerate(sequences):
            check_ids(f"sequence {number} to be scored", ids, self._model.vocabulary)
        self._check_loaded(adapter)
        await self._open.wait()
        told = [ids for ids in sequences if len(ids) > 1]
        body: dict[str, Any] = {
            "input_ids": [ids.tolist() for ids in told],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": [uuid.uuid4().hex for _ in told],  # shared with nobody
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(told)
        answers = iter(await self._connected.ask("/generate", body, timeout_s=WEIGHTS_S) if told else ())
        vocabulary, nothing = self._model.vocabulary, np.zeros(0, dtype=np.float32)
        return [_scores(next(answers)["meta_info"], ids, vocabulary) if len(ids) > 1 else nothing for ids in sequences]

    async def signals(self) -> Signals:
        answer = await self._connected.ask("/v1/loads?include=core", timeout_s=CHECK_S)
        loads = answer["loads"]
        return Signals(
            max((load["token_usage"] for load in loads), default=0.0),
            sum(load["num_running_reqs"] for load in loads),
            sum(load["num_waiting_reqs"] for load in loads),
            self._retracted,
        )

    async def check(self) -> None:
        if self._child is not None and self._child.ended():
            raise EngineDied(await self._why())
        status = await self._connected.status("/ready", timeout_s=CHECK_S)
        if status is None or (status != 200 and self._open.is_set()):  # while paused it says that it is not ready
            said = f"no answer within {CHECK_S:.0f} s" if status is None else f"status {status}"
            raise EngineDied(f"{self._connected.url}/ready: {said}; {await self._why()}")

    def describe(self) -> dict[str, Any]:
        where = {"endpoint": self._endpoint} if self._child is None else {"pid": self._child.pid}
        log = {} if self._child is None else {"log": str(self._child.log)}
        return {"engine": "sglang", "version": self._version, "model": str(self._model_path), **where, **log} | {
            "flags": dict(self._flags) if not self._endpoint else {},
            "seeded": bool(self._flags.get("enable-deterministic-inference")),
        }

    async def close(self) -> None:
        """A server that is somebody else's is left without adapters."""
        self._closing = True
        async with AsyncExitStack() as last:
            if self._scratch is not None:
                last.callback(self._scratch.remove)
            if self._child is not None:
                last.push_async_callback(self._child.close)
            if self._client is None:
                return
            last.push_async_callback(self._client.close)
            for flight in self._flights.values():
                if flight.stream is not None:
                    flight.stream.close()
            if self._endpoint and self._adapters:
                await self._client.unload_all(timeout_s=CHECK_S)

    @property
    def _connected(self) -> Client:
        if self._client is None or self._closing:
            raise EngineDied("the SGLang server is closed, or was never started")
        return self._client

    async def _control(self, path: str, body: Mapping[str, Any], timeout_s: float = CONTROL_S) -> None:
        answer = await self._connected.ask(path, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"the SGLang server refuses {path}: {answer.get('error_message') or answer}")

    async def _ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_S
        while await self._connected.status("/ready", timeout_s=CHECK_S) != 200:
            if self._child is not None and (how := self._child.ended()):
                raise EngineError(f"{how}, before it was ready; {self._child.log_tail()}")
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"{self._connected.url} is not ready after {START_S:.0f} s; {await self._why()}")
            await asyncio.sleep(POLL_S)

    async def _why(self) -> str:
        """How the server ended. Its connections break a little before it has."""
        if self._child is None:
            return f"the server at {self._endpoint} was started by somebody else: look there"
        for _ in range(int(2 / POLL_S)):
            if how := self._child.ended():
                return f"{how}; {self._child.log_tail()}"
            await asyncio.sleep(POLL_S)
        return f"the SGLang server (pid {self._child.pid}) runs; {self._child.log_tail()}"

    def _check_loaded(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self._adapters:
            raise EngineError(
                f"adapter {adapter} is not loaded; loaded are {', '.join(sorted(self._adapters)) or 'none'}"
            )

    def _forget(self, adapter: str) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch.path / adapter, ignore_errors=True)

    def _check_flags(self, facts: Mapping[str, Any]) -> None:
        """Somebody else may have started it; and flags of the config are the user's."""
        wanted = ["enable_return_routed_experts"] if self._routes else []
        wanted += ["disable_overlap_schedule"] if self._whole else ["enable_lora"]
        missing = ["--" + name.replace("_", "-") for name in wanted if not facts.get(name)]
        room = facts.get("max_loras_per_batch") or 0
        if not self._whole and room <= self._max_adapters:
            missing.append(f"--max-loras-per-batch {self._max_adapters + 1}")
        if missing:
            whose = f"endpoint {self._endpoint}" if self._endpoint else "arguments"
            raise EngineError(f"[inference.sglang] {whose}: the server has to have {', '.join(missing)}")

    def _body(self, call: Call) -> dict[str, Any]:
        greedy = call.temperature == 0
        own = set(call.stop)
        if own and not self._model.ends <= own:
            raise EngineError(
                f"call {call.name}: SGLang ends at each of {sorted(self._model.ends)}, not at {sorted(own)} alone: "
                f"ask for all of these, or for none"
            )
        sampling: dict[str, Any] = {
            "temperature": call.temperature,
            "top_p": 1.0 if greedy else call.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": call.most,
            "stop_token_ids": sorted(own),
            "ignore_eos": not own,
            "sampling_seed": call.seed % (1 << 63),  # where it is deterministic (describe)
        }
        if self._whole:
            sampling["stream_interval"] = 1  # what is sent together should be of the same weights
        body = {"input_ids": call.ids.tolist(), "sampling_params": sampling, "stream": True, "return_logprob": True}
        # What a call computes is cached under the key with which it began, also when the weights changed meanwhile.
        body |= {"extra_key": f"{call.cache_key}/{self._reloads}", "return_routed_experts": self._routes}
        if call.adapter is not None:
            body["lora_path"] = call.adapter
        if sampling["top_p"] < 1:  # what it calls log-probabilities are those before tokens were left out
            sampling["top_k"] = min(self._model.vocabulary, MOST_KEPT)
            body["return_sampling_mask"] = True
        return body


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _scores(meta: Mapping[str, Any], ids: npt.NDArray[np.int32], vocabulary: int) -> npt.NDArray[np.float32]:
    told = [row[1] for row in meta["input_token_logprobs"]]
    shown = np.where(ids < vocabulary - 1, ids, 0).tolist()  # it says 0 for the last id, though it scores that
    if told != shown or meta["cached_tokens"]:
        raise EngineError(
            f"the SGLang server was to score {len(ids)} tokens: it scored {len(told)}, which are "
            f"{'those' if told == shown else 'others'}, and took {meta['cached_tokens']} from its cache"
        )
    return np.array([row[0] for row in meta["input_token_logprobs"][1:]], dtype=np.float32)

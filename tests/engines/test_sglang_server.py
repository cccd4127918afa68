"""What is particular to SGLang: its traps, its process, the experts that it tells of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from engine_house import ADAPTERS, CLOSE, LONG, Engines, children, unheld_memory
from peft import PeftModel
from served_model import Ids, Tensors, logprobs_by, write_peft
from tiny_lm import VOCABULARY, tiny_lm

from async_rl.run.scratch import ELSEWHERE, Scratch
from async_rl.trajectory import Finish
from inference import flights
from inference.engine import EngineError
from inference.event_loop import EventLoop
from inference.server import Call
from inference.sglang_engine import SglangServer

pytestmark = [pytest.mark.only("sglang"), pytest.mark.timeout(600)]
START_S, WAIT_S = 400.0, 60.0
CONTEXT = 96
PROMPT = np.arange(5, 15, dtype=np.int32)
NODE = """
import asyncio, sys
from pathlib import Path
from engine_house import ADAPTERS, make_server

async def main():
    server = make_server("sglang", ADAPTERS, Path(sys.argv[1]), Path(sys.argv[2]))
    await server.start()
    print(server.describe()["pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None
    routes: Any


class Served:
    """A server of a model with experts, and what waits for it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.model = tiny_lm("qwen3_moe")
        self.model.save_pretrained(folder / "model")
        self.log = log
        self.server = self.another()
        self.loop = EventLoop("test")
        self.do(self.server.start(), START_S)

    def another(self, endpoint: str = "") -> SglangServer:
        return SglangServer(
            self.folder / "model", slots=4, max_context=CONTEXT, max_adapters=3, device="cpu", dtype="float32",
            whole=False, python=os.environ["ASYNC_RL_SGLANG_PYTHON"], endpoint=endpoint, log=self.log, routes=True,
            arguments={}, feed_forward=False,
        )  # fmt: skip

    def do(self, work: Any, within_s: float = WAIT_S) -> Any:
        return self.loop.run(work, within_s, "the test")

    def adapter(self, name: str, targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Path:
        """The folder of a random one."""
        generator = torch.Generator().manual_seed(sum(name.encode()))
        tensors: Tensors = {}
        for module, linear in self.model.named_modules():
            if module.rpartition(".")[2] in targets and "experts" not in module:
                a = torch.randn(4, linear.in_features, generator=generator) * 0.3
                b = torch.randn(linear.out_features, 4, generator=generator) * 0.3
                tensors |= {f"base_model.model.{module}.lora_{part}.weight": t for part, t in (("A", a), ("B", b))}
        return write_peft(self.folder / name, tensors, {"r": 4, "lora_alpha": 8, "target_modules": list(targets)})

    def logprobs(self, folder: Path | None, prompt: Ids, tokens: Ids) -> Any:
        """By transformers and peft, of a model without an adapter in it."""
        model = tiny_lm("qwen3_moe")
        with torch.no_grad():
            return logprobs_by(model if folder is None else PeftModel.from_pretrained(model, folder), prompt, tokens)

    async def sample(self, name: str, adapter: str | None, most: int = 12) -> Sampled:
        call = Call(name, PROMPT, most, 1.0, 1.0, 1, (), adapter, str(adapter))
        whole = Sampled([], [], None, None)
        async for piece in self.server.generate(call):
            whole = Sampled(
                [*whole.tokens, *piece.tokens], [*whole.logprobs, *piece.logprobs], piece.finish, piece.routes
            )
        return whole

    def close(self) -> None:
        self.do(self.server.close())
        self.loop.close()


@pytest.fixture(scope="module")
def served(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engines.close()
    before = set(children())
    made = Served(tmp_path_factory.mktemp("sglang"), engines.log())
    yield made
    assert made.server._child is not None
    in_memory = (made.server._child._scratch.path / ELSEWHERE).read_text().splitlines()
    made.close()
    assert set(children()) <= before
    assert in_memory
    assert [name for name in in_memory if Path(name).exists()] == []


def test_the_experts_it_tells_of_are_those_that_transformers_chooses(served: Served) -> None:
    sampled = served.do(served.sample("routes", None))
    ids = torch.tensor([[*PROMPT.tolist(), *sampled.tokens]])
    with torch.no_grad():
        logits = served.model(ids, output_router_logits=True).router_logits
    assert sampled.routes.shape == (len(PROMPT) + 12 - 1, len(logits), 2)
    for layer, scores in enumerate(logits):
        expected = scores[:-1].topk(2).indices.sort().values.numpy()
        np.testing.assert_array_equal(np.sort(sampled.routes[:, layer]), expected)


@pytest.mark.parametrize("targets", [("k_proj",), ("v_proj", "o_proj"), ("q_proj", "k_proj")])
def test_an_adapter_of_some_of_what_it_has_in_one_matrix_is_served_as_peft_serves_it(
    served: Served, targets: tuple[str, ...]
) -> None:
    name = "-".join(targets)
    folder = served.adapter(name, targets)
    served.do(served.server.load(name, folder))
    tokens = np.arange(VOCABULARY, dtype=np.int32)
    (scored,) = served.do(served.server.score(name, [tokens]))
    served.do(served.server.unload(name))
    assert np.abs(scored - served.logprobs(None, tokens[:1], tokens[1:])).max() > 0.01
    np.testing.assert_allclose(scored, served.logprobs(folder, tokens[:1], tokens[1:]), atol=CLOSE, rtol=0)


def test_an_adapter_that_was_unloaded_is_not_loaded_again_by_a_request(served: Served) -> None:
    served.do(served.server.load("gone", served.adapter("gone")))
    served.do(served.server.unload("gone"))
    with pytest.raises(EngineError, match="gone is not loaded"):
        served.do(served.sample("late", "gone"))
    with pytest.raises(EngineError, match="gone is not loaded"):
        served.do(served.server.score("gone", [PROMPT]))
    # What it does by itself: the reason for the above.
    body = {"input_ids": PROMPT.tolist(), "sampling_params": {"max_new_tokens": 1}, "lora_path": "gone"}
    assert served.do(served.server._connected.ask("/generate", body, timeout_s=WAIT_S))["output_ids"]
    served.do(served.server._connected.ask("/unload_lora_adapter", {"lora_name": "gone"}, timeout_s=WAIT_S))


def test_an_adapter_in_use_is_not_unloaded_and_holds_up_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "LAST_CALL_S", 0.001)
    served.do(served.server.load("used", served.adapter("used")))

    async def unload_while_it_runs() -> Sampled:
        calls = [asyncio.create_task(served.sample(f"long-{i}", "used", most=CONTEXT - len(PROMPT))) for i in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="is used by call long-0"):
            await served.server.unload("used")
        await served.server.load("other", served.adapter("other"))
        return (await asyncio.gather(*calls))[0]

    assert len(served.do(unload_while_it_runs()).tokens) == CONTEXT - len(PROMPT)
    served.do(served.server.unload("used"))
    served.do(served.server.unload("other"))


def test_an_abort_ends_its_own_call_and_not_those_whose_names_begin_with_it(served: Served) -> None:
    async def abort_one() -> tuple[Sampled, Sampled]:
        calls = [asyncio.create_task(served.sample(name, None, most=CONTEXT - len(PROMPT))) for name in ("1", "10")]
        await asyncio.sleep(0)
        await served.server.abort("1")
        await served.server.abort("unknown")
        first, second = await asyncio.gather(*calls)
        return first, second

    aborted, other = served.do(abort_one())
    assert (aborted.finish, other.finish) == ("abort", "length")
    assert len(aborted.tokens) < len(other.tokens) == CONTEXT - len(PROMPT)
    assert served.do(served.server.signals()).running == 0


def test_who_has_no_key_is_turned_away_and_nobody_can_read_it(served: Served) -> None:
    url = served.server._connected.url
    key = served.server._connected._session.headers["Authorization"].split()[1]

    async def without_a_key() -> list[int]:
        async with aiohttp.ClientSession() as session:
            one = await session.post(f"{url}/generate", json={"input_ids": [1]})
            other = await session.get(f"{url}/server_info")
            return [one.status, other.status]

    assert served.do(without_a_key()) == [401, 401]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert key not in " ".join(process.cmdline())
    assert key not in served.log.read_text()
    assert served.log.stat().st_mode & 0o077 == 0


def test_a_server_that_is_there_already_can_be_used_and_keeps_nobodys_adapters(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served.server._connected
    monkeypatch.setenv("SGLANG_API_KEY", first._session.headers["Authorization"].split()[1])

    async def attach() -> Any:
        second = served.another(endpoint=first.url)
        await first.ask("/load_lora_adapter", {"lora_name": "left", "lora_path": str(folder)}, timeout_s=WAIT_S)
        await second.start()
        await second.load("theirs", folder)
        scored = await second.score("theirs", [PROMPT])
        await second.close()
        return scored[0], await first.ask("/v1/models", timeout_s=WAIT_S)

    folder = served.adapter("theirs")
    scored, models = served.do(attach())
    np.testing.assert_allclose(scored, served.logprobs(folder, PROMPT[:1], PROMPT[1:]), atol=CLOSE, rtol=0)
    assert [model["id"] for model in models["data"] if model["id"] in ("theirs", "left")] == []


def test_an_id_outside_the_vocabulary_does_not_reach_it(served: Served) -> None:
    with pytest.raises(EngineError, match=f"token id {VOCABULARY}"):
        served.do(served.server.score(None, [np.array([1, VOCABULARY], np.int32)]))
    served.do(served.server.check())


@pytest.mark.long  # it has an engine of its own, whose start alone takes a minute or two
def test_what_a_preempted_request_sampled_stays_as_it_was_and_it_goes_on(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, made to, preempts one every few steps, and computes its KV cache again."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
    bed = engines.extra(ADAPTERS)
    try:
        bed.serve(0)
        requests = [bed.model.request(i, length=40, new=LONG) for i in range(6)]
        done = bed.run(requests)
        assert bed.ask(bed.server.signals()).preempted > 0
        for request in requests:
            bed.assert_sampled_by(0, request, done[request.key[1]])
            assert len(done[request.key[1]].tokens) == LONG
    finally:
        bed.engine.close()


@pytest.mark.long  # two starts of an engine, as above
def test_nothing_is_left_of_a_node_that_is_killed_when_the_next_begins(engines: Engines, tmp_path: Path) -> None:
    engines.close()
    in_memory = unheld_memory()
    command = [sys.executable, "-P", "-c", NODE, str(engines.model.path), str(tmp_path / "log")]
    # A place of its own: another test's node that starts meanwhile would take away what this one leaves.
    place = Path(tempfile.mkdtemp(prefix="sgl-", dir="/tmp"))
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(place)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as node:
        assert node.stdout is not None
        server = psutil.Process(int(node.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        node.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert len(processes) >= 3
    assert alive == []
    assert unheld_memory() - in_memory
    Scratch(place).remove()
    assert unheld_memory() - in_memory == set()
    shutil.rmtree(place)

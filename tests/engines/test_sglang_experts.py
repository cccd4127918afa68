"""Adapters on a mixture's experts, served by SGLang: against the trainer, and against what peft makes of the export.

SGLang's own code keeps them and says by which of them each token is computed; its kernels are those of the shim."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_house import Engines
from peft import PeftModel
from served_model import logprobs_by
from tiny_lm import VOCABULARY, tiny_lm
from transformers import AutoModelForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.engine import EngineError, Request
from inference.served_engine import ServedEngine
from inference.served_policies import AdapterFolders, modules_of
from inference.sglang_engine import SglangServer
from trainer.export import export
from trainer.torch_backend import TorchBackend

pytestmark = [pytest.mark.only("sglang"), pytest.mark.timeout(400)]

CONTEXT, NEW = 64, 10
CLOSE = 1e-5  # nats
WIDTH = {"moe_intermediate_size": 32}  # a multiple of what SGLang pads to on a CPU
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
CASES: list[tuple[Any, tuple[str, ...]]] = [
    ("each", ()),
    ("shared_outer", ()),
    ("each", (GATE,)),
    ("shared_outer", (UP, "q_proj")),
    ("each", (DOWN,)),
    ("shared_outer", (DOWN,)),
    ("each", ("q_proj", "k_proj", "v_proj", "o_proj")),
]
Scores = list[npt.NDArray[np.float32]]


class Trained(NamedTuple):
    policy: PolicyId
    path: Path
    modules: tuple[str, ...]
    scores: Scores


def sequences() -> list[npt.NDArray[np.int32]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (30, 12, 21)]


def save(folder: Path, **changes: Any) -> Path:
    tiny_lm("qwen3_moe", **(WIDTH | changes)).save_pretrained(folder)
    return folder


class Experts:
    """A node's engine over a server of a mixture, and what is trained for it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.model = save(folder / "model")
        self.engine = self.start(self.model, log)
        self._made = 0

    def start(self, model: Path, log: Path) -> ServedEngine:
        server = SglangServer(
            model, slots=4, max_context=CONTEXT, max_adapters=3, device="cpu", dtype="float32", whole=False,
            python=os.environ["ASYNC_RL_SGLANG_PYTHON"], endpoint="", log=log, routes=True, arguments={},
        )  # fmt: skip
        return ServedEngine(server, model, slots=4, max_context=CONTEXT, max_resident=3, stop_tokens=())

    def train(self, layout: Any, targets: tuple[str, ...], model: Path | None = None) -> Trained:
        """A policy of random numbers, as the trainer writes it and scores with it."""
        self._made += 1
        trainer = TrainerConfig(rank=4, alpha=6, expert_adapters=layout, targets=targets)
        backend = TorchBackend(
            model or self.model, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=0, device="cpu"
        )
        generator = torch.Generator().manual_seed(self._made)
        with torch.no_grad():
            for parameter in backend.learnable.parameters.values():  # type: ignore[attr-defined]
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        path = self.folder / f"policy-{self._made}.safetensors"
        policy = PolicyId("main", self._made, backend.export(path))
        return Trained(policy, path, backend.modules, backend.logprobs(sequences()))

    def by_peft(self, trained: Trained) -> Any:
        """The plain model, with what `async-rl export` writes."""
        place = self.folder / f"peft-{trained.policy.version}"
        if not place.exists():
            export(trained.path, place, model=str(self.model))
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.model), str(place)).eval()

    def run(self, requests: list[Request]) -> dict[int, Any]:
        for request in requests:
            self.engine.submit(request)
        done = []
        while self.engine.active:
            done += self.engine.step()
        return {each.key[1]: each for each in done}


@pytest.fixture(scope="module")
def experts(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    engines.close()
    made = Experts(tmp_path_factory.mktemp("experts"), engines.log())
    yield made
    made.engine.close()


@pytest.fixture
def clear(experts: Experts) -> Iterator[Experts]:
    yield experts
    for policy in list(experts.engine.resident):
        if policy != experts.engine.serving:
            experts.engine.evict(policy)


def furthest(found: Scores, wanted: Scores) -> float:
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("layout", "targets"), CASES)
def test_an_adapter_is_served_as_it_was_trained_and_as_peft_has_it(
    clear: Experts, layout: str, targets: tuple[str, ...]
) -> None:
    trained = clear.train(layout, targets)
    assert clear.engine.install(trained.policy, trained.path).matched_modules == trained.modules
    scores = clear.engine.score(trained.policy, sequences())
    bare = clear.engine._calls.run(clear.engine._server.score(None, sequences()), "the bare model")
    model = clear.by_peft(trained)
    peft = [logprobs_by(model, ids[:1], ids[1:]) for ids in sequences()]
    print(f"{layout} {targets}: {furthest(scores, trained.scores):.1e} trainer, {furthest(scores, peft):.1e} peft")
    assert furthest(scores, trained.scores) < CLOSE
    assert furthest(scores, peft) < CLOSE
    assert furthest(scores, bare) > 0.1


def test_requests_under_several_policies_and_routes_are_each_those_of_their_own(clear: Experts) -> None:
    """Three of them decode side by side, one pinned to each, with a prompt in common."""
    kinds: list[tuple[str, tuple[str, ...]]] = [("each", ()), ("shared_outer", ()), ("each", (UP,))]
    trained = [clear.train(layout, targets) for layout, targets in kinds]
    for each in trained:
        clear.engine.install(each.policy, each.path)
    clear.engine.flip(trained[0].policy, "finish")
    prompt = np.arange(3, 9, dtype=np.int32)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NEW)
    requests = [Request((0, i), prompt, sampling, i, trained[i % 3].policy) for i in range(6)]
    done = clear.run(requests)
    assert len(done) == 6
    for sample, completion in done.items():
        model = clear.by_peft(trained[sample % 3])
        np.testing.assert_allclose(
            completion.logprobs, logprobs_by(model, prompt, completion.tokens), atol=CLOSE, rtol=0
        )
        ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            gates = model(ids, output_router_logits=True).router_logits
        for layer, scores in enumerate(gates):
            expected = scores[:-1].topk(2).indices.sort().values.numpy()
            np.testing.assert_array_equal(np.sort(completion.routes[:, layer]), expected)


def test_the_place_of_one_that_has_gone_holds_nothing_of_it(clear: Experts) -> None:
    """An adapter of down alone, after one of everything."""
    for targets in ((), (DOWN,), ("q_proj",)):
        trained = [clear.train("each", targets) for _ in range(2)]
        for each in trained:
            clear.engine.install(each.policy, each.path)
        for each in trained:
            assert furthest(clear.engine.score(each.policy, sequences()), each.scores) < CLOSE
            clear.engine.evict(each.policy)


def test_experts_of_a_width_that_it_would_end_at_are_refused_and_it_goes_on(clear: Experts, tmp_path: Path) -> None:
    trained = clear.train("each", (DOWN,), save(tmp_path / "narrow", moe_intermediate_size=16))
    server = clear.engine._server
    folders = AdapterFolders(tmp_path, *modules_of(tmp_path / "narrow", True))
    folders.write(trained.policy, folders.read(trained.policy, trained.path))
    folder = folders.folder(trained.policy)
    with pytest.raises(EngineError, match=r"down_proj.* has an intermediate width of 16: on a CPU SGLang ends at"):
        clear.engine._calls.run(server.load("narrow", folder), "a load")
    clear.engine._calls.run(server.check(), "a look")

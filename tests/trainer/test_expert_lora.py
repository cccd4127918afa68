"""Adapters on fused experts: against whole merged weights under autograd."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from merged_adapters import merged_logits
from tiny_lm import VOCABULARY, tiny_lm

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import read_adapter
from async_rl.trainer_config import ExpertAdapters, StepControlConfig
from trainer.activation_checkpointing import checkpoint_layers
from trainer.adapter_init import expert_a
from trainer.backend import Sample
from trainer.logprobs import Scorer
from trainer.lora import adapter_off, attach_lora
from trainer.targets import resolve_targets
from trainer.torch_backend import TorchBackend

LAYOUTS: list[ExpertAdapters] = ["each", "shared_outer"]
TEMPERATURE = 0.7
MIXED = {"mlp_only_layers": [0]}  # a leading dense layer, whose projections have the names of the experts'
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


def adapted(model: Any, trainer: TrainerConfig) -> dict[str, torch.nn.Parameter]:
    """A random adapter on `model`, in place."""
    parameters = attach_lora(model, resolve_targets(model, trainer.targets), trainer, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return parameters


def sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (40, 9, 25, 25)]
    return tokens, [np.arange(1, len(sequence)) for sequence in tokens]


def expected(model: Any, tensors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Log-probabilities of all of the sequences' tokens."""
    values = []
    for sequence in sequences()[0]:
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        logits = merged_logits(model, tensors, scale, ids)[0, :-1] / TEMPERATURE
        values.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(values)


def close(found: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    assert float((found.double() - wanted.double()).abs().max()) <= share * float(wanted.abs().max())


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_merged_weights(layout: ExpertAdapters, dtype: torch.dtype, share: float) -> None:
    """In packed and padded rows, with layers computed again, with a dense layer before the experts."""
    for changes, packing, checkpointed in (({}, "never", False), (MIXED, "auto", True), ({}, "auto", False)):
        plain = tiny_lm("qwen3_moe", torch.float64, experts_implementation="eager", **changes)
        model = tiny_lm("qwen3_moe", dtype, **changes)
        trainer = TrainerConfig(rank=4, alpha=6, expert_adapters=layout)
        parameters = adapted(model, trainer)
        scorer = Scorer(model, packing)  # type: ignore[arg-type]
        assert scorer.packed == (packing == "auto")
        if checkpointed:
            checkpoint_layers(model)
        values = scorer.logprobs(scorer.rows(*sequences()), TEMPERATURE)
        weights = torch.linspace(-1, 1, len(values), dtype=dtype)
        (values * weights).sum().backward()

        tensors = {name: each.detach().double().requires_grad_(True) for name, each in parameters.items()}
        wanted = expected(plain, tensors, 1.5)
        (wanted * weights.double()).sum().backward()
        close(values.detach(), wanted.detach(), share)
        largest = max(float(each.grad.abs().max()) for each in tensors.values() if each.grad is not None)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            assert tensors[name].grad is not None
            assert float((parameter.grad.double() - tensors[name].grad).abs().max()) <= share * largest, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_what_it_begins_with(layout: ExpertAdapters) -> None:
    model = tiny_lm("qwen3_moe", **MIXED)
    trainer = TrainerConfig(rank=4, expert_adapters=layout)
    targets = resolve_targets(model)
    assert targets.notices == ()
    assert targets.patterns == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    parameters = attach_lora(model, targets, trainer, seed=3)
    assert list(parameters) == sorted(parameters)
    assert sum(each.numel() for each in parameters.values()) == targets.parameters(4, layout)
    assert {id(each) for each in parameters.values()} == {id(each) for each in model.parameters() if each.requires_grad}
    shared = layout == "shared_outer"
    of_experts = {name.removeprefix(EXPERTS): each for name, each in parameters.items() if name.startswith(EXPERTS)}
    wanted: dict[str, tuple[int, int]] = {}
    for projection, out, inside in (("gate_proj", 16, 32), ("up_proj", 16, 32), ("down_proj", 32, 16)):
        for part, shape in (("A", (4, inside)), ("B", (out, 4))):
            if shared and part == ("B" if projection == "down_proj" else "A"):
                wanted[f".{projection}.lora_{part}.weight"] = shape
            else:
                wanted |= {f".{expert}.{projection}.lora_{part}.weight": shape for expert in range(4)}
    assert {name: tuple(each.shape) for name, each in of_experts.items()} == wanted
    for name, each in of_experts.items():
        if "lora_A" in name:
            assert torch.equal(each.detach(), expert_a(EXPERTS + name, 4, each.shape[1], 3).float())
        else:
            assert not each.any()


def test_names_of_targets_mean_experts_too() -> None:
    model = tiny_lm("qwen3_moe", **MIXED)
    both = resolve_targets(model, ("gate_proj",))
    assert [each.name for each in both.modules] == ["model.layers.0.mlp.gate_proj"]
    assert [each.name for each in both.experts] == ["model.layers.1.mlp.experts.gate_proj"]
    assert both.patterns == ("gate_proj",)
    fused = resolve_targets(model, ("gate_up_proj",))
    assert [each.projection for each in fused.experts] == ["gate_proj", "up_proj"]
    assert "model.layers.1.mlp.experts.3.up_proj" in fused.patterns  # the last name is the dense layer's, too
    assert resolve_targets(model, ("experts.down_proj",)).modules == ()
    assert resolve_targets(model, ("q_proj",)).experts == ()


def test_without_the_adapter_experts_are_the_base_models() -> None:
    plain, model = tiny_lm("qwen3_moe"), tiny_lm("qwen3_moe")
    adapted(model, TrainerConfig(rank=4))
    ids = torch.arange(20)[None] % VOCABULARY
    with torch.no_grad():
        base = plain(input_ids=ids).logits
        assert not torch.allclose(model(input_ids=ids).logits, base, atol=0.1)
        with adapter_off(model):
            torch.testing.assert_close(model(input_ids=ids).logits, base, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(input_ids=ids).logits, base, atol=0.1)


def test_half_precision_experts_have_float32_adapters() -> None:
    model = tiny_lm("qwen3_moe", torch.bfloat16)
    parameters = adapted(model, TrainerConfig(rank=4))
    assert {each.dtype for each in parameters.values()} == {torch.float32}
    ids = torch.arange(20)[None] % VOCABULARY
    exact = tiny_lm("qwen3_moe", torch.float64, experts_implementation="eager")
    wanted = merged_logits(
        exact, {name: each.detach().double() for name, each in parameters.items()}, 8.0, ids
    ).detach()
    with torch.no_grad():
        found = model(input_ids=ids).logits.double()
    assert float((found - wanted).abs().mean()) < 0.1 * float(wanted.abs().mean())


# --- in the backend --------------------------------------------------------------------------------------------------


def backend(folder: Path, **changes: Any) -> TorchBackend:
    trainer = msgspec.structs.replace(TrainerConfig(rank=4, alpha=8, learning_rate=1e-2), **changes)
    return TorchBackend(
        folder, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=0, device="cpu", steps=4
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mixture")
    tiny_lm("qwen3_moe", **MIXED).save_pretrained(place)
    return place


def samples() -> list[Sample]:
    made = []
    for index, sequence in enumerate(sequences()[0]):
        mask = np.ones(len(sequence), dtype=np.uint8)
        mask[4:] = 0
        behaviour = np.full(len(sequence), -3.0, dtype=np.float32)
        ages = np.zeros(len(sequence), dtype=np.int32)
        made.append(Sample(sequence, behaviour, mask, ages, (-1.0) ** index, index, index // 2))
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_on_exactly_and_its_file_is_the_policy(
    folder: Path, tmp_path: Path, layout: ExpertAdapters
) -> None:
    first = backend(folder, expert_adapters=layout)
    first.step(samples(), 1e-2)
    first.save(tmp_path)
    digest = first.export(tmp_path / "policy")
    second = backend(folder, expert_adapters=layout)
    second.load(tmp_path)
    assert second.export(tmp_path / "again") == digest
    tensors, config = read_adapter(tmp_path / "policy", digest)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors} == set(first.modules)
    assert all(each.any() for name, each in tensors.items() if "lora_B" in name)
    for each in (first, second):
        each.step(samples(), 1e-2)
    assert first.export(tmp_path / "policy") == second.export(tmp_path / "again")
    other = "each" if layout == "shared_outer" else "shared_outer"
    with pytest.raises(AsyncRLError, match="has other tensors than what learns here"):
        backend(folder, expert_adapters=other).load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_step_control_predicts_what_a_step_on_experts_does(folder: Path, layout: ExpertAdapters, method: Any) -> None:
    control = StepControlConfig(budget=1e-5, final_budget=1e-5, method=method, max_scale=1.0)
    made = backend(folder, expert_adapters=layout, step_control=control, targets=("gate_proj", "up_proj", "down_proj"))
    for _ in range(3):
        metrics = made.step(samples(), 1e-4).metrics
    assert metrics["predicted_kl"] > 0
    assert metrics["realised_kl"] == pytest.approx(metrics["applied_kl"], rel=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_canary_is_in_every_expert_and_leaves_no_trace(
    folder: Path, tmp_path: Path, layout: ExpertAdapters
) -> None:
    made = backend(folder, expert_adapters=layout)
    made.step(samples(), 1e-2)
    before = copy.deepcopy({name: each.detach() for name, each in made.learnable.parameters.items()})  # type: ignore[attr-defined]
    probe = sequences()[0][:2]
    canary = made.canary(tmp_path / "canary", 5, probe)
    tensors, _ = read_adapter(tmp_path / "canary", canary.digest)
    assert tensors.keys() == before.keys()
    assert all(each.any() for each in tensors.values())
    assert max(float(np.abs(a - b).max()) for a, b in zip(canary.logprobs, canary.base, strict=True)) > 0.05
    for name, each in made.learnable.parameters.items():  # type: ignore[attr-defined]
        assert torch.equal(each, before[name])

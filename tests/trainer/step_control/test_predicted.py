"""Predicted divergence against the true one, in float64 on tiny Hugging Face models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from moved_models import divergence_of, logits_of, moved, scaled
from tiny_lm import VOCABULARY, tiny_lm
from torch import nn
from torch.func import functional_call, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.learnable import LowRank, Proposal
from trainer.logprobs import Scorer
from trainer.step_control.predicted import Method, Prediction, Predictor
from trainer.step_control.probe import Probe
from trainer.targets import resolve_targets

TEMPERATURE = 0.7
SMALL = 3e-6  # of a direction that changes logits by about 5 nats: the third order is then as small against the second


def low_rank(model: Any, rank: int = 3, seed: int = 1) -> Proposal:
    """A random change of every linear layer but the head, in two pairs each as LoRA has them."""
    generator = torch.Generator().manual_seed(seed)

    def pair(out: int, inside: int) -> LowRank:
        a, b = (torch.randn(size, generator=generator) for size in ((rank, inside), (out, rank)))
        return LowRank(a / inside**0.5, 0.3 * b)

    return Proposal(
        {
            target.name: (pair(target.out_features, target.in_features), pair(target.out_features, target.in_features))
            for target in resolve_targets(model).modules
        },
        {},
    )


def whole(model: Any, seed: int = 2) -> Proposal:
    """A random change of every parameter: embeddings, norms, head, experts."""
    generator = torch.Generator().manual_seed(seed)
    dense = {
        name: 0.1 * torch.randn(each.shape, generator=generator).to(each) for name, each in model.named_parameters()
    }
    return Proposal({}, dense)


def sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (12, 9, 20)]
    return tokens, [np.arange(4, len(each)) for each in tokens]


def probe_of(model: Any, proposal: Proposal, temperature: float = TEMPERATURE) -> Probe:
    return Probe(Scorer(model), *sequences(), temperature, proposal)


def predict(model: Any, proposal: Proposal, method: Method = "jvp", temperature: float = TEMPERATURE) -> Prediction:
    return Predictor(method)(probe_of(model, proposal, temperature), proposal)


def true_divergence(model: Any, proposal: Proposal, temperature: float = TEMPERATURE) -> float:
    before, after = (logits_of(each, *sequences()) for each in (model, moved(model, proposal)))
    return divergence_of(before, after, temperature)


def exact_lm(kind: str) -> Any:
    """In float64; the grouped product of experts is not made for that."""
    return tiny_lm(kind, torch.float64, **({"experts_implementation": "eager"} if kind == "qwen3_moe" else {}))


KINDS = ["qwen3", "llama", "gpt_neox", "gemma2", "granite", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [low_rank, whole])
def test_the_prediction_is_the_true_divergence_of_a_small_step(kind: str, make: Any) -> None:
    model = exact_lm(kind)
    step = scaled(make(model), SMALL)
    assert predict(model, step).divergence == pytest.approx(true_divergence(model, step), rel=2e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_is_that_of_sampling(temperature: float) -> None:
    model = tiny_lm("qwen3", torch.float64)
    step = scaled(low_rank(model), SMALL)
    predicted = predict(model, step, temperature=temperature).divergence
    assert predicted == pytest.approx(true_divergence(model, step, temperature), rel=2e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("make", [low_rank, whole])
def test_the_layers_tangents_are_the_derivative_by_the_weights(kind: str, make: Any) -> None:
    model = tiny_lm(kind, torch.float64)
    step = make(model)
    after = moved(model, step)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    direction = {name: after.get_parameter(name).detach() - each for name, each in weights.items()}
    model.set_attn_implementation("eager")
    squares: list[torch.Tensor] = []
    for tokens, places in zip(*sequences(), strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]

        def logits(parameters: dict[str, torch.Tensor], ids: torch.Tensor = ids) -> torch.Tensor:
            return functional_call(model, parameters, (ids,), {"use_cache": False}).logits[0]

        z, dz = (each[places - 1] / TEMPERATURE for each in jvp(logits, (weights,), (direction,)))
        p = torch.softmax(z, -1)
        squares.append(0.5 * ((p * dz**2).sum(-1) - (p * dz).sum(-1) ** 2))
    assert predict(model, step).divergence == pytest.approx(float(torch.cat(squares).mean()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("make", [low_rank, whole])
def test_a_difference_of_two_passes_agrees_to_one_percent(dtype: torch.dtype, length: float, make: Any) -> None:
    """Whatever the length of the step itself."""
    model = tiny_lm("qwen3", dtype)
    step = scaled(make(model), length)
    by_jvp = predict(model, step).divergence
    assert predict(model, step, "difference").divergence == pytest.approx(by_jvp, rel=0.01)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_a_difference_agrees_where_logits_are_capped_and_experts_fused(kind: str) -> None:
    model = exact_lm(kind)
    step = scaled(whole(model), 1e-3)
    assert predict(model, step, "difference").divergence == pytest.approx(predict(model, step).divergence, rel=0.01)


def test_experts_that_are_computed_in_groups_have_a_derivative_too() -> None:
    model = tiny_lm("qwen3_moe")
    assert model.config._experts_implementation == "grouped_mm"
    step = scaled(whole(model), 1e-3)
    exact = exact_lm("qwen3_moe")
    wanted = predict(exact, Proposal({}, {name: each.double() for name, each in step.dense.items()})).divergence
    assert predict(model, step).divergence == pytest.approx(wanted, rel=1e-3)
    assert model.config._experts_implementation == "grouped_mm"


def test_tied_embeddings_move_at_both_ends() -> None:
    model = tiny_lm("qwen3", torch.float64, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    step = scaled(whole(model), SMALL)
    assert predict(model, step).divergence == pytest.approx(true_divergence(model, step), rel=2e-4)
    assert predict(model, step, "difference").divergence == pytest.approx(true_divergence(model, step), rel=0.01)


def test_bfloat16_is_predicted_as_well_as_it_can_be_computed() -> None:
    exact = tiny_lm("qwen3", torch.float64)
    step = scaled(low_rank(exact), 1e-2)
    wanted = predict(exact, step).divergence
    model = tiny_lm("qwen3", torch.bfloat16)
    assert predict(model, step).divergence == pytest.approx(wanted, rel=0.15)
    assert predict(model, step, "difference").divergence == pytest.approx(wanted, rel=0.25)


# --- what cannot be predicted ----------------------------------------------------------------------------------------


class _Loses(torch.autograd.Function):
    """Without forward mode."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


@pytest.fixture
def opaque() -> Any:
    """A model with an operator that has no forward mode."""
    model = tiny_lm("qwen3", torch.float64)
    model.model.norm.register_forward_hook(lambda module, args, out: _Loses.apply(out))
    return model


def test_where_an_operator_has_no_forward_mode_two_passes_predict_and_it_is_said_once(
    opaque: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step = scaled(low_rank(opaque), 1e-3)
    predictor = Predictor("auto")
    with caplog.at_level(logging.WARNING):
        found = [predictor(probe_of(opaque, step), step).divergence for _ in range(3)]
    assert found == pytest.approx([predict(tiny_lm("qwen3", torch.float64), step).divergence] * 3, rel=0.01)
    assert [record.message.count("difference of two passes") for record in caplog.records] == [1]
    with pytest.raises(NotImplementedError, match="jvp"):
        predict(opaque, step, "jvp")


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_a_derivative_that_is_lost_is_an_error(method: Method) -> None:
    model = tiny_lm("qwen3", torch.float64)
    frozen = logits_of(model, *sequences())  # whatever is computed

    def lose(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(out).copy_(torch.ones(out.shape[-1], dtype=out.dtype))

    model.model.norm.register_forward_hook(lose)
    step = low_rank(model)
    assert frozen.isfinite().all()
    with pytest.raises(FloatingPointError, match="an operator of the model has lost it"):
        predict(model, step, method)


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_a_prediction_that_is_not_finite_is_an_error(method: Method) -> None:
    model = tiny_lm("qwen3")
    step = scaled(low_rank(model), float("inf"))
    with pytest.raises(FloatingPointError, match="predicted for the step"):
        predict(model, step, method)


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_no_step_has_no_divergence(method: Method) -> None:
    model = tiny_lm("qwen3")
    assert predict(model, scaled(low_rank(model), 0.0), method).divergence == 0.0
    assert predict(model, Proposal({}, {}), method).divergence == 0.0


# --- what it leaves, and what it takes -------------------------------------------------------------------------------


class _Shapes(TorchDispatchMode):
    """Of tensors that are made, in memory that is not a parameter's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()
        self._known = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, Sequence) else [out]:
            if not isinstance(each, torch.Tensor) or each._is_zerotensor():
                continue
            storage = each.untyped_storage()
            whole = storage.nbytes() >= each.numel() * each.element_size()  # and not one number seen many times
            if whole and storage.data_ptr() not in self._known:
                self.made.add(tuple(each.shape))
        return out


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_no_change_of_a_whole_weight_is_ever_made_of_a_low_rank_one(method: Method) -> None:
    model = tiny_lm("qwen3", hidden_size=36, intermediate_size=56)
    step = low_rank(model)
    probe = probe_of(model, step)
    weights = {shape for name in step.tangents for shape in _both(model.get_submodule(name).weight)}
    with _Shapes(model) as shapes:
        Predictor(method)(probe, step)
    assert shapes.made
    assert not shapes.made & weights
    with _Shapes(model) as shapes:
        moved(model, step)
    assert shapes.made & weights


def _both(weight: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(weight.shape), tuple(weight.T.shape)


@pytest.mark.parametrize("method", ["jvp", "difference"])
@pytest.mark.parametrize("make", [low_rank, whole])
def test_the_model_is_afterwards_what_it_was(method: Method, make: Any) -> None:
    model = tiny_lm("gemma2", torch.float64)
    before = logits_of(model, *sequences())
    parameters = dict(model.named_parameters())
    values = {name: each.clone() for name, each in parameters.items()}
    attention = model.config._attn_implementation
    predict(model, scaled(make(model), 1e-2), method)
    assert torch.equal(logits_of(model, *sequences()), before)
    assert all(parameters[name] is each for name, each in model.named_parameters())
    assert all(torch.equal(each, values[name]) for name, each in model.named_parameters())
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks for module in model.modules())

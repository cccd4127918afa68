"""The chunked head against float64 by hand: values, gradients, memory, half precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import head as head_module
from trainer.head import Mixture, head_logprobs, head_logprobs_and_mean

WIDTH, VOCABULARY = 6, 11


def by_hand(
    hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray, target: np.ndarray, temperature: float, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and Σ up·d/d hidden, a token at a time."""
    values, slopes = [], []
    for h, token, factor in zip(hidden, target, up, strict=True):
        logits = (weight @ h + bias) / temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        values.append(np.log(p[token]))
        slopes.append(factor * (weight[token] - p @ weight) / temperature)
    return np.array(values), np.array(slopes)


@given(
    n=st.integers(1, 12), chunk_bytes=st.integers(0, 2000), temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 99), biased=st.booleans(),
)  # fmt: skip
def test_values_and_gradients_are_those_by_hand_at_any_chunk(
    n: int, chunk_bytes: int, temperature: float, seed: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY, bias=biased).double().requires_grad_(False)
    hidden = (3 * torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, VOCABULARY, (n,), generator=generator)
    up = torch.randn(n, generator=generator, dtype=torch.float64)
    values = head_logprobs(hidden, head, target, temperature, chunk_bytes)
    (values * up).sum().backward()
    bias = head.bias.numpy() if biased else np.zeros(VOCABULARY)
    arrays = (hidden.detach().numpy(), head.weight.numpy(), bias, target.numpy())
    expected, slope = by_hand(*arrays, temperature, up.numpy())
    np.testing.assert_allclose(values.detach().numpy(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(hidden.grad, slope, rtol=0, atol=1e-12)


@given(
    n=st.integers(1, 12), k=st.integers(1, VOCABULARY), chunk_bytes=st.integers(0, 2000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=st.integers(0, 99), frozen=st.booleans(),
)  # fmt: skip
def test_the_mean_over_a_mixture_and_its_gradient_are_those_by_hand(
    n: int, k: int, chunk_bytes: int, temperature: float, seed: int, frozen: bool
) -> None:
    """A sum over the mixture's tokens of what `by_hand` says of each."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY).double().requires_grad_(not frozen)
    hidden = (3 * torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, VOCABULARY, (n,), generator=generator)
    ids = torch.rand(n, VOCABULARY, generator=generator).argsort(1)[:, :k]
    weights, up, up_mean = (torch.rand(n, width, generator=generator).double() for width in (k, 1, 1))
    mixture = Mixture(ids, weights)
    values, mean = head_logprobs_and_mean(hidden, head, target, mixture, temperature, chunk_bytes)
    (values * up[:, 0] + mean * up_mean[:, 0]).sum().backward()
    arrays = (hidden.detach().numpy(), head.weight.detach().numpy(), head.bias.detach().numpy())
    own, expected_slope = by_hand(*arrays, target.numpy(), temperature, up[:, 0].numpy())
    expected = np.zeros(n)
    for j in range(k):
        weight = weights[:, j].numpy()
        logprobs, slopes = by_hand(*arrays, ids[:, j].numpy(), temperature, weight * up_mean[:, 0].numpy())
        expected += weight * logprobs
        expected_slope = expected_slope + slopes
    np.testing.assert_allclose(values.detach().numpy(), own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean.detach().numpy(), expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(hidden.grad, expected_slope, rtol=0, atol=1e-11)


def test_a_head_that_trains_gets_its_gradient_too_and_so_does_an_adapter_on_it() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, WIDTH, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, (9,))
    for adapted in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, VOCABULARY))
        if adapted:
            inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
        model.double()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        whole = torch.log_softmax(model[0](hidden) / 0.7, -1).gather(1, target[:, None])[:, 0]
        ours = head_logprobs(hidden, model[0], target, 0.7, chunk_bytes=2 * VOCABULARY * 8)
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)
        expected = torch.autograd.grad(whole.square().sum(), trained)
        found = torch.autograd.grad(ours.square().sum(), trained)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("promoted_at_a_time", [1, 4, VOCABULARY])
def test_a_half_precision_head_is_computed_in_float32(
    dtype: torch.dtype, promoted_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", promoted_at_a_time * WIDTH * 4)
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype).requires_grad_(False)
    hidden = (4 * torch.randn(40, WIDTH)).to(dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (40,))
    values = head_logprobs(hidden, head, target, 1.0)
    arrays = (hidden.detach().double().numpy(), head.weight.double().numpy(), np.zeros(VOCABULARY), target.numpy())
    expected, slope = by_hand(*arrays, 1.0, np.ones(40))
    assert values.dtype == torch.float32
    np.testing.assert_allclose(values.detach().numpy(), expected, atol=3e-6)
    values.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    np.testing.assert_allclose(hidden.grad.double().numpy(), slope, rtol=2e-2, atol=1e-2)
    own = torch.log_softmax(head(hidden).float(), -1).gather(1, target[:, None])[:, 0].detach().numpy()
    assert np.abs(own - expected).max() > 10 * np.abs(values.detach().numpy() - expected).max()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_no_more_than_a_chunk_of_logits_ever_exists(frozen: bool) -> None:
    tokens, chunk, vocabulary = 256, 8, 500
    head = nn.Linear(WIDTH, vocabulary).requires_grad_(not frozen)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    target = torch.randint(0, vocabulary, (tokens,))
    with Largest() as largest:
        head_logprobs(hidden, head, target, 1.0, chunk_bytes=chunk * vocabulary * 4).sum().backward()
    assert largest.elements <= max(chunk * vocabulary, vocabulary * WIDTH)
    with Largest() as whole:
        head_logprobs(hidden, head, target, 1.0).sum().backward()
    assert whole.elements == tokens * vocabulary


def test_without_gradients_nothing_is_kept_for_them() -> None:
    head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    hidden = torch.randn(5, WIDTH, requires_grad=True)
    with torch.no_grad():
        values = head_logprobs(hidden, head, torch.zeros(5, dtype=torch.int64), 1.0)
    assert values.grad_fn is None

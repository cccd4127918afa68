"""Packed or padded, all logits or chunks of them: the same log-probabilities and gradients, or not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import CONFIGS, VOCABULARY, tiny_lm
from transformers import PreTrainedModel

from async_rl.errors import AsyncRLError
from trainer.head import Mixture
from trainer.logprobs import Scorer

PLAIN = ("qwen2", "qwen3", "llama")
LENGTHS = (23, 5, 40, 12, 23, 2, 31, 12)
# What each model's attention and head allow, and a word of the reason why not.
PACKED = {"qwen2", "qwen3", "llama", "gpt_neox", "gpt2", "qwen3_moe", "glm4_moe", "granite"}
PADDED = {
    "gemma2": "last 4096 tokens",
    "gemma3_text": "last 64 tokens",
    "mistral": "last 64 tokens",
    "mamba": "differ by",
    "qwen3_next": "differ by",
    "falcon": "not exchangeable",
}
WHOLE = {"granite", "gemma2"}  # they do something to their logits


def sequences(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random tokens, and which of them are wanted: with holes, and not always up to the end."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    wanted = [np.flatnonzero(random.random(length - 1) < 0.7) + 1 for length in LENGTHS]
    return tokens, [where if where.size else np.array([1]) for where in wanted]


def scorer(model: Any, packed: bool, chunked: bool) -> Scorer:
    made = Scorer(model, "auto" if packed else "never")
    assert made.packed == packed
    made.chunked = chunked
    return made


def plain_logprobs(model: Any, tokens: np.ndarray, wanted: np.ndarray, temperature: float) -> np.ndarray:
    """One sequence alone through the whole model, normalised by numpy in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double().numpy()
    logits = logits / temperature
    largest = logits.max(axis=1, keepdims=True)
    normalised = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    return normalised[wanted - 1, tokens[wanted]]


def gradients(model: Any, made: Scorer, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the gradient of their weighted sum in all parameters but the head's (frozen)."""
    model.requires_grad_(True)
    made.head.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    values = made.logprobs(made.rows(*sequences()), 0.7)
    (values * weight.to(values.dtype)).sum().backward()
    found = [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    return values.detach().double(), torch.cat(found)


@pytest.mark.parametrize("kind", [*PLAIN, "gpt_neox"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_values_and_gradients_are_the_same_packed_padded_and_in_chunks(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    weight = torch.randn(sum(len(where) for where in sequences()[1]), generator=torch.Generator().manual_seed(1))
    whole = head = None
    for packed in (False, True):
        for rows_at_once in (0, 1, 7, 1000):
            model = tiny_lm(kind, dtype)
            made = scorer(model, packed, chunked=rows_at_once > 0)
            made.chunk_bytes = rows_at_once * VOCABULARY * dtype.itemsize
            values, gradient = gradients(model, made, weight)
            if whole is None:
                whole, head = values, gradient
                continue
            assert float((values - whole).abs().max()) < tolerance
            assert head is not None
            assert float(torch.linalg.vector_norm(gradient - head) / torch.linalg.vector_norm(head)) < tolerance


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_means_over_mixtures_are_the_models_own_packed_padded_and_in_chunks(packed: bool, chunked: bool) -> None:
    model = tiny_lm("gpt_neox", torch.float64)
    made = scorer(model, packed, chunked)
    made.chunk_bytes = 7 * VOCABULARY * 8
    tokens, wanted = sequences()
    random, k = np.random.default_rng(4), 6
    n = sum(len(where) for where in wanted)
    ids = np.array([random.permutation(VOCABULARY)[:k] for _ in range(n)])
    weights = random.dirichlet(np.ones(k), n)
    with torch.no_grad():
        own, mean = made.logprobs_and_mean(
            made.rows(tokens, wanted), Mixture(torch.from_numpy(ids), torch.from_numpy(weights)), 0.7
        )
        alone = made.logprobs(made.rows(tokens, wanted), 0.7)
    first, expected = 0, []
    for sequence, where in zip(tokens, wanted, strict=True):
        for place in where:
            row = ids[first]
            here = [plain_logprobs(model, np.r_[sequence[:place], token], np.array([place]), 0.7)[0] for token in row]
            expected.append(float(np.dot(weights[first], here)))
            first += 1
    torch.testing.assert_close(own, alone, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_model_gives_its_own_log_probabilities_however_it_is_computed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        made = Scorer(tiny_lm(kind))
    assert made.packed == (kind in PACKED)
    assert made.chunked == (kind not in WHOLE)
    assert kind in PACKED or PADDED[kind] in caplog.text
    tokens, wanted = sequences()
    with torch.no_grad():
        found = made.logprobs(made.rows(tokens, wanted), 0.7).numpy()
    alone = tiny_lm(kind)
    expected = [plain_logprobs(alone, row, where, 0.7) for row, where in zip(tokens, wanted, strict=True)]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-5)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_packed_sequence_does_not_see_the_others(kind: str) -> None:
    made = scorer(tiny_lm(kind), packed=True, chunked=True)
    tokens, wanted = sequences()
    ends = np.cumsum([len(where) for where in wanted])
    with torch.no_grad():
        before = made.logprobs(made.rows(tokens, wanted), 1.0)
        for changed in range(len(tokens)):
            others = [*tokens[:changed], (tokens[changed] + 1) % VOCABULARY, *tokens[changed + 1 :]]
            after = made.logprobs(made.rows(others, wanted), 1.0)
            same = (before == after).numpy()
            kept = np.ones(len(before), bool)
            kept[ends[changed] - len(wanted[changed]) : ends[changed]] = False
            assert same[kept].all()
            assert not same[~kept].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_packing_is_judged_by_what_padding_alone_changes(dtype: torch.dtype) -> None:
    made = scorer(tiny_lm("qwen3", dtype), packed=True, chunked=True)
    tokens, wanted = sequences()
    with torch.no_grad():
        found = made.logprobs(made.rows(tokens, wanted), 1.0)
    exact = tiny_lm("qwen3", dtype).double()
    expected = [plain_logprobs(exact, row, where, 1.0) for row, where in zip(tokens, wanted, strict=True)]
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - np.concatenate(expected)).mean() < 0.05


def test_a_model_with_fewer_embeddings_than_logits_is_tried_with_tokens_that_it_has() -> None:
    model = tiny_lm("qwen3")
    model.model.embed_tokens = torch.nn.Embedding(5, 32)
    assert Scorer(model).packed


def test_packing_never_leaves_the_models_own_attention() -> None:
    model = tiny_lm("qwen3")
    own = model.config._attn_implementation
    assert not Scorer(model, "never").packed
    assert model.config._attn_implementation == own


def test_a_model_that_cannot_be_packed_keeps_its_own_attention() -> None:
    model = tiny_lm("mistral")
    own = model.config._attn_implementation
    assert not Scorer(model).packed
    assert model.config._attn_implementation == own


def test_a_packed_model_still_computes_what_is_given_to_it_plainly() -> None:
    tokens = sequences()[0][0]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    model = tiny_lm("qwen3")
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert Scorer(model).packed
        assert float((model(input_ids=ids).logits - before).abs().max()) < 1e-5


def test_a_soft_cap_shows_on_logits_far_below_it() -> None:
    model = tiny_lm("gemma2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)  # logits so small that the cap changes them by less than a rounding
    assert not Scorer(model).chunked


def test_a_model_without_a_head_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "get_output_embeddings", lambda self: None)
    with pytest.raises(AsyncRLError, match="no output head"):
        Scorer(tiny_lm("qwen3"))

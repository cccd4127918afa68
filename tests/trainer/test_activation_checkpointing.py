"""Checkpointed layers: the same gradients from less memory, without dropout, with a frozen embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_lm import VOCABULARY, tiny_lm
from torch import nn

from async_rl.config import AlgorithmConfig, ConfigError, TrainerConfig
from trainer.activation_checkpointing import checkpoint_layers
from trainer.logprobs import Scorer
from trainer.lora import attach_lora
from trainer.targets import resolve_targets
from trainer.torch_backend import TorchBackend


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    storages: dict[int, int] = {}
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total[0] = sum(storages.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def step(model: nn.Module, packing: str, checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    parameters = attach_lora(model, resolve_targets(model), TrainerConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    scorer = Scorer(model, packing)  # type: ignore[arg-type]
    if checkpointed:
        assert checkpoint_layers(model) == 2
    random = np.random.default_rng(0)
    tokens = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (90, 20, 55, 55)]
    rows = scorer.rows(tokens, [np.arange(1, len(sequence)) for sequence in tokens])
    with kept_bytes() as kept:
        values = scorer.logprobs(rows, 0.7)
    values.sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in parameters.values() if parameter.grad is not None])
    assert gradient.norm() > 0
    return values.detach(), gradient, kept[0]


@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt_neox"])
def test_gradients_are_the_same_and_less_is_kept(kind: str, packing: str) -> None:
    # Dropout that would act in training mode: the model stays in eval mode, checkpointed or not.
    changes = {"attention_dropout": 0.5} | ({"hidden_dropout": 0.5} if kind == "gpt_neox" else {})
    values, gradient, kept = step(tiny_lm(kind, **changes), packing, checkpointed=False)
    again, recomputed, less = step(tiny_lm(kind, **changes), packing, checkpointed=True)
    assert torch.equal(values, again)
    torch.testing.assert_close(recomputed, gradient, rtol=1e-6, atol=1e-7)
    assert less < 0.4 * kept


def test_the_key_of_the_configuration_does_it(tmp_path: Path) -> None:
    tiny_lm("qwen3").save_pretrained(tmp_path)
    kept = {}
    for wanted in (False, True):
        trainer = TrainerConfig(rank=4, activation_checkpointing=wanted)
        backend = TorchBackend(
            tmp_path, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=0, device="cpu"
        )
        sequence = np.arange(60, dtype=np.int32) % VOCABULARY
        with kept_bytes() as total:
            backend.scorer.logprobs(backend.scorer.rows([sequence], [np.arange(1, 60)]), 1.0)
        kept[wanted] = total[0]
    assert kept[True] < 0.4 * kept[False]


def test_without_gradients_the_layers_compute_as_before() -> None:
    model = tiny_lm("qwen3")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        checkpoint_layers(model)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_model_without_layers_to_checkpoint_is_refused_with_advice() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Linear has no layers .* lower micro_batch_tokens"):
        checkpoint_layers(model)

"""Nothing of a weight's size is made in a training step, and what is kept is as small as it is meant to be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sketched import dense_model, expert_model, some_loss, some_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_rl.config import TrainerConfig
from trainer.activation_checkpointing import checkpoint_layers
from trainer.bench_memory import saved_activations
from trainer.sketch.weights import SketchWeights

# Wide layers and few tokens: every weight is larger than any activation, and than a block of those that are applied.
WIDE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 2048}


class Allocations(TorchDispatchMode):
    """Raises at an operator whose result lies in new memory of at least `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                size = each.untyped_storage().nbytes()
                if size >= self.limit:
                    raise MemoryError(f"{func}: {size} bytes for {tuple(each.shape)}")
        return out


@contextlib.contextmanager
def nothing_as_large_as(weight: int) -> Iterator[None]:
    with Allocations(weight):
        yield


@pytest.mark.parametrize(
    ("dtype", "again", "experts"),
    [
        (torch.float32, False, False),
        (torch.float32, True, True),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
    ],
)
def test_a_whole_step_makes_nothing_of_a_weights_size(dtype: torch.dtype, again: bool, experts: bool) -> None:
    model = expert_model(**WIDE, **EXPERTS) if experts else dense_model(**WIDE)
    weights = SketchWeights(model.to(dtype), TrainerConfig(kind="sketch", rank=16), 5, "")
    if again:
        checkpoint_layers(model)
    matrices = [block.weight.shape[-1] * block.weight.shape[-2] for block in weights.blocks.values()]
    assert min(matrices) == 1024 * 2048
    limit = min(matrices) * dtype.itemsize
    tokens = some_tokens()
    for number in range(2):  # the second has moments and a new projection
        with nothing_as_large_as(limit):
            weights.zero()
            some_loss(model, tokens).backward()
            proposal = weights.propose(weights.norm(), 6e-5)
            weights.take(proposal, 0.5 + number)
    assert weights.steps == 2


def test_a_dense_gradient_is_found_out() -> None:
    model, tokens = dense_model(**WIDE), some_tokens()
    with nothing_as_large_as(4 * 1024 * 2048), pytest.raises(MemoryError, match=r"8388608 bytes for \("):
        some_loss(model, tokens).backward()


def test_so_is_a_product_that_is_formed_whole() -> None:
    weights = SketchWeights(dense_model(**WIDE), TrainerConfig(kind="sketch", rank=16), 5, "")
    some_loss(weights.model, some_tokens()).backward()
    proposal = weights.propose(weights.norm(), 6e-5)
    (a, b), *_ = next(iter(proposal.tangents.values()))
    with nothing_as_large_as(4 * 1024 * 2048), pytest.raises(MemoryError, match="mm"):
        b @ a


def kept_for_backward(model: Any, tokens: torch.Tensor) -> int:
    """Bytes that autograd keeps after a forward pass, parameters and what shares memory apart."""

    def forward() -> torch.Tensor:
        loss = some_loss(model, tokens)
        assert loss.requires_grad
        return loss

    return saved_activations(model, forward)


@pytest.mark.parametrize(
    ("sizes", "state"),
    [
        # The quickstart's model, and the larger one that the bounds are stated for.
        ({"hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 256, "vocab_size": 99}, 20),
        ({"hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 8,
          "num_key_value_heads": 8, "intermediate_size": 1365, "vocab_size": 99}, 80),
    ],
)  # fmt: skip
def test_at_rank_16_state_and_activations_are_the_promised_part_of_dense_adamws(
    sizes: dict[str, Any], state: int
) -> None:
    """Gradients and optimiser: at most 1/20 and 1/80 of dense; activations of all parameters training: 0.8."""
    tokens = some_tokens(rows=8, length=32, vocabulary=99)
    dense = dense_model(**sizes)
    parameters = sum(parameter.numel() for parameter in dense.parameters())
    activations = kept_for_backward(dense, tokens)
    weights = SketchWeights(dense_model(**sizes), TrainerConfig(kind="sketch", rank=16), 5, "")
    own = weights.sketches.flat.nbytes + sum(moment.nbytes for moment in weights.memory.variance.values())
    assert own * state <= 3 * 4 * parameters  # a gradient and two moments
    assert kept_for_backward(weights.model, tokens) <= 0.8 * activations
    learn = sum(block.weight.numel() for block in weights.blocks.values())
    assert learn > 0.9 * parameters
    assert own * state <= 3 * 4 * learn  # even of the same weights alone

"""A loss of one's own, by import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gradient_batches import make_backend, make_batch, make_model
from loss_tensors import tensors_of

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import ConfigError, TrainerConfig
from async_rl.errors import AsyncRLError
from trainer.algorithm.loss import token_losses
from trainer.torch_backend import TorchBackend

SOURCE = """
import torch

def square(current, data):
    return (current - data.behaviour).square() * (1 + data.age)

def summed(current, data):
    return current.sum()

def listed(current, data):
    return current.tolist()

def whole_numbers(current, data):
    return current.long()

NUMBER = 3
"""


@pytest.fixture(autouse=True, scope="module")
def own_losses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "losses_unwritten.py").write_text("def square(current, data)\n")
    (folder / "losses_of_typos.py").write_text("square = tocrh.square\n")
    (folder / "losses_of_mine.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("losses_of_mine", None)


def test_it_takes_the_place_of_the_composed_loss() -> None:
    current, data = tensors_of("ordinary")
    losses = token_losses(current.requires_grad_(), data, AlgorithmConfig(loss="losses_of_mine:square"))
    expected = [(p - q) ** 2 * (1 + age) for p, q, age in zip(current.detach(), data.behaviour, data.age, strict=True)]
    assert losses.tolist() == pytest.approx([float(each) for each in expected])
    assert losses.requires_grad


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("summed", r"returned torch\.float64 \[\]: a floating-point tensor of shape \[10\] is needed"),
        ("listed", "returned list: a floating-point tensor"),
        ("whole_numbers", r"returned torch\.int64 \[10\]"),
    ],
)
def test_what_is_not_one_loss_per_token_is_refused(name: str, says: str) -> None:
    current, data = tensors_of("ordinary")
    with pytest.raises(AsyncRLError, match=rf"loss = 'losses_of_mine:{name}' {says}"):
        token_losses(current, data, AlgorithmConfig(loss=f"losses_of_mine:{name}"))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'.*PYTHONPATH"),
        ("losses_unwritten:square", "cannot be loaded: SyntaxError: .*losses_unwritten.py, line 1"),
        ("losses_of_typos:square", "cannot be loaded: NameError: name 'tocrh' is not defined"),
        ("losses_of_mine:missing", "cannot be loaded: .*no attribute 'missing'"),
        ("losses_of_mine:NUMBER", "is not a function: it is a int"),
    ],
)
def test_what_cannot_be_loaded_is_one_error_before_the_model_is_read(loss: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        TorchBackend(tmp_path, trainer=TrainerConfig(), algorithm=AlgorithmConfig(loss=loss), temperature=1.0, seed=0)


def test_its_gradient_reaches_the_policy() -> None:
    current, data = tensors_of("ordinary")
    losses = token_losses(current.requires_grad_(), data, AlgorithmConfig(loss="losses_of_mine:square"))
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    assert torch.allclose(gradient, 2 * (current - data.behaviour).detach() * (1 + data.age))


def test_it_learns_where_no_answer_is_better_than_another(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path, AlgorithmConfig(loss="losses_of_mine:square"), "float32")
    batch = [sample._replace(advantage=0.0) for sample in make_batch(tmp_path)]
    first = backend.step(batch, 1e-4)
    assert not first.skipped
    assert first.metrics["learning_fraction"] == 1.0
    assert backend.step(batch, 1e-4).metrics["loss"] < first.metrics["loss"]


def test_the_share_that_learns_is_of_all_tokens(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path, AlgorithmConfig(loss="losses_of_mine:square"), "float32")
    batch = make_batch(tmp_path)
    batch[1:] = [sample._replace(advantage=0.0) for sample in batch[1:]]
    assert backend.step(batch, 0.0).metrics["learning_fraction"] == 1.0

"""S = G·Aᵀ on every layer, against autograd's dense gradient, in every situation in which gradients are made."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sketched import dense_gradients, dense_model, expert_model, some_loss, some_tokens
from tiny_lm import tiny_lm
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.config import TrainerConfig
from trainer.activation_checkpointing import checkpoint_layers
from trainer.logprobs import Scorer
from trainer.sketch.attach import Attached, attach_sketches
from trainer.sketch.linear import _SketchedLinear
from trainer.targets import TargetError

TRAINER = TrainerConfig(kind="sketch", rank=8, ranks={"q_proj": 5, "up_proj": 3})
MODELS: dict[str, Callable[[], Any]] = {"dense": dense_model, "experts": expert_model}


def expected(attached: Attached, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: gradients[name].double() @ attached.projections.matrix(name, block.rank, block.columns).double().T
        for name, block in attached.blocks.items()
    }


def assert_sketched(attached: Attached, gradients: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for name, wanted in expected(attached, gradients).items():
        found = attached.sketches.views[name]
        assert found.shape == wanted.shape
        assert float(wanted.norm()) > 0, name
        assert float((found - wanted).norm() / wanted.norm()) < tolerance, name


@pytest.mark.parametrize("kind", MODELS)
def test_every_layers_sketch_is_its_dense_gradient_projected(kind: str) -> None:
    model, tokens = MODELS[kind](), some_tokens()
    gradients = dense_gradients(copy.deepcopy(model), tokens)
    attached = attach_sketches(model, TRAINER, base_seed=3)
    assert attached.blocks.keys() == {name for name in gradients if name.endswith("_proj")}
    some_loss(model, tokens).backward()
    assert_sketched(attached, gradients)
    assert all(parameter.grad is None for parameter in model.parameters())
    attached.sketches.zero()
    assert not any(bool(view.any()) for view in attached.sketches.views.values())


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gemma2", "falcon", "qwen3_next", "granite"])
def test_it_holds_for_other_families_of_models(family: str) -> None:
    model, tokens = tiny_lm(family), some_tokens()
    gradients = dense_gradients(copy.deepcopy(model), tokens)
    attached = attach_sketches(model, TrainerConfig(kind="sketch", rank=8), base_seed=3)
    some_loss(model, tokens).backward()
    assert_sketched(attached, gradients)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("again", [False, True])
def test_it_holds_over_micro_batches_with_layers_computed_again(kind: str, again: bool) -> None:
    model, tokens = MODELS[kind](), some_tokens(rows=6)
    gradients = dense_gradients(copy.deepcopy(model), tokens)
    attached = attach_sketches(model, TRAINER, base_seed=3)
    if again:
        assert checkpoint_layers(model) == 2
    for part in tokens.split([1, 3, 2]):
        with torch.no_grad():
            some_loss(model, part)  # a pass without gradients in between changes nothing
        some_loss(model, part).backward()
    assert_sketched(attached, gradients)


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_a_rank_for_what_is_not_sketched_is_refused_with_the_names_that_are(targets: tuple[str, ...]) -> None:
    trainer = TrainerConfig(kind="sketch", rank=8, ranks={"q_proj": 5, "o_projection": 3}, targets=targets)
    exist = "q_proj$" if targets else "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    with pytest.raises(TargetError, match=rf"\[trainer.ranks\] o_projection: .*; there are: {exist}"):
        attach_sketches(expert_model(), trainer, base_seed=3)


def test_two_layers_with_one_weight_are_refused() -> None:
    model = dense_model()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    with pytest.raises(TargetError, match=r"layers.0.self_attn.q_proj and model.layers.1.self_attn.q_proj share one"):
        attach_sketches(model, TRAINER, base_seed=3)
    others = TrainerConfig(kind="sketch", rank=8, targets=("down_proj", "o_proj"))
    assert len(attach_sketches(model, others, base_seed=3).blocks) == 4


def test_it_holds_for_packed_rows() -> None:
    model = dense_model()
    lengths = [9, 4, 7]
    tokens = [np.random.default_rng(n).integers(0, 19, n).astype(np.int32) for n in lengths]
    wanted = [np.arange(1, n) for n in lengths]
    plain = copy.deepcopy(model)
    attached = attach_sketches(model, TRAINER, base_seed=3)
    scorer = Scorer(model, "auto")
    assert scorer.packed
    assert scorer.chunked
    scorer.logprobs(scorer.rows(tokens, wanted), 0.7).sum().backward()
    gradients: dict[str, torch.Tensor] = {}
    padded = Scorer(plain, "never")
    padded.logprobs(padded.rows(tokens, wanted), 0.7).sum().backward()
    for name, parameter in plain.named_parameters():
        gradients[name.removesuffix(".weight")] = parameter.grad
    assert_sketched(attached, gradients)


def test_in_bfloat16_it_holds_to_that_precision() -> None:
    model, tokens = dense_model().to(torch.bfloat16), some_tokens()
    gradients = dense_gradients(copy.deepcopy(model), tokens)
    attached = attach_sketches(model, TRAINER, base_seed=3)
    some_loss(model, tokens).backward()
    assert attached.sketches.flat.dtype == torch.float32
    assert_sketched(attached, gradients, tolerance=0.03)


def test_biases_are_frozen_and_still_added() -> None:
    model, tokens = dense_model(attention_bias=True), some_tokens()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    before = some_loss(model, tokens)
    gradients = dense_gradients(copy.deepcopy(model), tokens)
    attached = attach_sketches(model, TRAINER, base_seed=3)
    loss = some_loss(model, tokens)
    assert torch.equal(loss, before)
    loss.backward()
    assert_sketched(attached, gradients)


def test_only_named_layers_and_experts_are_sketched() -> None:
    model = expert_model()
    attached = attach_sketches(model, TrainerConfig(kind="sketch", targets=("q_proj", "experts.up_proj")), base_seed=3)
    assert list(attached.blocks) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.up_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    fused = attach_sketches(expert_model(), TrainerConfig(kind="sketch", targets=("gate_up_proj",)), base_seed=3)
    assert list(fused.blocks) == [f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate", "up")]
    with pytest.raises(TargetError, match="'query' matches no module"):
        attach_sketches(expert_model(), TrainerConfig(kind="sketch", targets=("query",)), base_seed=3)
    with pytest.raises(TargetError, match=r"lm_head is the output head.*train_embeddings"):
        attach_sketches(expert_model(), TrainerConfig(kind="sketch", targets=("lm_head",)), base_seed=3)
    both = attach_sketches(expert_model(), TrainerConfig(kind="sketch", targets=("gate_proj",)), base_seed=3)
    assert list(both.blocks) == ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.gate_proj"]
    gradients = dense_gradients(expert_model(), some_tokens())
    some_loss(model, some_tokens()).backward()
    assert_sketched(attached, gradients)


@pytest.mark.parametrize("kind", MODELS)
def test_the_outputs_are_those_of_the_plain_model(kind: str) -> None:
    model, tokens = MODELS[kind](), some_tokens()
    with torch.no_grad():
        before = model(tokens).logits
        attach_sketches(model, TRAINER, base_seed=3)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(tokens).logits.detach(), before, rtol=1e-5, atol=1e-6)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def products_of(call: Callable[[], Any]) -> int:
    with Products() as products:
        call()
    return products.count


@pytest.mark.parametrize("experts", [4, 32])
def test_experts_are_multiplied_in_one_product_with_and_without_gradients(experts: int) -> None:
    model = expert_model(num_experts=experts, num_experts_per_tok=4)
    tokens, trainer = some_tokens(), TrainerConfig(kind="sketch", rank=8)

    @torch.no_grad()
    def scored() -> None:
        model(input_ids=tokens, use_cache=False)

    before = products_of(scored)
    attach_sketches(model, trainer, base_seed=3)
    assert products_of(scored) == before
    # Forward two for each of 11 linear layers and 3 experts' projections (x Wᵀ and x Aᵀ), backward two again.
    assert products_of(lambda: some_loss(model, tokens).backward()) <= before + 4 * (11 + 3)


def test_the_mean_over_draws_converges_to_the_gradient_at_one_over_the_root() -> None:
    """E[AᵀA] = 1, so S·A = G·AᵀA is the gradient but for noise of the size √((columns − 1)/rank) · ‖G‖."""
    tokens = some_tokens()
    gradients = dense_gradients(dense_model(), tokens)
    name = "model.layers.1.mlp.gate_proj"
    errors = {}
    for draws in (16, 256):
        total = torch.zeros_like(gradients[name], dtype=torch.float64)
        model = dense_model()
        attached = attach_sketches(model, TrainerConfig(kind="sketch", rank=8, targets=("gate_proj",)), base_seed=3)
        for update in range(draws):
            attached.projections.draw(update)
            attached.sketches.zero()
            some_loss(model, tokens).backward()
            a = attached.projections.matrix(name, 8, 32)
            total += (attached.sketches.views[name] @ a).double() / draws
        errors[draws] = float((total - gradients[name]).norm() / gradients[name].norm())
        assert errors[draws] == pytest.approx(math.sqrt(31 / 8 / draws), rel=0.15)
    assert errors[16] / errors[256] == pytest.approx(4, rel=0.2)


def test_projections_do_not_depend_on_how_the_model_is_wrapped_or_on_other_layers() -> None:
    """The name is the checkpoint's: neither checkpointing nor the choice of targets changes what is drawn."""
    some = attach_sketches(dense_model(), TrainerConfig(kind="sketch", rank=8, targets=("o_proj",)), base_seed=3)
    model = dense_model()
    checkpoint_layers(model)
    all_of_them = attach_sketches(model, TrainerConfig(kind="sketch", rank=8), base_seed=3)
    for name, block in some.blocks.items():
        assert block.weight.data_ptr() != all_of_them.blocks[name].weight.data_ptr()
        one, other = (each.projections.signs(name, 8, block.columns) for each in (some, all_of_them))
        assert torch.equal(one, other)
    assert not torch.equal(
        some.projections.signs("model.layers.0.self_attn.o_proj", 8, 32),
        some.projections.signs("model.layers.1.self_attn.o_proj", 8, 32),
    )


@pytest.mark.parametrize("again", [False, True])
def test_what_was_kept_for_the_backward_pass_is_released_by_it(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    model = dense_model()
    attach_sketches(model, TRAINER, base_seed=3)
    if again:
        checkpoint_layers(model)
    kept: list[weakref.ref[torch.Tensor]] = []
    plain = _SketchedLinear.forward

    def watched(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        kept.append(weakref.ref(x))
        out = plain(ctx, x, *rest)
        projected = (x.numel() // x.shape[-1], rest[3].block.rank)
        assert [tuple(tensor.shape) for tensor in ctx.to_save] == [projected, tuple(rest[0].shape)]
        kept.append(weakref.ref(ctx.to_save[0]))
        return out

    monkeypatch.setattr(_SketchedLinear, "forward", staticmethod(watched))
    loss = some_loss(model, some_tokens())
    assert len(kept) == 2 * 14
    loss.backward()
    assert not [ref for ref in kept if ref() is not None]

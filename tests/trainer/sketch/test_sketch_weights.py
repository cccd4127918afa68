"""The sketch trainer's step, its files, and what it does to memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sketched import dense_model, expert_model, some_loss, some_tokens
from tiny_lm import tiny_lm

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.factors import apply_numpy
from async_rl.policy.projection import projection_key
from async_rl.policy.rounding import rounding_key
from async_rl.policy.update_file import read_base, read_kind, read_snapshot, read_update, weights_digest
from async_rl.schema import ConfigError
from trainer.sketch import applying
from trainer.sketch.weights import SketchWeights

TRAINER = TrainerConfig(kind="sketch", rank=8)
MODELS: dict[str, Callable[[], Any]] = {"dense": dense_model, "experts": expert_model}


def make(
    kind: str = "dense", trainer: TrainerConfig = TRAINER, dtype: torch.dtype = torch.float32, seed: int = 5
) -> SketchWeights:
    return SketchWeights(MODELS[kind]().to(dtype), trainer, seed, "")


def step(weights: SketchWeights, number: int, ratio: float = 6e-5) -> None:
    weights.zero()
    some_loss(weights.model, some_tokens(seed=number)).backward()
    weights.move(weights.norm(), ratio)


def copied(weights: SketchWeights) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in weights.parameters.items()}


def assert_same(weights: SketchWeights, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in weights.parameters.items():
        assert torch.equal(parameter, wanted[name]), name


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_all_weights_together_move_by_the_ratio_of_their_norm(kind: str) -> None:
    weights = make(kind, TrainerConfig(kind="sketch", rank=8, ranks={"q_proj": 3}))
    for number in range(3):
        before = {name: block.weight.double() for name, block in weights.blocks.items()}
        step(weights, number, 1e-2)
        moved = sum(float((block.weight - before[name]).square().sum()) for name, block in weights.blocks.items())
        size = sum(float(value.square().sum()) for value in before.values())
        assert math.sqrt(moved / size) == pytest.approx(1e-2, rel=1e-4)


def test_repeated_steps_lower_the_loss() -> None:
    weights, tokens = make("experts"), some_tokens()
    losses = []
    for _ in range(30):
        weights.zero()
        loss = some_loss(weights.model, tokens)
        loss.backward()
        weights.move(weights.norm(), 2e-2)
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_what_does_not_learn_stays_bit_for_bit() -> None:
    weights = make("experts")
    before = copied(weights)
    step(weights, 0)
    learns = {name for name in before if not torch.equal(before[name], weights.parameters[name])}
    assert learns == {name for name in before if "_proj" in name}


def test_a_proposal_says_what_taking_it_does_and_changes_nothing_before() -> None:
    for scale in (1.0, 0.37, 2.5):
        weights = make()
        some_loss(weights.model, some_tokens()).backward()
        before, memory = copied(weights), weights.memory.variance["model.layers.0.mlp.up_proj"].clone()
        proposal = weights.propose(weights.norm(), 1e-2)
        assert not proposal.dense
        assert proposal.tangents.keys() == weights.blocks.keys()
        assert_same(weights, before)
        assert torch.equal(weights.memory.variance["model.layers.0.mlp.up_proj"], memory)
        changes = {name: sum(b.double() @ a.double() for a, b in pairs) for name, pairs in proposal.tangents.items()}
        weights.take(proposal, scale)
        for name, block in weights.blocks.items():
            moved = block.weight.double() - before[f"{name}.weight"].double()
            assert float((moved - scale * changes[name]).norm() / moved.norm()) < 3e-4


def test_a_layer_that_a_model_computes_without_calling_it_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Mamba multiplies by dt_proj's weight by itself."""
    weights = SketchWeights(tiny_lm("mamba"), TRAINER, 5, "")
    step(weights, 0)
    assert "no gradient reaches backbone.layers.0.mixer.dt_proj (2 of 8 projections)" in caplog.text
    caplog.clear()
    step(weights, 1)
    step(make(), 0)
    assert not caplog.text


def test_moving_is_proposing_and_taking() -> None:
    one, other = make(), make()
    step(one, 0)
    some_loss(other.model, some_tokens(seed=0)).backward()
    other.take(other.propose(other.norm(), 6e-5), 1.0)
    assert_same(one, other.parameters)


def test_a_direction_that_is_not_finite_moves_nothing() -> None:
    weights = make()
    some_loss(weights.model, some_tokens()).backward()
    before = copied(weights)
    weights.sketches.views["model.layers.1.mlp.up_proj"][3, 2] = math.nan
    assert math.isnan(weights.norm())
    with pytest.raises(AsyncRLError, match="not finite"):
        weights.move(1.0, 6e-5)
    assert_same(weights, before)
    weights.zero()
    assert weights.steps == 0
    step(weights, 1)


# --- redraws ---------------------------------------------------------------------------------------------------------


def test_projections_are_redrawn_when_asked_to_and_named_by_the_step_of_the_draw() -> None:
    name = "model.layers.0.mlp.up_proj"
    for every, draws in ((1, [0, 1, 2, 3, 4]), (3, [0, 0, 0, 3, 3])):
        weights = make(trainer=TrainerConfig(kind="sketch", rank=8, redraw_every=every))
        drawn = []
        for number in range(5):
            drawn.append(weights.projections.update)
            before = weights.projections.signs(name, 8, 32).clone()
            step(weights, number)
            same = torch.equal(before, weights.projections.signs(name, 8, 32))
            assert same == ((number + 1) % every != 0)
        assert drawn == draws


def test_a_running_mean_averages_over_steps_and_is_carried_over_or_begun_anew() -> None:
    settings = {"kind": "sketch", "rank": 16, "redraw_every": 4, "momentum": 0.5}
    carrying, fresh = (make(trainer=TrainerConfig(**settings, carry_momentum=carry)) for carry in (True, False))
    for number in range(4):
        step(carrying, number)
        step(fresh, number)
    assert_same(carrying, fresh.parameters)
    assert all(bool(mean.any()) for mean in carrying.memory.mean.values())
    assert not any(bool(mean.any()) for mean in fresh.memory.mean.values())


def test_a_running_mean_that_would_outgrow_the_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"momentum = 0.9 with redraw_every = 1.*grows by .* each time.*redraw_every"):
        make(trainer=TrainerConfig(kind="sketch", rank=2, momentum=0.9))
    make(trainer=TrainerConfig(kind="sketch", rank=2, momentum=0.9, carry_momentum=False))
    make(trainer=TrainerConfig(kind="sketch", rank=2, momentum=0.9, redraw_every=20))


# --- files -----------------------------------------------------------------------------------------------------------


def projections_of(weights: SketchWeights, numbers: dict[str, Any]) -> dict[str, Any]:
    """Views of a receiver's arrays, by projection name."""
    found = {}
    for name, block in weights.blocks.items():
        if block.weight.dim() == 2:
            found[name] = numbers[f"{name}.weight"]
            continue
        path, _, last = name.rpartition(".")
        inner = block.weight.shape[1]
        if last == "down_proj":
            found[name] = numbers[name]
        else:
            rows = slice(0, inner) if last == "gate_proj" else slice(inner, None)
            found[name] = numbers[f"{path}.gate_up_proj"][:, rows]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_receiver_follows_bit_for_bit_by_numpy_alone_over_steps_and_a_restart(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    trainer = TrainerConfig(kind="sketch", rank=8, ranks={"q_proj": 3}, redraw_every=2)
    weights = make(kind, trainer, dtype)
    half = dtype == torch.bfloat16
    numbers = {
        name: (tensor.view(torch.int16).numpy().view(np.uint16) if half else tensor.numpy()).copy()
        for name, tensor in weights.parameters.items()
    }
    views = projections_of(weights, numbers)
    path = tmp_path / "policy"
    digest = weights.export(path)
    assert read_base(path).digest == digest == weights_digest(weights.parameters)
    for number in range(6):
        if number == 3:
            (tmp_path / "saved").mkdir()
            weights.save(tmp_path / "saved")
            before = path.read_bytes()
            weights = make(kind, trainer, dtype)
            weights.load(tmp_path / "saved")
            assert weights.export(path) == digest
            assert path.read_bytes() == before  # published once more, to the byte
            weights.export_whole(tmp_path / "whole")
            assert read_snapshot(tmp_path / "whole", digest).weights == weights_digest(weights.parameters)
        step(weights, number, 1e-3)
        parent, digest = digest, weights.export(path)
        update = read_update(path, digest)
        assert update.parent == parent
        assert update.factors.keys() == views.keys()
        for name, (q, s) in update.factors.items():
            key = projection_key(update.base_seed, update.drawn, name)
            rounding = rounding_key(update.base_seed, update.update, name) if half else None
            apply_numpy(views[name], q.numpy(), s.numpy(), key, rounding=rounding)
        for name, tensor in weights.parameters.items():
            own = tensor.view(torch.int16).numpy().view(np.uint16) if half else tensor.numpy().view(np.uint32)
            np.testing.assert_array_equal(numbers[name].view(own.dtype), own)


def test_a_policy_after_which_nothing_moved_keeps_its_digest(tmp_path: Path) -> None:
    weights, path = make(), tmp_path / "policy"
    base = weights.export(path)
    assert weights.export(path) == base
    assert read_kind(path) == "base"
    step(weights, 0)
    digest = weights.export(path)
    assert digest != base
    assert weights.export(path) == digest
    update = read_update(path, digest)
    assert update.parent == digest
    assert not update.factors


def test_several_steps_between_two_policies_are_one_update(tmp_path: Path) -> None:
    weights = make()
    weights.export(tmp_path / "policy")
    for number in range(3):
        step(weights, number)
    with pytest.raises(AsyncRLError, match="moved since the last export"):
        weights.export_whole(tmp_path / "whole")
    weights.export(tmp_path / "policy")
    assert [each.update for each in read_update(tmp_path / "policy").steps] == [0, 1, 2]


def test_policies_can_be_published_whole(tmp_path: Path) -> None:
    weights = make(trainer=TrainerConfig(kind="sketch", rank=8, publish="snapshots"))
    base = weights.export(tmp_path / "policy")
    assert read_base(tmp_path / "policy").digest == base
    step(weights, 0)
    step(weights, 1)
    digest = weights.export(tmp_path / "policy")
    snapshot = read_snapshot(tmp_path / "policy", digest)
    assert digest == snapshot.weights == weights_digest(weights.parameters)
    assert snapshot.update == weights.steps == 2  # whichever version that is
    assert_same(weights, snapshot.tensors)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [
        (TRAINER, torch.float32),
        (TRAINER, torch.bfloat16),
        (TrainerConfig(kind="sketch", rank=16, momentum=0.5, redraw_every=3), torch.float32),
    ],
)
def test_a_run_goes_on_bit_for_bit_from_what_was_saved(
    tmp_path: Path, kind: str, trainer: TrainerConfig, dtype: torch.dtype
) -> None:
    weights = make(kind, trainer, dtype)
    for number in range(5):
        step(weights, number)
        if number == 1:
            weights.save(tmp_path)
    again = make(kind, trainer, dtype)
    again.load(tmp_path)
    assert again.steps == 2
    for number in range(2, 5):
        step(again, number)
    assert_same(again, weights.parameters)
    for part, other in zip(again.memory, weights.memory, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in part.items())


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    weights = make()
    step(weights, 0)
    weights.save(tmp_path)
    others = {
        "seed 5, this run's is 6": make(seed=6),
        r"variance/.* has|float32 \[|has other tensors": make("experts"),
        "has other tensors": make(trainer=TrainerConfig(kind="sketch", rank=16, momentum=0.5, redraw_every=3)),
    }
    for message, other in others.items():
        before = copied(other)
        with pytest.raises(AsyncRLError, match=message):
            other.load(tmp_path)
        assert_same(other, before)
        assert other.steps == 0
    (tmp_path / "update.safetensors").write_bytes(b"broken")
    other = make()
    before = copied(other)
    with pytest.raises(AsyncRLError, match=r"update\.safetensors"):
        other.load(tmp_path)
    assert_same(other, before)


def test_a_snapshot_puts_everything_back(tmp_path: Path) -> None:
    trainer = TrainerConfig(kind="sketch", rank=16, momentum=0.5, redraw_every=2)
    weights, straight = make("experts", trainer), make("experts", trainer)
    for each in (weights, straight):
        step(each, 0)
    restore = weights.snapshot()
    for number in range(10, 13):
        step(weights, number)
    restore()
    for number in range(1, 4):
        step(weights, number)
        step(straight, number)
    assert_same(weights, straight.parameters)
    assert weights.export(tmp_path / "one") == straight.export(tmp_path / "other")


@pytest.mark.parametrize("measured", [applying.MEASURED, 512])  # all of each weight, and a part
def test_in_bfloat16_the_rounding_is_measured_and_loud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    monkeypatch.setattr(applying, "MEASURED", measured)
    weights = make(dtype=torch.bfloat16)
    before = copied(weights)
    some_loss(weights.model, some_tokens()).backward()
    proposal = weights.propose(weights.norm(), 6e-5)
    changes = {name: sum(b @ a for a, b in pairs) for name, pairs in proposal.tangents.items()}
    weights.take(proposal, 1.0)
    noise = update = 0.0
    for name, change in changes.items():
        stored = weights.parameters[f"{name}.weight"].float() - before[f"{name}.weight"].float()
        noise += float((stored - change).double().square().sum())
        update += float(change.double().square().sum())
    assert weights.rounding_noise == pytest.approx(math.sqrt(noise / update), rel=0.1)
    assert weights.rounding_noise > 3
    assert "rounding to bfloat16" in caplog.text
    float32 = make()
    step(float32, 0)
    assert float32.rounding_noise is None


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ConfigError, match="float32 or bfloat16"):
            make(dtype=dtype)


def test_a_trained_model_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = make("experts")
    step(weights, 0)
    weights.export_final(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in weights.parameters.items():
        assert torch.equal(loaded[name], parameter)


# --- embeddings ------------------------------------------------------------------------------------------------------

LEARNING = TrainerConfig(kind="sketch", rank=8, publish="snapshots", train_embeddings=True, learning_rate=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_can_learn_beside_the_sketches(tmp_path: Path, tied: bool) -> None:
    def made() -> SketchWeights:
        return SketchWeights(dense_model(tie_word_embeddings=tied), LEARNING, 5, "")

    weights = made()
    before = copied(weights)
    for number in range(5):
        step(weights, number)
        if number == 1:
            weights.save(tmp_path)
    assert weights.steps == 5
    learns = {name for name in before if not torch.equal(before[name], weights.parameters[name])}
    ends = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert learns == ends | {f"{name}.weight" for name in weights.blocks}
    again = made()
    again.load(tmp_path)
    for number in range(2, 5):
        step(again, number)
    assert_same(again, weights.parameters)
    restore = again.snapshot()
    step(again, 5)
    restore()
    assert_same(again, weights.parameters)
    step(again, 5)
    step(weights, 5)
    assert_same(again, weights.parameters)


def test_the_embeddings_learning_rate_follows_the_schedule_of_the_ratio() -> None:
    for rate, wanted in ((6e-5, 1e-3), (3e-5, 5e-4)):
        weights = SketchWeights(dense_model(), LEARNING, 5, "")
        some_loss(weights.model, some_tokens()).backward()
        proposal = weights.propose(weights.norm(), rate)
        # AdamW's first step moves each number by the learning rate.
        assert float(proposal.dense["lm_head.weight"].abs().median()) == pytest.approx(wanted, rel=1e-3)


def test_a_step_of_length_zero_moves_nothing_and_publishes_nothing(tmp_path: Path) -> None:
    weights = make()
    digest = weights.export(tmp_path / "policy")
    before = copied(weights)
    step(weights, 0, 0.0)
    assert_same(weights, before)
    assert weights.steps == 1
    assert weights.export(tmp_path / "policy") == digest
    assert not read_update(tmp_path / "policy").factors

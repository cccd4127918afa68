"""Controlled steps of the real backend on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import ROPE, VOCABULARY, save_qwen3

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.trainer_config import StepControlConfig
from trainer.backend import Sample
from trainer.sketch.weights import _Snapshot
from trainer.step_control.predicted import Prediction, Predictor
from trainer.step_control.probe import Probe
from trainer.torch_backend import TorchBackend

TEMPERATURE = 0.8
STEPS = 6
BUDGET = 2e-4
TOO_HIGH = {"lora": 2e-2, "full": 2e-3, "sketch": 3e-2}  # learning rates, and an update ratio
KINDS = list(TOO_HIGH)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {key: value for key, value in ROPE.items() if key != "tie_word_embeddings"}
    return save_qwen3(tmp_path_factory.mktemp("model"), 0.2, **sizes)


def make(
    path: Path, kind: str = "lora", control: dict[str, Any] | None = None, dtype: str = "float32", **trainer: Any
) -> TorchBackend:
    own = {
        "lora": {"rank": 4, "alpha": 8.0},
        "full": {},
        "sketch": {"rank": 8},
        "embeddings": {"rank": 8, "train_embeddings": True, "publish": "snapshots"},
    }[kind]
    kind = "sketch" if kind == "embeddings" else kind
    return TorchBackend(
        path,
        trainer=TrainerConfig(
            kind=kind,  # type: ignore[arg-type]
            step_control=None if control is None else StepControlConfig(**control),
            **{**own, **trainer},
        ),
        algorithm=AlgorithmConfig(),
        temperature=TEMPERATURE,
        seed=3,
        dtype=dtype,
        device="cpu",
        steps=STEPS,
    )


def batch(n: int = 8) -> list[Sample]:
    random = np.random.default_rng(0)
    samples = []
    for index in range(n):
        length = int(random.integers(8, 20))
        mask = np.where(np.arange(length) < 4, 1, 0).astype(np.uint8)
        samples.append(
            Sample(
                tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
                behaviour=np.where(mask == 0, -3.0, 0.0).astype(np.float32),
                mask=mask,
                ages=np.zeros(length, np.int32),
                advantage=float(random.normal()),
                attempt=index,
                group=index // 4,
            )
        )
    return samples


def rate_of(backend: TorchBackend) -> float:
    return TOO_HIGH[backend.trainer.kind]


def everything(backend: TorchBackend) -> list[torch.Tensor]:
    """Weights and the optimiser's state."""
    learnable: Any = backend.learnable
    if backend.trainer.kind == "sketch":
        moments = [*learnable.memory.variance.values(), *learnable.memory.mean.values()]
    else:
        states = [learnable.optimizer.state[each] for each in learnable.parameters.values()]
        moments = [state[key] for state in states for key in sorted(state)]
    return [each.detach().clone() for each in (*backend.model.parameters(), *moments)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def logprobs(backend: TorchBackend, samples: list[Sample]) -> torch.Tensor:
    """Whole distributions at every sampled place, float64 [n, vocabulary]."""
    rows = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
            logits = backend.model(input_ids=ids).logits[0, np.flatnonzero(sample.mask == 0) - 1]
            rows.append(torch.log_softmax(logits.double() / TEMPERATURE, -1))
    return torch.cat(rows)


def divergences(backend: TorchBackend, samples: list[Sample], steps: int) -> list[float]:
    """What each step really moved, over the whole batch."""
    found = []
    for _ in range(steps):
        before = logprobs(backend, samples)
        backend.step(samples, rate_of(backend))
        after = logprobs(backend, samples)
        found.append(float((before.exp() * (before - after)).sum(-1).mean()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_rate_ten_times_too_high_a_controlled_step_keeps_its_budget(path: Path, kind: str) -> None:
    """By the exact divergence over the whole batch."""
    samples = batch()
    control = {"budget": BUDGET, "final_budget": BUDGET, "responses": 8}
    controlled = divergences(make(path, kind, control), samples, STEPS)
    assert all(BUDGET / 2 < each < 2 * BUDGET for each in controlled), controlled
    free = divergences(make(path, kind), samples, STEPS)
    assert all(each > 2 * BUDGET for each in free), free


@pytest.mark.parametrize(("rate", "budget"), [(1e-3, 2e-4), (1e-3, 2e-5), (6e-5, 2e-6)])
def test_where_weights_round_a_step_keeps_its_budget_with_the_noise(path: Path, rate: float, budget: float) -> None:
    """By the exact divergence of the weights as stored, over the whole batch. The last budget is nearly all noise, and
    a fiftieth of what bfloat16 arithmetic makes of any change."""
    samples, exact = batch(), make(path, "full")
    control = {"budget": budget, "final_budget": budget, "responses": 8, "max_scale": 30.0}
    backend = make(path, "sketch", control, dtype="bfloat16")

    def as_stored() -> torch.Tensor:
        with torch.no_grad():
            for wide, stored in zip(exact.model.parameters(), backend.model.parameters(), strict=True):
                wide.copy_(stored)
        return logprobs(exact, samples)

    moved = []
    for _ in range(STEPS):
        before = as_stored()
        metrics = backend.step(samples, rate).metrics
        moved.append(float((before.exp() * (before - as_stored())).sum(-1).mean()))
        assert metrics["realised_kl"] == pytest.approx(moved[-1], rel=1e-2)
        if len(moved) > 1:
            assert metrics["applied_kl"] + metrics["noise_kl"] == pytest.approx(budget)
    assert moved[0] > 1.2 * budget  # nothing is known of the noise yet
    assert budget / 1.5 < fmean(moved[1:]) < 1.5 * budget, moved
    assert all(budget / 2 < each < 2 * budget for each in moved[1:]), moved


@pytest.mark.parametrize("kind", [*KINDS, "embeddings"])
@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_the_metrics_say_what_was_predicted_and_what_became_of_it(path: Path, kind: str, method: str) -> None:
    samples = batch()
    backend = make(path, kind, {"budget": BUDGET, "method": method, "max_scale": 0.5})
    before = logprobs(backend, samples)
    metrics = backend.step(samples, 1e-5).metrics
    assert metrics["step_scale"] == 0.5  # the step is so small that it may be as long as it can
    assert metrics["kl_budget"] == BUDGET
    assert metrics["mismatch"] == 0.0
    assert metrics["applied_kl"] == pytest.approx(metrics["predicted_kl"] / 4)
    assert metrics["realised_kl"] == pytest.approx(metrics["applied_kl"], rel=0.05)
    after = logprobs(backend, samples)
    assert metrics["realised_kl"] == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1.0)
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_scale_one_is_the_step_without_control(path: Path, kind: str) -> None:
    samples = batch()
    free, controlled = make(path, kind), make(path, kind, {"max_scale": 1.0, "budget": 1e9})
    for _ in range(3):
        free.step(samples, 1e-4)
        assert controlled.step(samples, 1e-4).metrics["step_scale"] == 1.0
    for one, other in zip(everything(free), everything(controlled), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_cannot_be_predicted_changes_nothing(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = batch()
    backend = make(path, kind, {})
    backend.step(samples, 1e-4)
    before, state = everything(backend), backend.control and backend.control.state()
    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "_predict", lambda *_: Prediction(math.inf, []))
        with pytest.raises(FloatingPointError, match=r"step control, after 1 optimiser steps: .*unchanged"):
            backend.step(samples, 1e-2)
    assert same(everything(backend), before)
    assert backend.control is not None
    assert backend.control.state() == state
    assert not backend.step(samples, 1e-4).skipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ruins_the_policy_says_that_it_was_taken_and_is_counted(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(path, kind, {})
    assert backend.control is not None
    backend.observe(1e-5)
    monkeypatch.setattr(Probe, "realised", lambda *_: math.nan)
    with pytest.raises(FloatingPointError, match=r"after 0 optimiser steps: the next was taken"):
        backend.step(batch(), 1e-2)
    state = backend.control.state()
    assert state["steps"] == backend.learnable.steps == 1
    assert not state["observed"]
    assert state["mismatch"] > 0


def test_a_controlled_step_copies_no_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(path, "sketch", {})
    copied: list[object] = []
    monkeypatch.setattr(_Snapshot, "keep_weights", lambda kept: copied.append(kept))
    backend.step(batch(), 1e-4)
    assert not copied
    kept = backend.learnable.snapshot()
    backend.step(batch(), 1e-4)
    assert copied  # where somebody may go back, they are
    kept()


def test_when_a_later_part_of_a_batch_fails_the_control_goes_back_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = batch()
    backend = make(path, "lora", {}, updates_per_batch=2)
    assert backend.control is not None
    backend.observe(1e-5)
    before, state = everything(backend), backend.control.state()
    realised = iter([1e-5, math.nan])
    monkeypatch.setattr(Probe, "realised", lambda *_: next(realised))
    with pytest.raises(FloatingPointError, match="after 1 optimiser steps"):
        backend.step(samples, 1e-4)
    assert same(everything(backend), before)
    assert backend.control.state() == state


def test_what_the_engines_diverge_by_is_taken_from_the_budget(path: Path) -> None:
    backend = make(path, "lora", {"budget": BUDGET, "final_budget": BUDGET})
    for k3 in (1e-4, 3e-4, math.nan):
        backend.observe(k3)
    metrics = backend.step(batch(), 1e-4).metrics
    assert metrics["mismatch"] == pytest.approx(0.3 * 2e-4)
    assert metrics["kl_budget"] == pytest.approx(BUDGET - 0.3 * 2e-4)
    metrics = backend.step(batch(), 1e-4).metrics
    assert metrics["mismatch"] == pytest.approx(0.3 * 2e-4)  # nothing new was seen
    backend.observe(1.0)
    assert backend.step(batch(), 1e-4).metrics["kl_budget"] == pytest.approx(BUDGET / 2)


def test_the_budget_falls_over_the_run(path: Path) -> None:
    backend = make(path, "lora", {"budget": 2e-4, "final_budget": 2e-5})
    budgets = [backend.step(batch(), 1e-4).metrics["kl_budget"] for _ in range(STEPS + 1)]
    assert budgets[0] == pytest.approx(2e-4)
    assert budgets[-2:] == pytest.approx([2e-5, 2e-5])
    assert budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize(("kind", "dtype"), [("lora", "float32"), ("sketch", "bfloat16")])
def test_a_run_goes_on_exactly_with_its_control(path: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    samples, control = batch(), {"budget": BUDGET}
    whole = make(path, kind, control, dtype)
    whole.observe(2e-5)
    whole.step(samples, 1e-3)
    whole.observe(4e-5)
    whole.save(tmp_path)
    resumed = make(path, kind, control, dtype)
    resumed.load(tmp_path)
    assert resumed.step(samples, 1e-3).metrics == whole.step(samples, 1e-3).metrics
    assert same(everything(resumed), everything(whole))


def test_a_state_that_is_none_is_refused(path: Path, tmp_path: Path) -> None:
    backend = make(path, "lora", {})
    backend.save(tmp_path)
    (tmp_path / "step_control.json").write_text('{"steps": "many"}')
    with pytest.raises(AsyncRLError, match="step control"):
        backend.load(tmp_path)


def test_few_tokens_are_looked_at_but_some_of_each_response(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = Probe.__init__

    def spy(self: Probe, scorer: Any, tokens: Any, wanted: Any, *rest: Any) -> None:
        seen.append(sum(len(each) for each in wanted))
        assert len(tokens) == 2
        made(self, scorer, tokens, wanted, *rest)

    monkeypatch.setattr(Probe, "__init__", spy)
    backend = make(path, "lora", {"probe_tokens": 20})
    backend.step(batch(), 1e-4)
    assert 0 < seen[0] <= 2 * 16

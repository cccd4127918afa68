"""What optimisers propose, against the true divergence of small steps; in float64, where models and kinds have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moved_models import divergence_of, in_float64, logits_of, moved
from tiny_lm import VOCABULARY, tiny_lm

from async_rl.config import AlgorithmConfig, TrainerConfig
from trainer.backend import Sample
from trainer.learnable import LowRank, Proposal
from trainer.logprobs import Scorer
from trainer.step_control.predicted import Predictor
from trainer.step_control.probe import Probe
from trainer.torch_backend import TorchBackend

TEMPERATURE = 0.8
RATES = {"lora": 1e-3, "full": 1e-4, "sketch": 1e-3}
SMALL = 1e-3  # times as long as these: the third order is then small enough


def batch() -> list[Sample]:
    random = np.random.default_rng(0)
    lengths = (9, 14, 11, 17)
    return [
        Sample(
            tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
            behaviour=np.full(length, -3.0, np.float32),
            mask=np.where(np.arange(length) < 3, 1, 0).astype(np.uint8),
            ages=np.zeros(length, np.int32),
            advantage=float(random.normal()),
            attempt=index,
            group=0,
        )
        for index, length in enumerate(lengths)
    ]


def proposed(folder: Path, kind: str, name: str, dtype: str, by: float = SMALL) -> tuple[TorchBackend, Proposal]:
    """After a step at an ordinary rate (a fresh adapter is no policy of its own), one that is `by` times as long."""
    tiny_lm(name).save_pretrained(folder)
    own = {"lora": {"rank": 4, "alpha": 8.0}, "full": {}, "sketch": {"rank": 8}}[kind]
    backend = TorchBackend(
        folder,
        trainer=TrainerConfig(kind=kind, **own),  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(),
        temperature=TEMPERATURE,
        seed=3,
        dtype=dtype,
        device="cpu",
    )
    backend.step(batch(), RATES[kind])
    backend.learnable.zero()
    backend._accumulate(batch(), backend._flatten(batch()))
    return backend, backend.learnable.propose(backend.learnable.norm(), RATES[kind] * by)


def predict(model: Any, proposal: Proposal) -> float:
    tokens, places = looked_at()
    return Predictor("jvp")(Probe(Scorer(model), tokens, places, TEMPERATURE, proposal), proposal).divergence


def looked_at() -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [each.tokens for each in batch()], [np.flatnonzero(each.mask == 0) for each in batch()]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_adamw_proposes_for_an_adapter_and_for_every_parameter_is_predicted(tmp_path: Path, kind: str) -> None:
    backend, proposal = proposed(tmp_path, kind, "gpt_neox", "float64")
    predicted = predict(backend.model, proposal)
    before = logits_of(backend.model, *looked_at())
    backend.learnable.take(proposal, 1.0)
    assert predicted == pytest.approx(
        divergence_of(before, logits_of(backend.model, *looked_at()), TEMPERATURE), rel=2e-4
    )
    assert predicted > 0


@pytest.mark.parametrize(
    ("name", "by", "error"),
    [
        ("gpt_neox", SMALL, 2e-4),
        ("qwen3_moe", 10 * SMALL, 1e-3),  # its norms and routers go through float32, which a smaller step would show
    ],
)
def test_what_a_sketch_proposes_is_predicted_experts_included(
    tmp_path: Path, name: str, by: float, error: float
) -> None:
    """The sketch is of float32 weights; its proposal is judged on the same model in float64."""
    backend, proposal = proposed(tmp_path, "sketch", name, "float32", by)
    model = in_float64(backend.model)
    exact = Proposal(
        {
            name: [LowRank(pair.a.double(), pair.b.double()) for pair in pairs]
            for name, pairs in proposal.tangents.items()
        },
        {},
    )
    assert any("experts" in each for each in exact.tangents) == (name == "qwen3_moe")
    predicted = predict(model, exact)
    before = logits_of(model, *looked_at())
    after = logits_of(moved(model, exact), *looked_at())
    assert predicted == pytest.approx(divergence_of(before, after, TEMPERATURE), rel=error)
    assert predicted > 0

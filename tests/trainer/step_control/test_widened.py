"""What a model of narrow weights says in float32 arithmetic, against the same model with its weights widened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sketched import expert_model, some_tokens
from tiny_lm import tiny_lm

from async_rl.config import TrainerConfig
from trainer.learnable import Proposal
from trainer.logprobs import Scorer
from trainer.sketch.attach import attach_sketches
from trainer.step_control.probe import Probe
from trainer.step_control.widened import in_float32


def probe_of(model: Any) -> Probe:
    tokens = list(some_tokens().int().numpy())
    return Probe(Scorer(model), tokens, [torch.arange(3, len(each)).numpy() for each in tokens], 0.8, Proposal({}, {}))


def logits(probe: Probe, outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([probe._logits(each) for each in outputs])


FAMILIES = ["qwen2", "gpt_neox", "gemma2", "falcon", "qwen3_next", "granite", "qwen3_moe"]


@pytest.mark.parametrize("family", [*FAMILIES, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_what_the_widened_model_says(family: str | None, dtype: torch.dtype) -> None:
    """The last: sketched experts, which keep views of their weights (of a width that narrow grouped products take)."""
    model: Any = (tiny_lm(family) if family else expert_model(moe_intermediate_size=24)).to(dtype)
    wide = copy.deepcopy(model).float()
    if family is None:
        attach_sketches(model, TrainerConfig(kind="sketch", rank=8), base_seed=3)
    before = copy.deepcopy(model.state_dict())
    narrow_probe, wide_probe = probe_of(model), probe_of(wide)
    found = logits(narrow_probe, in_float32(narrow_probe.outputs))
    assert found.dtype == torch.float32
    wanted = logits(wide_probe, wide_probe.outputs())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    plain = logits(narrow_probe, narrow_probe.outputs()).float()
    assert float((plain - wanted).abs().max()) > 20 * float((found - wanted).abs().max())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.dtype == dtype for parameter in model.parameters())

"""The lean forward of Llama's family: that it is used, and that it is not where it would be wrong. Its numbers are
checked against transformers and peft by the tests of the engine, which run on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import inference.forwards as forwards
from inference.slot_linear import ActiveSlot, JointWeights, LowRank, MergedLinear
from inference.torch_engine import TorchEngine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
def test_the_family_runs_on_the_lean_forward(kind, dtype, tiny_model):
    assert tiny_model(kind).engine(dtype=dtype).describe()["forward"] == "dense"


def changed_model(tiny, folder, **changes):
    """The tiny model with another config."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny.path)
    for name, value in changes.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_a_member_with_other_parts_runs_on_transformers_forward_and_says_why(changes, reason, qwen, tmp_path):
    path = changed_model(qwen, tmp_path, **changes)
    facts = TorchEngine(path, slots=2, max_context=16, max_resident=2, device="cpu").describe()
    assert facts["forward"].startswith("transformers")
    assert reason in facts["decode"]


def test_a_rotation_with_fixed_frequencies_is_the_models_own(qwen, tmp_path):
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    path = changed_model(qwen, tmp_path, rope_parameters=scaled)
    assert TorchEngine(path, slots=2, max_context=48, max_resident=2, device="cpu").describe()["forward"] == "dense"


def test_windows_on_some_layers_bound_what_is_seen_while_decoding_too(qwen, finish_all, tmp_path):
    path = changed_model(
        qwen, tmp_path, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    engine = TorchEngine(path, slots=2, max_context=48, max_resident=2, device="cpu")
    assert engine.describe()["forward"] == "dense"
    policy = engine.install(*qwen.policy(0)).policy
    engine.flip(policy, "finish")
    engine.submit(qwen.request(0, length=3, new=20))
    completion = finish_all(engine)[0]
    # One whole forward, which was compared with transformers' when the engine was made.
    (scores,) = engine.score(policy, [np.concatenate([qwen.prompt(0, 3), completion.tokens])])
    np.testing.assert_allclose(completion.logprobs, scores[2:], atol=1e-5)


def test_a_lean_forward_that_differs_is_not_used(qwen, finish_all, monkeypatch, caplog):
    real = forwards.forward_sequences

    def without_rotation(shape, weights, rotation, ids_bt):
        return real(shape, weights, torch.ones_like(rotation), ids_bt)

    monkeypatch.setattr(forwards, "forward_sequences", without_rotation)
    engine = qwen.engine()
    assert "differ by" in engine.describe()["decode"]
    assert "differ by" in caplog.text
    request = qwen.request(0)
    engine.submit(request)
    completion = finish_all(engine)[0]
    np.testing.assert_allclose(completion.logprobs, qwen.logprobs(0, request.prompt, completion.tokens, 1.0), atol=1e-5)


def test_joint_layers_hold_each_policys_weights_and_share_the_base():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 4, generator=generator) for rows in (3, 2)]
    active = ActiveSlot()
    layers = [MergedLinear(torch.nn.Parameter(w.clone(), requires_grad=False), None, active, slots=3) for w in weights]
    joint = JointWeights(layers)
    base = torch.cat(weights)
    a, b = torch.randn(2, 4, generator=generator), torch.randn(3, 2, generator=generator)
    layers[0].load(1, LowRank(a, b, 0.5))
    layers[1].load(1, None)
    layers[1].load(2, LowRank(a, b[:2], 2.0))
    update = torch.zeros(3, 5, 4)
    update[1, :3], update[2, 3:] = 0.5 * b @ a, 2.0 * b[:2] @ a
    for slot in range(3):
        torch.testing.assert_close(joint.matrices[slot], base + update[slot])
        for layer, part in zip(layers, (base + update[slot]).split([3, 2]), strict=True):
            torch.testing.assert_close(layer.in_slot(slot).weight, part)
    assert joint.matrices[0].data_ptr() == layers[0].weight.data_ptr()
    for layer in layers:  # what a slot held before leaves no trace
        layer.load(1, None)
    assert torch.equal(joint.matrices[1], base)
    assert torch.equal(layers[1].weight, weights[1])

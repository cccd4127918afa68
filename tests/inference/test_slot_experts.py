"""A mixture of experts in the torch engine: several policies with adapters on everything, against the trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from merged_adapters import merged_logits
from safetensors.torch import load_file
from tiny_lm import VOCABULARY, tiny_lm

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.policy.adapter import read_adapter
from async_rl.policy.experts import find_experts
from async_rl.version import PolicyId
from inference.adapter_match import match_adapter
from inference.engine import EngineError, Request, SamplingParams
from inference.served_policies import AdapterFolders, linear_shapes, modules_of
from inference.slot_experts import SlotExperts
from inference.torch_engine import TorchEngine
from trainer.peft_layout import stacks
from trainer.targets import resolve_targets
from trainer.torch_backend import TorchBackend

MIXED = {"mlp_only_layers": [0]}
LAYOUTS = ["each", "shared_outer"]
Policies = dict[int, tuple[PolicyId, Path, tuple[str, ...], list[np.ndarray]]]


def sequences() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (30, 12, 21)]


def trainer_backend(model: Path, layout: Any, seed: int) -> TorchBackend:
    """With a random adapter."""
    trainer = TrainerConfig(rank=4, alpha=6, expert_adapters=layout)
    made = TorchBackend(model, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=0, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.learnable.parameters.values():  # type: ignore[attr-defined]
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mixture") / "model"
    tiny_lm("qwen3_moe", **MIXED).save_pretrained(place)
    return place


@pytest.fixture(scope="module", params=LAYOUTS)
def policies(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Two of them: identity, file, the modules that the trainer says it adapts, and its log-probabilities."""
    folder, made = tmp_path_factory.mktemp("policies"), {}
    for version in (1, 2):
        backend = trainer_backend(model, request.param, version)
        path = folder / f"{version}.safetensors"
        policy = PolicyId("main", version, backend.export(path))
        made[version] = (policy, path, backend.modules, backend.logprobs(sequences()))
    return made


def engine(model: Path, **changes: Any) -> TorchEngine:
    given: dict[str, Any] = {"slots": 8, "max_context": 64, "max_resident": 3, "device": "cpu", "stop_tokens": ()}
    return TorchEngine(model, **(given | changes))


def oracle(model_kind: Any, path: Path, ids: np.ndarray) -> np.ndarray:
    tensors, config = read_adapter(path)
    scale = config["lora_alpha"] / config["r"]
    row = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = merged_logits(model_kind, tensors, scale, row)[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0].numpy()


def test_scores_are_the_trainers_with_two_policies_resident(model: Path, policies: Policies) -> None:
    one = engine(model)
    for policy, path, modules, _ in policies.values():
        assert one.install(policy, path).matched_modules == modules
    for policy, _, _, expected in policies.values():
        for ours, theirs in zip(one.score(policy, sequences()), expected, strict=True):
            assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    differs = [float(np.abs(a - b).max()) for a, b in zip(policies[1][3], policies[2][3], strict=True)]
    assert min(differs) > 0.5
    # The slot of a policy that has gone is another's, nothing of it is left.
    first, path, _, expected = policies[1]
    second, other, _, _ = policies[2]
    for policy in (first, second):
        one.evict(policy)
    one.install(second, other)
    one.install(first, path)
    assert np.abs(one.score(first, sequences()[:1])[0] - expected[0]).max() <= 1e-5 * np.abs(expected[0]).max()


@pytest.mark.parametrize("in_flight", ["finish", "continue", "recompute"])
def test_sampled_tokens_have_the_log_probabilities_of_their_policies(
    model: Path, policies: Policies, in_flight: Any
) -> None:
    """Two policies decode side by side, and a flip is survived."""
    one = engine(model)
    (first, path, _, _), (second, other, _, _) = policies[1], policies[2]
    one.install(first, path)
    one.flip(first, "finish")
    prompt = np.arange(3, dtype=np.int32)
    for index in range(3):
        one.submit(Request((0, index), prompt + index, SamplingParams(temperature=1.0, max_new_tokens=12), seed=index))
    for _ in range(4):
        one.step()
    one.install(second, other)
    one.flip(second, in_flight)
    one.submit(Request((0, 3), prompt, SamplingParams(temperature=1.0, max_new_tokens=12), seed=9))
    done = []
    while one.active:
        done += one.step()
    assert len(done) == 4
    plain = tiny_lm("qwen3_moe", **MIXED)
    for each in done:
        runs = [run.version for run in each.versions]
        asked = prompt + (each.key[1] if each.key[1] < 3 else 0)
        expected = oracle(plain, path if runs[0] == 1 else other, np.concatenate([asked, each.tokens]))[2:]
        known = len(each.tokens) if len(runs) == 1 else each.versions[0].count
        np.testing.assert_allclose(each.logprobs[:known], expected[:known], atol=2e-5)
        if in_flight == "recompute" and len(runs) == 2:
            after = oracle(plain, other, np.concatenate([asked, each.tokens]))[2:]
            np.testing.assert_allclose(each.logprobs[known:], after[known:], atol=2e-5)
    assert {run.version for each in done for run in each.versions} == {1, 2}


def test_half_precision_keeps_adapters_apart(tmp_path: Path, policies: Policies) -> None:
    """Each projection gives W x + scale·B(A x), to bfloat16's rounding of what it is added to and of the sum."""
    tiny_lm("qwen3_moe", **MIXED).save_pretrained(tmp_path)
    one = engine(tmp_path, dtype="bfloat16")
    projections = one._runner.experts
    assert not any(each.merges for each in projections.values())
    calls: list[tuple[SlotExperts, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for each in projections.values():
        each.register_forward_hook(lambda own, given, out: calls.append((own, given[0], given[1], out)))
    for policy, path, _, _ in policies.values():
        one.install(policy, path)
    for policy, path, _, _ in policies.values():
        calls.clear()
        one.score(policy, sequences())
        assert {own.target.name for own, *_ in calls} == projections.keys()
        adapters = stacks(read_adapter(path)[0])
        for own, x, bounds, out in calls:
            adapter = adapters[own.target.path, own.target.projection]
            starts, wanted, changes = bounds.tolist(), [], []
            for expert in range(own.target.experts):
                rows = x[starts[expert] : starts[expert + 1]].float()
                changes.append(1.5 * (rows @ adapter["A"][expert].T) @ adapter["B"][expert].T)
                wanted.append(rows @ own.weight[expert].float().T + changes[-1])
            want, change = torch.cat(wanted), torch.cat(changes)
            bound = 2**-7 * float(want.abs().max())
            assert float((out.float() - want).abs().max()) < bound
            assert 0.2 * float(change.abs().max()) > bound  # so a scale of 1.2, 0.5 or 0 would be seen


def test_one_tensor_too_few_or_of_another_shape_is_refused(model: Path, policies: Policies) -> None:
    tensors, config = read_adapter(policies[1][1])
    plain = tiny_lm("qwen3_moe", **MIXED)
    shapes, (experts, _) = linear_shapes(model), find_experts(plain)
    match_adapter(tensors, config, shapes, experts)
    name = next(name for name in sorted(tensors) if "experts" in name and "down_proj.lora_A" in name)
    lacking = {each: tensor for each, tensor in tensors.items() if each != name}
    with pytest.raises(EngineError, match=r"incomplete: target .*experts\.0\.down_proj has no lora_A"):
        match_adapter(lacking, config, shapes, experts)
    with pytest.raises(EngineError, match="has shape"):
        match_adapter(tensors | {name: tensors[name][:, 1:]}, config, shapes, experts)
    with pytest.raises(EngineError, match=r"matches no linear module of the model, nor experts"):
        match_adapter(tensors | {name.replace("experts.0", "experts.9"): tensors[name]}, config, shapes, experts)
    with pytest.raises(EngineError, match=r"not among the config's target_modules"):
        match_adapter(tensors, config | {"target_modules": ["q_proj"]}, shapes, experts)


def test_what_experts_share_is_not_also_their_own(model: Path, policies: Policies) -> None:
    tensors, config = read_adapter(policies[1][1])
    experts, _ = find_experts(tiny_lm("qwen3_moe", **MIXED))
    shared = "base_model.model.model.layers.1.mlp.experts.gate_proj.lora_A.weight"
    own = shared.replace("experts.", "experts.2.")
    both = tensors | {shared: torch.ones(4, 32), own: torch.ones(4, 32)}
    with pytest.raises(EngineError, match=r"experts.\d.gate_proj has a lora_A of its own, and one that all"):
        match_adapter(both, config, linear_shapes(model), experts)


def test_servers_that_serve_none_refuse_it_with_what_to_do(tmp_path: Path, model: Path, policies: Policies) -> None:
    policy, path, _, _ = policies[1]
    folders = AdapterFolders(tmp_path, linear_shapes(model))
    with pytest.raises(EngineError, match=r"adapts experts .* this engine does not serve") as refused:
        folders.write(policy, folders.read(policy, path))
    said = re.search(r"set \[trainer\] targets = (\[.*?\]), or", str(refused.value))
    assert said
    assert json.loads(said[1]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert not resolve_targets(tiny_lm("qwen3_moe", **MIXED), json.loads(said[1])).experts


def test_servers_that_serve_them_get_a_folder_and_report_what_the_trainer_says_it_adapts(
    tmp_path: Path, model: Path, policies: Policies
) -> None:
    folders = AdapterFolders(tmp_path, *modules_of(model, experts=True))
    for policy, path, modules, _ in policies.values():
        assert folders.write(policy, folders.read(policy, path)) == modules
        assert load_file(folders.folder(policy) / "adapter_model.safetensors").keys() == read_adapter(path)[0].keys()


def test_a_run_of_the_same_bits_is_refused(model: Path) -> None:
    with pytest.raises(EngineError, match="mixture of experts"):
        engine(model, exact=True)

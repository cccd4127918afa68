"""Which layer catches what: a real trainer's proofs against a real engine's, with the fault in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import save_qwen3
from transformers import AutoModelForCausalLM

import inference.adapter_slots as adapter_slots
from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.policy.adapter import read_adapter, write_adapter
from async_rl.proof import make_proof, probe_tokens
from async_rl.version import PolicyId
from buffer.proofs import Proofs, Verdict
from inference.engine import EngineError
from inference.slot_linear import LowRank
from inference.torch_engine import TorchEngine
from trainer.backend import Sample
from trainer.bench_replay import Shape, draw_model
from trainer.proving import Prover
from trainer.torch_backend import TorchBackend

VOCAB, SEED = 40, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("model"), std=0.15,
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, max_position_embeddings=48,
    )  # fmt: skip


class Delivery:
    """One trainer, one engine, and the buffer's judgement between them."""

    def __init__(self, model: Path, folder: Path, *, mixture: bool = False, dtype: str = "float32") -> None:
        trainer = TrainerConfig(rank=4, learning_rate=1e-4, warmup_steps=0)
        self.backend = TorchBackend(model, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=1)
        self.engine = TorchEngine(model, slots=2, max_context=40, max_resident=2, dtype=dtype)
        self.prover = Prover(self.backend, SEED, mixture=mixture)
        self.proofs = Proofs(kept=10)
        self.canary_path, self.path = folder / "canary", folder / "policy"
        self.canary, proof = self.prover.canary(self.canary_path)
        self.proofs.registered(self.canary, proof)
        self.version = -1
        self.publish()

    def publish(self) -> PolicyId:
        self.version += 1
        digest = self.backend.export(self.path)
        self.policy = PolicyId("main", self.version, digest)
        self.proofs.registered(self.policy, self.prover.prove(digest))
        return self.policy

    def train(self) -> None:
        tokens = np.arange(30, dtype=np.int32)
        mask = (tokens < 4).astype(np.uint8)
        sample = Sample(tokens, np.full(30, -3.0, np.float32), mask, np.zeros(30, np.int32), 1.0, 0, 0)
        assert not self.backend.step([sample], 1e-4).skipped

    def judge(self, policy: PolicyId, path: Path, bound: float | None = None) -> Verdict:
        """Load, score, and take off again."""
        installed = self.engine.install(policy, path)
        tokens = probe_tokens(SEED, self.engine.vocabulary_size)
        shown = make_proof(tokens, self.engine.score(policy, tokens), installed.matched_modules)
        self.engine.evict(policy)
        return self.proofs.judge(policy, shown, bound or self.engine.capabilities.logprob_bound)


@pytest.fixture
def delivery(model: Path, tmp_path: Path) -> Delivery:
    return Delivery(model, tmp_path)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change what the engine's own check lets through."""

    def break_(change: Any) -> None:
        whole = adapter_slots.match_adapter
        monkeypatch.setattr(
            adapter_slots, "match_adapter",
            lambda *arguments: {name: low for name, each in whole(*arguments).items() if (low := change(name, each))},
        )  # fmt: skip

    return break_


def scaled(name: str, each: LowRank) -> LowRank:
    return LowRank(each.a, each.b, each.scale / 8)


def doubled(name: str, each: LowRank) -> LowRank:
    return LowRank(each.a, each.b, each.scale * 2)


def base(name: str, each: LowRank) -> LowRank:
    return LowRank(each.a, each.b * 0, each.scale)


def one_lost(name: str, each: LowRank) -> LowRank | None:
    return None if name.endswith("1.mlp.down_proj") else each


def rows_reversed(name: str, each: LowRank) -> LowRank:
    """Another layout of one module of 21."""
    return LowRank(each.a, each.b.flip(0), each.scale) if name.endswith("2.self_attn.o_proj") else each


def test_what_is_delivered_passes_the_canary_and_every_flip(delivery: Delivery) -> None:
    assert delivery.judge(delivery.canary, delivery.canary_path).cause == ""
    for _ in range(3):
        delivery.train()
        verdict = delivery.judge(delivery.publish(), delivery.path)
        assert verdict.cause == ""
        assert verdict.mismatch is not None
        assert verdict.mismatch.max_dlogp < 1e-4


@pytest.mark.parametrize("fault", [scaled, doubled, base, rows_reversed])
def test_the_canary_catches_what_the_first_policies_are_too_small_to_show(
    delivery: Delivery, breaking: Any, fault: Any
) -> None:
    delivery.train()
    policy = delivery.publish()
    breaking(fault)
    assert delivery.judge(policy, delivery.path).cause == ""  # one step at this rate moves less than two engines differ
    cause = delivery.judge(delivery.canary, delivery.canary_path).cause
    assert "log-probabilities on the probe differ" in cause
    assert ("as the base model's do" in cause) == (fault is base)


@pytest.mark.parametrize("fault", [scaled, base])
def test_the_flip_probe_catches_it_where_the_canary_has_passed(delivery: Delivery, breaking: Any, fault: Any) -> None:
    assert delivery.judge(delivery.canary, delivery.canary_path).cause == ""
    for _ in range(80):
        delivery.train()
    policy = delivery.publish()
    assert delivery.judge(policy, delivery.path).cause == ""
    breaking(fault)
    assert "log-probabilities on the probe differ" in delivery.judge(policy, delivery.path).cause


def test_the_matched_set_catches_one_lost_module_whatever_it_does(delivery: Delivery, breaking: Any) -> None:
    breaking(one_lost)
    assert (
        "another set of modules (20) than the trainer adapts (21)"
        in delivery.judge(delivery.policy, delivery.path).cause
    )


def test_the_digest_catches_a_changed_file_before_anything_is_loaded(delivery: Delivery) -> None:
    tensors, config = read_adapter(delivery.path)
    for changed in (
        {name: tensor + 1e-6 for name, tensor in tensors.items()},
        {name.replace("q_proj", "k_proj_"): tensor for name, tensor in tensors.items()},
        {},
    ):
        write_adapter(delivery.path, changed, config)
        with pytest.raises(EngineError, match="is not the announced"):
            delivery.engine.install(delivery.policy, delivery.path)
    write_adapter(delivery.path, tensors, config | {"lora_alpha": 2 * config["lora_alpha"]})
    with pytest.raises(EngineError, match="is not the announced"):
        delivery.engine.install(delivery.policy, delivery.path)
    assert not delivery.engine.resident


def test_other_base_weights_are_caught_at_the_first_canary(delivery: Delivery, model: Path, tmp_path: Path) -> None:
    """Which no fingerprint of the safetensors headers can show."""
    other = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[3] += 0.1
    other.save_pretrained(tmp_path / "other")
    delivery.engine = TorchEngine(tmp_path / "other", slots=2, max_context=40, max_resident=2)
    assert "differ from the trainer's" in delivery.judge(delivery.canary, delivery.canary_path).cause


def test_a_tied_head_that_an_engine_does_not_tie_is_caught_by_the_base_and_the_canary(tmp_path: Path) -> None:
    """As an engine would that looks for a head of its own and finds none: it has one that was never loaded."""
    tied = save_qwen3(
        tmp_path / "tied", std=0.15, tie_word_embeddings=True,
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, max_position_embeddings=48,
    )  # fmt: skip
    delivery = Delivery(tied, tmp_path)
    assert delivery.judge(delivery.policy, delivery.path).cause == ""
    untied = AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.normal_(std=0.15)
    untied.config.tie_word_embeddings = False
    untied.save_pretrained(tmp_path / "untied")
    delivery.engine = TorchEngine(tmp_path / "untied", slots=2, max_context=40, max_resident=2)
    for policy, path in ((delivery.policy, delivery.path), (delivery.canary, delivery.canary_path)):
        assert "differ from the trainer's" in delivery.judge(policy, path).cause


def test_an_engine_in_bfloat16_is_caught_by_a_bound_that_float32_keeps(delivery: Delivery, model: Path) -> None:
    for dtype, wrong in (("float32", False), ("bfloat16", True)):
        delivery.engine = TorchEngine(model, slots=2, max_context=40, max_resident=2, dtype=dtype)
        for policy, path in ((delivery.canary, delivery.canary_path), (delivery.policy, delivery.path)):
            cause = delivery.judge(policy, path, bound=1e-4).cause
            assert ("differ from the trainer's" in cause) == wrong


# --- a mixture of experts in bfloat16 -------------------------------------------------------------------------------

LARGEST = "by up to"  # says who is judged by the largest difference


def halved(name: str, each: LowRank) -> LowRank:
    return LowRank(each.a, each.b, each.scale / 2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    draw_model(Shape(4, 64, 16, 2, 64), 0, folder)
    return folder


def test_a_bfloat16_mixture_passes_though_some_tokens_went_to_other_experts(mixture: Path, tmp_path: Path) -> None:
    delivery = Delivery(mixture, tmp_path, mixture=True, dtype="bfloat16")
    verdict = delivery.judge(delivery.canary, delivery.canary_path)
    assert verdict.cause == ""
    assert verdict.mismatch is not None
    assert verdict.mismatch.max_dlogp > delivery.engine.capabilities.logprob_bound > 5 * verdict.mismatch.mean_dlogp
    for _ in range(3):
        delivery.train()
        assert delivery.judge(delivery.publish(), delivery.path).cause == ""
    as_dense = Delivery(mixture, tmp_path, dtype="bfloat16")
    assert LARGEST in as_dense.judge(as_dense.canary, as_dense.canary_path).cause


@pytest.mark.parametrize("fault", [scaled, halved, doubled, base])
def test_the_canary_catches_a_wrong_adapter_of_a_bfloat16_mixture(
    mixture: Path, tmp_path: Path, breaking: Any, fault: Any
) -> None:
    delivery = Delivery(mixture, tmp_path, mixture=True, dtype="bfloat16")
    breaking(fault)
    cause = delivery.judge(delivery.canary, delivery.canary_path).cause
    assert "on average" in cause
    assert "as the base model's do" in cause or fault is not base


def test_other_base_weights_of_a_bfloat16_mixture_are_caught_by_its_first_policy(mixture: Path, tmp_path: Path) -> None:
    draw_model(Shape(4, 64, 16, 2, 64), 1, tmp_path / "other")
    delivery = Delivery(mixture, tmp_path, mixture=True, dtype="bfloat16")
    delivery.engine = TorchEngine(tmp_path / "other", slots=2, max_context=40, max_resident=2, dtype="bfloat16")
    assert "a mixture's average 0.2" in delivery.judge(delivery.policy, delivery.path).cause


def test_a_float32_mixture_is_judged_by_the_largest_difference(mixture: Path, tmp_path: Path, breaking: Any) -> None:
    delivery = Delivery(mixture, tmp_path, mixture=True)
    assert delivery.judge(delivery.canary, delivery.canary_path).cause == ""
    breaking(scaled)
    assert LARGEST in delivery.judge(delivery.canary, delivery.canary_path).cause

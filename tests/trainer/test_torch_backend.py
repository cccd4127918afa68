"""The torch backend on a model of a few thousand parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gradient_batches import VOCABULARY, make_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import policy_digest, read_adapter
from trainer.backend import Sample
from trainer.checkpoint import find_latest, write_checkpoint
from trainer.torch_backend import TorchBackend

TEMPERATURE = 0.7
PPO = AlgorithmConfig(treatment="clip", ratio_low=0.8, ratio_high=1.28, surrogate="ppo", ratio_level="sequence")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exact_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    make_model(path)
    return path


def make(
    model_path: Path, algorithm: AlgorithmConfig | None = None, dtype: str = "float32", **trainer: Any
) -> TorchBackend:
    return TorchBackend(
        model_path,
        trainer=TrainerConfig(rank=4, alpha=8.0, weight_decay=0.01, **trainer),
        algorithm=algorithm or AlgorithmConfig(),
        temperature=TEMPERATURE,
        seed=11,
        dtype=dtype,
        device="cpu",
    )


def samples(n: int = 8, seed: int = 0) -> list[Sample]:
    """Attempts of uneven length, one of them with a second segment, with masks that have holes."""
    generator = np.random.default_rng(seed)
    out = []
    for index in range(n):
        length = int(generator.integers(6, 20))
        mask = np.ones(length, np.uint8)
        mask[3:] = 0
        if length > 10:
            mask[6:8] = 2
        behaviour = np.where(mask == 0, -generator.exponential(2.0, length), 0).astype(np.float32)
        out.append(
            Sample(
                tokens=generator.integers(0, VOCABULARY, length).astype(np.int32),
                behaviour=behaviour,
                mask=mask,
                ages=(3 - np.arange(length) * (1 + index % 3) // length).astype(np.int32),
                advantage=float(generator.normal()),
                attempt=max(index - 1, 0),
                group=index // 4,
            )
        )
    return out


def near_policy(model_path: Path, batch: list[Sample]) -> list[Sample]:
    """The batch with behaviour log-probabilities close to the fresh policy's: ratios near 1, where no clip and no
    clamp hides an error."""
    proximal = make(model_path).step(batch, 0.0).proximal
    shift = [0.02 * (1 + index % 3) * (-1) ** index for index in range(len(batch))]
    return [
        sample._replace(behaviour=np.where(sample.mask == 0, p + s, 0).astype(np.float32))
        for sample, p, s in zip(batch, proximal, shift, strict=True)
    ]


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in backend.learnable.parameters.items()}


def moments(backend: TorchBackend) -> list[torch.Tensor]:
    return [state[key].clone() for state in backend.learnable.optimizer.state.values() for key in sorted(state)]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gradients(backend: TorchBackend, batch: list[Sample]) -> torch.Tensor:
    backend.learnable.optimizer.zero_grad()
    flat = backend._flatten(batch)
    backend._accumulate(batch, flat)
    return torch.cat([parameter.grad.flatten() for parameter in backend.learnable.parameters.values()])


# --- log-probabilities -----------------------------------------------------------------------------------------------


def reference_logprobs(model_path: Path, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """One sequence at a time, unpadded, through the plain model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0] / temperature
    return (
        torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(tokens[1:, None].astype(np.int64)))[:, 0].numpy()
    )


def test_logprobs_equal_the_plain_model_whatever_the_packing(model_path: Path) -> None:
    tokens = [sample.tokens for sample in samples()] + [np.array([3], np.int32), np.array([4, 5], np.int32)]
    for budget in (1, 64, 4096):
        scores = make(model_path, micro_batch_tokens=budget).logprobs(tokens, TEMPERATURE)
        for sequence, score in zip(tokens, scores, strict=True):
            assert score.dtype == np.float32
            assert score.shape == (len(sequence) - 1,)
            if len(sequence) > 1:
                np.testing.assert_allclose(score, reference_logprobs(model_path, sequence, TEMPERATURE), atol=1e-5)


def test_proximal_logprobs_are_at_sampling_temperature_and_zero_where_nothing_trains(model_path: Path) -> None:
    batch = samples()
    backend = make(model_path, micro_batch_tokens=64)
    result = backend.step(batch, 1e-3)
    assert not result.skipped
    for sample, proximal in zip(batch, result.proximal, strict=True):
        expected = np.concatenate([[0.0], reference_logprobs(model_path, sample.tokens, TEMPERATURE)])
        np.testing.assert_allclose(proximal, np.where(sample.mask == 0, expected, 0), atol=1e-5)
        assert proximal.dtype == np.float32


def test_metrics_are_those_of_the_proximal_policy(model_path: Path) -> None:
    batch = samples()
    result = make(model_path).step(batch, 1e-3)
    gap = np.concatenate([(p - s.behaviour)[s.mask == 0] for p, s in zip(result.proximal, batch, strict=True)])
    assert result.metrics["tokens"] == len(gap)
    assert result.metrics["mismatch_mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-5)
    assert result.metrics["mismatch_max"] == pytest.approx(np.abs(gap).max(), rel=1e-5)
    assert all(isinstance(value, float) for value in result.metrics.values())
    assert result.metrics["grad_norm"] > 0


# --- gradients -------------------------------------------------------------------------------------------------------


ALGORITHMS = [
    AlgorithmConfig(ratio_level="token", aggregation="sequence_mean"),
    AlgorithmConfig(ratio_level="sequence", aggregation="token_mean"),
    AlgorithmConfig(ratio_level="segment", treatment="mask", ratio_low=0.9, age_power=0.5, age_decay=0.5),
    AlgorithmConfig(ratio_level="geometric", gate="k2", gate_level="sequence", gate_bound=1e-3, negative_mask=0.01),
    AlgorithmConfig(
        surrogate="decoupled_ppo", proximal="log_linear", clip_low=0.8, clip_high=1.2, ratio_level="token", veto=0.97
    ),
    PPO,
]


@pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=lambda algorithm: f"{algorithm.surrogate}-{algorithm.ratio_level}"
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
def test_the_gradient_does_not_depend_on_the_split_or_the_order(
    exact_model_path: Path, algorithm: AlgorithmConfig, dtype: str, tolerance: float
) -> None:
    batch = near_policy(exact_model_path, samples())
    whole = gradients(make(exact_model_path, algorithm, dtype, micro_batch_tokens=4096), batch)
    assert whole.norm() > 0
    for budget, order in ((1, range(8)), (40, range(8)), (80, (5, 2, 7, 0, 1, 3, 6, 4))):
        backend = make(exact_model_path, algorithm, dtype, micro_batch_tokens=budget)
        split = gradients(backend, [batch[index] for index in order])
        assert float((split - whole).norm() / whole.norm()) < tolerance


def test_the_gradient_is_that_of_the_written_out_loss(exact_model_path: Path) -> None:
    """-1/N Σ min(ρ, 1.1)·A·log π, with ρ over the attempt, by plain peft on whole logits."""
    batch = near_policy(exact_model_path, samples())
    backend = make(exact_model_path, AlgorithmConfig(ratio_level="sequence", ratio_high=1.1), dtype="float64")
    ours = gradients(backend, batch)
    backend.learnable.optimizer.zero_grad()
    n = sum(int((sample.mask == 0).sum()) for sample in batch)
    logps, ratio_logs = [], dict.fromkeys({sample.attempt for sample in batch}, 0.0)
    for sample in batch:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        logp = torch.log_softmax(backend.model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
        logp = logp[:-1].gather(1, ids[1:, None])[:, 0][torch.from_numpy(sample.mask[1:] == 0)]
        logps.append(logp)
        ratio_logs[sample.attempt] += float(logp.detach().sum()) - float(sample.behaviour.astype(np.float64).sum())
    loss = sum(
        -min(np.exp(ratio_logs[sample.attempt]), 1.1) * sample.advantage * logp.sum() / n
        for sample, logp in zip(batch, logps, strict=True)
    )
    loss.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in backend.learnable.parameters.values()])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-9


def test_steps_raise_the_probability_of_what_was_rewarded(model_path: Path) -> None:
    backend = make(model_path, AlgorithmConfig(treatment="uncorrected"))
    batch = [sample._replace(advantage=1.0) for sample in samples()]
    first = backend.step(batch, 5e-3).metrics["entropy_proxy"]
    for _ in range(10):
        last = backend.step(batch, 5e-3).metrics["entropy_proxy"]
    assert last < first - 0.2


# --- a step is a transaction -----------------------------------------------------------------------------------------


def test_nothing_to_learn_is_skipped_and_changes_nothing(model_path: Path) -> None:
    backend = make(model_path)
    backend.step(samples(), 1e-2)
    before, state = weights(backend), moments(backend)
    flat = [sample._replace(advantage=0.0) for sample in samples()]
    masked = [sample._replace(mask=np.full_like(sample.mask, 4)) for sample in samples()]
    for batch in (flat, masked, []):
        result = backend.step(batch, 1e-2)
        assert result.skipped
        assert result.metrics["grad_norm"] == result.metrics["loss"] == 0.0
        assert same(list(before.values()), list(weights(backend).values()))
        assert same(state, moments(backend))
        assert [len(proximal) for proximal in result.proximal] == [len(sample.tokens) for sample in batch]
    assert backend.step(flat, 1e-2).metrics["mismatch_mean"] > 0  # measured all the same
    assert not any(proximal.any() for proximal in backend.step(masked, 1e-2).proximal)
    assert backend.learnable.steps == 1


@pytest.mark.parametrize("broken", ["advantage", "behaviour", "impossible", "huge"])
def test_what_is_not_finite_raises_and_changes_nothing(model_path: Path, broken: str) -> None:
    backend = make(model_path)
    backend.step(samples(), 1e-2)
    before, state = weights(backend), moments(backend)
    batch = samples()
    if broken in ("behaviour", "impossible"):
        batch[3].behaviour[batch[3].mask == 0] = np.nan if broken == "behaviour" else -np.inf
    else:
        batch[3] = batch[3]._replace(advantage=np.inf if broken == "advantage" else 1e38)
    names_it = r"attempt 2 .*log-probability" if broken in ("behaviour", "impossible") else "loss"
    with pytest.raises(FloatingPointError, match=names_it):
        backend.step(batch, 1e-2)
    assert same(list(before.values()), list(weights(backend).values()))
    assert same(state, moments(backend))
    clean, twin = backend.step(samples(), 1e-2), make(model_path)
    twin.step(samples(), 1e-2)
    assert clean.metrics == twin.step(samples(), 1e-2).metrics


def test_the_gradient_is_clipped_to_the_global_norm(model_path: Path) -> None:
    backend = make(model_path, max_grad_norm=1e-3, beta1=0.0, beta2=0.0)
    result = backend.step(samples(), 1e-3)
    assert result.metrics["grad_norm"] > 1e-2
    squares = sum(float(state["exp_avg_sq"].sum()) for state in backend.learnable.optimizer.state.values())
    assert squares == pytest.approx(1e-6, rel=1e-2)


def test_a_sampled_first_token_is_refused_by_name(model_path: Path) -> None:
    batch = samples()
    batch[4] = batch[4]._replace(mask=np.zeros_like(batch[4].mask), attempt=77)
    with pytest.raises(AsyncRLError, match="attempt 77"):
        make(model_path).step(batch, 1e-3)


def test_a_token_outside_the_vocabulary_is_refused_by_name(model_path: Path) -> None:
    batch = samples()
    batch[4] = batch[4]._replace(tokens=batch[4].tokens + VOCABULARY, attempt=77)
    with pytest.raises(AsyncRLError, match=r"attempt 77.*vocabulary of 17"):
        make(model_path).step(batch, 1e-3)


# --- files -----------------------------------------------------------------------------------------------------------


def test_after_save_and_load_the_next_steps_are_bit_identical(model_path: Path, tmp_path: Path) -> None:
    backend = make(model_path)
    for seed in range(3):
        backend.step(samples(seed=seed), 1e-2)
    folder = write_checkpoint(tmp_path, 3, backend.save, {})
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    found = find_latest(tmp_path)
    assert found is not None
    resumed = make(model_path)
    resumed.load(found.folder)
    assert resumed.learnable.steps == 3
    for seed in range(3, 5):
        assert backend.step(samples(seed=seed), 1e-2).metrics == resumed.step(samples(seed=seed), 1e-2).metrics
        assert same(list(weights(backend).values()), list(weights(resumed).values()))
        assert same(moments(backend), moments(resumed))


def test_a_backend_saved_before_its_first_step_resumes_too(model_path: Path, tmp_path: Path) -> None:
    make(model_path).save(tmp_path)
    backend, fresh = make(model_path), make(model_path)
    backend.step(samples(), 1e-2)
    backend.load(tmp_path)
    backend.step(samples(), 1e-2)
    fresh.step(samples(), 1e-2)
    assert same(list(weights(backend).values()), list(weights(fresh).values()))


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "backend.json"])
def test_loading_a_broken_file_names_it_and_changes_nothing(model_path: Path, tmp_path: Path, file: str) -> None:
    backend = make(model_path)
    backend.step(samples(), 1e-2)
    backend.save(tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:40])
    backend.step(samples(), 1e-2)
    before, state = weights(backend), moments(backend)
    with pytest.raises(AsyncRLError, match=file):
        backend.load(tmp_path)
    assert same(list(before.values()), list(weights(backend).values()))
    assert same(state, moments(backend))


def test_loading_another_rank_is_refused(model_path: Path, tmp_path: Path) -> None:
    make(model_path).save(tmp_path)
    trainer = msgspec.structs.replace(make(model_path).trainer, rank=2)
    other = TorchBackend(
        model_path,
        trainer=trainer,
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        dtype="float32",
        device="cpu",
    )
    with pytest.raises(AsyncRLError, match="resume with the configuration"):
        other.load(tmp_path)


def test_the_exported_adapter_has_peft_names_and_its_digest(model_path: Path, tmp_path: Path) -> None:
    backend = make(model_path)
    untrained = backend.export(tmp_path / "0.safetensors")
    backend.step(samples(), 1e-2)
    digest = backend.export(tmp_path / "1.safetensors")
    assert digest != untrained
    tensors, config = read_adapter(tmp_path / "1.safetensors", digest)
    assert policy_digest(tensors, config) == digest
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_the_peft_folder_gives_the_trainers_logits(model_path: Path, tmp_path: Path) -> None:
    backend = make(model_path)
    for _ in range(3):
        backend.step(samples(), 1e-2)
    backend.export_final(tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.from_numpy(samples()[0].tokens.astype(np.int64))[None]
    with torch.no_grad():
        plain = base(input_ids=ids).logits.clone()
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()(input_ids=ids).logits
        ours = backend.model(input_ids=ids).logits
    assert float((loaded - ours).abs().max()) <= 1e-6
    assert float((plain - ours).abs().max()) > 1e-2


def test_a_missing_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AsyncRLError, match="no such directory"):
        make(tmp_path / "absent")
    with pytest.raises(AsyncRLError, match="not a causal language model"):
        make(tmp_path)

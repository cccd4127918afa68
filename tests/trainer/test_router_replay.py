"""Router replay in the torch backend against transformers under the same forced routes, and what has gone wrong in
other systems: layers shifted, positions shifted, gradients of zero, a recomputation with other routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import tiny_lm
from tiny_moe import EACH, KINDS, LAYERS, VOCAB, forced, live_routes, logprobs, moe_model, random_routes, routers

from async_rl.config import AlgorithmConfig, ConfigError, TrainerConfig
from async_rl.policy.routers import find_routers
from async_rl.trajectory import MaskReason
from trainer.backend import Sample
from trainer.replay_torch import Replay
from trainer.torch_backend import TorchBackend

LENGTHS = (11, 7, 9, 11)
PROMPT = 3
TEMPERATURE = 0.8
PLAIN = {"advantage": "mean", "treatment": "uncorrected", "aggregation": "constant", "aggregation_length": 1}
ROUTED = (1, 2)


def sequences(seed: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS]


def samples(routes: list[np.ndarray] | None) -> list[Sample]:
    out = []
    for index, tokens in enumerate(sequences()):
        mask = np.full(len(tokens), MaskReason.SAMPLED, np.uint8)
        mask[:PROMPT] = MaskReason.PROMPT
        nothing = np.zeros(len(tokens), np.int32)
        of_this = None if routes is None else routes[index]
        advantage = (1.0, -0.5, 2.0, -1.0)[index]
        behaviour = np.full(len(tokens), -2.0, np.float32)
        out.append(Sample(tokens, behaviour, mask, nothing, advantage, index, index // 2, routes=of_this))
    return out


def backend(replay: str = "rollout", kind: str = "full", model: Any = None, **trainer: Any) -> TorchBackend:
    algorithm = AlgorithmConfig(**PLAIN, router_replay=replay)
    settings = TrainerConfig(kind=kind, micro_batch_tokens=22, learning_rate=1e-3, **trainer)
    model = moe_model() if model is None else model
    return TorchBackend("", trainer=settings, algorithm=algorithm, temperature=TEMPERATURE, seed=0, model=model)


def expected(routes: list[np.ndarray]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of the sampled tokens, and the gradient of the loss, one sequence at a time."""
    model = moe_model().requires_grad_(True)
    values = []
    for sample, of_this in zip(samples(None), routes, strict=True):
        with forced(model, of_this):
            found = logprobs(model, sample.tokens, TEMPERATURE)[PROMPT - 1 :]
        values.append(found.detach())
        (-sample.advantage * found.sum() / len(LENGTHS)).backward()  # the mean over attempts
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return values, gradients


def gradients_of(backend: TorchBackend, of: list[Sample]) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """What a step would move by."""
    found: dict[str, torch.Tensor] = {}

    def keep(norm: float, rate: float) -> None:
        found.update(
            {name: each.grad.clone() for name, each in backend.model.named_parameters() if each.grad is not None}
        )

    backend.learnable.move = keep  # type: ignore[method-assign]
    result = backend.step(of, 1e-3)
    return [each[PROMPT:] for each in result.proximal], found


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("packing", ["auto", "never"])
def test_forced_routes_give_what_transformers_gives_under_the_same(packing: str, checkpointed: bool) -> None:
    routes = random_routes(LENGTHS, ROUTED)
    ours = backend(packing=packing, activation_checkpointing=checkpointed)
    assert ours.scorer.packed == (packing == "auto")
    values, gradients = expected(routes)
    got, moved = gradients_of(ours, samples(routes))
    for mine, oracle in zip(got, values, strict=True):
        np.testing.assert_allclose(mine, oracle.numpy(), rtol=1e-6, atol=2e-6)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert moved.keys() >= gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(moved[name].numpy(), gradient.numpy(), atol=2e-6 * scale, err_msg=name)
    gates = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(gates) == len(ROUTED)  # the choice is given, and its weights are learned
    assert all(moved[name].abs().max() > 1e-4 * scale for name in gates)


def test_experts_that_the_live_router_would_not_choose_have_gradients() -> None:
    model = moe_model().requires_grad_(True)
    tokens = sequences()[0]
    live = live_routes(model, tokens)
    others = np.array([[sorted(set(range(6)) - set(row.tolist()))[:EACH] for row in rows] for rows in live])
    others[:, 0] = -1
    replay = Replay(model)
    with replay.serving(torch.from_numpy(others)):
        logprobs(model, tokens).sum().backward()
    assert replay.metrics() == {"replay_changed": 1.0, "replay_changed_tokens": 1.0}
    for gate in routers(model).values():
        assert gate.weight.grad is not None
        assert float(gate.weight.grad.abs().max()) > 0


def test_the_live_routers_own_choice_changes_nothing() -> None:
    model = moe_model()
    routes = [live_routes(model, tokens).astype(np.int16) for tokens in sequences()]
    live, _ = gradients_of(backend("none"), samples(None))
    result = backend().step(samples(routes), 1e-3)
    for mine, other in zip(result.proximal, live, strict=True):
        np.testing.assert_allclose(mine[PROMPT:], other, atol=1e-6)
    assert result.metrics["replay_missing"] == 0
    assert result.metrics["replay_changed"] == result.metrics["replay_changed_tokens"] == 0


@pytest.mark.parametrize("shift", ["layers", "positions"])
def test_routes_shifted_by_one_would_be_seen(shift: str) -> None:
    # Layers: as if routes were counted from the first router, and not from the first layer, which is dense here.
    routes = random_routes(LENGTHS, ROUTED)
    shifted = [np.roll(each, 1, axis=1 if shift == "layers" else 0) for each in routes]
    values, _ = expected(routes)
    got, _ = gradients_of(backend(), samples(shifted))
    assert max(np.abs(mine - oracle.numpy()).max() for mine, oracle in zip(got, values, strict=True)) > 0.05


def test_where_routes_are_not_known_the_router_chooses_and_it_is_counted() -> None:
    routes = random_routes(LENGTHS, ROUTED)
    routes[0][4, 1] = routes[2][:, 2] = -1
    values, _ = expected(routes)  # whose -1 are the live router's too
    result = backend().step(samples(routes), 1e-3)
    for mine, oracle in zip(result.proximal, values, strict=True):
        np.testing.assert_allclose(mine[PROMPT:], oracle.numpy(), atol=2e-6)
    computed = sum(length - 1 for length in LENGTHS)  # what follows the last token is not
    assert result.metrics["replay_missing"] == pytest.approx((1 + LENGTHS[2] - 1) / (2 * computed))
    nothing = backend().step(samples(None), 1e-3)
    assert nothing.metrics["replay_missing"] == 1
    assert "replay_changed" not in nothing.metrics


def test_each_micro_batch_is_recomputed_with_its_own_routes_whatever_was_served_since() -> None:
    routes = random_routes(LENGTHS, ROUTED)
    ours = backend(activation_checkpointing=True)
    assert ours.replay is not None
    _, gradients = expected(routes)
    total = torch.zeros(())
    for sample, of_this in zip(samples(None), routes, strict=True):
        wanted = [np.arange(PROMPT, len(sample.tokens))]
        rows = ours.scorer.rows([sample.tokens], wanted, [of_this])
        total = total - sample.advantage * ours.scorer.logprobs(rows, TEMPERATURE).sum() / len(LENGTHS)
    assert ours.replay.metrics()
    total.backward()  # of all of them, after all of them
    assert ours.replay.metrics() == {}  # a recomputation counts nothing
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in ours.model.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            np.testing.assert_allclose(parameter.grad.numpy(), gradients[name].numpy(), atol=2e-6 * scale)


def test_updates_of_a_batch_replay_what_the_pass_before_them_chose() -> None:
    seen: list[np.ndarray] = []
    ours = backend("trainer", updates_per_batch=2)
    model = moe_model()
    live = [live_routes(model, tokens) for tokens in sequences()]
    rows = ours.scorer.rows

    def spy(tokens: Any, wanted: Any, routes: Any = ()) -> Any:
        seen.extend(each for each in routes if each is not None)
        return rows(tokens, wanted, routes)

    ours.scorer.rows = spy  # type: ignore[method-assign]
    result = ours.step(samples(None), 0.5)  # a rate at which the second update would go elsewhere
    assert len(seen) == len(LENGTHS)
    by_length = sorted(live, key=len)
    for mine, oracle in zip(sorted(seen, key=len), by_length, strict=True):
        if len(oracle) in (7, 9):  # of one length each, so it is clear which is which
            np.testing.assert_array_equal(mine[:-1], oracle[:-1].astype(np.int16))
            assert (mine[-1] == -1).all()
    assert result.metrics["replay_missing"] == 0
    assert result.metrics["replay_changed"] > 0


def test_a_step_counts_its_own_forwards_alone() -> None:
    """Live routes are replayed, so nothing changes: what `reference` and a failed step served before, did change."""
    live = [live_routes(moe_model(), tokens).astype(np.int16) for tokens in sequences()]
    changed = samples(random_routes(LENGTHS, ROUTED))
    ours = backend(kind="lora", rank=4, targets=("q_proj", "v_proj"))
    ours.reference(changed)
    assert ours.step(samples(live), 0.0).metrics["replay_changed"] == 0
    with pytest.raises(FloatingPointError):
        ours.step([sample._replace(advantage=float("nan")) for sample in changed], 0.0)
    assert ours.step(samples(live), 0.0).metrics["replay_changed"] == 0
    assert ours.step(changed, 0.0).metrics["replay_changed"] > 0.3


def test_the_reference_goes_where_the_samples_went() -> None:
    routes = random_routes(LENGTHS, ROUTED)
    ours = backend(kind="lora", rank=4, targets=("q_proj", "v_proj"))
    with torch.no_grad():
        for parameter in ours.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)  # an adapter that would show
    values, _ = expected(routes)
    for mine, oracle in zip(ours.reference(samples(routes)), values, strict=True):
        np.testing.assert_allclose(mine[PROMPT:], oracle.numpy(), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_router_weighs_given_experts_by_its_own_rule(kind: str) -> None:
    model = moe_model(kind)
    found = find_routers(model)
    assert set(found) == set(routers(model))
    for router in found.values():
        hidden = torch.randn(20, router.module.weight.shape[1], generator=torch.Generator().manual_seed(3))
        logits, scores, indices = router.module(hidden)
        assert router.weigh is not None
        torch.testing.assert_close(router.weigh(logits, indices), scores)
        flipped = router.weigh(logits, indices.flip(1))
        torch.testing.assert_close(flipped, scores.flip(1))


def test_of_grouped_experts_only_the_last_choice_is_replaced() -> None:
    model, tokens = moe_model("deepseek_v3"), sequences()[0]
    routes = random_routes([len(tokens)], ROUTED)[0]
    assert (routes[:, 1] // 3 != routes[:, 1, :1] // 3).any()  # experts of two groups, of which a router chooses one
    replay, seen = Replay(model), []
    model.base_model.layers[1].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad(), replay.serving(torch.from_numpy(routes)):
        logprobs(model, tokens)
    np.testing.assert_array_equal(seen[0].numpy(), routes[:, 1])


def test_a_dense_model_and_a_rule_that_is_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_replay: Qwen3ForCausalLM has no router .* \"none\""):
        backend(model=tiny_lm("qwen3"))
    model = moe_model()
    gate, before = routers(model)[2], routers(model)[2].forward
    gate.forward = lambda hidden: (before(hidden)[0], before(hidden)[1] ** 2, before(hidden)[2])
    with pytest.raises(ConfigError, match="how Qwen3MoeTopKRouter in layer 2 weighs experts is not known"):
        Replay(model)


def test_routes_of_other_tokens_are_an_error_and_not_a_guess() -> None:
    model, tokens = moe_model(), sequences()[0]
    routes = torch.zeros(len(tokens) + 1, LAYERS, EACH, dtype=torch.int16)
    replay = Replay(model)
    with (
        pytest.raises(ValueError, match=r"routes \[12, 3, 2\] are served to layer 1 with 11 tokens"),
        replay.serving(routes),
    ):
        logprobs(model, tokens)

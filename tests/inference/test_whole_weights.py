"""The engine with one copy of the weights: what it is told to become it is to the bit, or it says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sketched_policies import File, SketchedPolicies
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.policy.update_file import weights_digest, write_snapshot
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import SNAPSHOT, SamplingParams
from inference.engine import EngineError, Request
from inference.model_weights import model_weights
from inference.torch_engine import TorchEngine

VOCAB = 29
SHAPE = {
    "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
KINDS = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "moe": ("qwen3_moe", EXPERTS | {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            name, extra = KINDS[kind]
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE, **extra))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.25)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


def engine_of(model: Path, storage: str = "float32", dtype: str = "auto", **changes: object) -> TorchEngine:
    options: dict[str, object] = {"slots": 4, "max_context": 48, "max_resident": 2, "device": "cpu"}
    return TorchEngine(model, dtype=storage if dtype == "auto" else dtype, storage=storage, **(options | changes))


def serve(engine: TorchEngine, files: Sequence[File], folder: Path, in_flight: str = "continue") -> None:
    """As a node does."""
    install(engine, files, folder)
    policy = files[-1].policy
    engine.flip(PolicyId("main", policy.version, policy.digest), in_flight)


def install(engine: TorchEngine, files: Sequence[File], folder: Path) -> None:
    """One file as it is, several as a folder."""
    policy = files[-1].policy
    path = files[0].path
    if len(files) > 1:
        path = folder / f"way-{len(list(folder.iterdir()))}"
        path.mkdir()
        for number, file in enumerate(files):
            (path / f"{number:06}.safetensors").write_bytes(file.path.read_bytes())
    engine.install(PolicyId("main", policy.version, policy.digest), path)


def weights_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return model_weights(engine._runner.model).parameters


def assert_is(engine: TorchEngine, policies: SketchedPolicies) -> None:
    expected = policies.tensors()
    held = weights_of(engine)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def request(sample: int, new: int = 12, policy: PolicyId | None = None) -> Request:
    prompt = np.random.default_rng(sample).integers(0, VOCAB, 5).astype(np.int32)
    return Request((7, sample), prompt, SamplingParams(1.0, new), 1000 + sample, policy)


def logprobs_of(policies: SketchedPolicies, model: Path, tokens: np.ndarray) -> np.ndarray:
    """By transformers, of the weights that numpy made."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    missing = oracle.load_state_dict(policies.tensors(), strict=False)
    oracle.tie_weights()
    assert not missing.unexpected_keys
    with torch.no_grad():
        logits = oracle(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return (
        torch.log_softmax(logits[:-1], -1)
        .gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        .numpy()
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_after_every_flip_weights_and_log_probabilities_are_those_of_the_updates_applied_in_numpy(
    models: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    model = models(kind)
    policies, engine = SketchedPolicies(model, tmp_path), engine_of(model)
    serve(engine, policies.main, tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 12).astype(np.int32)
    for number in range(4):
        scored = engine.score(policies.main[-1].policy, [tokens])[0]
        np.testing.assert_allclose(scored, logprobs_of(policies, model, tokens), atol=2e-4)
        assert_is(engine, policies)
        serve(engine, [policies.step(dense=number == 2, still=number == 1)], tmp_path)
    assert_is(engine, policies)
    assert engine.resident == {policies.main[-1].policy: 0}


@pytest.mark.parametrize(
    ("storage", "dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_weights_kept_in_the_trainers_dtype_give_its_bits_whatever_the_engine_computes_in(
    models: Callable[[str], Path], storage: str, dtype: str, tmp_path: Path
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path, storage), engine_of(models("tied"), storage, dtype)
    serve(engine, policies.main, tmp_path)
    for _ in range(5):
        serve(engine, [policies.step()], tmp_path)
    assert_is(engine, policies)
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {getattr(torch, dtype)}


def test_updates_are_applied_where_the_kept_weights_are_and_not_where_the_engine_computes(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in bfloat16 on a GPU, whose float32 weights lie in host memory; torch's "meta" stands for the GPU."""
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"), "float32", "bfloat16")
    serve(engine, policies.main, tmp_path)
    one = policies.step(dense=True)
    install(engine, [one], tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(engine._runner, "device", torch.device("meta"))
        engine.flip(one.policy, "continue")
    assert_is(engine, policies)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["never", pytest.param("always", marks=pytest.mark.slow)])
def test_requests_in_flight_go_on_under_the_new_weights_and_say_so(
    models: Callable[[str], Path], mode: str, tmp_path: Path
) -> None:
    """The compiled step has its weights from before the flip; with recompute the answer is that of the new weights
    alone from there on."""
    model = models("tied")
    policies = SketchedPolicies(model, tmp_path, size=0.2)
    engine = engine_of(model, compile_mode=mode)
    serve(engine, policies.main, tmp_path)
    for sample in (1, 2):
        engine.submit(request(sample))
    for _ in range(5):
        engine.step()
    serve(engine, [policies.step()], tmp_path, "recompute")
    done = {}
    while engine.active:
        done |= {completion.key[1]: completion for completion in engine.step()}
    for sample, completion in done.items():
        old, new = completion.versions
        assert [(run.version, run.digest) for run in (old, new)] == [
            (file.policy.version, file.policy.digest) for file in policies.main
        ]
        whole = np.concatenate([request(sample).prompt, completion.tokens])
        expected = logprobs_of(policies, model, whole)[4 + old.count :]
        np.testing.assert_allclose(completion.logprobs[old.count :], expected, atol=2e-4)
    assert engine.describe()["decode"].startswith("compiled") == (mode == "always")
    engine.close()


def test_a_layer_whose_weight_lies_the_other_way_round_is_known_by_its_checkpoints_bytes(tmp_path: Path) -> None:
    """GPT-2's, which are no targets of a sketch; snapshots have them as the checkpoint does."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    policies, engine = SketchedPolicies(tmp_path / "model", tmp_path), engine_of(tmp_path / "model", stop_tokens=[])
    serve(engine, policies.main, tmp_path)
    rng = np.random.default_rng(0)
    for weight in policies.weights.values():
        weight += rng.normal(0, 0.1, weight.shape).astype(np.float32)
    digest = write_snapshot(tmp_path / "all", policies.tensors(), None, 1)
    serve(engine, [File(PolicyId("main", 1, digest), SNAPSHOT, tmp_path / "all")], tmp_path)
    assert_is(engine, policies)
    tokens = rng.integers(0, VOCAB, 12).astype(np.int32)
    scored = engine.score(PolicyId("main", 1, digest), [tokens])[0]
    np.testing.assert_allclose(scored, logprobs_of(policies, tmp_path / "model", tokens), atol=2e-4)


# --- ways to a policy ------------------------------------------------------------------------------------------------


def test_a_chain_begins_where_the_engine_is_by_now_or_with_a_file_that_stands_alone(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    base = policies.main[0]
    ones = [policies.step() for _ in range(3)]
    snapshot, twos = policies.snapshot(), [policies.step() for _ in range(2)]
    serve(engine, [base, *ones], tmp_path)  # a joiner
    serve(engine, [ones[1], ones[2], *twos], tmp_path)  # whose first two it has by now
    assert_is(engine, policies)
    late = engine_of(models("tied"))
    serve(late, [snapshot, *twos], tmp_path)
    assert_is(late, policies)
    serve(engine, [base], tmp_path)  # back to the beginning, from the checkpoint
    assert weights_digest(weights_of(engine)) == base.policy.digest
    serve(engine, [snapshot], tmp_path)
    serve(engine, twos, tmp_path)
    assert_is(engine, policies)


def test_a_version_in_which_nothing_moved_is_another_name_of_the_same_weights(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    serve(engine, policies.main, tmp_path)
    serve(engine, [policies.step()], tmp_path)
    still = policies.step(still=True)
    assert still.policy.digest == policies.main[1].policy.digest
    serve(engine, [still], tmp_path)
    assert engine.serving == still.policy
    serve(engine, [policies.step()], tmp_path)
    assert_is(engine, policies)


def refused(engine: TorchEngine, policy: PolicyId, path: Path, says: str) -> None:
    """And nothing has changed."""
    serving, before = engine.serving, {name: tensor.clone() for name, tensor in weights_of(engine).items()}
    with pytest.raises(EngineError, match=says):
        engine.install(policy, path)
    assert engine.serving == serving
    assert set(engine.resident) == ({serving} if serving else set())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


def test_what_does_not_fit_is_refused_before_anything_changes(models: Callable[[str], Path], tmp_path: Path) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    base, one, two = policies.main[0], policies.step(), policies.step()
    refused(engine, one.policy, one.path, "changes .* is the checkpoint")  # nothing serves yet
    serve(engine, [base], tmp_path)
    refused(engine, two.policy, two.path, f"changes {one.policy.digest[:8]}")  # one is missing
    refused(engine, two.policy, one.path, "lead to")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(one.path.read_bytes()[:-7])
    refused(engine, one.policy, cut, "cannot be read")
    (empty := tmp_path / "empty").mkdir()
    refused(engine, one.policy, empty, "lead to nothing")
    cut.write_bytes(b"no file")
    refused(engine, one.policy, cut, "cannot be read")
    serve(engine, [one], tmp_path)  # the engine is none the worse
    serve(engine, [two], tmp_path)
    assert_is(engine, policies)


def test_updates_and_snapshots_of_another_model_are_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    others, engine = SketchedPolicies(models("moe"), tmp_path / "moe"), engine_of(models("untied"))
    one, snapshot = others.step(), others.snapshot()
    (way := tmp_path / "way").mkdir()
    (way / "0").write_bytes(others.main[0].path.read_bytes())
    (way / "1").write_bytes(one.path.read_bytes())
    refused(
        engine,
        one.policy,
        way,
        f"began with weights {others.main[0].policy.digest}, and those of .* are [0-9a-f]{{64}}",
    )
    refused(engine, snapshot.policy, snapshot.path, "has no parameter")
    policies = SketchedPolicies(models("untied"), tmp_path, "bfloat16")
    half = policies.step()
    (way / "0").write_bytes(policies.main[0].path.read_bytes())
    (way / "1").write_bytes(half.path.read_bytes())
    refused(engine, half.policy, way, "began with weights")  # the same model in another dtype
    refused(
        engine,
        policies.snapshot().policy,
        policies.snapshot().path,
        "is torch.bfloat16 .* the model's is torch.float32",
    )


def test_a_node_with_another_checkpoint_is_refused_with_both_digests(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    policies = SketchedPolicies(models("tied"), tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for file in models("tied").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    engine = engine_of(other)
    own = weights_digest(weights_of(engine))
    base = policies.main[0]
    refused(engine, base.policy, base.path, f"{base.policy.digest}.*{own}")


# --- one copy --------------------------------------------------------------------------------------------------------


def test_one_copy_offers_no_finish_and_room_for_one_that_waits(models: Callable[[str], Path], tmp_path: Path) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    assert engine.capabilities.in_flight == {"continue", "recompute"}
    assert engine.capabilities.in_place
    assert engine.capabilities.resident_versions == 2
    serve(engine, policies.main, tmp_path)
    one = policies.step()
    assert "model.embed_tokens.weight" in engine.install(one.policy, one.path).matched_modules
    with pytest.raises(EngineError, match="choose continue, recompute"):
        engine.flip(one.policy, "finish")
    with pytest.raises(EngineError, match="flip to it first"):
        engine.submit(request(1, policy=one.policy))
    with pytest.raises(EngineError, match="flip to it first"):
        engine.score(one.policy, [request(1).prompt])
    engine.evict(one.policy)
    serve(engine, [one], tmp_path)
    assert_is(engine, policies)


def test_a_flip_waits_for_what_is_pinned_to_the_policy_that_it_would_end(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    serve(engine, policies.main, tmp_path)
    base, one = policies.main[0].policy, policies.step()
    engine.submit(request(1, policy=base))
    engine.submit(request(2))
    engine.install(one.policy, one.path)
    for _ in range(3):
        with pytest.raises(EngineError, match="pinned"):
            engine.flip(one.policy, "continue")
        engine.step()
    engine.abort((7, 1))
    engine.flip(one.policy, "continue")
    assert_is(engine, policies)
    with pytest.raises(EngineError, match="is not"):
        engine.submit(request(3, policy=base))
    done = []
    while engine.active:
        done += engine.step()
    assert [run.version for run in {each.key[1]: each for each in done}[2].versions] == [0, 1]
    assert sum(run.count for run in done[-1].versions) == 12


def test_what_was_checked_against_other_weights_than_those_of_now_is_not_applied(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two ways from the checkpoint: with the first of them flipped to, the second begins somewhere else."""
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    files = [policies.main[0], policies.step(), policies.step()]
    install(engine, files[:2], tmp_path)
    install(engine, files, tmp_path)
    engine.flip(files[1].policy, "continue")
    before = {name: tensor.clone() for name, tensor in weights_of(engine).items()}
    with pytest.raises(EngineError, match=r"was checked against weights .* install it again"):
        engine.flip(files[2].policy, "continue")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())
    assert engine.serving == files[1].policy
    engine.evict(files[2].policy)
    serve(engine, files[2:], tmp_path)
    assert_is(engine, policies)


def test_an_apply_that_fails_half_way_leaves_an_engine_that_computes_nothing(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    serve(engine, policies.main, tmp_path)
    engine.submit(request(1))
    engine.step()
    one = policies.step()
    engine.install(one.policy, one.path)

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("inference.whole_weights.apply_update", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.flip(one.policy, "continue")
    for call in (engine.step, lambda: engine.score(policies.main[0].policy, [request(1).prompt])):
        with pytest.raises(EngineError, match="applied in part"):
            call()


def test_stamps_say_which_weights_sampled_a_token_through_many_flips(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    policies, engine = SketchedPolicies(models("tied"), tmp_path), engine_of(models("tied"))
    serve(engine, policies.main, tmp_path)
    engine.submit(request(1, new=20))
    for _ in range(6):
        engine.step()
        serve(engine, [policies.step()], tmp_path)
    done = []
    while engine.active:
        done += engine.step()
    runs = done[0].versions
    assert [run.version for run in runs] == list(range(7))
    assert runs[3] == VersionRun(3, policies.main[3].policy.digest, 1)

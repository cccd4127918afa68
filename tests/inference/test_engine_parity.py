"""An engine's half of `async-rl doctor`: what it makes of the policies, and a node of the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_lm import save_qwen3
from transformers import AutoModelForCausalLM

from async_rl.config import Config, InferenceConfig, ModelConfig
from async_rl.policy.adapter import read_adapter, write_adapter
from async_rl.proof import LARGEST_BOUND, Proof, compare
from async_rl.run import parity_files
from async_rl.run.doctor_report import Row, judged
from async_rl.run.parity_files import POLICIES, TRAINED, Policies, Trained
from async_rl.tasks.rendering import render
from inference import adapter_slots, parity
from inference.parity import first_prompt
from trainer.parity import measure as train
from trainer.tiny_model import char_tokenizer

TOKENIZER = char_tokenizer()
TASK = {"kind": "digit_sort", "digits": 6}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = save_qwen3(
        tmp_path_factory.mktemp("model"), std=0.25,
        vocab_size=len(TOKENIZER), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    TOKENIZER.save_pretrained(folder)
    inference = InferenceConfig(slots=2, max_context=40, max_new_tokens=12)
    return Config(model=ModelConfig(path=str(folder)), task=TASK, inference=inference)


@pytest.fixture
def folder(config: Config, tmp_path: Path) -> Path:
    train(config, tmp_path)
    return tmp_path


def test_the_engine_shows_base_and_canary_as_the_trainer_has_them(config: Config, folder: Path) -> None:
    served = parity.measure(config, folder)
    trained = parity_files.read(folder / TRAINED, Trained)
    assert (served.engine, served.bound, served.tokenizer_problem) == ("torch", 1e-3, "")
    assert served.prompt_tokens > 6
    assert isinstance(served.base, Proof)
    assert isinstance(served.canary, Proof)
    assert trained.canary is not None
    for ours, theirs in ((trained.base, served.base), (trained.canary, served.canary)):
        verdict = compare(ours, theirs, 1e-4)
        assert verdict.cause == ""
        assert verdict.mismatch is not None
        assert verdict.mismatch.mean_dlogp <= verdict.mismatch.max_dlogp < 1e-4
    swapped = compare(trained.canary, served.base, LARGEST_BOUND, trained.base.logprobs)
    assert swapped.cause.endswith("bound is 0.5, and as the base model's do")


def test_what_the_engine_refuses_is_told_and_the_other_policy_shown_all_the_same(config: Config, folder: Path) -> None:
    canary = parity_files.read(folder / POLICIES, Policies).canary
    assert canary is not None
    tensors, table = read_adapter(folder / canary.name)
    write_adapter(folder / canary.name, tensors, {**table, "lora_alpha": 2 * table["lora_alpha"]})
    served = parity.measure(config, folder)
    assert isinstance(served.canary, str)
    assert "is not the announced" in served.canary
    assert isinstance(served.base, Proof)


def row(config: Config, folder: Path) -> Row:
    """As `async-rl doctor` makes it."""
    trained = parity_files.read(folder / TRAINED, Trained)
    empty = Row(group="", engine="torch", trainer_dtype="float32", engine_dtype="float32")
    return judged(empty, trained, parity.measure(config, folder))


def test_an_adapter_at_twice_its_scale_is_told_apart_from_a_wrong_base(
    config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = adapter_slots.match_adapter
    monkeypatch.setattr(
        adapter_slots, "match_adapter",
        lambda *given: {name: each._replace(scale=2 * each.scale) for name, each in whole(*given).items()},
    )  # fmt: skip
    canary, advice = row(config, folder).problems
    assert canary.startswith("canary: its log-probabilities on the probe differ")
    assert "alpha / rank" in advice


def test_a_head_that_an_engine_does_not_tie_is_a_wrong_base(config: Config, folder: Path, tmp_path: Path) -> None:
    tied = AutoModelForCausalLM.from_pretrained(config.model.path)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    tied.config.tie_word_embeddings = True
    (tmp_path / "tied").mkdir()
    tied.save_pretrained(tmp_path / "tied")
    of_tied = msgspec.structs.replace(config, model=ModelConfig(path=str(tmp_path / "tied")))
    train(of_tied, folder)  # and `config` has another head
    base, canary, advice = row(config, folder).problems
    assert base.startswith("base: its log-probabilities on the probe differ")
    assert canary.startswith("canary: ")
    assert "tied to the embeddings in both or in neither" in advice


def problem(config: Config, vocabulary: int = len(TOKENIZER), **task: Any) -> str:
    changed = Config(model=config.model, task=TASK | task, inference=config.inference)
    return first_prompt(changed, TOKENIZER, vocabulary).problem


def test_a_prompt_that_no_node_could_start_is_a_problem(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(config) == ""
    assert problem(config, vocabulary=20).startswith("the prompt has token id ")
    assert f"the tokenizer has {len(TOKENIZER)} tokens, and the model only" in problem(config, len(TOKENIZER) - 1)
    monkeypatch.setattr(parity, "render", lambda *given: render(*given) * 8)
    assert "leaves no room for an answer" in problem(config)
    monkeypatch.setattr(parity, "render", lambda *given: 1 / 0)
    assert problem(config) == "the first instance cannot be rendered: division by zero"

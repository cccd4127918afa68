import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config import ConfigError, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.run.model_cache import model_path, tiny_model_path
from async_rl.tasks.registry import load_task
from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import Instance
from trainer.tiny_dialogues import IGNORED, labelled_ids
from trainer.tiny_model import (
    CHARACTERS,
    accuracy,
    answer_loss,
    char_tokenizer,
    common_words,
    ensure_tiny_model,
    fresh_instances,
    new_model,
    warm_start,
)

TASK = {"kind": "digit_sort", "digits": 3}
TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "learning_rate": 1e-2, "batch": 64}


def config(task=TASK, **tiny):
    return config_from_table({"task": task, "model": {"tiny": {**TINY, **tiny}}}, "test")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_made_model_loads_and_gets_about_what_its_recipe_says(tmp_path):
    lines = []
    wanted = config()
    path = ensure_tiny_model(wanted, lines.append)
    assert path == tiny_model_path(wanted) == model_path(wanted)
    recipe = json.loads((path / "recipe.json").read_text())
    assert 0.2 <= recipe["measured"]["sampled_accuracy"] <= 0.3
    assert recipe["tiny"]["hidden"] == 32
    assert any("sampled accuracy" in line for line in lines)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    task = load_task(TASK)
    take = fresh_instances(task, "train")
    take(100_000)
    torch.manual_seed(1)
    assert abs(accuracy(model, tokenizer, task, take(1024), sample=True) - 0.25) < 0.12
    greedy = accuracy(model, tokenizer, task, fresh_instances(task, "eval")(512), sample=False)
    assert greedy == recipe["measured"]["greedy_eval_accuracy"]
    assert greedy > recipe["measured"]["sampled_accuracy"]

    before = (path / "model.safetensors").stat()
    assert ensure_tiny_model(wanted, pytest.fail) == path  # nothing to say: nothing was made
    assert (path / "model.safetensors").stat() == before
    assert not list(path.parent.glob("*.partial"))


def test_with_experts_it_is_a_mixture_that_learns_and_uses_all_of_them(tmp_path):
    wanted = config(experts=4, experts_per_token=2, expert_intermediate=32)
    path = ensure_tiny_model(wanted, lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.model_type == "qwen3_moe"
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    take = fresh_instances(load_task(TASK), "train")
    answer_loss(model, AutoTokenizer.from_pretrained(path), take(64))
    for layer in chosen:
        assert layer.shape[1] == 2
        assert len(layer.unique()) == 4


def test_keys_of_experts_change_nothing_of_a_dense_model():
    assert tiny_model_path(config()) == tiny_model_path(config(experts_per_token=3, expert_intermediate=16))
    assert tiny_model_path(config(experts=4)) != tiny_model_path(config(experts=4, experts_per_token=3))
    with pytest.raises(ConfigError, match="experts_per_token = 3 is above experts = 2"):
        ensure_tiny_model(config(experts=2, experts_per_token=3), lambda line: None)


@pytest.mark.timeout(400)
def test_two_processes_at_once_make_it_once(tmp_path):
    file = tmp_path / "tiny.toml"
    tiny = "\n".join(f"{key} = {value}" for key, value in {**TINY, "accuracy_low": 0.01}.items())
    file.write_text(f'[task]\nkind = "digit_sort"\ndigits = 3\n[model.tiny]\n{tiny}\n')
    command = [sys.executable, "-P", "-m", "trainer.tiny_model", "--config", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    outputs = [maker.communicate(timeout=280)[0].splitlines() for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    path = outputs[0][-1]
    assert outputs[1][-1] == path
    assert os.path.isfile(os.path.join(path, "model.safetensors"))
    assert sum(line.startswith("made in") for output in outputs for line in output) == 1


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    task, tokenizer = load_task(TASK), char_tokenizer()

    def weights(seed):
        torch.manual_seed(seed)
        return warm_start(config(accuracy_low=0.01).model.tiny, task, tokenizer, lambda line: None).model.lm_head.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_a_jump_over_the_band_steps_back_and_goes_on_slower():
    # A band so narrow that at this rate a step often leaps over it; for which seed depends on the machine's rounding.
    tiny = config(accuracy_low=0.25, accuracy_high=0.26, learning_rate=2e-2).model.tiny
    for seed in range(20):
        lines = []
        torch.manual_seed(seed)
        made = warm_start(tiny, load_task(TASK), char_tokenizer(), lines.append)
        assert 0.25 <= made.sampled_accuracy <= 0.26
        if any("back to below, learning rate 0.01" in line for line in lines):
            return
    pytest.fail("no seed leapt over the band")


def test_a_band_that_is_not_reached_is_an_error_with_what_was():
    with pytest.raises(AsyncRLError, match=r"in 21 steps: sampled accuracy was 0\.\d+ at the last check"):
        ensure_tiny_model(config(learning_rate=1e-5, max_steps=21), lambda line: None)
    assert not tiny_model_path(config(learning_rate=1e-5, max_steps=21)).exists()


def test_the_free_estimate_is_what_sampling_gets():
    task, tokenizer = load_task(TASK), char_tokenizer()
    torch.manual_seed(0)
    model = warm_start(config().model.tiny, task, tokenizer, lambda line: None).model
    instances = fresh_instances(task, "train")(2000)
    with torch.no_grad():
        _, estimate = answer_loss(model, tokenizer, instances)
    assert abs(accuracy(model, tokenizer, task, instances, sample=True) - estimate) < 0.04  # 4 standard errors


def test_prompts_of_different_lengths_do_not_disturb_each_other():
    tokenizer = char_tokenizer()
    torch.manual_seed(0)
    model = new_model(config().model.tiny, tokenizer)
    instances = [Instance("12=", None, "12"), Instance("8765432=", None, "2345678")]
    with torch.no_grad():
        apart = [answer_loss(model, tokenizer, [instance])[0].item() for instance in instances]
        together = answer_loss(model, tokenizer, instances)[0].item()
    tokens = [sum(label != IGNORED for label in labelled_ids(each, tokenizer)[1]) for each in instances]
    assert together == pytest.approx(sum(a * n for a, n in zip(apart, tokens, strict=True)) / sum(tokens), rel=1e-5)


def test_every_character_survives_the_tokenizer(tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = render(Instance(CHARACTERS, None, ""), tokenizer)
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert decode([*ids, tokenizer.eos_token_id], tokenizer) == CHARACTERS


@pytest.mark.parametrize(("answer", "says"), [(12, "no text"), ("é", "printable ASCII")])
def test_a_task_that_it_cannot_learn_is_refused(answer, says):
    with pytest.raises(AsyncRLError, match=says):
        labelled_ids(Instance("1=", None, answer), char_tokenizer())


def test_a_shape_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="heads"):
        new_model(config(hidden=30, heads=4).model.tiny, char_tokenizer())


def test_the_place_in_the_cache_depends_on_all_that_decides_the_model():
    places = {
        tiny_model_path(made)
        for made in (config(), config(seed=1), config(accuracy_high=0.4), config({**TASK, "digits": 4}))
    }
    assert len(places) == 4
    assert tiny_model_path(config()) in places


def test_a_path_in_the_config_goes_before_the_cache():
    table = {"task": TASK, "model": {"path": "/models/mine", "tiny": TINY}}
    assert str(model_path(config_from_table(table, "test"))) == "/models/mine"
    with pytest.raises(ConfigError, match=r"model\.tiny"):
        tiny_model_path(config_from_table({"task": TASK, "model": {"path": "x"}}, "test"))


def test_the_place_is_found_without_torch():
    code = (
        "import sys; from async_rl.config import config_from_table; from async_rl.run.model_cache import model_path\n"
        f"print(model_path(config_from_table({{'task': {TASK!r}, 'model': {{'tiny': {TINY!r}}}}}, 'test')))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == str(model_path(config()))


def test_words_that_all_prompts_have_are_a_token_each_and_every_text_comes_back():
    pytest.importorskip("reasoning_gym")
    task = load_task({"kind": "reasoning_gym", "name": "spell_backward", "style": "plain"})
    words = common_words(task)
    assert words == [" backward", " nus", " sun", " this", " word", "Spell", "example"]
    tokenizer, letters = char_tokenizer(words), char_tokenizer()
    prompt = task.instance("train", 0).prompt
    assert len(tokenizer.encode(prompt)) < 0.5 * len(letters.encode(prompt)) == 0.5 * len(prompt)
    for text in (prompt, "Spelling this sunny word: Spell", "this this  this", "sun\nsun"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("sunny")) == 5  # a part of another word is spelled
    assert len(tokenizer.encode(" sun")) == 1
    assert common_words(load_task(TASK)) == []  # digits to be sorted: one token for each character, as without

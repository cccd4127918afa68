"""The maker of the quickstart's base model: half a million parameters, half a minute, no download.

A fresh Qwen3, or with experts Qwen3-MoE, of the size of [model.tiny] learns the task's right answers by supervised
learning and is stopped while it still gets most of them wrong: reinforcement learning has something to find, and
something to improve. What decides is the accuracy of *sampled* answers, not of greedy ones: models of one greedy
accuracy differed four-fold in the sampled one, and learned at that pace afterwards (measured).

    python -m trainer.tiny_model --config FILE     makes it unless it is there; the last line is its directory
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import itertools
import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from async_rl.config import Config, ConfigError, TinyModelConfig, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.exit_code import exit_code
from async_rl.run.model_cache import tiny_model_path, tiny_recipe
from async_rl.run.process import check_house
from async_rl.tasks.environment import EnvironmentTask
from async_rl.tasks.registry import load_task
from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import Instance, Split, Task, instance_of
from trainer.tiny_dialogues import IGNORED, labelled_ids, longest_turn, rewards_of_play

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
WORD = re.compile(r" ?(?<![A-Za-z])[A-Za-z]{2,}")
WORD_PROMPTS, WORD_SHARE = 100, 0.9  # in so many of so many prompts a word is one of the task's
MAX_POSITIONS = 2048
CHECK_SAMPLES = 512  # standard error of an accuracy of 0.25: 0.019
CHECK_EVERY = 20  # steps, while far from the band
MIN_RATE = 1 / 64  # of the learning rate; when steps so small still jump over the band, it is not to be hit
LOCK_TIMEOUT_S = 900.0

TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM
Say = Callable[[str], None]


class Made(NamedTuple):
    """What came out: the model, optimiser steps taken, accuracy at temperature 1 on fresh training instances."""

    model: TinyModel
    steps: int
    sampled_accuracy: float


# --- the parts -------------------------------------------------------------------------------------------------------


def char_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the special ones; and one for each of `words` (letters, with or
    without a space before them) where it is no part of another word."""
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *CHARACTERS, *words])}
    whole = [f"{' ' * word.startswith(' ')}(?<![A-Za-z]){word.strip()}(?![A-Za-z])" for word in words]
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*whole, r"[\s\S]"])), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def common_words(task: Task) -> list[str]:
    """Words that nearly all prompts of a task have: what it says besides the question itself."""
    prompts = [instance.prompt or "" for instance in fresh_instances(task, "train")(WORD_PROMPTS)]
    seen = Counter(word for prompt in prompts for word in set(WORD.findall(prompt)))
    return sorted(word for word, count in seen.items() if count >= WORD_SHARE * len(prompts))


def new_model(tiny: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> TinyModel:
    """A Qwen3, or with experts a Qwen3-MoE, with weights drawn from the global random state, float32."""
    if tiny.hidden % tiny.heads or tiny.heads % tiny.kv_heads or (tiny.hidden // tiny.heads) % 2:
        raise ConfigError(
            f"[model.tiny] hidden = {tiny.hidden} must be an even multiple of heads = {tiny.heads}, and heads a "
            f"multiple of kv_heads = {tiny.kv_heads}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.intermediate,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.hidden // tiny.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }
    sizes |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    if not tiny.experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    if tiny.experts_per_token > tiny.experts:
        raise ConfigError(
            f"[model.tiny] experts_per_token = {tiny.experts_per_token} is above experts = {tiny.experts}"
        )
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            num_experts=tiny.experts,
            num_experts_per_tok=tiny.experts_per_token,
            moe_intermediate_size=tiny.expert_intermediate,
            norm_topk_prob=True,
        )
    )


def answer_loss(model: TinyModel, tokenizer: Any, batch: Sequence[Instance]) -> tuple[torch.Tensor, float]:
    """Mean negative log-probability of the answers' tokens, and the mean probability of whole answers: what sampling
    would get right, as far as no other answer is right too."""
    sequences = [labelled_ids(instance, tokenizer) for instance in batch]
    ids, labels = ([torch.tensor(each) for each in column] for column in zip(*sequences, strict=True))
    # Padding is on the right, so causal attention alone keeps it from the answers.
    ids_bt = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels_bt = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
    logits = model(input_ids=ids_bt[:, :-1], use_cache=False).logits
    losses_bt = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels_bt, reduction="none")
    right = float(losses_bt.detach().sum(1).neg().exp().mean())
    return losses_bt.sum() / (labels_bt != IGNORED).sum(), right


@torch.no_grad()
def accuracy(model: TinyModel, tokenizer: Any, task: Task, instances: Sequence[Instance], *, sample: bool) -> float:
    """Mean reward of one attempt at each instance: sampled at temperature 1 from the global random state, or greedy.
    Completions may be as long as the longest right turn."""
    longest = max(longest_turn(instance, tokenizer) for instance in instances)

    def say(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return sampled_after(model, tokenizer, prompts, longest, sample=sample)

    if isinstance(task, EnvironmentTask):
        rewards = rewards_of_play(task, tokenizer, instances, say)
    else:
        answers = say([render(instance, tokenizer) for instance in instances])
        rewards = [
            task.score(instance, decode(tokens, tokenizer)).reward
            for instance, tokens in zip(instances, answers, strict=True)
        ]
    return sum(rewards) / len(rewards)


def sampled_after(
    model: TinyModel, tokenizer: Any, prompts: Sequence[Sequence[int]], longest: int, *, sample: bool
) -> list[list[int]]:
    """What the model says after each prompt, up to its stop token or so many tokens."""
    inputs = {"input_ids": [list(prompt) for prompt in prompts]}
    padded = tokenizer.pad(inputs, padding_side="left", return_tensors="pt")
    # top_k = 0: transformers cuts to the 50 likeliest tokens unless told otherwise.
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    out_bt = model.generate(**padded, max_new_tokens=longest, **how)
    said = out_bt[:, padded["input_ids"].shape[1] :].tolist()
    stop = tokenizer.eos_token_id
    return [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in said]


# --- the warm start --------------------------------------------------------------------------------------------------


def warm_start(tiny: TinyModelConfig, task: Task, tokenizer: Any, say: Say) -> Made:
    """Learn until sampled accuracy lies in [accuracy_low, accuracy_high]. A check that finds it above steps back to
    the last state found below, and goes on at half the learning rate. Raises AsyncRLError when that fails."""
    model = new_model(tiny, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny.learning_rate)
    take = fresh_instances(task, "train")
    below, rate, reached = snapshot(model, optimizer), tiny.learning_rate, 0.0
    for step in range(tiny.max_steps):
        loss, estimate = answer_loss(model, tokenizer, take(tiny.batch))
        # The estimate comes free with the loss, so the dear check waits for it; not for ever, for a task may have
        # right answers that the estimate does not know of.
        if estimate >= tiny.accuracy_low or step % CHECK_EVERY == CHECK_EVERY - 1:
            reached = accuracy(model, tokenizer, task, take(CHECK_SAMPLES), sample=True)
            say(f"step {step:3}: loss {loss.item():.3f}, sampled accuracy {reached:.3f} (n = {CHECK_SAMPLES})")
            if tiny.accuracy_low <= reached <= tiny.accuracy_high:
                return Made(model, step, reached)
            if reached > tiny.accuracy_high:
                rate /= 2
                restore(below, model, optimizer, rate)
                say(f"step {step:3}: above {tiny.accuracy_high}; back to below, learning rate {rate:.2g}")
                if rate < MIN_RATE * tiny.learning_rate:
                    break
                continue
            below = snapshot(model, optimizer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AsyncRLError(
        f"[model.tiny] did not come to rest between accuracy_low = {tiny.accuracy_low} and accuracy_high = "
        f"{tiny.accuracy_high} in {step + 1} steps: sampled accuracy was {reached:.3f} at the last check. Widen the "
        "band, raise max_steps, or change seed or learning_rate"
    )


def fresh_instances(task: Task, split: Split) -> Callable[[int], list[Instance]]:
    """A function that takes the next n instances of a split."""
    numbers = itertools.count()
    return lambda n: [instance_of(task, split, number) for number in itertools.islice(numbers, n)]


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def restore(state: tuple[Any, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float) -> None:
    weights, moments = copy.deepcopy(state)  # loading an optimiser's state may keep the tensors it is given
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    for group in optimizer.param_groups:
        group["lr"] = rate


# --- the cache -------------------------------------------------------------------------------------------------------


def ensure_tiny_model(config: Config, say: Say) -> Path:
    """The directory of the config's tiny model, made now unless it is there. Two processes make it once: the other
    one waits. Raises AsyncRLError when it cannot be made, ConfigError without [model.tiny]."""
    path = tiny_model_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), say):
        if not path.is_dir():
            partial = path.with_name(f"{path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a maker that was killed
            with one_thread(), torch.random.fork_rng(devices=[]):
                make_tiny_model(config, partial, say)
            partial.rename(path)
    return path


def make_tiny_model(config: Config, folder: Path, say: Say) -> None:
    """Make it and save model, tokenizer and recipe.json (with what was measured) to `folder`."""
    recipe = tiny_recipe(config)
    assert config.model.tiny is not None  # else tiny_recipe had raised
    task = load_task(config.task)
    tokenizer = char_tokenizer(common_words(task) if config.model.tiny.words else ())
    torch.manual_seed(config.model.tiny.seed)
    start = time.process_time()
    made = warm_start(config.model.tiny, task, tokenizer, say)
    greedy = accuracy(made.model, tokenizer, task, fresh_instances(task, "eval")(CHECK_SAMPLES), sample=False)
    measured = {
        "steps": made.steps,
        "sampled_accuracy": made.sampled_accuracy,
        "greedy_eval_accuracy": greedy,
        "samples": CHECK_SAMPLES,
        "parameters": made.model.num_parameters(),
        "cpu_seconds": round(time.process_time() - start, 2),
    }
    made.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps({**recipe, "measured": measured}, indent=2, default=str) + "\n")
    say(
        f"made in {made.steps} steps, {measured['cpu_seconds']} CPU-seconds: sampled accuracy "
        f"{made.sampled_accuracy:.3f}, greedy held-out accuracy {greedy:.3f}"
    )


@contextlib.contextmanager
def locked(path: Path, say: Say) -> Iterator[None]:
    """Hold an exclusive lock on a file; it ends with the process, however that ends. Raises AsyncRLError when
    another holds it for longer than LOCK_TIMEOUT_S."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        for attempt in itertools.count():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 0:
                    say("another process is making the tiny model: waiting for it")
                if time.monotonic() > deadline:
                    raise AsyncRLError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:g} s: end it, or set ASYNC_RL_CACHE to "
                        "another directory"
                    ) from None
                time.sleep(0.2)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For so small a model a second thread costs more than it gives (on a busy machine 17 times as slow)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny_model", description="Make the tiny base model.")
    parser.add_argument("--config", required=True, help="a TOML file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    disable_progress_bar()  # of transformers, for a file that is written in a millisecond

    def run() -> None:
        check_house(["trainer"])
        print(ensure_tiny_model(load_config(options.config, options.overrides), lambda line: print(line, flush=True)))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

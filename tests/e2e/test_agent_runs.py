"""An unmodified client of OpenAI's plays a task of two turns through a node's endpoint, while training runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_runs import TOLERANCE, Kept, largest_difference
from real_runs import SMALL, Shell, processes_of, records, summary
from transformers import AutoTokenizer

from async_rl.trajectory import MaskReason, Trajectory, segment_arrays

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.timeout(600)]

AGENT = """
import json, sys
from openai import OpenAI

question = json.load(sys.stdin)["prompt"]
client = OpenAI()
messages = [{"role": "user", "content": question}]
for turn in range(2):
    answer = client.chat.completions.create(model="any", messages=messages, temperature=0.2, seed=turn)
    messages += [answer.choices[0].message, {"role": "user", "content": question}]
"""
# What is said, one after the other: so the model, which knows questions and answers, reads what it knows.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
STEPS, GROUPS, SIZE = 3, 2, 3


def chat_model(folder: Path) -> Path:
    """The base model of the other tests, with a chat template."""
    config = folder / "plain.toml"
    config.write_text(SMALL)
    made = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.tiny_model", "--config", str(config)],
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    path = folder / "model"
    shutil.copytree(made.stdout.split()[-1], path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def check_tokens(trajectory: Trajectory, tokenizer: Any) -> str:
    """That a session is two turns of one question, as the template has them; the question."""
    (arrays,) = segment_arrays(trajectory)
    text = tokenizer.decode(arrays.tokens)
    question = text.partition("=")[0] + "="
    answers = [part for part in text.split(question) if part]
    assert [part.endswith("<eos>") for part in answers[:-1]] == [True]
    first = answers[0].removesuffix("<eos>")
    asked = [{"role": "user", "content": question}, {"role": "assistant", "content": first}]
    prompt = tokenizer.apply_chat_template([*asked, asked[0]], tokenize=True, return_dict=False)
    assert arrays.tokens[: len(prompt)].tolist() == prompt
    sampled = arrays.mask == MaskReason.SAMPLED
    # The template ends a turn that the model did not end by itself.
    words = tokenizer.decode(arrays.tokens[sampled]).replace("<eos>", "")
    assert words == "".join(answers).replace("<eos>", "")
    assert tokenizer.decode(arrays.tokens[~sampled]).replace("<eos>", "") == question * 2
    return str(question)


def test_an_openai_client_plays_while_training_runs_and_its_trajectories_train_token_by_token(
    shell: Shell, tmp_path: Path
) -> None:
    agent, config, run, model = tmp_path / "agent.py", tmp_path / "agent.toml", tmp_path / "run", chat_model(tmp_path)
    agent.write_text(AGENT)
    before, _, after = SMALL.partition("[model.tiny]")
    task = f'[model]\npath = "{model}"\n\n[task]\nkind = "agent"\ncommand = ["python", "{agent}"]\n\n[task.of]\n'
    config.write_text(before + task + after.partition("[task]\n")[2])
    kept = Kept(run, tmp_path)
    settings = {
        "run.steps": STEPS, "run.eval_every": 0, "buffer.groups_per_step": GROUPS, "buffer.group_size": SIZE,
        "buffer.max_staleness": 1, "inference.nodes": 1, "inference.slots": 6, "inference.max_context": 48,
        "inference.episodes.max_tokens": 96, "trainer.checkpoint_every": 1000,
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    kept.watch(shell.start("run", str(config), "--out", str(run), *options), 180)

    ledger, steps = summary(run)["ledger"], records(run)
    assert len(steps) == STEPS
    assert ledger["trained"] == STEPS * GROUPS * SIZE
    assert ledger["dropped"].get("env_failed", 0) == 0
    assert processes_of(run) == []
    trained = kept.trained()
    assert len(trained) >= (STEPS - 1) * GROUPS * SIZE  # the last batch may have come after the last look
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions: dict[int, set[str]] = {}
    for trajectory in trained:
        questions.setdefault(trajectory.lease, set()).add(check_tokens(trajectory, tokenizer))
    assert all(len(asked) == 1 for asked in questions.values()), "a lease asks one question"
    worst = largest_difference(model, kept, trained)
    lengths = [int((arrays.mask == MaskReason.SAMPLED).sum()) for each in trained for arrays in segment_arrays(each)]
    print(f"{len(trained)} attempts, {np.sum(lengths)} sampled tokens; largest |Δμ| {worst:.2e} nats")
    assert worst <= TOLERANCE

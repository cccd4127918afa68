from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.config import ConfigError
from async_rl.rewards.extraction import final_number
from async_rl.tasks.gsm8k import INSTRUCTION, Gsm8k
from async_rl.tasks.registry import load_task

TRAIN = [
    ("How many are 2 and 2?", "2 and 2 are <<2+2=4>>4.\n#### 4"),
    ("What is 600 times 2?", "It is 1,200.\n#### 1,200"),
]
TEST = [("What is 3 less than 1?", "#### -2")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in {"train": TRAIN, "test": TEST}.items():
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    return tmp_path


def task(folder: Path, **keys: str) -> Gsm8k:
    made = load_task({"kind": "gsm8k", "path": str(folder), **keys})
    assert isinstance(made, Gsm8k)
    return made


def test_training_and_evaluation_have_a_file_each(folder: Path) -> None:
    made = task(folder)
    assert (made.size("train"), made.size("eval")) == (2, 1)
    (message,) = made.instance("train", 1).messages or ()
    assert message == {"role": "user", "content": f"What is 600 times 2?\n\n{INSTRUCTION}"}
    assert made.instance("eval", 0).data == "-2"


def test_a_base_model_is_asked_in_plain_text_and_shown_what_a_right_answer_looks_like(folder: Path) -> None:
    made = task(folder, style="plain")
    instance = made.instance("train", 0)
    assert instance.prompt == "Question: How many are 2 and 2?\nAnswer:"
    assert made.score(instance, instance.answer).reward == 1.0


def test_what_a_base_model_makes_up_behind_its_answer_does_not_count(folder: Path) -> None:
    for style, reward in {"plain": 1.0, "chat": 0.0}.items():
        made = task(folder, style=style)
        assert made.score(made.instance("train", 0), " 4.\n#### 4\nQuestion: And 3?\nAnswer: #### 3").reward == reward


def test_the_right_number_behind_the_last_mark_earns_the_reward(folder: Path) -> None:
    made = task(folder)
    instance = made.instance("train", 1)
    for completion in ("#### 1200", "So:\n#### $1,200.00 ", "#### 3\nNo.\n####1200.", "#### 1200 apples"):
        assert made.score(instance, completion) == (1.0, {"format": 1.0}), completion
    for completion in ("#### 120", "#### -1200", "#### 1200\n#### 3", "#### 1200.5"):
        assert made.score(instance, completion) == (0.0, {"format": 1.0}), completion
    for completion in ("1200", "", "####", "#### the answer is 1200"):
        assert made.score(instance, completion) == (0.0, {"format": 0.0}), completion


def test_rewards_of_a_config_take_the_place_of_its_own(folder: Path) -> None:
    made = load_task(
        {
            "kind": "gsm8k",
            "path": str(folder),
            "style": "plain",
            "reward": [{"kind": "numeric"}, {"kind": "format", "pattern": "####", "weight": 0.25}],
        }
    )
    instance = made.instance("train", 1)
    assert made.score(instance, "#### 1200\nQuestion: #### 5") == (1.25, {"numeric": 1.0, "format": 1.0})
    assert made.score(instance, "#### 1") == (0.25, {"numeric": 0.0, "format": 1.0})
    with pytest.raises(ConfigError, match="kind = 'nummeric' is not known: did you mean 'numeric'"):
        load_task({"kind": "gsm8k", "path": str(folder), "reward": [{"kind": "nummeric"}]})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 007", "7"), ("#### 0", "0"), ("#### -0.0", "0"), ("#### −5", "-5"), ("#### -$5", "-5"),
        ("#### .50", "0.5"), ("#### +5", "5"), ("#### **18**", "18"), ("#### $-5", "-5"), ("#### = 5", "5"),
        ("#### **$1,800**", "1800"), ("#### +$5", "5"), ("#### = x", None), ("#### **", None),
        ("#### 1,000,000", "1000000"), ("#### 12%", "12"), ("####\n8", "8"), ("7", None), ("#### x", None),
    ],
)  # fmt: skip
def test_one_number_has_one_spelling(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_a_missing_or_broken_file_is_named_with_where_to_get_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/train\.jsonl: cannot be read: No such file .* \(they are at https"):
        task(folder / "nowhere")
    for text, says in {
        "": "there is no question in it",
        '{"question": "a", "answer": "#### 1"}\n{"question": 3}\n': "line 2: expected an object",
        '{"question": "a", "answer": "one"}\n': 'line 1: the answer does not end with "####" and a number',
    }.items():
        (folder / "test.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"test\.jsonl") as caught:
            task(folder)
        assert says in str(caught.value)
    with pytest.raises(ConfigError, match="required field `path`"):
        load_task({"kind": "gsm8k"})

r"""Mathematical answers: all of GSM8K, expressions that are written in another way, and some that never end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

from async_rl.errors import AsyncRLError
from async_rl.rewards import RewardError, equivalence, load_rewards
from async_rl.rewards.registry import Rewards
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance, Task

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of processor time may take very long where others want the processor too."""
    monkeypatch.setattr(equivalence, "WALL_FACTOR", 100)


@pytest.fixture(scope="module")
def mathematics() -> Rewards:
    return load_rewards([{"kind": "math", "timeout": 1}])


def value(rewards: Rewards, answer: str, completion: str) -> float:
    return rewards.score(Instance("", None, answer), completion).reward


@pytest.fixture(scope="module")
def gsm8k() -> Task:
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {GSM8K}")
    return load_task({"kind": "gsm8k", "path": str(GSM8K), "reward": [{"kind": "math"}]})


def spoiled(number: int, random: Random) -> str:
    """A wrong completion for this number, in one of the ways in which models are wrong."""
    return random.choice(
        [
            f"#### {number + random.choice([-1, 1])}", f"#### {number}0" if number else "#### 1", f"#### {number}.5",
            f"#### {-number or 1}", f"The answer is {number}.", f"#### {number} or {number + 1}", "####", "",
            f"#### {number}\nNo: #### {number + 2}", rf"\boxed{{{number + 10}}}", f"#### the same as {number}",
        ]
    )  # fmt: skip


def test_every_gold_answer_of_gsm8k_scores_1_and_a_thousand_spoiled_ones_0(gsm8k: Task) -> None:
    instances = [gsm8k.instance(split, n) for split in ("train", "eval") for n in range(gsm8k.size(split) or 0)]
    assert len(instances) == 8792
    wrong = [n for n, each in enumerate(instances) if gsm8k.score(each, each.answer).reward != 1.0]
    assert wrong == []
    random = Random(0)
    chosen = random.sample(instances, 1000)
    completions = [spoiled(int(each.data), random) for each in chosen]
    passed = [text for each, text in zip(chosen, completions, strict=True) if gsm8k.score(each, text).reward != 0.0]
    assert passed == []


def test_the_tasks_own_reward_agrees_on_every_gold_answer(gsm8k: Task) -> None:
    own = load_task({"kind": "gsm8k", "path": str(GSM8K)})
    for split in ("train", "eval"):
        for n in range(own.size(split) or 0):
            instance = own.instance(split, n)
            assert own.score(instance, instance.answer).reward == 1.0, json.dumps(instance.answer)


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (r"So it is \boxed{2\sqrt{2}}.", r"\boxed{\sqrt{8}}"), (r"\boxed{\frac{1}{2}}", r"#### 0.5"),
        (r"\boxed{\dfrac{3}{4}}", r"\boxed{\frac34}"), ("073", r"thus \boxed{73}"), ("x^2+1", r"\boxed{1 + x^2}"),
        (r"\text{(B)}", r"\boxed{(B)}"), ("(1,2)", r"\boxed{\left(1, 2\right)}"), (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
        ("10", r"\boxed{10^{1}}"), ("1,200", r"\boxed{1200}"), (r"\frac{\pi}{6}", r"\boxed{\dfrac{\pi}{6}}."),
    ],
)  # fmt: skip
def test_one_value_may_be_written_in_many_ways(mathematics: Rewards, answer: str, completion: str) -> None:
    assert value(mathematics, answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("5", "5"), ("5", r"\boxed{6}"), (r"\frac12", r"\boxed{\frac13}"), ("(1,2)", r"\boxed{(2,1)}"), ("5", ""),
        ("5", r"\boxed{5, 6}"), ("5", r"\boxed{\text{five}}"), ("073", r"\boxed{37}"), (r"\sqrt2", r"\boxed{1.414}"),
        ("5", "#### " + "5+" * 600 + "5"), ("x^2", r"\boxed{x^3}"), ("5", r"\boxed{}"), ("5", r"\boxed{\frac{5}{}}"),
    ],
)  # fmt: skip
def test_another_value_or_none_scores_0(mathematics: Rewards, answer: str, completion: str) -> None:
    assert value(mathematics, answer, completion) == 0.0


def test_what_takes_for_ever_to_compare_is_not_equal_and_says_so(mathematics: Rewards) -> None:
    score = mathematics.score(Instance("", None, "5"), r"\boxed{9^{9^{9^{9}}}}")
    assert score == (0.0, {"math": 0.0, "math.answered": 1.0, "math.timed_out": 1.0})
    assert value(mathematics, r"\frac12", r"\boxed{1/2}") == 1.0, "the next one is compared as ever"


def test_a_process_that_dies_of_something_else_is_a_failure_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "math_verify.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[3]}")
    rewards = load_rewards([{"kind": "math"}])
    with pytest.raises(RewardError, match="reward 'math': the process that compares expressions does not start"):
        value(rewards, "x", r"\boxed{y}")


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(AsyncRLError, match=r"pip install '\.\[tasks\]'"):
        load_rewards([{"kind": "math"}])

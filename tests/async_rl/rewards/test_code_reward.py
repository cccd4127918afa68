"""Reward kind code: from a completion to a program, and from its tests to a score. HumanEval is what it is held to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.rewards import RewardError, load_rewards
from async_rl.rewards.code import body_of, program_of
from async_rl.sandbox import Sandbox
from async_rl.schema import ConfigError
from async_rl.tasks.human_eval import HumanEval, HumanEvalConfig, packaged, problems
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance, Score, instance_of

PROMPT = 'def add(a, b):\n    """The sum."""\n'
TESTS = "def check(f):\n    assert f(1, 2) == 3\n    assert f(0, 0) == 0\n"
ROW = {"prompt": PROMPT, "test": TESTS, "entry_point": "add"}
MBPP = {
    "text": "Write a function to add.",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 5) == 5", "assert add(Zero(), 0) == 0"],
    "test_setup_code": "def Zero(): return 0",
}


def scored(row: dict[str, object], completion: str, **options: object) -> Score:
    return load_rewards([{"kind": "code", "wall": 60, **options}]).score(Instance("", None, None, row), completion)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_human_eval_passes_its_own_solutions_and_no_function_that_returns_nothing(sandbox: Sandbox, step: int) -> None:
    """Every `step`-th of the 164; as the completion of a base model and of a chat model in turn."""
    path = str(packaged())
    reward = ({"kind": "code", "wall": 100, "cpu": 40},)  # whatever a busy machine makes of the usual ones
    tasks = [
        HumanEval(HumanEvalConfig(path=path, eval_path=path, style=style, reward=reward)) for style in ("plain", "chat")
    ]
    assert tasks[0].size("eval") == 164

    def right_and_empty(number: int) -> tuple[Score, Score]:
        task, problem = tasks[number % 2], problems(packaged())[number]
        instance = task.instance("eval", number)
        whole = f"Here it is:\n\n```python\n{problem.prompt}    return None\n```\nDone."
        empty = "    return None\n" if number % 2 == 0 else whole
        return task.score(instance, instance.answer), task.score(instance, empty)

    numbers = range(0, 164, step)
    with ThreadPoolExecutor(2) as pool:
        scores = dict(zip(numbers, pool.map(right_and_empty, numbers), strict=True))
    assert [n for n, (right, _) in scores.items() if right.reward != 1 or right.components["code.passed"] != 1] == []
    assert [n for n, (_, empty) in scores.items() if empty.reward != 0] == []
    assert {name for _, empty in scores.values() for name in empty.components} <= {
        "code", "code.compiled", "code.passed", "code.wrong", "code.error",
    }  # fmt: skip


def test_a_score_says_what_came_of_the_program(sandbox: Sandbox) -> None:
    assert scored(ROW, "    return a + b\n") == Score(1.0, {"code": 1.0, "code.compiled": 1.0, "code.passed": 1.0})
    assert scored(ROW, "    return 0\n") == Score(
        0.0, {"code": 0.0, "code.compiled": 1.0, "code.passed": 0.5, "code.wrong": 1.0}
    )
    assert scored(ROW, "    return (\n").components == {
        "code": 0.0, "code.compiled": 0.0, "code.passed": 0.0, "code.syntax": 1.0,
    }  # fmt: skip
    assert scored(ROW, "    return 0\n", value="fraction").reward == 0.5
    assert scored(ROW, "    while True: pass\n", cpu=1, wall=2).components.keys() & {"code.cpu", "code.timeout"}
    assert scored(ROW, "    x = bytearray(200 << 20)\n", memory_mb=128).components["code.memory"] == 1
    assert scored(ROW, "    x = '" + "x" * (1 << 18) + "'\n").components["code.too_long"] == 1


def test_assertions_as_a_list_and_no_entry_point(sandbox: Sandbox) -> None:
    columns = {"tests": "test_list", "setup": "test_setup_code"}
    right = "Of course!\n```python\ndef add(a, b):\n    return a + b\n```\n"
    assert scored(MBPP, right, **columns).reward == 1
    assert scored(MBPP, right.replace("a + b", "a"), **columns).components["code.passed"] == pytest.approx(1 / 3)
    assert scored(MBPP, "I cannot do that.", **columns).components["code.syntax"] == 1


def test_tests_that_are_missing_or_broken_are_no_score(sandbox: Sandbox) -> None:
    with pytest.raises(RewardError, match=r"no tests: tests = 'test', and its data are \['prompt'\]"):
        scored({"prompt": PROMPT}, "    return 0\n")
    with pytest.raises(RewardError, match="no tests"):
        scored("text", "    return 0\n")  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="at fault, not the program: SyntaxError"):
        scored({**ROW, "test": "assert ("}, "    return 0\n")


def test_options_that_mean_nothing_are_refused(sandbox: Sandbox) -> None:
    for options in ({"wall": 0}, {"memory_mb": 1}, {"value": "some"}, {"timeout": 3}, {"cpu": 0.5}):
        with pytest.raises(ConfigError):
            load_rewards([{"kind": "code", **options}])


WHOLE = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("    return a + b\n", PROMPT + "    return a + b\n"),
        ("    return a + b\n\nprint(add(1, 2))\n", PROMPT + "    return a + b\n\n"),
        ("    return a + b\n\ndef other():\n    pass\n", PROMPT + "    return a + b\n\n"),
        (f"```python\n{WHOLE}```", f"{PROMPT}\n\n{WHOLE}"),
        (f"<think>\n```\nx\n</think>\n```py\n{WHOLE}```\nUse it:\n```python\nadd(1, 2)\n```", f"{PROMPT}\n\n{WHOLE}"),
        (f"```\ndef add(a, b):\n    pass\n```\nBetter:\n```\n{WHOLE}```\n", f"{PROMPT}\n\n{WHOLE}"),
        (f"```python\n{WHOLE}", f"{PROMPT}\n\n{WHOLE}"),
        (f"Sure.\n  ```python\n{WHOLE}  ```\n", f"{PROMPT}\n\n{WHOLE}"),
        (WHOLE, f"{PROMPT}\n\n{WHOLE}"),
        ("```python\n    return a + b\n```", PROMPT + "    return a + b\n"),
        ("```python\nimport os\n\nasync def add(a): ...\n```", f"{PROMPT}\n\nimport os\n\nasync def add(a): ...\n"),
        ("", PROMPT),
        ("Sorry.", PROMPT),
    ],
)  # fmt: skip
def test_the_program_that_a_completion_means(completion: str, program: str) -> None:
    assert program_of(PROMPT, completion, "add") == program


def test_without_a_name_the_last_block_is_the_program() -> None:
    assert program_of("", "```\nx = 1\n```\nor\n```\nx = 2\n```", "") == "\n\nx = 2\n"
    assert program_of("", "x = 3", "") == "\n\nx = 3"


def test_a_body_ends_where_a_line_stands_at_the_margin() -> None:
    assert body_of("    x = [\n1\n") == "    x = [\n"
    assert program_of("def f():\n    return ", "12\nprint(1)", "f") == "def f():\n    return 12\n"
    assert body_of("    x = [\n        1,\n]\n    return x\n# the end\n") == "    x = [\n        1,\n]\n    return x\n"


def test_the_task_asks_for_functions_and_reads_files_of_its_layout(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="evaluates as there is no eval_path"):
        load_task({"kind": "human_eval", "path": str(packaged())})
    task = load_task({"kind": "human_eval", "path": str(packaged()), "eval_path": str(packaged())})
    instance = instance_of(task, "train", 164)
    assert instance == task.instance("train", 0)
    assert instance.messages is not None
    assert instance.messages[0]["content"].endswith('"""\n```')
    assert task.score(instance, "```python\ndef has_close_elements(numbers, threshold): return False\n```").reward == 0


def test_files_that_are_not_of_its_layout_are_refused(tmp_path: Path) -> None:
    folder = tmp_path
    with pytest.raises(ConfigError, match="cannot be read"):
        problems(folder / "none.jsonl")
    for text, message in (("", "no problem"), ('{"prompt": 1}', "expected lines"), ("[", "expected lines")):
        (folder / "some.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=message):
            problems(folder / "some.jsonl")
    (folder / "some.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        problems(folder / "some.jsonl.gz")

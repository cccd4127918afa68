import json
import os
import subprocess
import sys

import pytest

from async_rl.config import ConfigError
from async_rl.tasks.gym import COMPOUND, HASH_ORDERED, tagged_answer
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import instance_of

pytest.importorskip("reasoning_gym")

GENERATORS = ["chain_sum", "gcd", "count_bits", "spell_backward"]


def gym(name, **keys):
    return load_task({"kind": "reasoning_gym", "name": name, **keys})


@pytest.mark.parametrize("name", GENERATORS)
def test_a_right_answer_scores_1_and_a_wrong_one_less(name):
    task = gym(name)
    for n in range(5):
        instance = task.instance("train", n)
        right = task.score(instance, f"Well, it is <answer>{instance.answer}</answer>")
        assert right == (1.0, {"format": 1.0})
        assert task.score(instance, "<answer>surely not</answer>").reward < 1


@pytest.mark.parametrize("name", GENERATORS)
def test_another_process_makes_the_same_instances(name):
    task = gym(name, seed=3)
    code = (
        "import json; from async_rl.tasks.registry import load_task\n"
        f"task = load_task({{'kind': 'reasoning_gym', 'name': {name!r}, 'seed': 3}})\n"
        "print(json.dumps([task.instance(s, n) for s in ('train', 'eval') for n in (0, 7)]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    other = json.loads(subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True).stdout)
    here = [task.instance(split, n) for split in ("train", "eval") for n in (0, 7)]
    assert other == json.loads(json.dumps(here))


def test_seed_and_split_change_the_instances():
    questions = [
        [gym("chain_sum", seed=seed).instance(split, n).messages for n in range(20)]
        for seed in (0, 1000)
        for split in ("train", "eval")
    ]
    assert all(a != b for i, a in enumerate(questions) for b in questions[:i])


def test_evaluation_takes_the_entries_after_those_of_training():
    task = gym("gcd", size=10, eval_size=5)
    indices = {split: {task.instance(split, n).data for n in range(task.size(split))} for split in ("train", "eval")}
    assert indices == {"train": set(range(10)), "eval": set(range(10, 15))}
    assert instance_of(task, "train", 13) == task.instance("train", 3)
    assert instance_of(task, "eval", 7) == task.instance("eval", 2)


def test_options_reach_the_generator():
    instance = gym("chain_sum", style="plain", options={"min_terms": 4, "max_terms": 4}).instance("train", 0)
    assert sum(instance.prompt.count(sign) for sign in (" + ", " - ")) == 3


def test_plain_style_takes_the_whole_completion():
    task = gym("count_bits", style="plain")
    instance = task.instance("eval", 0)
    assert instance.messages is None
    assert instance.prompt.endswith("\n")
    assert task.score(instance, f" {instance.answer}\n").reward == 1.0


def test_a_completion_without_an_answer_earns_nothing_and_says_why():
    task = gym("gcd")
    instance = task.instance("train", 0)
    assert task.score(instance, str(instance.answer)) == (0.0, {"format": 0.0})
    assert task.score(instance, "<answer> </answer>") == (0.0, {"format": 0.0})


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>1</answer> no: <answer> 2\n</answer>.", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_counts(completion, answer):
    assert tagged_answer(completion) == answer


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"name": "composite"}, "name one of them"),
        ({"name": "chain_sums"}, "'chain_sum'"),
        ({"name": "gcd", "options": {"seed": 1}}, "belongs in"),
        ({"name": "gcd", "options": {"colour": 1}}, "colour"),
        ({"name": "gcd", "options": {"min_numbers": -1}}, "min_numbers"),
        ({"name": "gcd", "sead": 1}, "did you mean `seed`"),
        ({}, "name"),
    ],
)
def test_what_the_generator_cannot_do_is_refused_by_name(keys, says):
    with pytest.raises(ConfigError) as error:
        load_task({"kind": "reasoning_gym", **keys})
    assert says in str(error.value)


def test_a_generator_that_differs_between_processes_is_refused():
    assert sys.flags.hash_randomization, "run the tests without PYTHONHASHSEED=0"
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        gym("word_ladder")


def generators():
    """All that can be configured by name. Those that walk over sets of strings are of a process of their own."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - COMPOUND - HASH_ORDERED)


OWN_ANSWER_IS_NOT_RIGHT = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their entries have no answer, and their verifiers are used as they are."""


@pytest.mark.parametrize("name", generators())
def test_every_generator_asks_and_judges(name):
    task = gym(name, style="plain", size=12, eval_size=4)
    for split in ("train", "eval"):
        instance = instance_of(task, split, 1)
        assert instance.prompt.strip()
        assert instance.answer is None or isinstance(instance.answer, str)
        own = task.score(instance, str(instance.answer)).reward
        assert own <= 0.01 if name in OWN_ANSWER_IS_NOT_RIGHT else own > 0.5
        for wrong in ("surely not", "1 x", "[[", "None", "7"):
            assert 0 <= task.score(instance, wrong).reward <= 1


def test_generators_that_follow_string_hashing_are_the_same_where_it_is_fixed():
    code = (
        "import sys; from async_rl.tasks.registry import load_task\n"
        "for name in sys.argv[1:]:\n"
        "    task = load_task({'kind': 'reasoning_gym', 'name': name, 'style': 'plain', 'size': 4, 'eval_size': 1})\n"
        "    asked = task.instance('train', 1)\n"
        "    print(task.score(asked, asked.answer).reward, repr(asked.prompt))\n"
    )
    command = [sys.executable, "-P", "-c", code, *sorted(HASH_ORDERED)]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    said = [subprocess.run(command, env=env, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0] == said[1]
    assert [line.partition(" ")[0] for line in said[0].splitlines()] == ["1.0"] * len(HASH_ORDERED)


def test_an_answer_that_a_verifier_cannot_read_is_wrong_and_no_failure():
    task = gym("prime_factorization", style="plain")
    instance = task.instance("train", 0)
    with pytest.raises(ValueError, match="invalid literal"):
        task._dataset.score_answer("two", task._entry(instance.data))
    assert task.score(instance, "two") == (0.0, {"format": 0.0})

"""The tables [[run.eval]]: what is not set, what is refused, and what must be equal everywhere."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli_w

from async_rl.config import Config, ConfigError, config_from_table, config_table
from async_rl.eval_config import best_set, eval_sets, eval_tasks
from async_rl.run.checks import with_eval_sizes

OWN = {"kind": "digit_sort", "digits": 3}


def config(*tables: dict[str, Any], kind: str = "lora", **run: Any) -> Config:
    sections: dict[str, Any] = {
        "run": {"eval_every": 10, **run, "eval": list(tables)},
        "model": {"path": "DIR"},
        "task": {"kind": "digit_sort"},
        "inference": {"max_new_tokens": 12, "max_context": 64, "in_flight": "finish" if kind == "lora" else "continue"},
        "trainer": {"kind": kind},
    }
    return config_from_table(sections, "test.toml")


def test_without_tables_there_is_one_set_as_the_keys_of_run_say_and_none_where_nothing_is_evaluated() -> None:
    (only,) = eval_sets(config(eval_samples=64, eval_temperature=0.5))
    assert (only.name, only.task, only.instances, only.samples, only.every) == ("eval", {}, 64, 1, 10)
    assert (only.sampling.temperature, only.sampling.max_new_tokens, only.pass_at) == (0.5, 12, (1,))
    assert eval_sets(config(eval_every=0)) == ()


def test_a_table_takes_what_it_does_not_say_from_run_and_inference() -> None:
    plain, own = eval_sets(
        config(
            {"name": "plain"},
            {"name": "own", "task": OWN, "instances": 5, "samples": 4, "every": 3, "temperature": 0.6,
             "max_new_tokens": 40, "timeout": 7.0, "pass_reward": 0.5},
        )
    )  # fmt: skip
    assert (plain.instances, plain.every, plain.sampling.max_new_tokens, plain.timeout_s) == (512, 10, 12, 300.0)
    assert (own.task, own.instances, own.samples, own.every, own.timeout_s) == (OWN, 5, 4, 3, 7.0)
    assert (own.sampling.temperature, own.sampling.max_new_tokens) == (0.6, 40)
    assert (own.pass_reward, own.pass_at) == (0.5, (1, 4))


def test_sets_are_due_at_their_own_pace_at_first_and_in_the_end() -> None:
    (own,) = eval_sets(config({"name": "own", "every": 3}))
    assert [version for version in range(9) if own.is_due(version, 8)] == [0, 3, 6, 8]


def test_a_written_config_is_read_as_it_was() -> None:
    made = config({"name": "own", "task": OWN, "samples": 4, "temperature": 1.0})
    again = config_from_table(tomllib.loads(tomli_w.dumps(config_table(made))), "config.toml")
    assert again == made
    assert eval_tasks(again) == {"own": OWN}
    assert "eval" not in config_table(config())["run"]


@pytest.mark.parametrize(
    ("tables", "run", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], {}, 'there are 2 sets named "a"'),
        ([{"name": "a"}], {"eval_every": 0}, "how often"),
        ([{"name": "a", "task": {"digits": 3}}], {}, "needs a key `kind`"),
        ([{"name": "a", "samples": 2}], {}, "at temperature 0 would all be the same"),
        ([{"name": "a", "samples": 2, "temperature": 1.0, "pass_at": [4]}], {}, "pass@4 needs as many samples"),
        ([{"name": "a", "max_new_tokens": 64}], {}, "leaves no room for a prompt"),
        ([{"name": "a", "instances": 1 << 20, "samples": 2, "temperature": 1.0}], {}, "are 2097152: 1048576 at most"),
        ([{"name": "a"}], {"best_by": "b"}, 'names no set of evaluation; there are "a"'),
        ([{"name": "a b"}], {}, "run.eval"),
        ([{"name": "a", "sample": 3}], {}, "did you mean `samples`"),
        ([], {"steps": 0, "eval_every": 0}, "trains nothing, and nothing is evaluated"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_what_to_do(tables: Any, run: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*tables, **run)


def test_the_best_is_kept_by_the_first_set_of_adapters_and_of_whole_weights_only_where_a_set_is_named() -> None:
    tables = ({"name": "a"}, {"name": "b"})
    assert best_set(config(*tables)) == "a"
    assert best_set(config(*tables, best_by="b")) == "b"
    assert best_set(config(*tables, best_by="none")) == ""
    assert best_set(config(*tables, kind="full")) == ""
    assert best_set(config(*tables, kind="full", best_by="b")) == "b"


def test_a_set_has_no_more_instances_than_its_task() -> None:
    small = {"kind": "reasoning_gym", "name": "chain_sum", "eval_size": 40}
    pytest.importorskip("reasoning_gym")
    (kept, cut) = eval_sets(with_eval_sizes(config({"name": "endless"}, {"name": "small", "task": small})))
    assert (kept.instances, cut.instances) == (512, 40)
    with pytest.raises(ConfigError, match="instances = 41, and its task has 40"):
        with_eval_sizes(config({"name": "small", "task": small, "instances": 41}))

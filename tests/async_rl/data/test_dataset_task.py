"""Kind "dataset": rows of files become instances, the same ones everywhere; what is wrong is said in one message."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from async_rl.config import BufferConfig, Config, ConfigError
from async_rl.data.order import Source
from async_rl.data.task import DatasetTask
from async_rl.run.checks import check_task
from async_rl.tasks.registry import instance_sources, known_instances, load_task
from async_rl.tasks.task import TaskError, instance_of

COLUMNS = {"prompt": "question", "answer": "answer"}


def task(*sources, **keys):
    return load_task({"kind": "dataset", "source": [{**COLUMNS, **source} for source in sources], **keys})


def asked(made, split="train"):
    return [made.instance(split, n).answer for n in range(made.size(split))]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "csv"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_format_gives_its_rows_in_order(files, kind, streaming):
    forward = {"streaming": True, "size": 25, "block": 10} if streaming else {}
    made = task({"path": str(files(kind, 25)), **forward})
    assert made.size("train") == 25
    assert made.size("eval") == 0
    assert [str(answer) for answer in asked(made)] == [str(n) for n in range(25)]
    assert made.instance("train", 3).messages == ({"role": "user", "content": "question 3"},)


def test_a_folder_and_a_pattern_are_their_files_in_the_order_of_names(files, tmp_path):
    files("parquet", 5, "b", first=5)
    files("parquet", 5, "a")
    (tmp_path / "state.json").write_text("{}")  # as data sets that were saved have
    for path in (tmp_path, tmp_path / "*.parquet"):
        assert asked(task({"path": str(path)})) == [str(n) for n in range(10)]
    files("jsonl", 1, "c")
    with pytest.raises(ConfigError, match="files of json and parquet: `path` is a file, a folder of files of one"):
        task({"path": str(tmp_path)})


def test_the_same_id_is_the_same_instance_in_another_process(files):
    table = {
        "kind": "dataset",
        "source": [
            {**COLUMNS, "path": str(files("jsonl", 40)), "weight": 2.0, "filter": [{"column": "level", "max": 2}]},
            {**COLUMNS, "path": str(files("parquet", 90)), "weight": 1.0, "streaming": True, "size": 80, "block": 7,
             "eval_rows": 9},
        ],
    }  # fmt: skip
    code = (
        "import json, sys; from async_rl.tasks.registry import load_task\n"
        "made = load_task(json.loads(sys.argv[1]))\n"
        "print(json.dumps([made.instance(s, n) for s in ('train', 'eval') for n in range(made.size(s))]))"
    )
    made = load_task(table)
    here = [made.instance(split, n) for split in ("train", "eval") for n in range(made.size(split))]
    env = {**os.environ, "PYTHONHASHSEED": "77", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", code, json.dumps(table)]
    other = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert other == json.loads(json.dumps(here))
    assert len(here) == 30 + 80 + 9


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_are_the_first_that_the_filters_leave_and_are_never_trained_on(files, streaming):
    source = {
        "path": str(files("jsonl", 40)), "eval_rows": 5, "filter": [{"column": "level", "values": [0, 3]}],
        **({"streaming": True, "size": 15, "block": 4} if streaming else {}),
    }  # fmt: skip
    made = task(source)
    left = [str(n) for n in range(40) if n % 4 in (0, 3)]
    assert asked(made) == left[5:]
    assert sorted(asked(made, "eval")) == sorted(left[:5])


def test_evaluation_data_of_its_own_of_several_sources_comes_in_turns(files):
    sources = [
        {"path": str(files("jsonl", 9)), "eval_path": str(files("jsonl", 30, "test", first=100))},
        {"path": str(files("parquet", 9)), "eval_path": str(files("parquet", 10, "test", first=200)), "eval_rows": 10},
        {"path": str(files("parquet", 9))},
    ]
    answers = [int(each) for each in asked(task(*sources), "eval")]
    assert sorted(answers) == [*range(100, 130), *range(200, 210)]
    assert [sum(each >= 200 for each in answers[n : n + 4]) for n in range(0, 40, 4)] == [1] * 10
    assert [each for each in answers if each < 200] != list(range(100, 130))  # nor are the first ones all of one kind


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        ({"column": "question", "max_length": 10}, lambda n: n < 10),
        ({"column": "question", "min_length": 11, "max_length": 11}, lambda n: n >= 10),
        ({"column": "level", "min": 1, "max": 2}, lambda n: n % 4 in (1, 2)),
        ({"column": "note", "values": ["even"]}, lambda n: n % 2 == 0),
        ({"column": "note", "min_length": 0}, lambda n: n % 2 == 0),  # what is missing meets nothing
        ({"column": "chat", "max_length": 1}, lambda n: True),
        ({"function": "my_filters:odd"}, lambda n: n % 2 == 1),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_filters_leave_what_meets_them(files, tmp_path, monkeypatch, conditions, left, streaming):
    (tmp_path / "my_filters.py").write_text("def odd(row):\n    return int(row['answer']) % 2 == 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected = [str(n) for n in range(30) if left(n)]
    forward = {"streaming": True, "size": len(expected)} if streaming else {}
    assert asked(task({"path": str(files("jsonl", 30)), "filter": [conditions], **forward})) == expected


def test_what_an_instance_is_made_of(files):
    path = str(files("jsonl", 3))
    chat = task({"path": path, "data": ["level", "note"]}, system="Be brief.", instruction="Only the number.")
    assert chat.instance("train", 2) == (
        None,
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "question 2\n\nOnly the number."},
        ),
        "2",
        {"level": 2, "note": "even"},
    )
    assert task({"path": path}, style="plain", instruction=" =").instance("train", 1)[:2] == ("question 1 =", None)
    messages = load_task({"kind": "dataset", "source": [{"path": path, "messages": "chat", "answer": "answer"}]})
    assert messages.instance("train", 1).messages == ({"role": "user", "content": "question 1"},)
    assert chat.score(chat.instance("train", 2), " 2\n").reward == 1.0
    assert chat.score(chat.instance("train", 2), "3") == (0.0, {"exact": 0.0})


def test_columns_of_another_kind_are_named(files):
    path = str(files("jsonl", 3))
    made = load_task({"kind": "dataset", "source": [{"path": path, "messages": "question", "answer": "answer"}]})
    with pytest.raises(TaskError, match="column 'question' has 'question 0': a list of messages"):
        made.instance("train", 0)
    with pytest.raises(TaskError, match="column 'level' has 0, which is no text"):
        task({"path": path, "prompt": "level"}).instance("train", 0)


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "size": 3}])
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"prompt": "questions"},
            "no column 'questions'; there are 'question', 'answer', 'level', 'note', 'chat'; did",
        ),
        ({"answer": "a", "data": ["b"]}, "no columns 'a', 'b'; there are 'question', 'answer'"),
        ({"filter": [{"column": "Level", "min": 1}]}, "no column 'Level'; .*did you mean 'level'"),
    ],
)
def test_a_missing_column_is_one_error_with_the_columns_that_there_are(files, keys, says, streaming):
    with pytest.raises(ConfigError, match=says):
        task({"path": str(files("jsonl", 3)), **keys, **streaming})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"name": "x"}, "either `path`"),
        ({"messages": "chat"}, "either `prompt`"),
        ({"split": "test"}, "split is of data sets of the hub"),
        ({"streaming": True}, "needs `size`"),
        ({"streaming": True, "size": 2, "eval_path": "x.jsonl"}, "needs `eval_rows`"),
        ({"block": 3}, "block has no meaning"),
        ({"size": 9}, "there are 5 rows, too few for 9 rows"),
        ({"eval_rows": 5}, "there are 5 rows, too few for any row after 5 kept for evaluation"),
        ({"eval_rows": 9}, "there are 5 rows, too few for any row after 9 kept for evaluation"),
        ({"weight": float("inf")}, "weight = inf is no number"),
        ({"name": "x", "path": "", "eval_split": "train"}, "eval_split is what is trained on"),
        ({"filter": [{"column": "level", "min": 9}]}, "there are 0 rows that its filters leave"),
        ({"filter": [{"column": "level"}]}, "has no condition"),
        ({"filter": [{"min": 1}]}, "either `column`"),
        ({"filter": [{"function": "a:b", "min": 1}]}, "make them a filter of their own"),
        ({"filter": [{"function": "no_such_module:f"}]}, "cannot be loaded"),
        ({"filter": [{"column": "level", "max_length": 1}]}, "a filter failed on a row: TypeError"),
        ({"filter": [{"colum": "level"}]}, "did you mean `column`"),
        ({"answer": ""}, "has no `answer`"),
        ({"path": "no/such.jsonl"}, "no such file"),
        ({"path": "", "name": "no/such-data"}, "'no/such-data': cannot be read"),
        ({"wait": 1}, "unknown key `wait`"),
    ],
)
def test_what_does_not_go_together_or_is_not_there_is_refused(files, keys, says):
    with pytest.raises(ConfigError, match=says):
        task({"path": str(files("jsonl", 5)), **keys})


def test_what_is_trained_on_is_not_evaluated_on(files):
    path = str(files("jsonl", 5))
    with pytest.raises(ConfigError, match="eval_path is what is trained on"):
        task({"path": path, "eval_path": path})


def test_sources_are_weighed_all_or_none_and_there_is_one(files):
    path = str(files("jsonl", 5))
    with pytest.raises(ConfigError, match="give all of them one, or none"):
        task({"path": path, "weight": 1.0}, {"path": path})
    with pytest.raises(ConfigError, match="needs a table"):
        task()
    with pytest.raises(ConfigError, match='style = "plain" asks in plain text'):
        task({"path": path}, style="plain", system="x")


# --- what others ask of it -------------------------------------------------------------------------------------------


def config(*sources, buffer=None, **run) -> Config:
    table = {"kind": "dataset", "source": [{**COLUMNS, **source} for source in sources]}
    made = Config()
    return Config(task=table, buffer=type(made.buffer)(**(buffer or {})), run=type(made.run)(**run))


def test_the_buffer_learns_sizes_and_shares_and_looks_only_where_it_must(files):
    path = str(files("jsonl", 30))
    by_size = config({"path": path}, {"path": path, "size": 10, "streaming": True, "block": 4})
    assert instance_sources(by_size) == (Source(30, 3, 0), Source(10, 1, 4))
    nowhere = config({"path": "elsewhere/x.jsonl", "size": 70, "weight": 0.5}, {"path": path, "weight": 1.5})
    assert instance_sources(nowhere) == (Source(70, 1, 0), Source(30, 3, 0))


class Mine(DatasetTask):
    """A class from elsewhere, as the registry sees it."""


def test_a_task_class_from_elsewhere_that_reads_forward_needs_epochs(files):
    source = {**COLUMNS, "path": str(files("jsonl", 30)), "size": 20, "streaming": True, "block": 4}
    table = {"kind": f"{__name__}:Mine", "source": [source]}
    with pytest.raises(ConfigError, match=r"reads its data forward.*set \[buffer\] epochs = true"):
        check_task(Config(task=table))
    check_task(Config(task=table, buffer=BufferConfig(epochs=True)))


def test_a_history_needs_sources_that_can_be_asked_again(files):
    path = str(files("jsonl", 30))
    assert known_instances(config({"path": path}, {"path": path, "size": 4}, buffer={"retire_above": 0.9})) == 34
    with pytest.raises(ConfigError, match="is only read forward: set streaming = false"):
        known_instances(config({"path": path, "size": 30, "streaming": True}, buffer={"retire_above": 0.9}))


def test_a_run_cannot_evaluate_on_nothing(files):
    path = str(files("jsonl", 30))
    check_task(config({"path": path}))
    check_task(config({"path": path, "eval_rows": 4}, eval_every=5))
    with pytest.raises(ConfigError, match="has nothing to evaluate on"):
        check_task(config({"path": path}, eval_every=5))
    with pytest.raises(TaskError, match="the task has no eval instances"):
        instance_of(task({"path": path}), "eval", 0)


def test_without_the_library_it_says_what_to_install(files):
    table = {"kind": "dataset", "source": [{**COLUMNS, "path": str(files("jsonl", 3))}]}
    code = (
        "import json, sys; sys.modules['datasets'] = None\n"
        "from async_rl.errors import AsyncRLError; from async_rl.tasks.registry import load_task\n"
        "try:\n    load_task(json.loads(sys.argv[1]))\nexcept AsyncRLError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, json.dumps(table)], capture_output=True, text=True)
    assert "needs a package that is not installed here (datasets): pip install '.[tasks]'" in done.stdout

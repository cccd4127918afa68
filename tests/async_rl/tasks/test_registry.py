import subprocess
import sys

import pytest

from async_rl.config import ConfigError
from async_rl.errors import AsyncRLError
from async_rl.tasks.registry import KINDS, load_task


def test_a_task_gets_its_own_keys():
    assert load_task({"kind": "digit_sort", "digits": 5}).digits == 5


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "needs a key `kind`"),
        ({"kind": "digit_sorting"}, "did you mean 'digit_sort'"),
        ({"kind": "zzz"}, "known kinds: digit_sort"),
        ({"kind": "digit_sort", "digit": 5}, "did you mean `digits`"),
        ({"kind": "digit_sort", "digits": 1}, ">= 2"),
        ({"kind": "no_such_module:Task"}, "no_such_module"),
        ({"kind": "async_rl.tasks.digit_sort:Missing"}, "Missing"),
        ({"kind": "async_rl.tasks.task:Instance"}, "needs `Config`"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_advice(table, says):
    with pytest.raises(ConfigError, match="task") as error:
        load_task(table)
    assert says in str(error.value)


def test_a_task_of_ones_own_is_named_by_its_import_path():
    assert load_task({"kind": "async_rl.tasks.digit_sort:DigitSort", "digits": 4}).digits == 4


def test_a_missing_optional_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # what Python does for a package that is not there
    with pytest.raises(AsyncRLError, match=r"pip install '\.\[tasks\]'"):
        load_task({"kind": "reasoning_gym", "name": "gcd"})


def test_tasks_import_neither_torch_nor_what_they_do_not_use():
    code = (
        "import sys, async_rl.tasks.rendering\n"
        "from async_rl.tasks.registry import load_task\n"
        "load_task({'kind': 'digit_sort'})\n"
        "assert not {'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_every_kind_names_a_module_of_ours():
    assert all(path.startswith(("async_rl.tasks.", "async_rl.data.")) for path in KINDS.values())

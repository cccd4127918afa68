"""A process that is asked over its standard streams answers in frames, and its end or its silence is an error."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import AsyncRLError
from async_rl.run import pipes
from async_rl.run.pipes import Child

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, time
import msgspec
from async_rl.run.pipes import take_over_pipes

class Text(msgspec.Struct):
    text: str

questions, answer = take_over_pipes()
print("this must not get between the frames", flush=True)
for body in questions:
    text = msgspec.msgpack.decode(body, type=Text).text
    if text == "die":
        sys.exit(3)
    if text == "hang":
        time.sleep(600)
    answer(Text(text * 2))
"""


class Text(msgspec.Struct):
    text: str


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipes, "END_S", 60.0)  # an exit code is known once the process has ended: the machine is busy
    (tmp_path / "answering_child.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    with Child("answering_child", [], environment) as made:
        yield made


@pytest.mark.timeout(240)
def test_every_question_gets_its_answer_whatever_the_child_prints_and_however_long_it_is(child: Child) -> None:
    for text in ("a", "", "é" * 300_000):
        assert child.ask(Text(text), Text, 60.0).text == text * 2


@pytest.mark.timeout(240)
def test_a_child_that_ends_is_named_with_its_exit_code(child: Child) -> None:
    with pytest.raises(AsyncRLError, match=r"answering_child \(process \d+\) ended before it answered, exit code 3"):
        child.ask(Text("die"), Text, 60.0)
    with pytest.raises(AsyncRLError, match="exit code 3"):
        child.ask(Text("a"), Text, 60.0)


@pytest.mark.timeout(240)
def test_a_child_that_is_silent_for_too_long_is_ended(child: Child) -> None:
    assert child.ask(Text("a"), Text, 60.0).text == "aa"
    with pytest.raises(AsyncRLError, match="has not answered in time"):
        child.ask(Text("hang"), Text, 0.2)
    with pytest.raises(AsyncRLError, match="exit code -9"):
        child.ask(Text("a"), Text, 60.0)

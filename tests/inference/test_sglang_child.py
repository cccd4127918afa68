"""The SGLang server's process, with an interpreter that has no SGLang; the server itself is tested in tests/engines."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from inference.engine import EngineError
from inference.sglang_child import Child, command_line, default_flags, merge_flags

FLAGS = default_flags(
    slots=4, max_context=100, max_adapters=3, device="cpu", dtype="float32", whole=False, feed_forward=False,
    routes=False,
)


def test_flags_are_words_of_a_command_line() -> None:
    flags = {"a": 1, "b": True, "c": False, "d": ["x", "y"], "e": {"f": None}, "g": "h i"}
    assert command_line(flags) == ["--a", "1", "--b", "--d", "x", "y", "--e", '{"f": null}', "--g", "h i"]


def test_flags_of_the_config_go_before_ours_however_they_are_spelled() -> None:
    merged = merge_flags(FLAGS, {"--max_lora_rank": 16, "tp-size": 2})
    assert merged == FLAGS | {"max-lora-rank": 16, "tp-size": 2}


@pytest.mark.parametrize("name", ["port", "--api_key", "model-path"])
def test_flags_that_are_the_nodes_are_refused_by_name(name: str) -> None:
    with pytest.raises(EngineError, match=r"\[inference.sglang\] arguments"):
        merge_flags(FLAGS, {name: "x"})


def test_a_batch_of_every_adapter_and_of_the_bare_model_has_room() -> None:
    assert FLAGS["max-loras-per-batch"] == 3 + 1


def test_a_server_that_cannot_start_says_how_it_ended_and_where_its_log_is(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    log.parent.mkdir()
    log.write_text("ValueError: of an earlier one\n")
    child = Child(sys.executable, tmp_path, FLAGS, "secret", log)
    deadline = time.monotonic() + 30
    while (ended := child.ended()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert f"(pid {child.pid}) ended with code 1" in ended
    assert str(log) in child.log_tail()
    assert "No module named" in child.log_tail()
    assert "earlier" not in child.log_tail()
    asyncio.run(child.close())
    assert not child._scratch.path.exists()


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"engine_python: /nowhere/python"):
        Child("/nowhere/python", tmp_path, FLAGS, "secret", tmp_path / "log")


def test_the_key_is_on_no_command_line_and_in_no_file_that_others_can_read(tmp_path: Path) -> None:
    child = Child(sys.executable, tmp_path, FLAGS, "secret", None)
    command = Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert b"secret" not in command
    assert os.stat(child._scratch.path).st_mode & 0o077 == 0
    asyncio.run(child.close())
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)

"""Two buffers of one run at once: what a killed launcher or a machine out of reach may leave, and a --resume makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config import Config, ModelConfig, TinyModelConfig
from async_rl.run.directory import RunDirectory


def started(directory: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-P", "-m", "buffer.service", "--name", "buffer",
        "--config", str(directory.config_path), "--dir", str(directory.path),
    ]  # fmt: skip
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def wait_for(condition: Callable[[], bool], log: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_a_second_buffer_takes_neither_socket_nor_journal_while_the_first_lives(tmp_path: Path) -> None:
    config = Config(task={"kind": "digit_sort"}, model=ModelConfig(tiny=TinyModelConfig()))
    directory = RunDirectory.create(tmp_path / "run", config)
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    first = started(directory, first_log)
    processes = [first]
    try:
        wait_for(lambda: "buffer listens" in first_log.read_text(), first_log)
        os.kill(first.pid, signal.SIGSTOP)  # it does not hear that its launcher was killed
        second = started(directory, second_log)
        processes.append(second)
        wait_for(lambda: "waits for the end of another" in second_log.read_text(), second_log)
        assert "buffer listens" not in second_log.read_text()
        first.kill()
        first.wait(20)
        wait_for(lambda: "buffer listens" in second_log.read_text(), second_log)
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
        directory.remove_sockets()

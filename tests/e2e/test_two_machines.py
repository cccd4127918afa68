"""docs/two-machines.md, typed: two folders of this machine stand for two machines, and 127.0.0.1 for both addresses."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import real_runs

from async_rl.run.directory import RunDirectory
from async_rl.run.summary import ledger_balances

pytestmark = [pytest.mark.e2e, pytest.mark.scale, pytest.mark.timeout(1000)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "two-machines.md"
FIRST, SECOND = "10.0.0.1", "10.0.0.2"
SHORT = [  # and slow enough that the node leaves and joins again meanwhile
    "--set", "run.steps=12", "--set", "run.eval_every=0", "--set", "buffer.groups_per_step=4",
    "--set", "inference.max_tokens_per_second=100",
]  # fmt: skip


def typed(command: str, free_port: Callable[[], int], ports: dict[str, str]) -> list[str]:
    """The page's one line that begins so, with this machine's address, free ports, and less to do."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (line,) = [each for block in blocks for each in block.splitlines() if each.startswith(f"async-rl {command}")]
    words = shlex.split(line.split("  #")[0].replace(FIRST, "127.0.0.1"))[1:]
    for port in re.findall(r":(57\d\d)", line):
        ports.setdefault(port, str(free_port()))
    words = [re.sub(r":(57\d\d)$", lambda found: f":{ports[found.group(1)]}", word) for word in words]
    return [*words, *(SHORT if words[0] in ("buffer", "infer", "train") else [])]


def copied(first: Path, second: Path) -> None:
    """The page's `ssh` and `scp` lines, from one folder to the other."""
    text = PAGE.read_text()
    (made,) = re.findall(rf"^ssh {SECOND} mkdir -m 700 -p (.*)$", text, re.MULTILINE)
    for folder in made.split():
        (second / folder).mkdir(mode=0o700)
    lines = re.findall(rf"^scp (.*) {SECOND}:(\S+)$", text, re.MULTILINE)
    assert len(lines) == 2
    for files, folder in lines:
        for file in files.split():
            shutil.copy(first / file, second / folder)


def test_the_page_leads_to_a_run_whose_node_knows_no_more_than_it_was_given(tmp_path: Path, free_port) -> None:
    first, second = real_runs.Shell(made(tmp_path / "first")), real_runs.Shell(made(tmp_path / "second"))
    ports: dict[str, str] = {}
    try:
        code, output = first.run(*typed("keys", free_port, ports))
        assert code == 0, output
        buffer = first.start(*typed("buffer", free_port, ports))
        run = first.folder / "shared-run"
        real_runs.wait_for((run / "run.json").exists, 60, "the run directory")
        trainer = first.start(*typed("train", free_port, ports))
        copied(first.folder, second.folder)
        node = second.start(*typed("infer", free_port, ports))
        real_runs.wait_for(lambda: steps_of(run) >= 3, 200, "three steps")
        code, output = first.run(*typed("status", free_port, ports))
        assert code == 0, output
        assert "left" in output
        code, output = first.run(*typed("drain", free_port, ports), "--grace", "1")
        assert code == 0, output
        output, _ = node.communicate(timeout=150)
        assert node.returncode == 0, output
        again = second.start(*typed("infer", free_port, ports))  # the same command joins again
        for process in (trainer, buffer, again):
            output, _ = process.communicate(timeout=500)
            assert process.returncode == 0, output
    finally:
        second.close()
        first.close()
    assert RunDirectory.open(run).endpoint == f"tcp://127.0.0.1:{ports['5701']}"
    summary = real_runs.summary(run)
    assert summary["steps"] == 12
    assert ledger_balances(summary["ledger"])
    assert {path.name for path in (second.folder / "my-keys").iterdir()} == {"service.public", "node.secret"}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def steps_of(run: Path) -> int:
    return len(real_runs.records(run)) if (run / "metrics.jsonl").exists() else 0

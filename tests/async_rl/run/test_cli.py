"""The command line: what a person types, and the one message that a mistake gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.config import CONFIGS, load_config, shipped_configs
from async_rl.run import checks
from async_rl.run.checks import check_model
from async_rl.run.cli import main
from async_rl.run.directory import RunDirectory


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))


def engine_at(folder: Path) -> None:
    """An interpreter with this one's packages, and with the names of both engines."""
    for name in ("vllm", "sglang"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (folder / "python").write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)


def test_a_dry_run_says_what_would_run_and_makes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "quickstart", "--dry-run", "--set", "run.steps=7"]) == 0
    out = capsys.readouterr().out
    for words in ("7 steps", "2 × torch", "32 groups × 8 = 256 attempts", "bound", "0 … 223", "digit_sort"):
        assert words in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_would_run_where_its_model_and_data_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(name)
    monkeypatch.setattr(checks, "BACKENDS", {})  # the same with megatron-core and without
    (tmp_path / "config.json").touch()
    if config.model.shape:
        shutil.copy(CONFIGS / "shapes" / f"{config.model.shape}.json", tmp_path / "config.json")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    engine_at(tmp_path / ".engines/vllm/bin")
    engine_at(tmp_path / ".engines/sglang/bin")
    places = ["--set", "model.path=."] if config.model.path else []
    if config.inference.engine != "torch":
        places += ["--set", f"inference.engine_python=.engines/{config.inference.engine}/bin/python"]
    if "path" in config.task:
        places += ["--set", "task.path=."]
    assert main(["run", name, "--dry-run", *places]) == 0
    assert name in capsys.readouterr().out


def test_a_dry_run_has_a_line_for_every_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine_at(tmp_path / ".engines/vllm/bin")
    engine_at(tmp_path / ".engines/sglang/bin")
    assert main(["run", "quickstart-mixed", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for words in ("torch: 1 × torch, 32 slots", "vllm: 1 × vllm, 32 slots", "sglang: 1 × sglang, 16 slots"):
        assert words in out
    for engine in ("vllm", "sglang"):
        assert f"finish,with{tmp_path}/.engines/{engine}/bin/python" in "".join(out.split())


def test_a_dry_run_without_an_engines_environment_says_how_to_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("vllm", "sglang"):
        assert main(["run", f"quickstart-{engine}", "--dry-run"]) == 1
        error = capsys.readouterr().err
        assert f".engines/{engine}/bin/python': cannot be run: No such file" in error
        assert "`make engines`" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstat"], "Did you mean 'quickstart'"),
        (["run", "quickstart", "--dry-run", "--set", "buffer.max_stalenes=1"], "did you mean `max_staleness`"),
        (["run", "quickstart", "--dry-run", "--set", "task.digit=3"], "did you mean `digits`"),
        (["run", "quickstart", "--dry-run", "--set", "model.path=/nowhere"], "'/nowhere' is not a directory"),
        (["run", "quickstart", "--set", "model.path=/nowhere"], "'/nowhere' is not a directory"),
        (["run", "quickstart", "--dry-run", "--set", "model.path=."], "has no config.json"),
        (["run", "quickstart", "--resume"], "--resume needs --out"),
        (["infer", "quickstart"], "is not a run directory"),
        (["infer", "quickstart", "--group", "fast"], "this config has no [[inference.group]]"),
        (["run", "quickstart", "--set", "inference.engine=vllm"], "needs vllm, not installed here"),
        (["train", "quickstart", "--out", "somewhere"], "is not a run directory"),
        (["status"], "is not a run directory"),
        (["buffer", "quickstart", "--set", "buffer.endpoint=tcp://0.0.0.0:1"], "0.0.0.0"),
    ],
)
def test_a_mistake_gets_one_message_and_a_code_that_is_not_0(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_trainer_does_not_write_over_a_run_with_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory.create(Path("here"), load_config("quickstart"))
    try:
        (directory.checkpoints / "20").mkdir()
        assert main(["train", "quickstart", "--out", "here"]) == 1
        assert "add --resume" in capsys.readouterr().err
    finally:
        directory.remove_sockets()


def test_a_model_to_be_made_is_named_by_its_place_in_the_cache(tmp_path: Path) -> None:
    assert check_model(load_config("quickstart")).startswith(str(tmp_path / "cache"))


def test_the_console_script_is_not_misled_by_modules_in_the_working_directory(tmp_path: Path) -> None:
    for name in ("trainer", "inference", "buffer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('decoy')")
    script = Path(sys.executable).with_name("async-rl")
    run = subprocess.run([script, "run", "quickstart", "--dry-run"], capture_output=True, text=True, env=os.environ)
    assert (run.returncode, run.stderr) == (0, "")

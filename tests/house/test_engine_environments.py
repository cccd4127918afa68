"""`make engines`: environments that are whole or not there, once for all clones, and no old ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("engines_script", ROOT / ".ci/engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engines_script", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_environment_is_built_once_and_a_half_built_or_an_old_one_goes(script: ModuleType, tmp_path: Path) -> None:
    requirements, shim, cache = tmp_path / "needs.txt", tmp_path / "shim", tmp_path / "cache"
    requirements.write_text("# nothing\n")
    shim.mkdir()
    (shim / "shimmed.py").write_text("VALUE = 1\n")
    environment = script.Environment("any", requirements, "import shimmed; assert shimmed.VALUE == 1", shim)
    half = cache / f"any-{script.hash_of(environment)}"
    (half / "bin").mkdir(parents=True)
    (half / "bin/python").write_text("broken off")
    folder = script.built(environment, cache)
    assert folder == half
    assert subprocess.run([folder / "bin/python", "-c", "import shimmed"], timeout=60).returncode == 0
    (folder / "mark").touch()
    os.utime(folder / ".ready", (1, 1))
    assert script.built(environment, cache) == folder
    assert (folder / "mark").exists()
    assert (folder / ".ready").stat().st_mtime > 1  # it says when the environment was last used

    (shim / "shimmed.py").write_text("VALUE = 2\n")
    with pytest.raises(SystemExit, match="shimmed"):  # it fails its check: the old one stays
        script.built(environment, cache)
    assert (folder / ".ready").exists()
    environment = environment._replace(check="import shimmed; assert shimmed.VALUE == 2")
    new = script.built(environment, cache)
    assert {path.name for path in cache.iterdir()} == {"any.lock", folder.name, new.name}


def test_only_old_environments_that_were_made_here_are_taken_away(script: ModuleType, tmp_path: Path) -> None:
    environment = script.Environment("any", tmp_path / "needs.txt", "")
    for name, made, last_use in (
        ("any-" + "0" * 16, True, 1.0),  # this alone
        ("any-" + "1" * 16, True, time.time()),
        ("any-" + "2" * 16, False, 1.0),
        ("any-data", True, 1.0),
        ("other-" + "0" * 16, True, 1.0),
    ):
        (tmp_path / name).mkdir()
        for file in (".ready", *(["pyvenv.cfg"] if made else [])):
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (last_use, last_use))
    assert [folder.name for folder in script.unused(environment, tmp_path)] == ["any-" + "0" * 16]


def test_an_environment_whose_removal_breaks_off_is_not_taken_for_whole(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(_: Path) -> None:
        raise KeyboardInterrupt

    (tmp_path / ".ready").touch()
    monkeypatch.setattr(script.shutil, "rmtree", broken_off)
    with pytest.raises(KeyboardInterrupt):
        script.remove(tmp_path)
    assert not (tmp_path / ".ready").exists()


def test_a_link_leads_to_the_newest(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        script.place(tmp_path / name, tmp_path / "links/any")
        assert os.readlink(tmp_path / "links/any") == str(tmp_path / name)
    assert [path.name for path in (tmp_path / "links").iterdir()] == ["any"]


def test_both_lists_are_whole_and_pinned() -> None:
    """They are installed without looking at what their packages ask for."""
    for name in ("vllm-cpu", "sglang-cpu"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert all(line.count("==") == 1 for line in pins)
        assert len({line.split("==")[0] for line in pins}) == len(pins) > 100

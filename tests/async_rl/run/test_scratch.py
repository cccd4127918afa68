"""What a node leaves on its disk: nothing, or something that the next one takes away."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.run.scratch import PREFIX, Scratch

HOLDER = """
import sys
from async_rl.run.scratch import Scratch
scratch = Scratch()
scratch.take_along(sys.argv[1:])
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_for_its_owner_alone_and_gone_with_all_that_is_in_it(root: Path) -> None:
    scratch = Scratch()
    assert scratch.path.parent == root
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    (scratch.path / "way").mkdir()
    (scratch.path / "way" / "0").write_bytes(b"1234")
    scratch.remove()
    assert list(root.iterdir()) == []


def test_what_a_killed_process_left_is_taken_away_by_the_next_and_not_before(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.write_bytes(b"1234")
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(elsewhere), "/no/such/file"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(root)},
    )  # fmt: skip
    assert holder.stdout is not None
    left = Path(holder.stdout.readline().strip())
    (left / "policy").write_bytes(b"1234")
    first = Scratch()
    assert (left / "policy").exists()
    assert elsewhere.exists()
    holder.kill()
    holder.communicate(timeout=20)
    assert left.exists()
    second = Scratch()
    assert set(root.iterdir()) == {first.path, second.path}
    first.remove(), second.remove()


def test_what_only_has_such_a_name_stays(root: Path) -> None:
    (root / "mine").mkdir()
    (root / f"{PREFIX}link").symlink_to(root / "mine", target_is_directory=True)
    (root / f"{PREFIX}file").write_bytes(b"1234")
    before = set(root.iterdir())
    Scratch().remove()
    assert set(root.iterdir()) == before


def test_processes_that_begin_at_once_take_away_nothing_of_each_other(root: Path) -> None:
    def make_and_use(_: int) -> bool:
        scratch = Scratch()
        (scratch.path / "policy").write_bytes(b"1234")
        whole = (scratch.path / "policy").read_bytes() == b"1234"
        scratch.remove()
        return whole

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(make_and_use, range(400)))
    assert list(root.iterdir()) == []

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint import CheckpointError, find_latest, write_checkpoint


def fill(text: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / "weights.bin").write_text(text * 100)
        (folder / "more.json").write_text(json.dumps(text))

    return save


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_found_with_its_state_and_two_are_kept(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "none") is None
    for version in (3, 9, 10, 11):
        write_checkpoint(tmp_path, version, fill(str(version)), {"next_ticket": version * 8})
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.version, found.state, found.skipped) == (11, {"next_ticket": 88}, ())
    assert (found.folder / "weights.bin").read_text() == "11" * 100
    assert names(tmp_path) == ["v00000010", "v00000011"]


def damage_truncate(folder: Path) -> None:
    path = folder / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(folder: Path) -> None:
    path = folder / "weights.bin"
    path.write_bytes(b"X" + path.read_bytes()[1:])


def damage_remove(folder: Path) -> None:
    (folder / "weights.bin").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"version": 2, "fi')


def damage_state(folder: Path) -> None:
    (folder / "learner.json").write_text('{"next_ticket": 1}')


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_truncate, "weights.bin"),
        (damage_flip, "weights.bin"),
        (damage_remove, "weights.bin"),
        (damage_manifest, "manifest.json"),
        (damage_state, "learner.json"),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, damage: Callable[[Path], None], word: str
) -> None:
    write_checkpoint(tmp_path, 1, fill("a"), {})
    damage(write_checkpoint(tmp_path, 2, fill("b"), {}))
    found = find_latest(tmp_path)
    assert found is not None
    assert found.version == 1
    assert len(found.skipped) == 1
    assert "v00000002" in found.skipped[0]
    assert word in found.skipped[0]


def test_all_broken_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    damage_flip(write_checkpoint(tmp_path, 1, fill("a"), {}))
    with pytest.raises(CheckpointError, match="v00000001"):
        find_latest(tmp_path)


def test_a_save_that_fails_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, fill("a"), {})

    def fail(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 2, fail, {})
    assert names(tmp_path) == ["v00000001"]


def test_a_crash_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """The states that a kill can leave: a partial folder; a replacement with the old one moved aside, before and
    after the new one is in place."""
    first = write_checkpoint(tmp_path, 1, fill("a"), {})
    (tmp_path / ".partial-v00000002").mkdir()
    (tmp_path / ".partial-v00000002" / "weights.bin").write_text("half")
    found = find_latest(tmp_path)
    assert found is not None
    assert found.version == 1
    first.rename(tmp_path / ".replaced-v00000001")
    found = find_latest(tmp_path)
    assert found is not None
    assert found.version == 1
    write_checkpoint(tmp_path, 2, fill("b"), {})
    assert names(tmp_path) == ["v00000001", "v00000002"]


def test_a_version_trained_again_replaces_the_old_one_and_the_lineage_after_it(tmp_path: Path) -> None:
    for version in (4, 5):
        write_checkpoint(tmp_path, version, fill("old"), {})
    damage_flip(tmp_path / "v00000005")
    write_checkpoint(tmp_path, 4, fill("new"), {})
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.version, found.skipped) == (4, ())
    assert (found.folder / "weights.bin").read_text() == "new" * 100


def test_a_broken_checkpoint_does_not_count_among_the_two_kept(tmp_path: Path) -> None:
    for version in (1, 2):
        write_checkpoint(tmp_path, version, fill("x"), {})
    damage_truncate(tmp_path / "v00000002")
    write_checkpoint(tmp_path, 3, fill("y"), {})
    assert names(tmp_path) == ["v00000001", "v00000003"]

"""The best version's folder: whole or not there, ties to the earlier, kept over a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import PolicyId
from trainer.best import Best, Score, is_better, read_score


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


def record(reward: float, name: str = "eval", cancelled: int = 0) -> dict[str, Any]:
    return {"set": name, "reward": reward, "n": 8, "cancelled": cancelled}


class Trainer:
    """Writes the version that it is at."""

    def __init__(self, folder: Path, by: str = "eval", pending: tuple[int, ...] = ()) -> None:
        self.folder = folder
        self.best = Best(folder, by, self.write, map(policy, pending))

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter.txt").write_text(str(self.version))

    def at(self, version: int) -> Trainer:
        self.version = version
        self.best.candidate(policy(version))
        return self

    @property
    def kept(self) -> str | None:
        file = self.folder / "best" / "adapter.txt"
        return file.read_text() if file.exists() else None

    @property
    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_the_best_so_far_is_kept_though_the_weights_have_moved_on_when_the_result_comes(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.at(0).at(3).at(6)
    for version, reward in ((0, 0.3), (3, 0.7), (6, 0.5)):
        trainer.best.judge(policy(version), record(reward))
    assert (trainer.kept, trainer.there) == ("3", ["best"])
    assert read_score(tmp_path / "best") == Score(3, policy(3).digest, "eval", 0.7, 8)
    assert trainer.best.summary() == json.loads((tmp_path / "best" / "evaluation.json").read_text())


@given(st.permutations(range(5)), st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=5, max_size=5))
@settings(deadline=None)
def test_of_equals_the_earlier_is_the_better_in_whatever_order_they_are_judged(
    order: list[int], rewards: list[float]
) -> None:
    best: Score | None = None
    for version in order:
        new = Score(version, "", "eval", rewards[version], 8)
        best = new if is_better(new, best) else best
    assert best is not None
    assert best.version == rewards.index(max(rewards))


def test_another_set_and_what_is_not_whole_do_not_count(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.at(0).at(1)
    trainer.best.judge(policy(0), record(0.9, name="other"))
    trainer.best.judge(policy(0), record(0.9, cancelled=1))
    assert trainer.kept is None
    trainer.best.judge(policy(1), record(0.1))
    assert (trainer.kept, trainer.there) == ("1", ["best"])


def test_without_a_set_nothing_is_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, by="").at(0)
    trainer.best.judge(policy(0), record(0.9))
    assert trainer.there == []
    assert trainer.best.summary() is None


def test_a_trainer_that_goes_on_keeps_the_best_and_the_candidates_that_wait_for_their_result(tmp_path: Path) -> None:
    before = Trainer(tmp_path)
    before.at(0).at(3).at(6)
    before.best.judge(policy(0), record(0.4))
    after = Trainer(tmp_path, pending=(3,))
    assert after.there == ["best", f"candidate-3-{policy(3).digest[:16]}"]
    assert after.best.score is not None
    after.best.judge(policy(3), record(0.6))
    assert (after.kept, after.there) == ("3", ["best"])


def test_a_trainer_killed_while_it_writes_or_replaces_leaves_the_best_that_was(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).at(0)
    trainer.best.judge(policy(0), record(0.4))
    (tmp_path / ".partial-candidate-3").mkdir()
    (tmp_path / "best").rename(tmp_path / ".replaced-best")  # between the two renames of a replacement
    again = Trainer(tmp_path)
    assert (again.kept, again.there) == ("0", ["best"])


def test_a_write_that_fails_leaves_no_candidate(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        Best(tmp_path, "eval", full, ()).candidate(policy(1))
    assert list(tmp_path.glob("candidate-*")) == []

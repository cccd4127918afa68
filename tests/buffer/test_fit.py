"""What is read from a run directory: known speeds come out again, and what a run cannot show is said or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl.config import config_from_table, config_table
from buffer.fit import FitError, fit, read_run, settled

STEP_S, ROW_S = 0.010, 0.0005  # of a decode step, and of each row in it
TRAIN_S, TOKEN_S = 0.2, 0.0005
PUSH_MS = [20.0, 30.0, 40.0]


def config(**inference: Any) -> Any:
    table = {
        "run": {"steps": 40},
        "model": {"path": "somewhere"},
        "task": {"kind": "digit_sort"},
        "buffer": {"groups_per_step": 4, "group_size": 2},
        "inference": {"max_context": 64, "max_new_tokens": 32} | inference,
        "trainer": {"checkpoint_every": 10},
    }
    return config_from_table(table, "test")


def steps(count: int = 40, alike: bool = False) -> list[dict[str, Any]]:
    """Lines of a trainer that waits half a second for each batch, and a whole second longer at every checkpoint."""
    rng = random.Random(0)
    lines, clock = [], 10.0
    for step in range(count):
        tokens = 100 if alike else rng.randint(50, 150)
        train = TRAIN_S + TOKEN_S * tokens + (1.0 if step < 3 else 0.0)
        cycle = train + 0.03 + 0.02
        clock += 0.5 + cycle + 0.01 + (1.0 if (step + 1) % 10 == 0 else 0.0)
        lines.append({
            "step": step, "version": step + 1, "time_s": clock, "reward": 0.5, "tokens": float(tokens),
            "batch_tokens": tokens + 8 * 5, "trained": 8, "staleness_mean": 1.5, "draw_wait_s": 0.5, "train_s": train,
            "cycle_s": cycle, "step_s": cycle + 0.5, "upload_ms": 20.0, "scoring_s": 0.004,
            "length_quantiles": [1, *[10] * 31, 32],
        })  # fmt: skip
    return lines


def pools(rows: tuple[int, ...] = (2, 8, 5, 7, 3, 8, 8), seconds: float = 0.0) -> list[dict[str, Any]]:
    """Looks at one node that decodes so many rows in turn, 50 steps each; `seconds` is a step's cost, if given."""
    busy, tokens, lines = 0.0, 0, []
    for look, count in enumerate((0, *rows)):
        busy += 50 * (seconds or STEP_S + ROW_S * count)
        tokens += 50 * count
        node = {"name": "a", "busy_s": busy, "decode_steps": 50 * look, "sampled_tokens": tokens}
        lines.append({"nodes": [node], "push_ms": PUSH_MS, "ready_groups": 3, "ready_bytes": 3 * 2 * (15 * 9 + 100)})
    return lines


def test_speeds_lengths_and_pushes_come_out_as_they_went_in():
    run = fit("run", config(), steps(), pools())
    assert run.speed == (pytest.approx(STEP_S), pytest.approx(ROW_S), 0.0)
    assert run.capped is False
    trainer = run.trainer
    assert trainer.token_s == pytest.approx(TOKEN_S)
    assert trainer.step_s.mean == pytest.approx(TRAIN_S)
    assert (trainer.export_s.mean, trainer.upload_s.mean) == (pytest.approx(0.03), pytest.approx(0.02))
    assert trainer.rest_s.mean == pytest.approx(0.01)
    assert (trainer.checkpoint_s, trainer.checkpoint_every) == (pytest.approx(1.0), 10)
    assert trainer.lend_s < 0.1  # not the half second: no batch was ever ready, so the wait says nothing of its way
    assert run.push_s.mean == pytest.approx(0.03)
    assert run.lengths.mean == pytest.approx((31 * 10 + (1 + 32) / 2) / 32)
    assert run.prompt_tokens == pytest.approx(5)
    assert run.staleness == pytest.approx(1.5)
    assert run.notes == ()


def test_a_batch_that_was_ready_shows_how_long_a_batch_needs_to_come():
    lines = steps()
    lines[20]["draw_wait_s"] = 0.004
    assert fit("run", config(), lines, pools()).trainer.lend_s == pytest.approx(0.004)


def test_what_never_varied_is_taken_as_constant_and_said():
    run = fit("run", config(), steps(alike=True), pools(rows=(8,) * 7))
    assert run.speed[:2] == (pytest.approx(STEP_S + 8 * ROW_S), 0.0)
    assert run.trainer.token_s == pytest.approx((TRAIN_S + 100 * TOKEN_S) / 100)
    assert "about 8 samples at once" in run.notes[0]
    assert "about 100 sampled tokens" in run.notes[1]


def test_of_a_node_that_its_cap_held_back_only_the_cap_is_known():
    held_back = fit("run", config(slots=8, max_tokens_per_second=100.0), steps(), pools(rows=(8,) * 7, seconds=0.1))
    assert (held_back.capped, held_back.speed) == (True, (0.0, 0.0, 100.0))
    free = fit("run", config(slots=8, max_tokens_per_second=5000.0), steps(), pools())
    assert (free.capped, free.speed[0]) == (False, pytest.approx(STEP_S))


def test_the_first_steps_are_left_out():
    assert [settled(steps, bound) for steps, bound in ((50, 4), (50, 0), (9, 4))] == [10, 2, 3]
    lines = steps(40, alike=True)
    for line in lines[:10]:
        line["staleness_mean"] = 0.0
    run = fit("run", config(), lines, pools())
    assert run.staleness == pytest.approx(1.5)
    assert run.steps_per_s == pytest.approx(30 / (lines[-1]["time_s"] - lines[9]["time_s"]))


@pytest.mark.parametrize(
    ("lines", "looks", "message"),
    [
        (steps(5), pools(), "5 steps are too few"),
        ([{key: value for key, value in line.items() if key != "cycle_s"} for line in steps()], pools(), "cycle_s"),
        (steps(), [{**look, "push_ms": []} for look in pools()], "no push was recorded"),
        (steps(), pools(rows=()), "no node at work"),
    ],
)
def test_a_run_that_says_too_little_is_refused_naming_what_is_missing(lines, looks, message):
    with pytest.raises(FitError, match=message):
        fit("run", config(), lines, looks)


def test_a_run_directory_is_read(tmp_path: Path):
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config_table(config())))
    lines = [*steps(), *({"time_s": 1.0, "pools": look} for look in pools())]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path)._replace(directory="run") == fit("run", config(), steps(), pools())
    with pytest.raises(FitError, match=r"no metrics\.jsonl"):
        read_run(tmp_path / "elsewhere")

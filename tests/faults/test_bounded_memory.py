"""Nothing grows with the length of a run: two thousand steps, and every process has the size it had after the first."""

from __future__ import annotations

import random
from pathlib import Path

import growth
import pytest
import real_runs
from fake_work import FakeNode, FakeTrainer, Published, Service, finish

from async_rl.config import batch_bytes, group_bytes

STEPS, WARM_UP = 2000, 200
ENDING = 20  # steps before the last: fewer and fewer attempts run, and what a node compiles for these comes once
LIMIT_BYTES = dict.fromkeys(("buffer", "store", "node-0", "trainer"), 1024)  # a step
TABLE = [
    "run.eval_every=0", "buffer.groups_per_step=2", "buffer.group_size=2", "inference.slots=8", "inference.nodes=1",
    "trainer.checkpoint_every=500", "trainer.learning_rate=1e-5", f"run.steps={STEPS}",
]  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(2250)
def test_no_process_grows_with_the_steps_of_a_run(tmp_path: Path) -> None:
    shell = real_runs.Shell(tmp_path)
    run = tmp_path / "long"
    try:
        settings = [word for setting in TABLE for word in ("--set", setting)]
        process = shell.start("run", str(shell.config), "--out", str(run), *settings)
        watched = growth.Watched(run)
        watched.follow(lambda: process.poll() is None, 850)
        assert process.returncode == 0
    finally:
        shell.close()
    bounds = {}
    for name, samples in sorted(watched.samples.items()):
        late = [(step, size) for step, size in samples if WARM_UP < step <= STEPS - ENDING]
        slope, bound = growth.slope_bound([step for step, _ in late], [size for _, size in late])
        first, last = late[0][1] / 2**20, late[-1][1] / 2**20
        print(f"{name}: {slope:.0f} bytes a step (95 %: < {bound:.0f}), {first:.1f} to {last:.1f} MiB, n = {len(late)}")
        bounds[name] = bound
    assert bounds.keys() == LIMIT_BYTES.keys()
    assert {name: bound for name, bound in bounds.items() if bound >= LIMIT_BYTES[name]} == {}


def test_ready_bytes_stay_within_capacity_though_lengths_differ_a_thousandfold(tmp_path: Path) -> None:
    """Room is reserved by the longest that may come; the lowest open ticket alone may go beyond, by one group."""
    sizes = {"inference": {"max_context": 4096, "max_new_tokens": 3000}, "run": {"steps": 12}}
    (tmp_path / "sizes").mkdir()
    with Service(tmp_path / "sizes", **sizes) as plain:
        capacity = int(1.5 * batch_bytes(plain.config))
    (tmp_path / "run").mkdir()
    with Service(tmp_path / "run", buffer={"capacity_bytes": capacity, "max_staleness": 8}, **sizes) as buffer:
        published = Published()
        nodes = [
            FakeNode(buffer.dial("node", name), name, published, seed, lambda rng: int(4 * 1000 ** rng.random()))
            for seed, name in enumerate(("a", "b"))
        ]
        trainer = FakeTrainer(buffer.dial("trainer", "trainer"), buffer.config, published, pause_s=0.3)
        tool = buffer.dial("tool", "tool")
        for thread in (*nodes, trainer):
            thread.start()
        seen = []
        while trainer.is_alive() and trainer.steps_done < 11:
            seen.append(buffer.status(tool).ready_bytes)
        finish(trainer, *nodes)
        tool.close(0.2)
        lengths = [len(data) for _, data in trainer.trained]
        assert max(lengths) > 50 * min(lengths)  # a trajectory of 4 tokens is a few hundred bytes of names and numbers
        assert 0 < max(seen) <= capacity + group_bytes(buffer.config)


def test_the_slope_of_a_line_with_noise_is_found_and_bounded() -> None:
    noise = random.Random(0)
    steps = range(200, 2000)
    flat = [100_000_000 + noise.randrange(50_000) for _ in steps]
    growing = [size + 2048 * step for step, size in zip(steps, flat, strict=True)]
    assert abs(growth.slope_bound(steps, flat)[0]) < growth.slope_bound(steps, flat)[1] < 20
    assert growth.slope_bound(steps, growing)[1] == pytest.approx(2048, abs=20)

"""Nothing grows with the length of a run: two thousand steps, and every process has the size it had after the first."""

from __future__ import annotations

import random
from pathlib import Path

import growth
import pytest
import real_runs

STEPS, WARM_UP = 2000, 200
LIMIT_BYTES = 1024  # a step
TABLE = [
    "run.eval_every=0", "buffer.groups_per_step=2", "buffer.group_size=2", "inference.slots=8", "inference.nodes=1",
    "trainer.checkpoint_every=500", f"run.steps={STEPS}",
]  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(900)
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
        late = [(step, size) for step, size in samples if step > WARM_UP]
        slope, bound = growth.slope_bound([step for step, _ in late], [size for _, size in late])
        first, last = late[0][1] / 2**20, late[-1][1] / 2**20
        print(f"{name}: {slope:.0f} bytes a step (95 %: < {bound:.0f}), {first:.1f} to {last:.1f} MiB, n = {len(late)}")
        bounds[name] = bound
    assert bounds.keys() == {"buffer", "store", "trainer", "node-0"}
    assert {name: bound for name, bound in bounds.items() if bound >= LIMIT_BYTES} == {}


def test_the_slope_of_a_line_with_noise_is_found_and_bounded() -> None:
    noise = random.Random(0)
    steps = range(200, 2000)
    flat = [100_000_000 + noise.randrange(50_000) for _ in steps]
    growing = [size + 2048 * step for step, size in zip(steps, flat, strict=True)]
    assert abs(growth.slope_bound(steps, flat)[0]) < growth.slope_bound(steps, flat)[1] < 20
    assert growth.slope_bound(steps, growing)[1] == pytest.approx(2048, abs=20)

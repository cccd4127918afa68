"""What gradient sketches learn, beside dense AdamW and LoRA, and what step control is worth.

    python docs/sketch/learn.py [--seeds 5] [--jobs 2] [--only ARM]...     # writes learning.json
    python docs/sketch/render.py

Runs of the quickstart's model on its task, from its base model, with its loss, on data that is exactly four versions
old, as most of the quickstart's is: the real backend and the real engine, and the queue of `async-rl bench staleness`
between them. The rate is warmed up and decays as the quickstart's. A finished run is written at once, and what the file
holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from async_rl.config import TrainerConfig, load_config  # noqa: E402
from async_rl.run.bench import machine, made_now  # noqa: E402
from async_rl.run.bench_staleness import Runner, is_run, line, write  # noqa: E402
from async_rl.run.bench_staleness_cells import Cell, Outcome, Scale, overrides_of  # noqa: E402

PATH = HERE / "learning.json"
LAG = 4
BUDGET = 5e-4  # nats a token and step, at the first; a tenth at the last
SCALE = Scale(updates=100, groups=16, group_size=8, eval_every=10, eval_samples=512)

SCHEDULE = {"run.steps": SCALE.updates, "trainer.warmup_steps": 5, "trainer.final_learning_rate": 0.1}
LORA = {**SCHEDULE}
WHOLE = {**SCHEDULE, "inference.in_flight": "recompute"}
DENSE = {**WHOLE, "trainer.kind": "full"}
SKETCH = {
    **WHOLE, "trainer.kind": "sketch", "trainer.publish": "snapshots",
    "trainer.learning_rate": TrainerConfig().learning_rate,  # the quickstart's has no meaning here
}  # fmt: skip
CONTROL = {"trainer.step_control.budget": BUDGET, "trainer.step_control.final_budget": BUDGET / 10}
BF16 = {"model.dtype": "bfloat16", "inference.dtype": "bfloat16"}
PLAIN, STEADY = SKETCH, {**SKETCH, "trainer.momentum": 0.9, "trainer.redraw_every": 20}

ARMS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "dense AdamW": (DENSE, (1e-4, 3e-4)),
    "sketch, momentum 0.9, redrawn every 20 steps": (STEADY, (1e-3, 2e-3)),
    "sketch, momentum 0.9, never redrawn": ({**STEADY, "trainer.redraw_every": SCALE.updates}, (2e-3,)),
    "sketch, redrawn every step": (PLAIN, (4e-3, 6e-3)),
    "sketch, never redrawn": ({**PLAIN, "trainer.redraw_every": SCALE.updates}, (4e-3,)),
    "sketch of rank 64, momentum 0.8, redrawn every 10 steps": (
        {**SKETCH, "trainer.rank": 64, "trainer.momentum": 0.8, "trainer.redraw_every": 10}, (2e-3,),
    ),
    "sketch, momentum 0.9, redrawn every 20 steps, bfloat16 storage": ({**STEADY, **BF16}, (2e-3,)),
    "LoRA": (LORA, (5e-4, 1e-3)),
    "dense AdamW, ten times too fast": (DENSE, (3e-3,)),
    "dense AdamW, ten times too fast, step control": ({**DENSE, **CONTROL}, (3e-3,)),
    "sketch, ten times too fast": (STEADY, (2e-2,)),
    "sketch, ten times too fast, step control": ({**STEADY, **CONTROL}, (2e-2,)),
    "LoRA, ten times too fast": (LORA, (1e-2,)),
    "LoRA, ten times too fast, step control": ({**LORA, **CONTROL}, (1e-2,)),
}  # fmt: skip
"""By name: the settings, and the rates that are tried (a learning rate, or an update ratio)."""


def cells(seeds: int) -> Iterator[Cell]:
    for seed in range(seeds):
        for name, (settings, rates) in ARMS.items():
            for rate in rates:
                yield Cell(correction=name, settings=settings, lag=LAG, reuse=1, learning_rate=rate, seed=seed)


def held() -> list[dict[str, Any]]:
    return json.loads(PATH.read_text())["runs"] if PATH.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="an arm's name; may be given several times")
    options = parser.parse_args()
    wanted = [cell for cell in cells(options.seeds) if not options.only or cell.correction in options.only]
    for cell in wanted:
        load_config(SCALE.config, overrides_of(SCALE, cell))  # a mistake is reported before anything runs
    runs = held()
    left = [cell for cell in wanted if not is_run(cell, runs)]

    def finished(cell: Cell, outcome: Outcome, seconds: float) -> None:
        runs.append({**msgspec.to_builtins(cell), **msgspec.to_builtins(outcome), "wall_s": round(seconds, 1)})
        document = {"made": made_now(), "machine": machine(), "settings": msgspec.to_builtins(SCALE), "runs": runs}
        write(PATH, document)
        print(f"{len(runs)}: {line(runs[-1])}", flush=True)

    if left:
        Runner(SCALE, options.jobs).work_off(left, finished)


if __name__ == "__main__":
    main()

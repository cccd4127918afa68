"""By hand, on an idle machine: what slow rewards do to sampling.

    PYTHONPATH=.:tests/support python -P tests/support/slow_rewards.py [--seconds 1.0] [--rounds 3] [--steps 40]

Two arms in turn, each a whole run of the tiny model: rewards that take `--seconds` each, and instant ones. The node is
capped to 20 samples a second, 32 scoring workers, and a staleness bound that does not bind. Prints the rollout's tokens
a second between the first and the last step of each run, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import real_runs

SAMPLES_PER_SECOND = 20
TOKENS = 9  # of a sample: eight digits and the end; those that go on are cut there
# A step is made to take as long as all samples in the engine would, those that wait for a slot too: some two for each
# that has one. So much more is allowed (the rate that is reached is printed).
CAP = 2.3 * SAMPLES_PER_SECOND * TOKENS

TASKS = '''
import random, time
from async_rl.schema import NonNegative
from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig

class Config(DigitSortConfig, frozen=True, kw_only=True):
    seconds: NonNegative = 0.0
    """That scoring takes."""
    crashes: NonNegative = 0.0
    """The share of scorings that fail, half of them with the whole worker."""

class Task(DigitSort):
    Config = Config

    def __init__(self, config):
        super().__init__(config)
        self._seconds, self._crashes, self._chance = config.seconds, config.crashes, random.Random()

    def score(self, instance, completion):
        time.sleep(self._seconds)
        draw = self._chance.random()
        if draw < self._crashes / 2:
            import os
            os._exit(7)
        if draw < self._crashes:
            raise RuntimeError("by chance")
        return super().score(instance, completion)
'''


def prepare(shell: real_runs.Shell) -> Path:
    """A config of the small run on the task above, from the small run's base model."""
    (shell.folder / "chancy_task.py").write_text(TASKS)
    return real_runs.own_task(shell, "chancy.toml", '[task]\nkind = "chancy_task:Task"\ndigits = 8\n')


def settings(**values: Any) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def measure(shell: real_runs.Shell, config: Path, name: str, seconds: float, steps: int) -> float:
    """Tokens a second that were sampled for what trained between the first step and the last."""
    run = shell.folder / name
    code, output = shell.run(
        "run", str(config), "--out", str(run),
        *settings(
            task__seconds=seconds, run__steps=steps, run__eval_every=0, inference__nodes=1, inference__slots=8,
            inference__max_new_tokens=TOKENS, inference__max_tokens_per_second=CAP,
            inference__reward_workers=32, buffer__groups_per_step=2, buffer__max_staleness=64,
            trainer__checkpoint_every=steps,
        ),
        timeout=600, PYTHONPATH=f"{shell.folder}:{Path(__file__).resolve().parents[2]}",
    )  # fmt: skip
    assert code == 0, output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "reward" in line]
    print(f"{name}: staleness at most {max(line['staleness_max'] for line in taken)}", flush=True)
    return float(real_runs.summary(run)["tokens_per_second"]["rollout"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shell = real_runs.Shell(Path(folder))
        try:
            config = prepare(shell)
            rates: dict[str, list[float]] = {"instant": [], "slow": []}
            for number in range(options.rounds):
                for arm, seconds in (("instant", 0.0), ("slow", options.seconds)):
                    rates[arm].append(measure(shell, config, f"{arm}-{number}", seconds, options.steps))
                    print(f"{arm:8} {(rate := rates[arm][-1]):.1f} tokens/s, {rate / TOKENS:.1f} samples/s", flush=True)
        finally:
            shell.close()
    instant, slow = (statistics.median(rates[arm]) for arm in ("instant", "slow"))
    print(f"median   {instant:.1f} and {slow:.1f} tokens/s: slow rewards leave {slow / instant:.3f} of instant ones'")


if __name__ == "__main__":
    main()

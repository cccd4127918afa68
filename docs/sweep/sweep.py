"""The sweep behind the quickstart's correction and learning rate: whole runs at staleness bound 4.

    python docs/sweep/sweep.py            run what is missing, then write bound4.json and bound4.md beside this file
    python docs/sweep/sweep.py --table    only write the table again

Every cell is `async-rl run quickstart` with the correction, learning rate and seed set: real processes, one after the
other. A seed decides the base model, the adapter's start, the prompts and the sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "bound4.json"
TABLE = HERE / "bound4.md"

CORRECTIONS = {
    "sequence, truncated at 2": {
        "ratio_level": "sequence", "treatment": "truncate", "surrogate": "policy_gradient", "ratio_high": 2.0,
    },
    "token, truncated at 2": {
        "ratio_level": "token", "treatment": "truncate", "surrogate": "policy_gradient", "ratio_high": 2.0,
    },
    "PPO clip, token, 0.8 to 1.28": {
        "ratio_level": "token", "treatment": "clip", "surrogate": "ppo", "ratio_low": 0.8, "ratio_high": 1.28,
    },
    "PPO clip, sequence, 0.8 to 1.28": {
        "ratio_level": "sequence", "treatment": "clip", "surrogate": "ppo", "ratio_low": 0.8, "ratio_high": 1.28,
    },
    "uncorrected": {"treatment": "uncorrected", "surrogate": "policy_gradient"},
}  # fmt: skip
RATES = (1e-3, 2e-3)
SEEDS = (0, 1, 2)
STEPS = 160  # fewer than the quickstart's, and enough to tell the settings apart


def run_cell(correction: str, rate: float, seed: int) -> dict[str, object]:
    settings = {f"algorithm.{key}": value for key, value in CORRECTIONS[correction].items()}
    settings |= {"trainer.learning_rate": rate, "run.seed": seed, "model.tiny.seed": seed, "buffer.max_staleness": 4}
    settings["run.steps"] = STEPS
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "async_rl.run.cli", "run", "quickstart", "--out", str(run)]
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        outcome: dict[str, object] = {"correction": correction, "learning_rate": rate, "seed": seed}
        if done.returncode:
            return outcome | {"failed": done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]}
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        evals = [line["eval"]["reward"] for line in lines if "eval" in line]
        return outcome | {
            "eval": evals,
            "reward_first": summary["reward"]["first"],
            "reward_last": summary["reward"]["last"],
            "staleness_mean": summary["staleness"]["mean"],
            "wall_seconds": summary["wall_seconds"],
        }


def table(results: list[dict[str, object]]) -> str:
    """One line per (correction, rate): the last evaluation's mean over seeds, each seed, and the sampled reward."""
    lines = [
        "# Quickstart at bound 4: correction and learning rate",
        "",
        f"Written by `python docs/sweep/sweep.py`: {STEPS} steps, two nodes, bound 4 (and nearly every token 4",
        "versions old, for the trainer is the slower pool here). Evaluation: 512 held-out prompts, greedy, exact",
        "match, after the last step (standard error of one about 0.02). Reward: sampled at temperature 1, mean of the",
        "last 15 steps, and its ratio to the first 15. A row with one seed was not pursued: its evaluations had fallen",
        "far below their start on the way.",
        "",
        "| correction | learning rate | eval, mean | eval, each seed | reward, each seed | ratio, worst |",
        "|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, float], list[dict[str, object]]] = {}
    for result in results:
        cells.setdefault((result["correction"], result["learning_rate"]), []).append(result)
    for (correction, rate), entries in sorted(cells.items(), key=lambda cell: -_mean_eval(cell[1])):
        good = [entry for entry in entries if "failed" not in entry]
        evals = ", ".join(f"{entry['eval'][-1]:.3f}" for entry in good)
        rewards = ", ".join(f"{entry['reward_last']:.3f}" for entry in good)
        worst = min((entry["reward_last"] / entry["reward_first"] for entry in good), default=0.0)
        failed = f" ({len(entries) - len(good)} failed)" if len(good) < len(entries) else ""
        mean = f"{_mean_eval(entries):.3f}"
        lines.append(f"| {correction} | {rate:g} | {mean} | {evals}{failed} | {rewards} | {worst:.2f} |")
    return "\n".join(lines) + "\n"


def _mean_eval(entries: list[dict[str, object]]) -> float:
    return statistics.mean(entry["eval"][-1] if "failed" not in entry else 0.0 for entry in entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table again")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(entry["correction"], entry["learning_rate"], entry["seed"]) for entry in results}
    # Seed by seed, so that a sweep cut short still has whole columns.
    for seed in () if options.table else SEEDS:
        for correction in CORRECTIONS:
            for rate in RATES:
                if (correction, rate, seed) not in done:
                    results.append(run_cell(correction, rate, seed))
                    print(json.dumps(results[-1]), flush=True)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(table(results))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()

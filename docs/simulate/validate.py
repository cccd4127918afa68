"""`async-rl simulate` against real runs: fitted on one, held against three others that differ from it in kind.

    python docs/simulate/validate.py --runs DIR            make the runs that are missing there, then compare
    python docs/simulate/validate.py --runs DIR --next     make the next missing run only (they want a quiet machine)

Writes validation.json and validation.md beside this file, and what the fit needs of its run into fitted/, so that
`async-rl simulate quickstart --from docs/simulate/fitted` works anywhere. Each run takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from real import forecast, is_done, measured, real_run

from async_rl.config import config_table, load_config

HERE = Path(__file__).resolve().parent

FITTED = "fitted"
RUNS: dict[str, dict[str, Any]] = {
    FITTED: {"run.steps": 40, "inference.nodes": 2},
    "twice the nodes: the trainer sets the pace": {"run.steps": 60, "inference.nodes": 4},
    "lock-step (bound 0)": {"run.steps": 40, "inference.nodes": 2, "buffer.max_staleness": 0},
    "one node of other slots and cap, flips in flight, half the batch": {
        "run.steps": 90, "inference.nodes": 1, "inference.slots": 48, "inference.max_tokens_per_second": 500,
        "inference.in_flight": "continue", "buffer.groups_per_step": 4,
    },
}  # fmt: skip
"""By name: what differs from real.BASE."""


def keep(run: Path, folder: Path) -> None:
    """A run's config, without the place of its model on this machine, and its metrics."""
    folder.mkdir(exist_ok=True)
    config = load_config(str(run / "config.toml"))
    table = config_table(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path="")))
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    shutil.copyfile(run / "metrics.jsonl", folder / "metrics.jsonl")


def compare(runs: Path) -> list[dict[str, Any]]:
    keep(runs / "simulate-0", HERE / "fitted")
    rows = []
    for number, (name, changes) in enumerate(RUNS.items()):
        directory = runs / f"simulate-{number}"
        nodes = ("--nodes", str(changes["inference.nodes"]))
        said = forecast("buffer.forecast", changes, HERE / "fitted", directory / "forecast.json", *nodes)
        (predicted,) = said["forecasts"]
        rows.append({"run": name, "changes": changes, "predicted": predicted, "measured": measured(directory)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# `async-rl simulate` against real runs",
        "",
        "Written by `python docs/simulate/validate.py`. Lengths and speeds come from the first run alone; the others",
        "were not seen. All have two cores: capped nodes on one, trainer and services on the other. The first steps",
        "are left out on both sides (`buffer.fit.settled`), since a real run's first batch waits for nodes that load.",
        "",
        "Others: cores that other processes kept busy during the real run.",
        "",
        "| run | steps/s real | predicted | ratio | staleness real | predicted | ratio | idle nodes, trainer real |"
        " predicted | others |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        real, said = row["measured"], row["predicted"]
        stale = f"{said['staleness_mean'] / real['staleness']:.3f}" if real["staleness"] else "equal"
        lines.append(
            f"| {row['run']} | {real['steps_per_s']:.4f} | {said['steps_per_s']:.4f} | "
            f"{said['steps_per_s'] / real['steps_per_s']:.3f} | {real['staleness']:.3f} | "
            f"{said['staleness_mean']:.3f} | {stale} | {real['nodes_idle']:.0%}, {real['trainer_idle']:.0%} | "
            f"{said['nodes_idle']:.0%}, {said['trainer_idle']:.0%} | {real['others_cores']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="where the run directories are or will be")
    parser.add_argument("--next", action="store_true", help="make one missing run, and compare nothing")
    options = parser.parse_args()
    for number, changes in enumerate(RUNS.values()):
        directory = options.runs / f"simulate-{number}"
        if not is_done(directory):
            real_run(directory, changes)
            if options.next:
                return
    rows = compare(options.runs)
    (HERE / "validation.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "validation.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

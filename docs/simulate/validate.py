"""`async-rl simulate` against real runs: fitted on one, held against three others that differ from it in kind.

    python docs/simulate/validate.py --runs DIR            make the runs that are missing there, then compare
    python docs/simulate/validate.py --runs DIR --next     make the next missing run only (they want a quiet machine)
    python docs/simulate/validate.py --again               predict again what validation.json has measurements of

Writes validation.json and validation.md beside this file, and what the fit needs of its run into fitted/, so that
`async-rl simulate quickstart --from docs/simulate/fitted` works anywhere. Each run takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
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
        "run.steps": 200, "inference.nodes": 1, "inference.slots": 48, "inference.max_tokens_per_second": 500,
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
        real = measured(runs / f"simulate-{number}")
        rows.append({"run": name, "changes": changes, "predicted": predict(changes), "measured": real})
    return rows


def predict_again() -> list[dict[str, Any]]:
    """After a change of the forecast; of runs whose settings this file has changed since, with those that they had."""
    rows = json.loads((HERE / "validation.json").read_text())
    return [row | {"predicted": predict(row["changes"])} for row in rows]


def predict(changes: dict[str, Any]) -> dict[str, Any]:
    nodes = ("--nodes", str(changes["inference.nodes"]))
    with tempfile.TemporaryDirectory() as folder:
        said = forecast("buffer.forecast", changes, HERE / "fitted", Path(folder) / "forecast.json", *nodes)
    (predicted,) = said["forecasts"]
    return dict(predicted)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# `async-rl simulate` against real runs",
        "",
        "Written by `python docs/simulate/validate.py`. Lengths and speeds come from the first run alone; the others",
        "were not seen. All have two cores: capped nodes on one, trainer and services on the other. The first steps",
        "are left out on both sides (`buffer.fit.settled`), since a real run's first batch waits for nodes that load.",
        "",
        "A prediction is the mean over simulated runs that differ by chance alone, ± their standard deviation: a real",
        "run is a single draw, and lies about so far from what such runs are like on the average.",
        "",
        "Others: cores that other processes kept busy during the real run.",
        "",
        "| run | steps | steps/s real | predicted | ratio | staleness real | predicted | ratio |"
        " idle nodes, trainer real | predicted | others |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        real, said = row["measured"], row["predicted"]
        stale = f"{said['staleness_mean'] / real['staleness']:.3f}" if real["staleness"] else "equal"
        rate = f"{said['steps_per_s']:.4f} ± {said['steps_per_s_spread']:.4f}"
        age = f"{said['staleness_mean']:.3f} ± {said['staleness_spread']:.3f}"
        lines.append(
            f"| {row['run']} | {row['changes']['run.steps']} | {real['steps_per_s']:.4f} | {rate} | "
            f"{said['steps_per_s'] / real['steps_per_s']:.3f} | {real['staleness']:.3f} | {age} | {stale} | "
            f"{real['nodes_idle']:.0%}, {real['trainer_idle']:.0%} | "
            f"{said['nodes_idle']:.0%}, {said['trainer_idle']:.0%} | {real['others_cores']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--runs", type=Path, help="where the run directories are or will be")
    source.add_argument("--again", action="store_true", help="keep the measurements, predict them again")
    parser.add_argument("--next", action="store_true", help="make one missing run, and compare nothing")
    options = parser.parse_args()
    if options.again:
        write(predict_again())
        return
    for number, changes in enumerate(RUNS.values()):
        directory = options.runs / f"simulate-{number}"
        if not is_done(directory):
            real_run(directory, changes)
            if options.next:
                return
    write(compare(options.runs))


def write(rows: list[dict[str, Any]]) -> None:
    (HERE / "validation.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "validation.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

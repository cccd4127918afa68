"""`async-rl plan` against brute force: real runs with one to four capped nodes, planned from one of them.

    python docs/plan/brute_force.py --runs DIR            make the runs that are missing there, then compare
    python docs/plan/brute_force.py --runs DIR --next     make the next missing run only (they want a quiet machine)

Writes brute_force.json, brute_force.md and plan.png beside this file. Each run takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "simulate"))

from real import forecast, is_done, measured, real_run  # noqa: E402

STEPS = {1: 24, 2: 36, 3: 45, 4: 45}
"""By number of nodes: about a minute each."""
PLANNED_FROM = 2


def changes(nodes: int) -> dict[str, Any]:
    return {"run.steps": STEPS[nodes], "inference.nodes": nodes}


def compare(runs: Path) -> dict[str, Any]:
    source = runs / f"plan-{PLANNED_FROM}"
    options = ("--nodes", str(max(STEPS)), "--plot", str(HERE / "plan.png"))
    plan = forecast("buffer.plan", changes(PLANNED_FROM), source, source / "plan.json", *options)
    real = {nodes: measured(runs / f"plan-{nodes}") for nodes in STEPS}
    best = max(real, key=lambda nodes: real[nodes]["steps_per_s"])
    chosen = plan["chosen"]["nodes"]
    return {
        "points": [
            {"nodes": point["nodes"], "predicted": point, "measured": real[point["nodes"]]} for point in plan["points"]
        ],
        "chosen": chosen,
        "best": best,
        "chosen_over_best": real[chosen]["steps_per_s"] / real[best]["steps_per_s"],
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "# `async-rl plan` against brute force",
        "",
        f"Written by `python docs/plan/brute_force.py`: real runs with 1 to {max(STEPS)} capped nodes on one core, the",
        f"trainer on the other; planned from the run with {PLANNED_FROM} nodes. Others: cores that other processes",
        "kept busy during the real run.",
        "",
        "| nodes | steps/s measured | predicted | ratio | staleness measured | predicted | idle nodes, trainer measured"
        " | predicted | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in result["points"]:
        real, said = point["measured"], point["predicted"]
        lines.append(
            f"| {point['nodes']} | {real['steps_per_s']:.4f} | {said['steps_per_s']:.4f} | "
            f"{said['steps_per_s'] / real['steps_per_s']:.3f} | {real['staleness']:.3f} | "
            f"{said['staleness_mean']:.3f} | {real['nodes_idle']:.0%}, {real['trainer_idle']:.0%} | "
            f"{said['nodes_idle']:.0%}, {said['trainer_idle']:.0%} | {real['others_cores']:.2f} |"
        )
    lines += [
        "",
        f"Chosen: {result['chosen']} nodes, which measured {result['chosen_over_best']:.1%} of the best, that of "
        f"{result['best']} nodes.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="where the run directories are or will be")
    parser.add_argument("--next", action="store_true", help="make one missing run, and compare nothing")
    options = parser.parse_args()
    for nodes in STEPS:
        directory = options.runs / f"plan-{nodes}"
        if not is_done(directory):
            real_run(directory, changes(nodes))
            if options.next:
                return
    result = compare(options.runs)
    (HERE / "brute_force.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "brute_force.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()

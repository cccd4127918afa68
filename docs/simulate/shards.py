"""docs/simulate/shards.json and shards.md: pools of different sizes on a buffer of 16 shards, under
the real rules and a virtual clock, 1 % of the nodes dying each minute.

    python docs/simulate/shards.py 100 1000 10000
    python docs/simulate/shards.py --step 1.5 100 1000 10000   # a faster trainer

The batch grows with the pool: F = 0.6 groups a node. What is written says how long each took.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from async_rl.wire.messages import SamplingParams
from buffer.forecast import Forecast, forecast
from buffer.rules import Rules
from buffer.scenario import Constant, Lognormal, Scenario, Speed, TrainerSpeed, as_table

HERE = Path(__file__).parent
SHARDS, BOUND, GROUP, SLOTS, STEPS = 16, 8, 8, 8, 40
LIFE_S = 6000.0  # 1 % a minute
STEP_S = 2.0


def world(nodes: int, step_s: float = STEP_S) -> tuple[Rules, Scenario]:
    """Answers of 400 tokens in the median, cut at 1024, at 250 tokens a second and slot; pushes of half a second."""
    groups = -(-nodes * 6 // 10 // SHARDS) * SHARDS
    rules = Rules(
        run_seed=0, steps=STEPS, groups_per_step=groups, group_size=GROUP, max_staleness=BOUND, lead=BOUND, window=1,
        on_short_group="retry", zero_variance="keep", max_tries=8, capacity_bytes=1 << 60, group_bytes=1 << 20,
        lease_timeout=600.0, eval_share=0.5, sampling=SamplingParams(1.0, 1024), shards=SHARDS,
    )  # fmt: skip
    scenario = Scenario(
        seed=3, nodes=nodes, slots=SLOTS, lengths=Lognormal(400.0, 0.5, 1024.0), speed=Speed(step_s=SLOTS / 2000),
        push_s=Lognormal(0.5, 0.3), trainer=TrainerSpeed(Constant(step_s)), whole_groups=True, node_life_s=LIFE_S,
    )  # fmt: skip
    return rules, scenario


def page(rows: list[dict[str, object]]) -> str:
    lines = [
        "# Many nodes on sixteen shards, simulated",
        "",
        f"Made by `python docs/simulate/shards.py`: {SHARDS} shards, bound {BOUND}, groups of {GROUP}, {SLOTS} slots a "
        f"node, {STEPS} steps, 0.6 new groups a node and batch, and nodes of which 1 % die each minute "
        f"(they join again 10 s later). A node holds two groups or three, so F (K + 1) = {0.6 * (BOUND + 1):.1f} "
        "groups a node is 1.8 times what is in flight or more. Idle time is taken after the first steps, as `async-rl "
        "simulate` does; messages are those to and from the buffer that carry no trajectory, for each that came back.",
        "",
        "| nodes | groups a batch | a step in s | steps | staleness max | bound | trainer idle | nodes idle | "
        "messages | lost with a node, leased again | computed in s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['nodes']:,} | {row['groups']:,} | {row['step_s']:g} | {row['steps']} | {row['staleness_max']} | "
        f"{BOUND} | {row['trainer_idle']:.1%} | {row['nodes_idle']:.1%} | {row['control_messages']:.2f} | "
        f"{row['lost']:,.0f} | {row['took_s']:.0f} |"
        for row in rows
    ]
    lines += [
        "",
        f"The trainer waits for the oldest ticket. That of a dead node is noticed after three heartbeats and sampled "
        f"anew, for which {BOUND} steps ahead are time enough at {STEP_S:g} s a step and not at 1.5 s: there a trainer "
        "stands still although nodes have nothing to do. So we explain it; one seed each.",
    ]
    return "\n".join(lines) + "\n"


def row_of(made: Forecast, groups: int, step_s: float) -> dict[str, object]:
    if made.error:
        raise SystemExit(f"{made.nodes} nodes: {made.error}")
    return {**as_table(made), "groups": groups, "step_s": step_s, "lost": made.dropped.get("node_lost", 0.0)}


def main(counts: list[int], step_s: float) -> None:
    file = HERE / "shards.json"
    kept = json.loads(file.read_text()) if file.exists() else []
    rows = {(row["step_s"], row["nodes"]): row for row in kept}
    for nodes in counts:
        rules, scenario = world(nodes, step_s)
        rows[step_s, nodes] = row_of(forecast(rules, scenario), rules.groups_per_step, step_s)
        print(rows[step_s, nodes], flush=True)
        ordered = [rows[each] for each in sorted(rows, key=lambda each: (-each[0], each[1]))]
        file.write_text(json.dumps(ordered, indent=1) + "\n")
        (HERE / "shards.md").write_text(page(ordered))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pools of several sizes on sixteen shards, simulated.")
    parser.add_argument("nodes", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--step", type=float, default=STEP_S, metavar="S", help="seconds that the trainer takes a step")
    options = parser.parse_args()
    main(options.nodes, options.step)

"""docs/simulate/shards.json and shards.md: pools of different sizes on a buffer of 16 shards, under
the real rules and a virtual clock, 1 % of the nodes dying each minute.

    python docs/simulate/shards.py 100 1000 10000

The batch grows with the pool: F = 0.6 groups a node. What is written says how long each took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from async_rl.wire.messages import SamplingParams
from buffer.forecast import Forecast, forecast
from buffer.rules import Rules
from buffer.scenario import Constant, Lognormal, Scenario, Speed, TrainerSpeed, as_table

HERE = Path(__file__).parent
SHARDS, BOUND, GROUP, SLOTS, STEPS = 16, 8, 8, 8, 40
LIFE_S = 6000.0  # 1 % a minute
STEP_S = 2.0


def world(nodes: int) -> tuple[Rules, Scenario]:
    """Answers of 400 tokens in the median, cut at 1024, at 250 tokens a second and slot; pushes of half a second."""
    groups = -(-nodes * 6 // 10 // SHARDS) * SHARDS
    rules = Rules(
        run_seed=0, steps=STEPS, groups_per_step=groups, group_size=GROUP, max_staleness=BOUND, lead=BOUND, window=1,
        on_short_group="retry", zero_variance="keep", max_tries=8, capacity_bytes=1 << 60, group_bytes=1 << 20,
        lease_timeout=600.0, eval_share=0.5, sampling=SamplingParams(1.0, 1024), shards=SHARDS,
    )  # fmt: skip
    scenario = Scenario(
        seed=3, nodes=nodes, slots=SLOTS, lengths=Lognormal(400.0, 0.5, 1024.0), speed=Speed(step_s=SLOTS / 2000),
        push_s=Lognormal(0.5, 0.3), trainer=TrainerSpeed(Constant(STEP_S)), whole_groups=True, node_life_s=LIFE_S,
    )  # fmt: skip
    return rules, scenario


def page(rows: list[dict[str, object]]) -> str:
    lines = [
        "# Many nodes on sixteen shards, simulated",
        "",
        f"Made by `python docs/simulate/shards.py`: {SHARDS} shards, bound {BOUND}, groups of {GROUP}, {SLOTS} slots a "
        f"node, {STEPS} steps of {STEP_S:g} s, 0.6 new groups a node and batch, and nodes of which 1 % die each minute "
        f"(they join again 10 s later). A node holds two groups or three, so F (K + 1) = {0.6 * (BOUND + 1):.1f} "
        "groups a node is 1.8 times what is in flight or more. Idle time is taken after the first steps, as `async-rl "
        "simulate` does; messages are those to and from the buffer that carry no trajectory, for each that came back.",
        "",
        "| nodes | groups a batch | steps | staleness max | bound | trainer idle | nodes idle | messages | lost with a "
        "node, leased again | computed in s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['nodes']:,} | {row['groups']:,} | {row['steps']} | {row['staleness_max']} | {BOUND} | "
        f"{row['trainer_idle']:.1%} | {row['nodes_idle']:.1%} | {row['control_messages']:.2f} | "
        f"{row['lost']:,.0f} | {row['took_s']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def row_of(made: Forecast, groups: int) -> dict[str, object]:
    if made.error:
        raise SystemExit(f"{made.nodes} nodes: {made.error}")
    return {**as_table(made), "groups": groups, "lost": made.dropped.get("node_lost", 0.0)}


def main(counts: list[int]) -> None:
    file = HERE / "shards.json"
    rows = {row["nodes"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for nodes in counts:
        rules, scenario = world(nodes)
        rows[nodes] = row_of(forecast(rules, scenario), rules.groups_per_step)
        print(nodes, rows[nodes], flush=True)
        ordered = [rows[each] for each in sorted(rows)]
        file.write_text(json.dumps(ordered, indent=1) + "\n")
        (HERE / "shards.md").write_text(page(ordered))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [100, 1000, 10_000])

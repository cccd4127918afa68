"""docs/bench/README.md from the files of `async-rl bench NAME --json docs/bench/NAME.json`:

    python docs/bench/render.py

A test checks that the page is what this makes of the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.run.bench import ratios, remarks, spread
from async_rl.run.bench_pipeline import ideal_lines

HERE = Path(__file__).parent

INTRODUCTION = """\
# Benchmarks

Each file here was written by `async-rl bench NAME --json docs/bench/NAME.json`; this page is made of them by
`docs/bench/render.py`. Figures of one machine do not carry over to another, so look at the ratios: every arm was
measured in turn with its baseline, and a ratio is the median of those within a round (lowest–highest), above 1 meaning
better than the baseline. `--compare docs/bench/NAME.json` sets a run of yours beside these. `transport_curve` is
`bench transport --curve --producers 4 --arms CURVE raw ingest`. `memory` is written by
`python -m trainer.megatron.measure_memory --json docs/bench/memory.json`: an estimate beside what it is an estimate of,
where a ratio of 1 is best.
"""


def render(folder: Path) -> str:
    """The page's text."""
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return "\n".join([INTRODUCTION, *(_section(name, document) for name, document in documents.items())])


def _section(name: str, document: dict[str, Any]) -> str:
    machine = document["machine"]
    libraries = ", ".join(f"{name} {number}" for name, number in machine["libraries"].items())
    lines = [
        f"## {name}",
        "",
        f"{document['made'][:10]}, {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{libraries}; {document['settings']['rounds']} rounds.",
        "",
        *(line for cell in document["cells"] for line in _table(cell, document["metrics"])),
    ]
    if "ideal" in document:
        lines += [*(f"- {line}" for line in ideal_lines(document["ideal"]).splitlines()), ""]
    return "\n".join(lines)


def _table(cell: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| {cell['cell']} | ratio | " + " | ".join(metric["label"] for metric in metrics) + " |",
        "|---|---|" + "---|" * len(metrics),
    ]
    for arm, values in cell["arms"].items():
        ratio = "baseline" if arm == cell["baseline"] else spread(ratios(cell, arm, metrics[0]), 3)
        row = [spread(values.get(metric["key"]), metric["digits"]) for metric in metrics]
        lines.append(f"| {arm} | {ratio} | " + " | ".join(row) + " |")
    return [*lines, "", *(f"- {line}" for line in remarks(cell)), *([""] if remarks(cell) else [])]


if __name__ == "__main__":
    (HERE / "README.md").write_text(render(HERE))

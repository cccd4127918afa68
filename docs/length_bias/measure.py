"""What not waiting for late answers does to their lengths, where an answer takes as long as it has tokens.

    python docs/length_bias/measure.py            # some minutes; writes length_bias.json and length_bias.md beside it

Three real runs of the quickstart's model, one for each `buffer.on_stale`: a node as fast as this machine, and one held
to so many tokens a second that its longer answers take more time than the bound allows. The temperature is high, so
that lengths differ, and the learning rate low, so that they stay as they are.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

from real_runs import Shell, summary, wait_for  # noqa: E402

LIMIT_S = 900.0
CHOICES = ("wait", "drop", "mask")
SLOW_TOKENS_PER_SECOND, SLOW_SLOTS = 120, 4
SETTINGS = {
    "run.steps": 40, "run.eval_every": 0, "buffer.max_staleness": 1, "buffer.groups_per_step": 8,
    "buffer.group_size": 8, "inference.slots": 16, "inference.temperature": 2.0, "inference.max_new_tokens": 64,
    "inference.max_context": 80, "trainer.learning_rate": 1e-6, "trainer.checkpoint_every": 0,
}  # fmt: skip


def run(folder: Path, on_stale: str) -> dict[str, Any]:
    """The run's summary."""
    settings = {**SETTINGS, "buffer.on_stale": on_stale}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    arguments = ["quickstart", "--out", str(folder), *words]
    shell = Shell(folder.parent)
    try:
        buffer = shell.start("buffer", *arguments)
        wait_for((folder / "run.json").exists, 60, "the run directory")
        slow = (
            "--set", f"inference.max_tokens_per_second={SLOW_TOKENS_PER_SECOND}", "--set",
            f"inference.slots={SLOW_SLOTS}",
        )  # fmt: skip
        pools = [
            shell.start("infer", *arguments, "--name", "fast"),
            shell.start("infer", *arguments, "--name", "slow", *slow),
            shell.start("train", *arguments),
            buffer,
        ]
        for process in pools:
            output, _ = process.communicate(timeout=LIMIT_S)
            if process.returncode:
                raise SystemExit(output)
    finally:
        shell.close()
    return summary(folder)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    dropped = Counter(found["ledger"]["dropped"])
    return {
        "staleness_max": found["staleness"]["max"],
        "dropped_stale": dropped["stale"],
        "cancelled": dropped["cancelled"],
        "waste": found["waste"],
        **found["length_bias"],
    }


def page(result: dict[str, Any]) -> str:
    rows = []
    for choice, found in result["runs"].items():
        low, high = found["interval"]
        mean = found["mean_tokens"]
        rows.append(
            f"| {choice} | {found['sampled']:,} | {found['trained']:,} | {mean['sampled']:.2f} | {mean['trained']:.2f} "
            f"| {found['ks']:.4f} ({low:.4f}–{high:.4f}) | {found['waste']:.1%} | {found['dropped_stale']:,} "
            f"| {found['cancelled']:,} |"
        )
    lines = "\n".join(rows)
    return f"""# What not waiting does to the lengths of answers

Made by `python docs/length_bias/measure.py` on {result["machine"]}, from
[length_bias.json](length_bias.json): runs of {result["steps"]} steps at bound 1 with a node as fast as the machine, and
one that samples {result["slow"]} answers at once at {result["tokens_per_s"]} tokens a second together, on which an
answer takes as long as it has tokens. KS is the Kolmogorov-Smirnov distance of the lengths that trained from those of
all good answers that arrived, with its 95 % interval (Dvoretzky-Kiefer-Wolfowitz, at half of 5 % for each). An attempt
that is cancelled, because it could no longer make the bound, has no length and is not in it.

| on_stale | sampled | trained | mean tokens sampled | trained | KS | waste | stale | cancelled |
|---|---|---|---|---|---|---|---|---|
{lines}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = {choice: figures(run(Path(folder) / choice, choice)) for choice in CHOICES}
    result = {
        "machine": f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "steps": SETTINGS["run.steps"],
        "slow": SLOW_SLOTS,
        "tokens_per_s": SLOW_TOKENS_PER_SECOND,
        "runs": runs,
    }
    (HERE / "length_bias.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "length_bias.md").write_text(page(result))


if __name__ == "__main__":
    main()

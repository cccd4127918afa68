"""What `make run` must have shown, read from the run's summary.json: `python .ci/check_quickstart.py runs/latest`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 360  # .ci/run holds the whole command to it, the making of the base model included


def problems(summary: dict[str, Any]) -> list[str]:
    if None in (summary["eval"]["first"], summary["eval"]["last"]) or not summary["ledger"]:
        return ["there is an evaluation at each end, and a closing account from the buffer"]
    first, last = summary["eval"]["first"], summary["eval"]["last"]
    reward, staleness, ledger = summary["reward"], summary["staleness"], summary["ledger"]
    accounted = sum(ledger[key] for key in ("leased", "ready", "batched", "trained")) + sum(ledger["dropped"].values())
    holds = {
        f"eval.first = {first} is at most 0.6": first <= 0.6,
        f"eval.last = {last} is at least 0.75": last >= 0.75,
        f"eval rose from {first} to {last}, by at least 0.2": last >= first + 0.2,
        f"sampled reward rose from {reward['first']} to {reward['last']}, to 1.5 times": reward["last"]
        >= 1.5 * reward["first"],
        f"staleness.max = {staleness['max']} is within the bound of 4": staleness["max"] <= 4 == staleness["bound"],
        f"staleness.mean = {staleness['mean']} is above 0": staleness["mean"] > 0,
        f"the ledger balances: {ledger['issued']} issued, {accounted} accounted for": ledger["issued"] == accounted,
        f"it took {summary['wall_seconds']} s, at most {LONGEST_SECONDS}": summary["wall_seconds"] <= LONGEST_SECONDS,
    }
    return [claim for claim, held in holds.items() if not held]


if __name__ == "__main__":
    found = problems(json.loads((Path(sys.argv[1]) / "summary.json").read_text()))
    for claim in found:
        print(f"does not hold: {claim}", file=sys.stderr)
    print(f"quickstart: {int(not found)} passed, {int(bool(found))} failed")
    sys.exit(bool(found))

"""A real run can be watched, looked at, simulated and planned from; every benchmark runs."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import real_runs
from browser import Browser, find_chromium

from async_rl.errors import AsyncRLError
from async_rl.run.cli import BENCHES
from async_rl.run.metrics import read_metrics, steps_of
from async_rl.run.status import state_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS = 12
POOLS = {"buffer", "store", "trainer", "node-0", "node-1"}
CAP = 100  # tokens a second of a node: slow, so that who looks at the run has the time to


def all_are_there(run: Path) -> bool:
    if len(steps_of(read_metrics(run / "metrics.jsonl"))) < 3:
        return False
    with suppress(AsyncRLError):  # the buffer may be too busy to answer in time
        ready = {node.name for node in state_of(str(run)).nodes if node.state == "ready"}
        return ready == {"node-0", "node-1"} and {file.stem for file in (run / "prometheus").glob("*.json")} == POOLS
    return False


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was scraped while it ran: its directory, with what was seen in scraped.json and status.json."""
    shell = real_runs.Shell(tmp_path_factory.mktemp("watched"))
    try:
        run = shell.folder / "run"
        process = shell.start(
            "run", str(shell.config), "--out", str(run), "--set", f"run.steps={STEPS}", "--set", "run.eval_every=6",
            "--set", 'run.trackers=["tensorboard"]', "--set", f"inference.max_tokens_per_second={CAP}",
        )  # fmt: skip
        real_runs.wait_for(lambda: all_are_there(run), 200, "both nodes and a few steps")
        scraped = {}
        for file in (run / "prometheus").glob("*.json"):
            ((target,),) = (entry["targets"] for entry in json.loads(file.read_text()))
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
                scraped[file.stem] = answer.read().decode()
        code, status = shell.run("status", str(run), "--json")
        assert code == 0, status
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        (shell.folder / "scraped.json").write_text(json.dumps(scraped))
        (shell.folder / "status.json").write_text(status)
        return run
    finally:
        shell.close()


def test_every_process_of_a_run_can_be_scraped_while_it_runs(watched: Path) -> None:
    scraped = json.loads((watched.parent / "scraped.json").read_text())
    assert set(scraped) == POOLS
    for name, text in scraped.items():
        assert "async_rl_" in text, name
    assert list((watched / "prometheus").glob("*.json")) == []


def test_status_of_a_running_run_names_its_nodes_and_who_waits(watched: Path) -> None:
    status = json.loads((watched.parent / "status.json").read_text())
    assert status["phase"] == "running"
    assert {node["name"] for node in status["nodes"]} == {"node-0", "node-1"}
    assert status["ledger_balances"] is True
    assert status["waiting"]


def test_a_capped_node_samples_no_faster_than_its_cap(watched: Path) -> None:
    looks = [line["pools"] for line in map(json.loads, (watched / "metrics.jsonl").open()) if "pools" in line]
    nodes = {node["name"]: node for node in looks[-1]["nodes"]}
    for node in nodes.values():
        assert 0 < node["sampled_tokens"] <= CAP * node["busy_s"] * 1.05 + 64


def test_a_run_that_is_over_has_a_report_a_status_and_event_files(watched: Path, shell: real_runs.Shell) -> None:
    assert (watched / "report.html").stat().st_size > 100_000
    assert list((watched / "tensorboard").glob("events*"))
    code, text = shell.run("status", str(watched))
    assert code == 0, text
    for words in ("finished", "node-0", "balance"):
        assert words in text
    (watched / "report.html").unlink()
    code, text = shell.run("report", str(watched))
    assert code == 0, text
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with Browser(chromium) as browser:
        for width in (1280, 390):
            browser.open(watched / "report.html", width)
            assert browser.complaints() == []


def test_a_run_can_be_simulated_and_planned_from(watched: Path, shell: real_runs.Shell) -> None:
    forecast, plan, plot = (shell.folder / name for name in ("forecast.json", "plan.json", "plan.png"))
    config = str(watched / "config.toml")
    code, text = shell.run("simulate", config, "--from", str(watched), "--nodes", "2,20", "--json", str(forecast))
    assert code == 0, text
    assert len(json.loads(forecast.read_text())["forecasts"]) == 2
    code, text = shell.run("plan", config, "--from", str(watched), "--json", str(plan), "--plot", str(plot))
    assert code == 0, text
    assert plan.stat().st_size > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


# These take minutes also at their quickest; flips has a test of its own (tests/inference/test_bench_flips.py).
LONGEST = ("transport", "scale", "flips")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LONGEST else ()) for name in BENCHES],
)
def test_a_benchmark_runs_and_can_be_compared_with_itself(name: str, shell: real_runs.Shell) -> None:
    file = shell.folder / f"{name}.json"
    code, text = shell.run("bench", name, "--quick", "--json", str(file), timeout=450)
    assert code == 0, text
    document = json.loads(file.read_text())
    assert document["bench"] == name
    for cell in document["cells"]:
        assert cell["baseline"] in cell["arms"]
        assert all(values for arm in cell["arms"].values() for values in arm.values())

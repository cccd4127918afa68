"""Whole runs with real processes, sockets and a real (tiny) language model."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import peft
import pytest
import real_runs
import transformers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def check_finished(run: Path, steps: int, bound: int) -> dict:
    """What must hold of every run that ended well."""
    summary = real_runs.summary(run)
    ledger = summary["ledger"]
    open_attempts = ledger["leased"] + ledger["ready"] + ledger["batched"]
    assert summary["steps"] == steps
    assert open_attempts == 0
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["trained"] == sum(record["trained"] - record["reused"] for record in real_runs.records(run))
    assert summary["staleness"]["max"] <= bound
    assert real_runs.processes_of(run) == []
    return summary


def test_reward_rises_when_a_model_learns_across_processes(shell):
    run = shell.folder / "learns"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run),
        "--set", "run.steps=60", "--set", "run.eval_every=60", "--set", "run.eval_samples=256",
        "--set", "buffer.groups_per_step=16", "--set", "inference.slots=64", "--set", "buffer.max_staleness=2",
        timeout=580,
    )  # fmt: skip
    assert code == 0, output
    summary = check_finished(run, steps=60, bound=2)
    rewards = [record["reward"] for record in real_runs.records(run)]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    # 1,280 samples at each end, so a standard error below 0.015: a rise by a quarter is not luck.
    assert last >= first + 0.08, (first, last)
    assert summary["staleness"]["mean"] > 0
    assert summary["eval"]["last"] > summary["eval"]["first"]
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert "try next" in output


def test_with_bound_0_every_token_is_of_the_trainers_version_and_both_log_probabilities_agree(shell):
    """And its final adapter loads with the line that the run prints (one run serves both)."""
    run = shell.folder / "lockstep"
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--set", "buffer.max_staleness=0")
    assert code == 0, output
    check_finished(run, steps=6, bound=0)
    for record in real_runs.records(run):
        assert record["staleness_tokens"] == [record["tokens"]]
        assert record["mismatch_mean"] <= 1e-6
        assert record["mismatch_max"] <= 5e-5
    line = next(line.strip() for line in output.splitlines() if "PeftModel.from_pretrained" in line)
    namespace = {"peft": peft, "transformers": transformers}
    exec(line, namespace)
    assert any("lora_B" in name for name, _ in namespace["model"].named_parameters())
    config = json.loads((run / "adapters" / "final" / "adapter_config.json").read_text())
    assert config["r"] == 16


@pytest.mark.parametrize("in_flight", ["continue", pytest.param("recompute", marks=pytest.mark.long)])
def test_every_in_flight_policy_completes_a_run_within_the_bound(shell, in_flight):
    run = shell.folder / in_flight
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--set", f"inference.in_flight={in_flight}")
    assert code == 0, output
    check_finished(run, steps=6, bound=4)


def test_groups_that_teach_nothing_are_sampled_anew_and_every_batch_has_its_size(shell):
    """Two answers to a question of which a quarter is right: most groups have equal rewards."""
    run = shell.folder / "refill"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "buffer.zero_variance=refill",
        "--set", "buffer.group_size=2", "--set", "buffer.max_tries=100",
    )  # fmt: skip
    assert code == 0, output
    summary = check_finished(run, steps=6, bound=4)
    assert [record["trained"] for record in real_runs.records(run)] == [8] * 6
    assert {record["reward"] for record in real_runs.records(run)} == {0.5}  # one right and one wrong, in each group
    assert summary["ledger"]["dropped"]["zero_variance"] >= summary["ledger"]["trained"] / 2


@pytest.mark.sample
def test_a_group_trains_in_several_batches_and_is_counted_once(shell):
    """B = 4, R = 2: two new groups a batch, and from the second on two that trained before."""
    run = shell.folder / "replay"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "buffer.order=replay", "--set", "buffer.reuse=2"
    )
    assert code == 0, output
    summary = check_finished(run, steps=6, bound=4)
    assert [record["trained"] for record in real_runs.records(run)] == [16] + [32] * 5
    assert [record["reused"] for record in real_runs.records(run)] == [0] + [16] * 5
    assert summary["ledger"]["trained"] == 6 * 16
    assert summary["reused"] == {"trained": 5 * 16, "short_batches": 1}
    assert summary["waste"] is not None


@pytest.mark.sample
def test_the_newest_groups_train_first_and_what_that_costs_is_told(shell):
    run = shell.folder / "fresh"
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--set", "buffer.order=fresh")
    assert code == 0, output
    summary = check_finished(run, steps=6, bound=4)
    assert summary["ledger"]["trained"] == 6 * 4 * 8
    assert summary["waste"] is not None


@pytest.mark.sample
def test_trouble_that_the_trainer_reports_makes_nodes_work_less_far_ahead_on_questions_with_a_history(shell):
    """Any k3 is too much here, so the bound falls from its first report on; instances are few, and asked by history."""
    run = shell.folder / "adaptive"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "run.steps=16", "--set", "buffer.adaptive=true",
        "--set", "buffer.adaptive_k3=1e-9", "--set", "task.size=24", "--set", "buffer.difficulty=weighted",
        "--set", "buffer.retire_above=0.95",
    )  # fmt: skip
    assert code == 0, output
    summary = check_finished(run, steps=16, bound=4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bounds = [line["pools"]["adaptive_bound"] for line in lines if "pools" in line]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] <= 2
    assert summary["ledger"]["trained"] == 16 * 32


def test_pools_started_by_hand_over_tcp_outlive_a_node_that_is_killed_when_another_has_joined(shell, free_port):
    run = shell.folder / "by-hand"
    endpoints = [
        "--set", f"buffer.endpoint=tcp://127.0.0.1:{free_port()}",
        "--set", f"buffer.store_endpoint=tcp://127.0.0.1:{free_port()}",
        "--set", "run.steps=300",
    ]  # fmt: skip
    common = [str(shell.config), "--out", str(run), *endpoints]
    buffer = shell.start("buffer", *common)
    real_runs.wait_for((run / "run.json").exists, 100, "the buffer's run directory")
    first = shell.start("infer", *common, "--name", "first")
    trainer = shell.start("train", *common)
    real_runs.wait_for(lambda: (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= 5, 90, "five steps")
    second = shell.start("infer", *common, "--name", "second")

    def second_contributes() -> bool:
        return any("second" in record["nodes"] for record in real_runs.records(run))

    real_runs.wait_for(second_contributes, 90, "work of the second node")
    code, output = shell.run("status", str(run))
    assert code == 0, output
    assert "second" in output
    first.kill()
    outputs = {}
    for name, process in {"trainer": trainer, "second": second, "buffer": buffer}.items():
        outputs[name], _ = process.communicate(timeout=300)
        assert process.returncode == 0, (name, outputs[name])
    assert "node first is gone" in outputs["buffer"]
    check_finished(run, steps=300, bound=4)
    # It served what was current when it joined, which was not version 0.
    serving = [line for line in outputs["second"].splitlines() if "serving policy" in line]
    assert serving
    assert int(serving[0].split("serving policy ")[1].split("-")[0]) >= 4


@pytest.mark.sample
def test_an_interrupted_run_goes_on_from_its_checkpoint_and_the_ledger_balances(shell):
    run = shell.folder / "resumed"
    arguments = [str(shell.config), "--out", str(run), "--set", "run.steps=24"]
    process = shell.start("run", *arguments)
    real_runs.wait_for(lambda: (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= 5, 90, "five steps")
    real_runs.interrupt(process)
    output, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    assert "--resume" in output
    assert real_runs.processes_of(run) == []
    before = max(record["step"] for record in real_runs.records(run))
    assert before < 23

    code, output = shell.run("run", str(run / "config.toml"), "--out", str(run), "--resume")
    assert code == 0, output
    summary = real_runs.summary(run)
    assert summary["steps"] == 24
    assert summary["ledger_balances"]
    # Interrupted runs checkpoint at the step they reached, so no step is trained twice.
    assert [record["step"] for record in real_runs.records(run)] == list(range(24))
    assert summary["ledger"]["trained"] == 24 * 32

"""What a person sees when something is wrong: one message that says what, where and what to do, and an exit."""

from __future__ import annotations

import socket

import pytest
import real_runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(750)]


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_a_wrong_key_names_the_nearest_right_one(shell):
    code, output = shell.run("run", str(shell.config), "--set", "buffer.max_stalenes=2")
    assert code != 0
    assert "max_stalenes" in last_line(output)
    assert "`max_staleness`" in last_line(output)
    assert "Traceback" not in output


def test_a_wrong_task_key_names_the_nearest_right_one(shell):
    code, output = shell.run("run", str(shell.config), "--set", "task.digit=5")
    assert code != 0
    assert "`digits`" in last_line(output)


def test_a_missing_model_path_is_named(shell):
    code, output = shell.run("run", str(shell.config), "--set", "model.path=/nowhere/model")
    assert code != 0
    assert "/nowhere/model" in last_line(output)
    assert "Traceback" not in output


def test_a_port_in_use_is_named_and_nothing_is_left(shell, free_port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = shell.folder / "taken"
        code, output = shell.run(
            "run", str(shell.config), "--out", str(run), "--set", f"buffer.endpoint=tcp://127.0.0.1:{port}"
        )
    assert code != 0
    assert f"127.0.0.1:{port}" in output
    assert "in use" in output
    assert real_runs.processes_of(run) == []


def test_a_dead_buffer_endpoint_ends_within_its_time_out_and_is_named(shell, free_port):
    run = shell.folder / "dead"
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    common = [str(shell.config), "--out", str(run), "--set", f"buffer.endpoint={endpoint}"]
    buffer = shell.start("buffer", *common)
    real_runs.wait_for((run / "run.json").exists, 100, "the run directory")
    real_runs.interrupt(buffer)
    buffer.wait(timeout=250)
    code, output = shell.run("infer", *common, "--set", "run.connect_timeout=3")
    assert code != 0
    assert "waited 3 s" in last_line(output)
    assert endpoint in last_line(output)
    assert "buffer" in last_line(output)


def test_an_address_beyond_loopback_is_refused_without_keys(shell):
    code, output = shell.run("run", str(shell.config), "--set", "buffer.endpoint=tcp://0.0.0.0:5555")
    assert code != 0
    assert "0.0.0.0 can be reached from other machines, which needs CURVE keys" in last_line(output)


def test_a_node_with_another_task_is_refused_with_both_values(shell, free_port):
    run = shell.folder / "fingerprint"
    common = [str(shell.config), "--out", str(run), "--set", f"buffer.endpoint=tcp://127.0.0.1:{free_port()}"]
    shell.start("buffer", *common)
    real_runs.wait_for((run / "run.json").exists, 100, "the run directory")
    shell.start("train", *common)
    node = shell.start("infer", *common, "--set", "inference.temperature=0.5")
    output, _ = node.communicate(timeout=220)
    assert node.returncode != 0
    assert "temperature 0.5" in output
    assert "temperature 1.0" in output

"""The push benchmark: that what it calls flipped is served, that its baselines copy all, and that nothing stays."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from async_rl.policy.adapter import write_adapter
from async_rl.version import PolicyId
from inference.bench_push_receiver import (
    AnyAnswer,
    Failed,
    Go,
    Join,
    Leave,
    Ready,
    Receiver,
    ServedModel,
    Take,
    Taken,
    hear,
    make_adapter,
    tell,
)

PATIENCE_S = 280.0
MODULE = "layers.3.self_attn.k_proj"
BENCH = (sys.executable, "-P", "-m", "inference.bench_push", "--sizes", "1")


# --- the receiver ----------------------------------------------------------------------------------------------------


def test_what_is_flipped_to_is_what_the_layers_compute_with_and_not_before(tmp_path: Path) -> None:
    model = ServedModel()
    layer = model.linears[MODULE]
    x = torch.linspace(-1, 1, layer.in_features, dtype=torch.bfloat16)[None]
    base = layer(x)
    served = []
    for version in (1, 2, 3):
        tensors, config = make_adapter(1_000_000, seed=version)
        path = tmp_path / "adapter.safetensors"
        policy = PolicyId("main", version, write_adapter(path, tensors, config))
        model.install(policy, path)
        if served:
            assert torch.equal(layer(x), served[-1])
        model.flip(policy)
        assert model.serving == policy
        a, b = (tensors[f"base_model.model.{MODULE}.lora_{part}.weight"] for part in "AB")
        served.append(layer(x))
        torch.testing.assert_close(served[-1], base + (x @ a.T) @ b.T)
    assert not torch.equal(served[0], served[1])
    assert not torch.equal(served[1], served[2])
    model.clear()
    assert torch.equal(layer(x), base)


@pytest.mark.parametrize("size", [1_000_000, 160_000_000])
def test_an_adapter_has_about_the_size_it_is_asked_to_have(size: int) -> None:
    tensors, _ = make_adapter(size, seed=0)
    assert len(tensors) == 392
    assert sum(tensor.nbytes for tensor in tensors.values()) == pytest.approx(size, rel=0.01)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[Receiver, Callable[[object], AnyAnswer], mmap.mmap]]:
    """In a thread, its shared memory, and a way to tell it something and hear what it says."""
    ours, theirs = multiprocessing.Pipe()
    shared = mmap.mmap(-1, 1 << 16)
    made = Receiver("receiver", theirs, shared, 1 << 16, tmp_path)
    thread = threading.Thread(target=made.work)
    thread.start()

    def say(order: object) -> AnyAnswer:
        if order is not None:
            tell(ours, order)
        assert ours.poll(PATIENCE_S)
        return hear(ours, AnyAnswer)

    yield made, say, shared
    ours.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_what_comes_through_shared_memory_is_copied_whole_and_only_after_the_word(receiver) -> None:
    made, say, shared = receiver
    data = os.urandom(50_000)
    assert say(Take("shared memory", len(data))) == Ready()
    shared[: len(data)] = data
    assert isinstance(say(Go()), Taken)
    assert bytes(made._own[: len(data) + 1]) == data + b"\0"


def test_what_comes_over_tcp_is_copied_whole_and_a_sender_that_hangs_up_is_told_of(receiver) -> None:
    made, say, _ = receiver
    data = os.urandom(50_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert say(Join(port=listener.getsockname()[1])) == Ready()
        connection, _ = listener.accept()
    with connection:
        assert say(Take("raw TCP", len(data))) == Ready()
        connection.sendall(data[:20_000])
        connection.sendall(data[20_000:])
        assert isinstance(say(None), Taken)
        assert bytes(made._own[: len(data)]) == data
        assert say(Take("raw TCP", 10)) == Ready()
        connection.sendall(data[:9])
    failed = say(None)
    assert isinstance(failed, Failed)
    assert "hung up after 9 of 10 bytes" in failed.error
    assert say(Leave()) == Ready()


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary directory for everything that a benchmark makes, short enough for its sockets; no process that
    names it is left when the test ends well."""
    folder = Path(tempfile.mkdtemp(prefix="p-", dir="/tmp"))
    yield folder
    for process in processes_of(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(place), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*BENCH, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Tests that a shell runs in the background begin with SIGINT ignored, and their children would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes_of(place: Path) -> list[psutil.Process]:
    """Every process that was started with this temporary directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(place) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def nothing_is_left(place: Path) -> None:
    """The store's watchdog looks every quarter of a second whether the store is still there."""
    deadline = time.monotonic() + PATIENCE_S
    while processes_of(place):
        assert time.monotonic() < deadline, processes_of(place)
        time.sleep(0.02)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    said = ""
    while text not in said:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = process.stdout.readline() if ready else ""
        assert line, f"waited for {text!r}, it said {said!r}"
        said += line


@pytest.mark.slow
def test_a_quick_run_writes_every_measurement_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    written = tmp_path / "push.json"
    process = start(place, "--receivers", "1", "2", "--quick", "--json", str(written))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    cells = json.loads(written.read_text())["cells"]
    assert [cell["cell"] for cell in cells] == ["1 MB to 1 receiver", "1 MB to 2 receivers"]
    for cell in cells:
        assert list(cell["arms"]) == ["store", "relay", "raw TCP", "shared memory"]
        assert all(len(values) == 2 for arm in cell["arms"].values() for values in arm.values())
        assert all(value > 0 for arm in cell["arms"].values() for values in arm.values() for value in values)
        store = cell["arms"]["store"]
        for fetched, verified, flipped in zip(
            *(store[f"{moment}_ms"] for moment in ("fetched", "verified", "flipped")), strict=True
        ):
            assert fetched < verified < flipped
    nothing_is_left(place)
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "tidy"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, True), (signal.SIGKILL, -9, False)],
)
def test_a_run_that_is_ended_takes_its_processes_along(place: Path, number: int, code: int, tidy: bool) -> None:
    """And its files and sockets, where it can still do so."""
    process = start(place, "--receivers", "3", "--rounds", "100000")
    read_until(process, "round 2")
    assert len(processes_of(place)) == 6  # itself, three receivers, the store and its watchdog
    os.killpg(process.pid, number)  # as a terminal sends it: receivers get it, too
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, output
    nothing_is_left(place)
    assert tidy == (list(place.iterdir()) == [])


@pytest.mark.slow
def test_a_run_whose_store_dies_says_so_and_leaves_nothing(place: Path) -> None:
    process = start(place, "--receivers", "2", "--rounds", "100000")
    read_until(process, "round 2")
    (store,) = [child for child in processes_of(place) if "buffer.store" in child.cmdline()]
    store.kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, output
    assert "error: the store has died (exit code -9)" in output.splitlines()[-1]
    nothing_is_left(place)
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_a_run_whose_receiver_dies_names_it_and_leaves_nothing(place: Path) -> None:
    process = start(place, "--receivers", "2", "--rounds", "100000")
    read_until(process, "round 2")
    receivers = [child for child in psutil.Process(process.pid).children() if "buffer.store" not in child.cmdline()]
    max(receivers, key=lambda child: child.pid).kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, output
    assert "error: receiver-1 " in output.splitlines()[-1]
    nothing_is_left(place)
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_more_than_the_memory_holds_is_refused_before_anything_is_made(place: Path) -> None:
    process = start(place, "--receivers", "1000000")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "use fewer --receivers" in output.splitlines()[-1]
    assert list(place.iterdir()) == []

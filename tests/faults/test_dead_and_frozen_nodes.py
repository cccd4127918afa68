"""A node that is frozen, half-open or idle is found by its silence, named, and costs the others only its work."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_work import FakeNode, FakeTrainer, Published, Service, finish, node_main, wait_for
from tcp_proxy import TcpProxy

from async_rl.wire.link import Client, LinkTimeout

HEARTBEAT_S = 0.5
SILENCE_S = 3 * HEARTBEAT_S
SLACK_S = 25.0  # of a busy machine, and of the looks at it from here


class Crowd:
    """A buffer, a trainer and a sound node at work; who is about to fall ill joins them."""

    def __init__(self, folder: Path, steps: int, **buffer: Any) -> None:
        self.buffer = Service(folder, run={"steps": steps}, buffer={"heartbeat": HEARTBEAT_S} | buffer)
        self.published = Published()
        self.tool = self.buffer.dial("tool", "tool")
        self.trainer = FakeTrainer(
            self.buffer.dial("trainer", "trainer"), self.buffer.config, self.published, pause_s=0.05
        )
        self.sound = self.node("sound")

    def node(self, name: str, endpoint: str = "") -> FakeNode:
        link = self.buffer.dial("node", name, endpoint)
        return FakeNode(link, name, self.published, len(name), lambda rng: 16)

    def start(self, *others: FakeNode) -> None:
        for thread in (self.trainer, self.sound, *others):
            thread.start()
        wait_for(lambda: self.trainer.steps_done >= 3, "three steps")

    def wait_until_ready(self, name: str) -> None:
        wait_for(lambda: "ready" in self._states(name), f"{name} to be ready", 60)

    def check_is_lost_in_time(self, name: str) -> None:
        """From now on: no status has it any more, and the log says why."""
        took_s = wait_for(lambda: not self._states(name), f"{name} to be lost", 60)
        assert took_s < SILENCE_S + SLACK_S
        assert f"node {name} is gone: silent for" in self.buffer.log.read_text()

    def _states(self, name: str) -> list[str]:
        return [node.state for node in self.buffer.status(self.tool).nodes if node.name == name]

    def check_the_run_goes_on_and_ends(self, steps: int) -> None:
        done = self.trainer.steps_done
        wait_for(lambda: self.trainer.steps_done >= min(done + 5, steps), "five more steps", 60)
        finish(self.trainer, self.sound, timeout_s=240)
        assert self.trainer.steps_done == steps
        assert self.trainer.final is not None
        ledger = dict(self.trainer.final.ledger)
        issued = ledger.pop("issued")
        assert issued == sum(ledger.values())
        assert len({key for key, _ in self.trainer.trained}) == len(self.trainer.trained) == ledger["trained"]


@contextmanager
def crowd(folder: Path, steps: int, **buffer: Any) -> Iterator[Crowd]:
    made = Crowd(folder, steps, **buffer)
    try:
        yield made
    finally:
        made.trainer.ending = made.sound.ending = True
        made.tool.close(0.2)
        made.buffer.close()


def test_a_frozen_node_is_lost_after_three_heartbeats_and_welcome_when_it_thaws(tmp_path: Path) -> None:
    steps = 300
    with crowd(tmp_path, steps) as all_:
        context = multiprocessing.get_context("spawn")
        version = context.Value("i", -1)
        arguments = (str(all_.buffer.directory.path), all_.buffer.directory.endpoint, "frozen", HEARTBEAT_S, version)
        process = context.Process(target=node_main, args=arguments, daemon=True)
        process.start()
        assert process.pid is not None
        try:
            wait_for(lambda: bool(all_._states("frozen")), "the frozen one to come")
            all_.start()
            version.value = all_.published.version
            all_.wait_until_ready("frozen")
            os.kill(process.pid, signal.SIGSTOP)
            all_.check_is_lost_in_time("frozen")
            os.kill(process.pid, signal.SIGCONT)
            version.value = all_.published.version
            all_.wait_until_ready("frozen")
            all_.check_the_run_goes_on_and_ends(steps)
        finally:
            process.kill()
            process.join(10)


def test_a_node_whose_connection_is_half_open_is_lost_after_three_heartbeats(tmp_path: Path) -> None:
    steps = 60
    with crowd(tmp_path, steps) as all_, TcpProxy(all_.buffer.directory.endpoint) as proxy:
        node = all_.node("half-open", proxy.endpoint)
        all_.start(node)
        all_.wait_until_ready("half-open")
        proxy.silent = True
        all_.check_is_lost_in_time("half-open")
        all_.check_the_run_goes_on_and_ends(steps)
        node.ending = True


def test_a_node_that_takes_leases_and_never_answers_loses_them_when_their_time_is_up(tmp_path: Path) -> None:
    steps, lease_timeout_s = 40, 2.0
    with crowd(tmp_path, steps, lease_timeout=lease_timeout_s) as all_:
        idle = all_.node("idle")
        all_.start(idle)
        all_.wait_until_ready("idle")
        idle.withholds = True
        wait_for(lambda: bool(idle._owed), "leases for the idle one")
        all_.check_the_run_goes_on_and_ends(steps)
        assert all_.trainer.final is not None
        assert all_.trainer.final.ledger["dropped.cancelled"] > 0
        # A ticket may come to it again, as long as it has asked for more than it holds: for 64 samples in all.
        assert max(all_.trainer.step_seconds) < 4 * lease_timeout_s + SLACK_S
        idle.ending = True


def test_who_waits_is_named_while_a_node_does_not_answer(tmp_path: Path) -> None:
    """Whoever asks for the status while a batch does not come hears for what the trainer waits, and why."""
    with Service(tmp_path, run={"steps": 10_000}, buffer={"heartbeat": HEARTBEAT_S}) as buffer:
        published = Published()
        idle = FakeNode(buffer.dial("node", "idle"), "idle", published, 0, lambda rng: 16)
        trainer = FakeTrainer(buffer.dial("trainer", "trainer"), buffer.config, published)
        tool = buffer.dial("tool", "tool")
        idle.start()
        trainer.start()
        wait_for(lambda: trainer.steps_done >= 1, "a step")
        idle.paused = True
        ticket = r"the trainer waits for ticket \d+ \((leased to idle|not leased: it needs a node at version)"
        wait_for(lambda: re.match(ticket, buffer.status(tool).waiting) is not None, "the idle node to be named", 60)
        idle.ending = trainer.ending = True
        tool.close(0.2)


def test_a_service_that_accepts_the_connection_and_never_answers_is_named(tmp_path: Path) -> None:
    with Service(tmp_path) as buffer, TcpProxy(buffer.directory.endpoint) as proxy:
        proxy.silent = True
        link = Client(
            proxy.endpoint, run=buffer.directory.run_id, token=buffer.directory.token, role="node", name="node-0",
            peer="the buffer",
        )  # fmt: skip
        started = time.monotonic()
        with pytest.raises(LinkTimeout, match=f"node-0 waited 2 s for a welcome from the buffer at {proxy.endpoint}"):
            link.connect(2.0)
        assert time.monotonic() - started < 2.0 + SLACK_S
        link.close(0.2)


def test_a_buffer_that_is_frozen_ends_who_waits_for_it_with_its_name(tmp_path: Path) -> None:
    with Service(tmp_path, run={"steps": 100_000}, buffer={"heartbeat": HEARTBEAT_S}) as buffer:
        published = Published()
        link = buffer.dial("trainer", "trainer")
        trainer = FakeTrainer(link, buffer.config, published)
        node = FakeNode(buffer.dial("node", "node"), "node", published, 0, lambda rng: 16)
        node.start()
        trainer.start()
        wait_for(lambda: trainer.steps_done >= 1, "a step")
        os.kill(buffer.process.pid, signal.SIGSTOP)
        link._lost_after_s = 2.0
        trainer.join(2.0 + SILENCE_S + SLACK_S)
        assert not trainer.is_alive()
        assert "the service" in str(trainer.error)
        assert buffer.directory.endpoint in str(trainer.error)
        node.ending = True


def test_a_batch_is_lent_again_to_a_trainer_that_was_frozen(tmp_path: Path) -> None:
    """The trainer's link falls silent for longer than three heartbeats and comes back: the same batch is still its."""
    with Service(tmp_path, run={"steps": 5}) as buffer, TcpProxy(buffer.directory.endpoint) as proxy:
        published = Published()
        node = FakeNode(buffer.dial("node", "node"), "node", published, 0, lambda rng: 16)
        trainer = FakeTrainer(buffer.dial("trainer", "trainer", proxy.endpoint), buffer.config, published, pause_s=0.5)
        node.start()
        trainer.start()
        wait_for(lambda: trainer.steps_done >= 1, "a step")
        proxy.silent = True
        time.sleep(1.5 * 3 * buffer.config.buffer.heartbeat)
        proxy.silent = False
        finish(trainer, node)
        assert trainer.steps_done == 5
        assert len({key for key, _ in trainer.trained}) == 5 * 16

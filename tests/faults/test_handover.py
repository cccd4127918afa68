"""SIGTERM with some seconds of grace: what a node has begun goes on at another one, and nothing is sampled twice.

The test plays the trainer, so that it sees every trajectory, and under one policy each text depends on its seed alone.
"""

from __future__ import annotations

import re
import signal
import time

import pytest
import real_runs
from played_trainer import PlayedTrainer, Said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SETTINGS = [
    "--set", "run.steps=1", "--set", "buffer.groups_per_step=8", "--set", "buffer.group_size=8",
    "--set", "inference.slots=24",
    "--set", "launch.grace=6", "--set", "buffer.heartbeat=3",  # none is killed at its end, or taken for dead
]  # fmt: skip
SLOW = ["--set", "inference.max_tokens_per_second=20"]  # 64 answers of some 9 tokens: 15 s for two nodes


class Run:
    """A buffer, a played trainer, and nodes by name."""

    def __init__(self, shell: real_runs.Shell, name: str, *settings: str) -> None:
        self.shell = shell
        self.folder = shell.folder / name
        self.settings = [str(shell.config), "--out", str(self.folder), *SETTINGS, *settings]
        self.buffer = shell.start("buffer", *self.settings)
        real_runs.wait_for((self.folder / "run.json").exists, 60, "the run directory")
        self.nodes: dict[str, real_runs.subprocess.Popen[str]] = {}
        self.outputs: dict[str, str] = {}

    def node(self, name: str, *settings: str) -> None:
        self.nodes[name] = self.shell.start("infer", *self.settings, "--name", name, *settings)

    def end(self, name: str) -> int:
        self.outputs[name], _ = self.nodes[name].communicate(timeout=60)
        return self.nodes[name].returncode

    def sampled(self) -> int:
        """What all nodes together say that they sampled."""
        found = [re.search(r"sampled (\d+) tokens", output) for output in self.outputs.values()]
        assert all(found), self.outputs
        return sum(int(match[1]) for match in found if match)


def whole(shell: real_runs.Shell) -> dict[tuple[int, int], Said]:
    """What one quiet node says."""
    run = Run(shell, "whole")
    trainer = PlayedTrainer(run.folder)
    trainer.publish()
    run.node("only")
    texts = trainer.draw()
    trainer.finish()
    assert run.end("only") == 0
    trainer.close()
    assert run.sampled() == sum(len(one.text) for one in texts.values())
    return texts


class Moved:
    """The same with two slow nodes, the first of which is told to end when both are in the middle of something."""

    def __init__(self, shell: real_runs.Shell, *settings: str) -> None:
        self.run = Run(shell, "moved", *SLOW, *settings)
        trainer = PlayedTrainer(self.run.folder)
        self.run.node("first")
        self.run.node("second")
        real_runs.wait_for(lambda: len(trainer.status().nodes) == 2, 200, "both nodes")
        trainer.publish()  # not before: one alone would take all

        def both_work() -> bool:
            nodes = trainer.status().nodes
            return min(node.leased_samples for node in nodes) >= 16 and min(node.decode_steps for node in nodes) >= 2

        real_runs.wait_for(both_work, 90, "leases of both nodes")
        told = time.monotonic()
        self.run.nodes["first"].send_signal(signal.SIGTERM)
        assert self.run.end("first") == 0, self.run.outputs["first"]
        self.seconds = time.monotonic() - told
        self.texts = trainer.draw()
        self.status = trainer.finish()
        assert self.run.end("second") == 0
        trainer.close()
        match = re.search(r"left: (\d+) attempts with (\d+) tokens handed over", self.run.outputs["first"])
        assert match, self.run.outputs["first"]
        self.attempts, self.tokens = int(match[1]), int(match[2])
        self.trained_tokens = sum(len(one.text) for one in self.texts.values())


def without_nodes(texts: dict[tuple[int, int], Said]) -> dict[tuple[int, int], Said]:
    return {place: one._replace(node="") for place, one in texts.items()}


def test_what_a_node_began_goes_on_elsewhere_word_for_word_and_no_token_is_sampled_twice(shell):
    expected = whole(shell)
    moved = Moved(shell)
    assert moved.seconds < 60
    assert moved.attempts >= 8
    assert moved.tokens > moved.attempts
    assert without_nodes(moved.texts) == without_nodes(expected)
    assert moved.run.sampled() == moved.trained_tokens
    status = moved.status
    assert status.handovers == {"handed_over": moved.attempts, "mixed": 0}
    assert status.ledger["trained"] == 64
    assert status.ledger["issued"] == 64 + status.ledger["dropped.cancelled"]  # those that it had not begun
    assert status.ledger["dropped.node_lost"] == 0


@pytest.mark.faults
def test_with_discard_the_text_is_the_same_but_what_was_begun_is_sampled_again(shell):
    """So the count above would notice."""
    moved = Moved(shell, "--set", "inference.handover=discard")
    assert (moved.attempts, moved.status.handovers) == (0, {})
    assert moved.run.sampled() > moved.trained_tokens
    assert moved.status.ledger["trained"] == 64
    assert without_nodes(moved.texts) == without_nodes(whole(shell))

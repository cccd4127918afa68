"""A node that joins a run under way samples its first token under the policy that is current when it comes."""

from __future__ import annotations

import pytest
import real_runs
from played_trainer import PlayedTrainer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SETTINGS = [
    "--set", "run.steps=4000", "--set", "buffer.groups_per_step=4", "--set", "buffer.group_size=4",
    "--set", "inference.slots=8", "--set", "inference.max_tokens_per_second=200", "--set", "buffer.max_staleness=8",
]  # fmt: skip


def test_a_joiner_serves_the_current_version_before_its_first_token(shell):
    folder = shell.folder / "joining"
    arguments = [str(shell.config), "--out", str(folder), *SETTINGS]
    shell.start("buffer", *arguments)
    real_runs.wait_for((folder / "run.json").exists, 60, "the run directory")
    trainer = PlayedTrainer(folder)
    trainer.publish()
    first = shell.start("infer", *arguments, "--name", "first")
    for _ in range(3):
        trainer.draw()
        trainer.publish()
    # Version 3 is current. Versions 0 to 2 are young enough to train, and still in the store.
    joined = trainer.version
    joiner = shell.start("infer", *arguments, "--name", "joiner")
    oldest: list[int] = []
    while len(oldest) < 8 and trainer.version < 3999:
        said = trainer.draw()
        trainer.publish()
        oldest += [run.version for one in said.values() if one.node == "joiner" for run in one.versions]
    trainer.finish()
    for process in (first, joiner):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    trainer.close()
    assert len(oldest) >= 8, "the joiner took no part"
    assert min(oldest) >= joined

"""Encrypted runs: all pools with one folder of keys, and each with no more keys than it needs."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import real_runs

pytestmark = [pytest.mark.e2e, pytest.mark.sample, pytest.mark.timeout(600)]

QUICK = ["--set", "run.steps=2", "--set", "run.eval_every=0", "--set", "inference.nodes=1"]
ANYWHERE = ["--set", "buffer.endpoint=tcp://0.0.0.0:*", "--set", "buffer.store_endpoint=tcp://0.0.0.0:*"]


def secrets_of(run: Path, keys: Path) -> list[str]:
    words = [path.read_text().split()[1] for path in keys.glob("*.secret")]
    return [*words, (run / "token").read_text().strip()]


def holds(path: Path, words: list[str]) -> bool:
    data = path.read_bytes()
    return any(word.encode() in data for word in words)


def test_a_run_with_keys_listens_anywhere_and_leaves_no_secret_in_its_files(shell):
    keys, run = shell.folder / "keys", shell.folder / "run"
    code, said = shell.run("keys", str(keys))
    assert code == 0, said
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), *QUICK, *ANYWHERE, "--set", "buffer.keys=keys", "--debug",
        timeout=500,
    )  # fmt: skip
    assert code == 0, output
    assert real_runs.summary(run)["steps"] == 2
    assert json.loads((run / "run.json").read_text())["endpoint"].startswith("tcp://0.0.0.0:")
    assert f'keys = "{keys}"' in (run / "config.toml").read_text()
    secrets = secrets_of(run, keys)
    files = [path for path in run.rglob("*") if path.is_file() and path != run / "token"]
    assert [path for path in files if holds(path, secrets)] == []
    assert not any(secret in text for secret in secrets for text in (said, output))
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "token").stat().st_mode) == 0o600


def test_pools_by_hand_need_only_their_own_keys(shell):
    keys, run = shell.folder / "keys", shell.folder / "run"
    shell.run("keys", str(keys))
    own = {}
    for role in ("node", "trainer", "tool"):
        own[role] = shell.folder / f"keys-{role}"
        own[role].mkdir()
        shutil.copy(keys / "service.public", own[role])
        shutil.copy(keys / f"{role}.secret", own[role])
        (keys / f"{role}.secret").unlink()
    common = [str(shell.config), "--out", str(run), *QUICK]

    code, refused = shell.run("buffer", *common, *ANYWHERE)
    assert code != 0
    assert "async-rl keys" in refused

    shell.start("buffer", *common, *ANYWHERE, "--set", f"buffer.keys={keys}")
    real_runs.wait_for((run / "run.json").exists, 100, "the run directory")
    real_runs.wait_for((run / "prometheus" / "buffer.json").exists, 100, "the buffer")
    endpoint = json.loads((run / "run.json").read_text())["endpoint"].replace("0.0.0.0", "127.0.0.1")
    ask = ["status", endpoint, "--token", str(run / "token"), "--json", "--keys"]
    code, output = shell.run(*ask, str(own["tool"]))
    assert code == 0, output
    assert json.loads(output)["phase"] == "running"
    code, output = shell.run(*ask, str(own["node"]))
    assert code != 0
    assert "tool.secret: cannot be read" in output
    code, output = shell.run(*ask[:-1])
    assert code != 0
    assert "--keys" in output

    node = shell.start("infer", *common, "--set", f"buffer.keys={own['node']}")
    code, output = shell.run("train", *common, "--set", f"buffer.keys={own['trainer']}", timeout=500)
    assert code == 0, output
    assert node.wait(60) == 0
    assert real_runs.summary(run)["ledger"]["trained"] > 0

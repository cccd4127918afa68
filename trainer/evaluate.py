"""`python -m trainer.evaluate SOURCE`: a policy on its sets of evaluation, by a run of no steps on this machine.

SOURCE is a run directory (then `--version` says which of its policies) or an adapter. The run that does it has a
directory, a buffer, a store, nodes and a trainer as any other, and the trainer begins with SOURCE in place of a fresh
policy: as its version 0, which is all that is evaluated. So what is served is proved as it always is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from rich.console import Console
from safetensors.torch import save_file

from async_rl.config import (
    Config,
    config_from_table,
    config_table,
    load_config,
)
from async_rl.errors import AsyncRLError
from async_rl.eval_config import DEFAULT_SET, NONE, EvalSetConfig
from async_rl.launch_config import LaunchConfig
from async_rl.policy.adapter import write_adapter
from async_rl.run.directory import RUNS, RunDirectory
from async_rl.run.exit_code import exit_code
from async_rl.run.local import run_all
from async_rl.run.metrics import Record, eval_sets_of, read_metrics
from trainer.best import BEST, read_score
from trainer.checkpoint import checkpoints, write_checkpoint
from trainer.export import FINAL, MODEL_FILE, Policy, export, read_policy
from trainer.optimizer_state import ADAPTER_FILE, COUNTERS_FILE, OPTIMIZER_FILE, Counters, read_counters, write_counters
from trainer.state import State

EVALS = "evals"  # of a run directory: what was evaluated of it later
KNOWN = ("version", "set")  # of a record: which set it is, and the version that it has in the evaluating run
Save = Callable[[Path], None]


class Begin(NamedTuple):
    """What the evaluating run begins with: its config, and what fills a checkpoint's folder; None: it begins anew.
    `temporary` is to be taken away afterwards."""

    config: Config
    save: Save | None
    temporary: Path | None = None


# --- which policy ----------------------------------------------------------------------------------------------------


def kept_versions(run: Path) -> dict[str, Path | None]:
    """A run's policies by what `--version` calls them, None being the base model; numbers name checkpoints, and what is
    kept as best or final."""
    found: dict[str, Path | None] = {"base": None}
    for folder in reversed(checkpoints(run / "checkpoints")):
        found[str(int(folder.name[1:]))] = folder
    best, final = run / "adapters" / BEST, run / FINAL
    if (score := read_score(best)) is not None:
        found |= {str(score.version): found.get(str(score.version), best), "best": best}
    if final.is_dir():
        found["final"] = final
    return found


def choose(run: Path, version: str) -> tuple[str, Path | None]:
    """Name and place of a version; "" is the newest checkpoint, as of a run that went on after its first end the final
    policy is older; without any, the final policy, the best one, or the base. Raises AsyncRLError naming those there
    are."""
    found = kept_versions(run)
    newest = [str(int(folder.name[1:])) for folder in checkpoints(run / "checkpoints")]
    name = version or [*newest, *reversed(found)][0]
    if name not in found:
        raise AsyncRLError(f"{run} has no version {name!r} to evaluate; there are {', '.join(found)}")
    return name, found[name]


def begin_with(config: Config, place: Path | None, *, foreign: bool) -> Begin:
    """The config under which `place` is evaluated. A checkpoint of whole weights becomes a model in a folder that is to
    be taken away. `foreign`: an adapter of which the config may know nothing. Raises
    AsyncRLError."""
    if place is None:
        return Begin(config, None)
    if (place / MODEL_FILE).is_file():  # a whole model takes the place of the base
        return Begin(replace(config, model=replace(config.model, path=str(place.resolve()), tiny=None)), None)
    if (place / COUNTERS_FILE).is_file() and read_counters(place).kind != "lora":
        # A policy that is a change of weights needs those that it changes: version 0 is a model of its own.
        folder = Path(tempfile.mkdtemp(prefix="async-rl-eval-"))
        export(place, folder)
        return Begin(replace(config, model=replace(config.model, path=str(folder), tiny=None)), None, folder)
    policy = read_policy(place)
    if config.trainer.kind != "lora":
        raise AsyncRLError(
            f'{place} is an adapter, and the config has [trainer] kind = "{config.trainer.kind}": name its own with '
            "--config"
        )
    if foreign:
        config = _for_adapter(config, policy)
    return Begin(config, lambda folder: _write(policy, folder))


def _for_adapter(config: Config, policy: Policy) -> Config:
    table = policy.config
    targets = tuple(table["target_modules"])
    trainer = replace(config.trainer, rank=table["r"], alpha=float(table["lora_alpha"]), targets=targets)
    model = config.model
    if policy.base_model and not model.path:
        model = replace(model, path=policy.base_model, tiny=None)
    return replace(config, trainer=trainer, model=model)


def _write(policy: Policy, folder: Path) -> None:
    """As the torch backend writes an adapter, before its first step."""
    wide = {name: each.to(torch.promote_types(each.dtype, torch.float32)) for name, each in policy.tensors.items()}
    digest = write_adapter(folder / ADAPTER_FILE, wide, policy.config)
    save_file({}, folder / OPTIMIZER_FILE)
    write_counters(folder, Counters(0, digest, policy.base_model, "lora"))


# --- the run that evaluates it ---------------------------------------------------------------------------------------


def evaluating(config: Config, instances: int | None, samples: int | None) -> Config:
    """The config of a run of no steps on this machine, which evaluates every set once. Raises ConfigError."""
    sets = config.run.eval or (EvalSetConfig(name=DEFAULT_SET),)
    run = replace(
        config.run, steps=0, eval_every=1, eval=tuple(_once(config, each, instances, samples) for each in sets),
        best_by=NONE, deterministic=False, trackers=(), prometheus=False,
    )  # fmt: skip
    buffer = replace(config.buffer, endpoint="auto", store_endpoint="auto", shards=1, keys="")
    trainer = replace(config.trainer, step_control=None, checkpoint_every=0)
    made = replace(config, run=run, buffer=buffer, trainer=trainer, launch=LaunchConfig(grace=config.launch.grace))
    return config_from_table(config_table(made), "the evaluation's config")


def _once(config: Config, each: EvalSetConfig, instances: int | None, samples: int | None) -> EvalSetConfig:
    """Samples that are to differ need a temperature: where evaluation has none, that of training."""
    changes: dict[str, Any] = {"every": 1}
    if instances is not None:
        changes["instances"] = instances
    if samples is not None:
        changes |= {"samples": samples, "pass_at": tuple(k for k in each.pass_at if k <= samples)}
        known = config.run.eval_temperature if each.temperature is msgspec.UNSET else each.temperature
        if samples > 1 and not known:
            changes["temperature"] = config.inference.temperature
    return replace(each, **changes)


def evaluate(
    begin: Begin, out: Path | None, runs: Path, flags: Sequence[str], console: Console
) -> tuple[Path, dict[str, Record]]:
    """The run's directory, and what came of each set. Raises AsyncRLError when it fails, or a set has no result."""
    directory = RunDirectory.create(out, begin.config, runs)
    if begin.save is not None:
        state = msgspec.to_builtins(State(), str_keys=True)
        write_checkpoint(directory.checkpoints, 0, begin.save, state)
    code = run_all(begin.config, directory.path, True, flags, console, closing=False)
    if code:
        raise KeyboardInterrupt
    found = {name: items[-1] for name, items in eval_sets_of(read_metrics(directory.metrics_path)).items()}
    for each in begin.config.run.eval:
        if each.name not in found:
            why = f"nothing of it was done within its timeout; logs: {directory.logs}"
            raise AsyncRLError(f"set {each.name!r} has no result: {why}")
    return directory.path, found


# --- the command -----------------------------------------------------------------------------------------------------


def table(found: dict[str, Record]) -> str:
    """A line for each set, and below it one for each pass@k."""
    rows = [("set", "", "value (95 %)", "instances", "samples", "cancelled")]
    for name, item in found.items():
        counts = (str(item[key]) for key in ("instances", "samples", "cancelled"))
        rows.append((name, "mean", _with_interval(item["reward"], item), *counts))
        for k, each in item["pass"].items():
            rows.append(("", f"pass@{k}", _with_interval(each["value"], each), str(each["n"]), "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _with_interval(value: float | None, item: Record) -> str:
    if value is None:
        return "–"
    interval = item["interval"]
    return f"{value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _config_of(options: argparse.Namespace) -> tuple[Config, bool]:
    """The config, and whether SOURCE is a run directory. Raises ConfigError."""
    is_run = (options.source / "run.json").is_file()
    if options.config:
        return load_config(options.config, options.overrides), is_run
    owner = options.source if is_run else options.source.resolve().parent.parent  # DIR/adapters/best
    if not (owner / "run.json").is_file():
        raise AsyncRLError(
            f"{options.source} is no run directory, nor in one: say with --config CONFIG by which task, model and "
            "engine to evaluate it"
        )
    return load_config(str(owner / "config.toml"), options.overrides), is_run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="async-rl eval", description="Evaluate a trained policy on this machine.")
    parser.add_argument("source", type=Path, metavar="DIR|ADAPTER", help="run directory, PEFT folder or adapter file")
    parser.add_argument("--version", default="", help="of a run: a kept number (default: newest), best, final, base")
    parser.add_argument("--config", default="", help="a TOML file, or a shipped one's name (default: the run's own)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument("--n", type=int, help="instances of each set (default: as configured)")
    parser.add_argument("--samples", type=int, help="samples of each instance (default: as configured)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the evaluation runs (default: DIR/evals)")
    parser.add_argument("--debug", action="store_true", help="log more, and show a traceback on error")
    return parser


def _main(options: argparse.Namespace) -> None:
    config, is_run = _config_of(options)
    name, place = choose(options.source, options.version) if is_run else ("", options.source)
    if options.version and not is_run:
        raise AsyncRLError("--version is of a run directory: this is an adapter, which has none")
    if place is not None and not place.exists():
        raise AsyncRLError(f"{place} is not there")
    foreign = not is_run and bool(options.config)
    begin = begin_with(evaluating(config, options.n, options.samples), place, foreign=foreign)
    runs = options.source / EVALS if is_run else RUNS
    flags = ["--debug"] if options.debug else []
    try:
        path, found = evaluate(begin, options.out, runs, flags, Console(stderr=True))
    finally:
        if begin.temporary is not None:
            shutil.rmtree(begin.temporary, ignore_errors=True)
    print(table(found))
    what = f"version {name} of {options.source}" if is_run else str(options.source)
    print(f"{what}; the evaluation's own run: {path}")
    if options.json:
        sets = {each: {key: value for key, value in item.items() if key not in KNOWN} for each, item in found.items()}
        said = {"source": str(options.source), "version": name or None, "run": str(path), "sets": sets}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(said)) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 with one message on error."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _main(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())

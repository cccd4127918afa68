"""What a forecast rests on: a configuration, a run that was measured, and what was given by hand.

Nothing is made up: what neither says is refused by name, and what had to be assumed is listed (`notes`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from async_rl.config import Config, load_config, shipped_configs
from async_rl.errors import AsyncRLError
from async_rl.inference_config import as_one_kind
from async_rl.run.directory import RUNS
from buffer.fit import LINK_S, Measured, read_run
from buffer.rules import Rules, rules_from_config
from buffer.scenario import Constant, Distribution, Lognormal, Scenario, Speed, TrainerSpeed, Values

EACH_SAMPLE_UP_TO = 500_000  # attempts of a simulated run; beyond that a group's samples are one event


class MissingError(AsyncRLError):
    """Neither a run nor the command line says something that the forecast needs."""


class World(NamedTuple):
    """`scenario` has the config's own numbers of nodes; `rules` its steps, or those asked for."""

    config: Config
    rules: Rules
    scenario: Scenario
    measured: Measured | None
    notes: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both forecasting commands take."""
    shipped = ", ".join(shipped_configs())
    parser.add_argument("config", metavar="CONFIG", help=f"a TOML file, or the name of a shipped one ({shipped})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
        help="override a value of the config; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--from", type=Path, dest="run", metavar="DIR",
        help=f"the directory of a run (for example {RUNS}/latest) whose lengths and speeds to use",
    )  # fmt: skip
    parser.add_argument("--steps", type=_count, metavar="N", help="training steps to simulate (default: the config's)")
    parser.add_argument(
        "--lengths", type=_lengths, metavar="MEDIAN,SIGMA",
        help="sampled tokens of an answer: lognormal, cut at inference.max_new_tokens",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-per-second", type=_positive, metavar="RATE",
        help="of a node with every slot busy; its decode step takes the same time with fewer",
    )  # fmt: skip
    parser.add_argument("--train-seconds", type=_positive, metavar="SECONDS", help="from a batch to the stored policy")
    parser.add_argument(
        "--push-seconds", type=_positive, metavar="SECONDS",
        help="from a policy's publication until a node serves it (default: as measured, else 0.1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random in the simulation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--debug", action="store_true", help="show a traceback on error")


def world_from(options: argparse.Namespace) -> World:
    """Raises AsyncRLError: a broken config or run directory, or MissingError."""
    overrides = list(options.overrides)
    if options.steps:
        overrides.append(f"run.steps={options.steps}")
    config = load_config(options.config, overrides)
    measured = read_run(options.run) if options.run is not None else None
    notes: list[str] = []
    if groups := config.inference.group:
        notes.append(f"the nodes of {len(groups)} groups are taken to be equally fast")
        config = msgspec.structs.replace(config, inference=as_one_kind(config.inference))
    if measured is not None:
        notes += [*measured.notes, *_differences(config, measured.config, options)]
    elif not (options.lengths and options.tokens_per_second and options.train_seconds):
        given = {"--lengths": options.lengths, "--tokens-per-second": options.tokens_per_second,
                 "--train-seconds": options.train_seconds}  # fmt: skip
        missing = ", ".join(name for name, value in given.items() if not value)
        raise MissingError(
            f"nothing says how fast this would be: give --from DIR, a run to take lengths and speeds from "
            f"(`async-rl run {options.config} --set run.steps=30` makes one), or {missing}"
        )
    scenario = Scenario(
        seed=options.seed,
        nodes=config.inference.nodes,
        slots=config.inference.slots,
        lengths=_cut(options.lengths or _known(measured).lengths, config.inference.max_new_tokens),
        prompt_tokens=measured.prompt_tokens if measured else 0.0,
        overhead_bytes=measured.overhead_bytes if measured else Scenario().overhead_bytes,
        speed=_speed(config, measured, options.tokens_per_second),
        delivery_s=measured.delivery_s if measured else Constant(LINK_S),
        push_s=_push(measured, options.push_seconds, notes),
        trainer=_trainer(config, measured, options.train_seconds),
        in_flight=config.inference.in_flight,
        notice_s=3 * config.buffer.heartbeat,
        eval_every=config.run.eval_every,
        eval_n=config.run.eval_samples,
        eval_timeout_s=config.run.eval_timeout,
        draw_timeout_s=config.run.draw_timeout,
    )
    rules = rules_from_config(config)
    if rules.steps * rules.fresh_groups * rules.group_size > EACH_SAMPLE_UP_TO:
        scenario = scenario._replace(whole_groups=True)
        notes.append("a group's samples end together, as one event, for there are too many to follow each")
    return World(config, rules, scenario, measured, tuple(notes))


def _known(measured: Measured | None) -> Measured:
    assert measured is not None  # else `world_from` has refused
    return measured


def _cut(lengths: Distribution, most: int) -> Distribution:
    """No answer is longer than inference.max_new_tokens."""
    if isinstance(lengths, Values):
        return Values(tuple(min(value, float(most)) for value in lengths.values))
    return Lognormal(lengths.median, lengths.sigma, float(most)) if isinstance(lengths, Lognormal) else lengths


def _speed(config: Config, measured: Measured | None, tokens_per_second: float | None) -> Speed:
    """Of one node: given, or as measured, under the config's cap."""
    cap, slots = config.inference.max_tokens_per_second, config.inference.slots
    if tokens_per_second:
        return Speed(step_s=slots / tokens_per_second, tokens_per_second=cap)
    measured = _known(measured)
    had = measured.config.inference.max_tokens_per_second
    if measured.capped and not 0 < cap <= had:
        raise MissingError(
            f"the nodes of {measured.directory} were held back by inference.max_tokens_per_second = {had:g}, so how "
            f"fast they are with {f'{cap:g}' if cap else 'no cap'} is not known: give --tokens-per-second, or a run "
            "without a cap"
        )
    return measured.speed._replace(tokens_per_second=cap)


def _push(measured: Measured | None, seconds: float | None, notes: list[str]) -> Distribution:
    if seconds:
        return Constant(seconds)
    if measured is not None:
        nodes = measured.config.inference.nodes
        notes.append(f"pushes take as long as they did to {nodes} node{'s' if nodes > 1 else ''}, to however many")
        return measured.push_s
    notes.append(f"a push is taken to need {Scenario().push_s.mean:g} s")
    return Scenario().push_s


def _trainer(config: Config, measured: Measured | None, seconds: float | None) -> TrainerSpeed:
    if seconds:
        return TrainerSpeed(step_s=Constant(seconds), lend_s=LINK_S)
    return _known(measured).trainer._replace(checkpoint_every=config.trainer.checkpoint_every)


def _differences(config: Config, measured: Config, options: argparse.Namespace) -> list[str]:
    """What differs between the two configs and was taken from the measured one all the same."""
    differs = []
    if config.task != measured.task and not options.lengths:
        differs.append("[task]")
    if (config.model.tiny, config.model.dtype) != (measured.model.tiny, measured.model.dtype):
        differs.append("[model]")
    if not options.train_seconds:
        mine, theirs = config.trainer, measured.trainer
        keys = ("kind", "backend", "rank", "ranks", "targets", "step_control", "micro_batch_tokens")
        differs += [f"trainer.{key}" for key in keys if getattr(mine, key) != getattr(theirs, key)]
    if not differs:
        return []
    return [f"the run that was measured had another {', '.join(differs)}; its lengths and speeds are used as they were"]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: 1 or more")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: more than 0")
    return value


def _lengths(text: str) -> Lognormal:
    try:
        median, sigma = (float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected MEDIAN,SIGMA, for example 400,0.6") from error
    if not (median > 0 and sigma >= 0):
        raise argparse.ArgumentTypeError(f"{text}: the median must be above 0, sigma 0 or more")
    return Lognormal(median, sigma)

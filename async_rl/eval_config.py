"""The tables [[run.eval]]: on which sets of held-out instances the policy is evaluated, how often and how.

A config without any has one set, "eval", of its own task, if run.eval_every says how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from async_rl.schema import ConfigError, NonNegative, PositiveFloat, PositiveInt, Section
from async_rl.wire.messages import MAX_EVALUATED, SamplingParams

if TYPE_CHECKING:
    from async_rl.config import Config, RunConfig

DEFAULT_SET = "eval"
AUTO, NONE = "auto", "none"
SetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class EvalSetConfig(Section, frozen=True, kw_only=True):
    """One table [[run.eval]]. What is not set is as run.eval_every, eval_samples, eval_temperature, eval_timeout and
    inference.max_new_tokens say."""

    name: SetName
    """Under which its numbers are kept."""
    task: dict[str, Any] = msgspec.field(default_factory=dict)
    """A [task] table of its own, of which the eval split is asked; empty: the run's."""
    instances: PositiveInt | UnsetType = UNSET
    samples: PositiveInt = 1
    """Of each instance; above 1 the temperature must be, too."""
    every: PositiveInt | UnsetType = UNSET
    """Versions; the first and the last are evaluated in any case."""
    temperature: NonNegative | UnsetType = UNSET
    max_new_tokens: PositiveInt | UnsetType = UNSET
    timeout: PositiveFloat | UnsetType = UNSET
    pass_reward: float = 1.0
    """An answer with at least this reward passes, for pass@k."""
    pass_at: tuple[PositiveInt, ...] = ()
    """The k of pass@k; empty: 1, and `samples`."""


class EvalSet(NamedTuple):
    """A set with all of its settings. `task` is empty where it is the run's."""

    name: str
    task: Mapping[str, Any]
    instances: int
    samples: int
    every: int
    sampling: SamplingParams
    timeout_s: float
    pass_reward: float
    pass_at: tuple[int, ...]

    def is_due(self, version: int, steps: int) -> bool:
        return version % self.every == 0 or version == steps


def eval_sets(config: Config) -> tuple[EvalSet, ...]:
    """In the order of the config; none where nothing is evaluated."""
    run = config.run
    tables = run.eval or ((EvalSetConfig(name=DEFAULT_SET),) if run.eval_every else ())
    return tuple(_with_defaults(table, run, config.inference.max_new_tokens) for table in tables)


def _with_defaults(table: EvalSetConfig, run: RunConfig, max_new_tokens: int) -> EvalSet:
    temperature = run.eval_temperature if table.temperature is UNSET else table.temperature
    longest = max_new_tokens if table.max_new_tokens is UNSET else table.max_new_tokens
    return EvalSet(
        name=table.name,
        task=table.task,
        instances=run.eval_samples if table.instances is UNSET else table.instances,
        samples=table.samples,
        every=run.eval_every if table.every is UNSET else table.every,
        sampling=SamplingParams(temperature, longest),
        timeout_s=run.eval_timeout if table.timeout is UNSET else table.timeout,
        pass_reward=table.pass_reward,
        pass_at=tuple(sorted(set(table.pass_at or (1, table.samples)))),
    )


def eval_tasks(config: Config) -> dict[str, Mapping[str, Any]]:
    """The [task] tables of the sets that have one of their own, by the set's name."""
    return {table.name: table.task for table in config.run.eval if table.task}


def best_set(config: Config) -> str:
    """By the mean of which set the best version is kept; empty where none is."""
    names = [each.name for each in eval_sets(config)]
    if config.run.best_by == AUTO:
        return names[0] if names and config.trainer.kind == "lora" else ""
    return "" if config.run.best_by == NONE else config.run.best_by


def check_eval(config: Config) -> None:
    """Raises ConfigError."""
    sets = eval_sets(config)
    names = [each.name for each in sets]
    if not config.run.steps and not sets:
        raise ConfigError("[run] steps = 0 trains nothing, and nothing is evaluated either: set steps, or eval_every")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'[[run.eval]] there are {names.count(name)} sets named "{name}": give each its own name')
    for each in sets:
        _check_set(each, config.inference.max_context)
    by = config.run.best_by
    if by not in (AUTO, NONE, *names):
        there = ", ".join(f'"{name}"' for name in names) or 'none: set run.eval_every, or "none"'
        raise ConfigError(f'[run] best_by = "{by}" names no set of evaluation; there are {there}')


def _check_set(each: EvalSet, max_context: int) -> None:
    where = f'[[run.eval]] of name "{each.name}"'
    if not each.every:
        raise ConfigError(f"{where}: how often? Set its `every`, or run.eval_every for all")
    if each.task and "kind" not in each.task:
        raise ConfigError(f"{where}: its [run.eval.task] needs a key `kind`, as [task] does")
    if (count := each.instances * each.samples) > MAX_EVALUATED:
        raise ConfigError(
            f"{where}: {each.instances} instances with {each.samples} samples each are {count}: {MAX_EVALUATED} at most"
        )
    if each.samples > 1 and not each.sampling.temperature:
        raise ConfigError(
            f"{where}: samples = {each.samples} at temperature 0 would all be the same: set a temperature, or samples "
            "= 1"
        )
    if max(each.pass_at) > each.samples:
        raise ConfigError(
            f"{where}: pass@{max(each.pass_at)} needs as many samples of an instance, and there are {each.samples}: "
            "raise `samples`"
        )
    if each.sampling.max_new_tokens >= max_context:
        raise ConfigError(
            f"{where}: max_new_tokens = {each.sampling.max_new_tokens} leaves no room for a prompt in [inference] "
            f"max_context = {max_context}"
        )

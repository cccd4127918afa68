"""The memory estimate as a table, for any machine: `python -m trainer.megatron.memory_table CONFIG [--set KEY=VALUE]`.

`async-rl run CONFIG --dry-run` starts this for [trainer] backend = "megatron". It needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from async_rl.config import Config, ConfigError, load_config
from async_rl.inference_config import node_groups
from async_rl.parallel_config import check_parallel
from async_rl.run.exit_code import exit_code
from async_rl.run.model_cache import model_path
from trainer.megatron.layer_memory import WIDE
from trainer.megatron.memory import Estimate, Stage, estimate
from trainer.megatron.shape import ModelShape, read_shape, tiny_shape

PARTS = {
    "weights": "weights",
    "adapters": "adapters",
    "learning": "gradients, moments",
    "activations": "activations",
    "at_work": "at work",
}
GB = 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.megatron.memory_table", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or the name of a shipped one")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)

    def run() -> None:
        config = load_config(options.config, options.overrides)
        console.print(memory_text(config), highlight=False, soft_wrap=True)

    return exit_code(run)


def memory_text(config: Config) -> Group:
    """What is printed for a config. Raises ConfigError where the model's size is not known, or the layout does not fit
    it."""
    if config.trainer.backend != "megatron" or config.trainer.kind != "lora":
        raise ConfigError('there is an estimate of memory for [trainer] backend = "megatron" and kind = "lora" alone')
    check_parallel(config.trainer.parallel)
    shape, file = _shape(config)
    replays = config.algorithm.router_replay != "none"
    if replays and not any(shape.has_experts(layer) for layer in range(shape.num_hidden_layers)):
        raise ConfigError('[algorithm] router_replay: the model has no experts: set it to "none"')
    found = estimate(shape, config.trainer, config.model.dtype, longest=_longest(config), replays=replays)
    return Group(Text(_heading(config, found, file)), _table(found), Text("\n".join(_remarks(found))))


def _shape(config: Config) -> tuple[ModelShape, Path | str]:
    path = model_path(config)
    if config.model.tiny and not config.model.path and not (path / "config.json").is_file():
        return tiny_shape(config.model.tiny), "[model.tiny]"
    return read_shape(msgspec.structs.replace(config.model, path=str(path)))


def _longest(config: Config) -> int:
    """Tokens that a sequence may have."""
    return max(group.inference.max_context for group in node_groups(config.inference))


def _micro_batch(config: Config) -> str:
    budget, longest = config.trainer.micro_batch_tokens, _longest(config)
    if longest <= budget:
        return f"micro-batches of {budget:,} tokens"
    return f"micro-batches of one sequence of {longest:,} tokens (max_context; micro_batch_tokens are only {budget:,})"


def _heading(config: Config, found: Estimate, file: Path | str) -> str:
    trainer, parallel = config.trainer, config.trainer.parallel
    over = f"{parallel.tensor} tensor × {parallel.pipeline} pipeline × {parallel.data} data"
    experts = f", experts over {parallel.expert} × {parallel.expert_tensor} of them"
    return (
        f"estimated memory of each of {parallel.ranks} ranks ({over}{experts}), in GB of 10⁹ bytes\n"
        f"{_count(found.parameters)} parameters in {config.model.dtype} ({file}), adapters of rank "
        f"{trainer.rank}, {_micro_batch(config)}"
        f"{', layers computed again' if trainer.activation_checkpointing else ''}"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.1f} billion" if parameters >= 1e8 else f"{parameters / 1e6:,.1f} million"


def _table(found: Estimate) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("stage")
    table.add_column("layers")
    for column in ("micro-batches", *PARTS.values(), "total"):
        table.add_column(column, justify="right")
    for stages, layers, stage in _alike(found.stages):
        row = [f"{getattr(stage, part) / GB:.2f}" for part in (*PARTS, "total")]
        table.add_row(stages, layers, str(stage.in_flight), *row)
    return table


def _alike(stages: Sequence[Stage]) -> list[tuple[str, str, Stage]]:
    """Rows: a run of stages that need the same is one."""
    rows, numbered = [], enumerate(stages)
    for _, group in groupby(numbered, key=lambda each: each[1]._replace(first=0, end=0)):
        members = list(group)
        (first, start), (last, end) = members[0], members[-1]
        numbers = f"{first}" if first == last else f"{first} … {last}"
        rows.append((numbers, f"{start.first} … {end.end - 1}", start))
    return rows


def _remarks(found: Estimate) -> list[str]:
    largest = found.largest
    part = max(PARTS, key=lambda part: getattr(largest, part))
    numbers = found.adapter_parameters
    share = getattr(largest, part) / largest.total
    return [
        f"most of the fullest rank's {largest.total / GB:.1f} GB: {PARTS[part]}, {share:.0%}",
        f"the whole adapter: {numbers:,} numbers, {WIDE * numbers / GB:.2f} GB to publish with each version",
        "not counted: CUDA's own memory and buffers of collectives, some 2 GB a GPU; experts that get more than their "
        "share of tokens",
    ]


if __name__ == "__main__":
    sys.exit(main())

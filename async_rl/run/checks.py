"""What can be known before a run starts: packages, task, model; and what `--dry-run` prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from rich.table import Table

from async_rl.algorithm_config import describe
from async_rl.buffer_config import fresh_groups, lead
from async_rl.config import Config, ConfigError, is_mixture, keys_folder, shape_file
from async_rl.errors import AsyncRLError
from async_rl.eval_config import eval_sets
from async_rl.inference_config import (
    SERVES_EXPERTS,
    NodeGroup,
    describe_group,
    interpreter,
    lives_elsewhere,
    node_groups,
)
from async_rl.launch_config import describe_launch
from async_rl.routes import SGLANG_SEES_NO_DENSE, dense_unseen_by_sglang, read_config
from async_rl.run.launch import child_environment
from async_rl.run.model_cache import model_path
from async_rl.run.process import HOUSE, check_house
from async_rl.tasks.environment import EnvironmentTask, check_attempts
from async_rl.tasks.registry import instance_sources, known_instances, load_task
from async_rl.trainer_config import adapts_feed_forward, describe_trainer
from async_rl.wire.keys import ServiceKeys, dial_keys
from async_rl.wire.messages import Role

# What each pool imports beyond the ground floor; the names are also those of the extras that install them.
NEEDS = {
    "buffer": (),
    "inference": ("torch", "transformers", "safetensors"),
    "trainer": ("torch", "transformers", "safetensors", "peft", "matplotlib"),
}

# What every pool imports, and what a node's engine is imported as.
GROUND = ("async_rl", "msgspec", "numpy", "prometheus_client", "zmq", "rich", "tomli_w", "xxhash")
ENGINES = {"vllm": ("vllm",), "sglang": ("aiohttp",)}
PROBE = "import sys, importlib.util as u; print('lacks', *(name for name in sys.argv[1:] if u.find_spec(name) is None))"
TASK_PROBE = """
import sys, msgspec
from async_rl.errors import AsyncRLError
from async_rl.tasks.registry import load_task
try:
    load_task(msgspec.json.decode(sys.stdin.buffer.read()))
except AsyncRLError as error:
    sys.exit(str(error))
"""
PROBE_S = 60.0  # for an interpreter to start on a machine that is busy

# What a trainer backend imports beyond that.
BACKENDS = {"megatron": ("megatron", "triton")}

# What each of run.trackers imports; their names are those of extras too.
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_installed(pools: Iterable[str] = HOUSE) -> None:
    """Raises AsyncRLError when a pool's dependencies are not installed, or when another package hides the pool's."""
    for pool in pools:
        missing = [name for name in NEEDS[pool] if find_spec(name) is None]
        if missing:
            raise AsyncRLError(
                f"the {pool} pool needs {', '.join(missing)}, not installed here: in the checkout, "
                f"pip install '.[{pool}]'"
            )
        check_house([pool])


def check_backend(config: Config) -> None:
    """Raises AsyncRLError when the trainer's backend is not installed here, or not offered for the model."""
    missing = [name for name in BACKENDS.get(config.trainer.backend, ()) if find_spec(name) is None]
    if missing:
        raise AsyncRLError(
            f'[trainer] backend = "{config.trainer.backend}" needs megatron-core and triton, and there is no '
            f"{' and no '.join(missing)} here: in the checkout, pip install '.[megatron]' on Python 3.12 or newer; on "
            "3.11, pip install --no-deps --ignore-requires-python -c constraints.txt megatron-core triton"
        )
    parallel = config.trainer.parallel
    if config.trainer.backend == "torch" and parallel.ranks > 1 and is_mixture(config):
        raise ConfigError(
            f'[trainer.parallel] data = {parallel.data}: backend "torch" cuts no mixture of experts over ranks: set '
            'data = 1, or backend = "megatron"'
        )


def check_engines(groups: Sequence[NodeGroup], task: Mapping[str, Any]) -> None:
    """Raises AsyncRLError when the nodes of a group cannot run in their interpreter, not with this [task], or not start
    their server."""
    for engine, python, elsewhere, has_server in dict.fromkeys(
        (each.engine, interpreter(each), lives_elsewhere(each), bool(each.sglang.endpoint))
        for each in (group.inference for group in groups)
    ):
        if elsewhere:
            _check_interpreter(python, (*GROUND, *NEEDS["inference"], *ENGINES[engine]), engine)
            _check_task_there(python, task, engine)
            continue
        check_installed(["inference"])
        if missing := [name for name in ENGINES.get(engine, ()) if find_spec(name) is None]:
            raise AsyncRLError(
                f'[inference] engine = "{engine}" needs {", ".join(missing)}, not installed here: in the checkout, '
                f"pip install '.[{engine}]'{_ELSEWHERE if engine == 'vllm' else ''}"
            )
        if engine == "sglang" and not has_server:
            _check_interpreter(python, ("sglang",), engine)


ATTENTION = '["q_proj", "k_proj", "v_proj", "o_proj"]'


def check_mixture(config: Config, groups: Sequence[NodeGroup]) -> None:
    """Raises ConfigError for a mixture of experts that nodes of these groups would not serve. What cannot be known
    without the model's config.json is not looked at."""
    check_expert_adapters(config, groups)
    file = shape_file(config)
    dense = () if file is None else dense_unseen_by_sglang(read_config(file))
    for group in groups:
        if dense and group.inference.engine == "sglang":
            raise ConfigError(f'{_whose(group)} engine = "sglang": {SGLANG_SEES_NO_DENSE.format(dense=dense)}')


def check_expert_adapters(config: Config, groups: Sequence[NodeGroup]) -> None:
    """Raises ConfigError when a mixture's experts are adapted and nodes would refuse the first policy for it. What
    cannot be known without the model's config.json is not looked at."""
    trainer = config.trainer
    if not adapts_feed_forward(trainer) or not is_mixture(config):
        return
    others = " or ".join(f'engine = "{each}"' for each in sorted(SERVES_EXPERTS, reverse=True))
    for group in groups:
        if (engine := group.inference.engine) not in SERVES_EXPERTS:
            raise ConfigError(
                f'{_whose(group)} engine = "{engine}" serves no adapters on experts, and [trainer] targets '
                f"{'names' if trainer.targets else '= [], everything linear, means'} those of this mixture of experts: "
                f"set [trainer] targets = {ATTENTION} (the names of attention in Qwen3), or {others}"
            )


_ELSEWHERE = ", or set [inference] engine_python to an interpreter that has it (`make engines` makes one for CPUs)"


def _check_interpreter(python: str, names: Sequence[str], engine: str) -> None:
    where = _where(python, engine)
    try:
        probe = _run(python, PROBE, *names)
    except subprocess.TimeoutExpired as error:
        raise AsyncRLError(f"{where}: this interpreter says nothing for {PROBE_S:g} s: run it by hand") from error
    except OSError as error:
        raise AsyncRLError(
            f"{where}: cannot be run: {error.strerror}: give the path of a Python interpreter in whose environment "
            f"{engine} is installed (`make engines` in the checkout makes .engines/{engine}/bin/python, for CPUs)"
        ) from error
    said = (probe.stderr.strip().splitlines() or ["nothing"])[-1]
    if probe.returncode != 0:
        raise AsyncRLError(f"{where}: needs a Python of 3.11 or newer; this one exits with {probe.returncode}: {said}")
    answer, *missing = probe.stdout.split() or [""]
    if answer != "lacks":
        raise AsyncRLError(f"{where}: needs a Python of 3.11 or newer; this is none: it does not run what it is given")
    if missing:
        raise AsyncRLError(
            f"{where}: that environment lacks {', '.join(missing)}: in the checkout, {python} -m pip install "
            f"'{'sglang' if engine == 'sglang' else '.[vllm]'}', or `make engines` for CPUs"
        )


def _check_task_there(python: str, task: Mapping[str, Any], engine: str) -> None:
    """A node makes the task's instances itself, with the packages of its own environment."""
    where = _where(python, engine)
    try:
        probe = _run(python, TASK_PROBE, given=msgspec.json.encode(task).decode())
    except subprocess.TimeoutExpired as error:
        raise AsyncRLError(f"{where}: [task] is not loaded there within {PROBE_S:g} s") from error
    if probe.returncode != 0:
        said = (probe.stderr.strip().splitlines() or ["nothing"])[-1]
        raise AsyncRLError(f"{where}: in that environment, in which the node runs, [task] cannot be loaded: {said}")


def _run(python: str, program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-P", "-c", program, *arguments], env=child_environment(python), input=given,
        capture_output=True, text=True, timeout=PROBE_S,
    )  # fmt: skip


def _whose(group: NodeGroup) -> str:
    return f"[[inference.group]] {group.name!r}" if group.name else "[inference]"


def _where(python: str, engine: str) -> str:
    return f'[inference] engine = "{engine}", engine_python = {python!r}'


def check_trackers(config: Config) -> None:
    """Raises AsyncRLError when run.trackers names one whose package is not installed here."""
    missing = [name for name in dict.fromkeys(config.run.trackers) if find_spec(TRACKERS[name]) is None]
    if missing:
        raise AsyncRLError(
            f"run.trackers needs {', '.join(TRACKERS[name] for name in missing)}, not installed here: in the "
            f"checkout, pip install '.[{','.join(missing)}]', or leave {', '.join(missing)} out"
        )


def check_task(config: Config) -> None:
    """Raises ConfigError for a task, or a key of its own, that is not known, or one that [buffer] cannot use."""
    task = load_task(config.task)
    if isinstance(task, EnvironmentTask):
        check_attempts(config.task, config, task.limits.time_limit)
    if not instance_sources(config) and getattr(task, "reads_forward", False):
        raise ConfigError(
            f"[task] kind = {config.task['kind']!r} reads its data forward, and the buffer would ask it in any order: "
            "set [buffer] epochs = true"
        )
    known_instances(config)
    for each in eval_sets(config):
        size = (load_task(each.task) if each.task else task).size("eval")
        if size == 0:
            raise ConfigError(
                f'[run] says to evaluate on the set "{each.name}", and its task has nothing to evaluate on: name '
                "held-out data there, or set eval_every = 0"
            )


def with_eval_sizes(config: Config) -> Config:
    """The config with no more instances of a set than its task has: asked again they would be counted twice. Raises
    ConfigError where a set's own `instances` asks for more."""
    own = {each.name: each.task for each in config.run.eval}
    run = config.run
    for each in eval_sets(config):
        size = load_task(own.get(each.name) or config.task).size("eval")
        if size is None or each.instances <= size:
            continue
        tables = [table for table in run.eval if table.name == each.name]
        if tables and tables[0].instances is not UNSET:
            raise ConfigError(
                f'[[run.eval]] of name "{each.name}": instances = {each.instances}, and its task has {size} to '
                "evaluate on: lower it"
            )
        if not tables:
            run = replace(run, eval_samples=size)
        else:
            run = replace(run, eval=tuple(replace(t, instances=size) if t is tables[0] else t for t in run.eval))
    return replace(config, run=run)


def check_model(config: Config) -> str:
    """What there is of the base model, in words. Raises ConfigError when [model] path is no model."""
    path = model_path(config)
    if (path / "config.json").is_file():
        return str(path)
    if not config.model.path:
        return f"{path} (to be made)"
    what = "has no config.json" if path.is_dir() else "is not a directory"
    raise ConfigError(
        f"[model] path = {str(path)!r} {what}: give the directory of a model in Hugging Face layout "
        "(--set model.path=DIR)"
    )


def memory_estimate(config: Config, name: str, overrides: Sequence[str]) -> str:
    """What each rank of the Megatron backend will need for LoRA, as text; "" for other backends and kinds. It needs no
    torch, and no model where [model] shape or [model.tiny] says how large that is. Raises AsyncRLError, also for a
    layout that the model cannot have."""
    if config.trainer.backend != "megatron" or config.trainer.kind != "lora":
        return ""
    check_house(["trainer"])
    options = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-P", "-m", "trainer.megatron.memory_table", name, *options]
    try:
        told = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired as error:
        raise AsyncRLError(f"no memory estimate within {PROBE_S:g} s: run it by hand: {command}") from error
    if told.returncode:
        said = told.stderr.strip().splitlines() or [f"the memory estimate ended with {told.returncode}"]
        raise AsyncRLError(said[-1].removeprefix("error: "))
    return told.stdout


def with_keys(config: Config, *roles: Role, services: bool = False) -> Config:
    """The config with the absolute path of its keys, after looking at those that these roles (and the services) need.
    Raises KeyFileError."""
    folder = keys_folder(config)
    if folder is None:
        return config
    if services:
        ServiceKeys(folder)
    for role in roles:
        dial_keys(folder, role)
    return msgspec.structs.replace(config, buffer=msgspec.structs.replace(config.buffer, keys=str(folder)))


def dry_run_table(config: Config, model: str) -> Table:
    """What would run: pools, endpoints, batch, bound, tickets."""
    buffer, inference, trainer, algorithm = config.buffer, config.inference, config.trainer, config.algorithm
    attempts = buffer.groups_per_step * buffer.group_size
    fresh = fresh_groups(buffer.groups_per_step, buffer.reuse)
    tickets = config.run.steps * fresh
    again = f", {fresh} of them new, each trained up to {buffer.reuse} times" if buffer.reuse > 1 else ""
    evaluation = "never"
    if config.run.eval_every:
        evaluation = f"every {config.run.eval_every} versions, {config.run.eval_samples} instances"
    rows = [
        ("run", f"{config.run.name}, seed {config.run.seed}, {config.run.steps} steps"),
        ("model", f"{model}, {config.model.dtype} on {config.model.device}"),
        ("task", ", ".join(f"{key} = {value}" for key, value in config.task.items())),
        ("buffer", f"{_endpoint(buffer.endpoint, 'buffer')}, order {buffer.order}"),
        ("store", _endpoint(buffer.store_endpoint, "store")),
        ("keys", buffer.keys or "none: no link leaves this machine"),
        *(("inference", describe_group(group)) for group in node_groups(inference)),
        ("relays", _relays(config)),
        ("sampling", f"temperature {inference.temperature:g}, up to {inference.max_new_tokens} new tokens"),
        (
            "trainer",
            describe_trainer(trainer),
        ),
        ("algorithm", describe(algorithm)),
        ("batch", f"{buffer.groups_per_step} groups × {buffer.group_size} = {attempts} attempts{again}"),
        ("bound", f"{buffer.max_staleness} versions; tickets up to {lead(buffer)} versions ahead of a node's own"),
        ("tickets", f"0 … {tickets - 1:,} ({tickets * buffer.group_size:,} attempts)"),
        ("evaluation", evaluation),
        ("launch", describe_launch(config.launch)),
        ("metrics", ", ".join(["metrics.jsonl", *_listeners(config)])),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text.replace("[", r"\["))
    return table


def _relays(config: Config) -> str:
    """Which nodes pass policies on, and how many pull from each."""
    relaying = [group for group in node_groups(config.inference) if group.inference.relay]
    if not relaying:
        return "none: the store sends every node its copy"
    names = ", ".join(f"{group.name or 'every node'} at {group.inference.relay_endpoint}" for group in relaying)
    return f"{names}; {config.buffer.relay_fanout} nodes pull from each source, and from the store"


def _listeners(config: Config) -> list[str]:
    """Who hears of the run's numbers besides its own file."""
    prometheus = []
    if config.run.prometheus:
        missing = "" if find_spec("prometheus_client") else ": not from here, pip install prometheus-client"
        prometheus = [f"Prometheus on loopback (found by DIR/prometheus/*.json){missing}"]
    return [*prometheus, *dict.fromkeys(config.run.trackers)]


def _endpoint(endpoint: str, socket: str) -> str:
    return f"ipc, a socket {socket!r} in a private directory" if endpoint == "auto" else endpoint


def is_made(path: Path) -> bool:
    """Whether a made model is whole: its directory appears under its name only then."""
    return (path / "config.json").is_file()

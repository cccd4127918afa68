"""Configuration: TOML into strict structs, checked as a whole before anything starts.

`load_config` reads a file (or the name of a shipped one), applies `--set section.key=value`, refuses unknown keys by
naming the nearest known one, and checks what no single section can see (`check_config`). Every failure is one
ConfigError that says what, where and what to do.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from async_rl.algorithm_config import AlgorithmConfig, check_algorithm, under_preset, with_preset
from async_rl.buffer_config import BufferConfig as BufferConfig
from async_rl.buffer_config import batches_held, check_buffer, fresh_groups
from async_rl.credit_config import check_credit
from async_rl.eval_config import EvalSetConfig, check_eval, eval_sets
from async_rl.inference_config import InferenceConfig as InferenceConfig
from async_rl.inference_config import check_group, check_inference, node_groups
from async_rl.launch_config import LaunchConfig, check_launch
from async_rl.relay_config import check_relay
from async_rl.routes import RouteShape, has_experts, read_route_shape
from async_rl.schema import ConfigError as ConfigError
from async_rl.schema import Count, Fraction, NonNegative, PositiveFloat, PositiveInt
from async_rl.schema import Section as Section
from async_rl.schema import convert_section as convert_section
from async_rl.trainer_config import TrainerConfig as TrainerConfig
from async_rl.trainer_config import check_trainer
from async_rl.trajectory import BYTES_PER_TOKEN, MAX_SEGMENTS
from async_rl.wire.messages import MAX_EVALUATED

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class RunConfig(Section, frozen=True, kw_only=True):
    name: str = "run"
    seed: Count = 0
    steps: Count = 100
    """0: nothing is trained; version 0 is evaluated, and that is all."""
    deterministic: bool = False
    """The same seed gives the same run, stopped and resumed or not: ticket n is sampled under exactly the version
    max(0, n // groups_per_step - max_staleness), by steps of fixed shapes, on CPUs in float32. It costs throughput."""
    eval_every: Count = 0
    """Evaluate at version 0, every this many versions, and at the end; 0 is never."""
    eval_samples: Annotated[int, Meta(ge=1, le=MAX_EVALUATED)] = 512
    """Instances, with a sample of each."""
    eval_temperature: NonNegative = 0.0
    eval_timeout: PositiveFloat = 300.0
    """Seconds; what is not done by then is cancelled and the result reported with its n."""
    eval: tuple[EvalSetConfig, ...] = ()
    """Tables [[run.eval]]: several sets, for which the keys above are the defaults."""
    best_by: str = "auto"
    """The set by whose mean the best version is kept, in adapters/best. auto: the first one, if what learns is an
    adapter; of whole weights each evaluated version is written, so name a set where that is wanted. none: none."""
    connect_timeout: PositiveFloat = 60.0
    """Seconds that a pool waits for the services to answer before it gives up."""
    draw_timeout: PositiveFloat = 600.0
    """Seconds that the trainer waits for one batch before it gives up, naming what is missing."""
    watchdog_s: PositiveFloat = 300.0
    """Seconds after which a process whose main loop does not move is ended, with a message."""
    work_timeout: PositiveFloat = 3600.0
    """Seconds that may pass instead where it cannot show that it moves: the model's loading, one step, a checkpoint."""
    prometheus: bool = True
    """Every process serves its metrics on loopback; DIR/prometheus/*.json says where (file_sd)."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where else the numbers of steps and evaluations go: event files in DIR/tensorboard, Weights & Biases."""


class TinyModelConfig(Section, frozen=True, kw_only=True):
    """A small base model made on the spot by supervised learning on the task, stopped when *sampled* accuracy enters
    [accuracy_low, accuracy_high]; made once and cached by a hash of everything that decides it."""

    seed: Count = 0
    hidden: PositiveInt = 128
    layers: PositiveInt = 3
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    intermediate: PositiveInt = 256
    experts: Count = 0
    """Of every layer, in place of its MLP: a Qwen3-MoE. 0: a dense Qwen3."""
    experts_per_token: PositiveInt = 2
    expert_intermediate: PositiveInt = 128
    words: bool = False
    """Words that nearly all of the task's prompts have are one token each, in place of one for every character."""
    learning_rate: PositiveFloat = 2e-3
    batch: PositiveInt = 128
    accuracy_low: Fraction = 0.2
    accuracy_high: Fraction = 0.3
    max_steps: PositiveInt = 400


Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section, frozen=True, kw_only=True):
    path: str = ""
    """A directory in Hugging Face layout. Empty with [model.tiny]: the made model's place in the cache."""
    shape: str = ""
    """A file of configs/shapes, without .json: the model's config.json, for the memory estimate of --dry-run on a
    machine where `path` is not. Only with [trainer] backend = "megatron"."""
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tiny: TinyModelConfig | None = None


class Config(Section, frozen=True, kw_only=True):
    """A whole run. `task` stays a table here; the task named by its `kind` checks its own keys."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: dict[str, Any] = msgspec.field(default_factory=dict)
    buffer: BufferConfig = BufferConfig()
    inference: InferenceConfig = InferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    launch: LaunchConfig = LaunchConfig()


def spread_ranks(config: Config) -> int:
    """How many processes of the launcher's the trainer is: its ranks, where each is placed by itself; else one."""
    ray = config.launch.ray
    return config.trainer.parallel.ranks if ray is not None and ray.spread_ranks else 1


def keys_folder(config: Config) -> Path | None:
    """Where the CURVE keys lie, None without."""
    return Path(config.buffer.keys).expanduser().resolve() if config.buffer.keys else None


def check_config(config: Config) -> None:
    """Everything that no single value shows. Raises ConfigError."""
    buffer, inference = config.buffer, config.inference
    if "kind" not in config.task:
        raise ConfigError('[task] needs a key `kind`: which task to train on, for example kind = "digit_sort"')
    if not config.model.path and config.model.tiny is None:
        raise ConfigError("[model] needs `path` (a directory in Hugging Face layout) or a table [model.tiny]")
    if config.model.shape and config.trainer.backend != "megatron":
        raise ConfigError(
            f'[model] shape = "{config.model.shape}" has no meaning with [trainer] backend = "{config.trainer.backend}"'
            ', only with "megatron": remove it'
        )
    check_buffer(buffer)
    check_credit(config.algorithm, group_size=buffer.group_size, max_new_tokens=inference.max_new_tokens)
    updates = config.trainer.updates_per_batch
    check_algorithm(config.algorithm, updates_per_batch=updates)
    if updates > buffer.groups_per_step:
        raise ConfigError(
            f"[trainer] updates_per_batch = {updates} takes whole groups for each update: it may be at most [buffer] "
            f"groups_per_step = {buffer.groups_per_step}"
        )
    check_inference(inference, deterministic=config.run.deterministic)
    check_eval(config)
    check_launch(config.launch, inference, ranks=config.trainer.parallel.ranks)
    for group in node_groups(inference):
        try:
            _check_nodes(msgspec.structs.replace(config, inference=group.inference))
        except ConfigError as error:
            raise ConfigError(f"group {group.name!r}: {error}" if group.name else str(error)) from error
    if buffer.capacity_bytes < (needed := _least_capacity(config)):
        raise ConfigError(
            f"[buffer] capacity_bytes = {buffer.capacity_bytes} is below one batch of at most {needed} "
            f"bytes{', with what it may use again' if buffer.reuse > 1 else ''}: raise it, or lower groups_per_step, "
            "group_size or inference.max_context"
        )


def _check_nodes(config: Config) -> None:
    """What one group's nodes cannot do; [inference] is theirs alone. Raises ConfigError."""
    check_trainer(
        config.trainer,
        in_flight=config.inference.in_flight,
        reference_kl=config.algorithm.reference_kl,
        dtype=config.model.dtype,
        deterministic=config.run.deterministic,
    )
    check_group(
        config.inference,
        one_copy=config.trainer.kind != "lora",
        evaluates=bool(eval_sets(config)),
        center_scores=config.algorithm.center_scores,
        sends_routes=config.algorithm.router_replay == "rollout",
        deterministic=config.run.deterministic,
    )
    check_relay(config.inference, encrypted=bool(config.buffer.keys), placed=config.launch.kind == "ray")
    if config.run.deterministic and (settings := lacking_for_determinism(config)):
        raise ConfigError(f"run.deterministic = true needs other settings: add {' '.join(settings)}")


def with_group(config: Config, name: str) -> Config:
    """The config as a node of this group has it: as if all nodes were like it. Raises ConfigError for a group that
    there is not, and without a name where the config has groups."""
    groups = node_groups(config.inference)
    for group in groups:
        if group.name == name:
            return msgspec.structs.replace(config, inference=group.inference)
    if not config.inference.group:
        raise ConfigError(f"--group {name}: this config has no [[inference.group]]: leave it out")
    known = ", ".join(group.name for group in groups)
    what = f"there is no [[inference.group]] of the name {name!r}" if name else "its nodes are of different groups"
    raise ConfigError(f"{what}: choose one with --group NAME, of {known}")


def lacking_for_determinism(config: Config) -> list[str]:
    """The settings, as `--set key=value`, without which the clock would decide what is sampled (by overtaking, by what
    has come back so far, policies changing within a trajectory, other shapes, a step compiled some time), or fixed
    shapes are not shown to work."""
    buffer, inference = config.buffer, config.inference
    wanted = {
        "buffer.order": (buffer.order, "fifo"),
        "buffer.on_stale": (buffer.on_stale, "wait"),
        "buffer.adaptive": (str(buffer.adaptive).lower(), "false"),
        "buffer.retire_above": (f"{buffer.retire_above:g}", "0"),
        "buffer.difficulty": (buffer.difficulty, "uniform"),
        "inference.in_flight": (inference.in_flight, "finish"),
        "inference.handover": (inference.handover, "discard"),
        "model.dtype": (config.model.dtype, "float32"),
        "inference.dtype": ("float32" if inference.dtype == "auto" else inference.dtype, "float32"),
        "model.device": ("cpu" if config.model.device == "auto" else config.model.device, "cpu"),
        "inference.compile": ("never" if inference.compile == "auto" else inference.compile, "never"),
    }
    return [f"--set {key}={value}" for key, (present, value) in wanted.items() if present != value]


ATTEMPT_OVERHEAD_BYTES = 640  # header, names, reward components, a note of an error
VERSION_RUN_BYTES = 80  # a version, a digest in hex, a count
SEGMENT_BYTES = 160  # of an attempt of several: its header, with what is told of extras
TURN_BYTES = 10  # the reward of a turn takes 20, and a turn has two tokens at least
TOP_TOKEN_BYTES = 4 + 4  # an id and a log-probability of each of the sampler's likeliest tokens (async_rl.top_tokens)


def group_bytes(config: Config) -> int:
    """The most that one group's payloads can take; reserved when the group is leased. A trajectory young enough to
    train spans at most max_staleness + 1 versions, and one more may come in while it waits. Raises ConfigError where
    routes come with it, and what says of how many layers and experts is not here."""
    runs = (config.buffer.max_staleness + 2) * VERSION_RUN_BYTES
    token = BYTES_PER_TOKEN + config.algorithm.center_scores * TOP_TOKEN_BYTES
    if config.algorithm.router_replay == "rollout":
        token += model_routes(config).bytes_per_token
    if config.inference.episodes.max_tokens:
        token, runs = token + TURN_BYTES, MAX_SEGMENTS * (runs + SEGMENT_BYTES)
    return config.buffer.group_size * (longest_attempt(config) * token + runs + ATTEMPT_OVERHEAD_BYTES)


def longest_attempt(config: Config) -> int:
    """Tokens of an attempt at most, all its segments together."""
    inference = config.inference
    return max(inference.episodes.max_tokens, *(group.inference.max_context for group in node_groups(inference)))


def batch_bytes(config: Config) -> int:
    """The least capacity: room for a batch, and for all that may be used again."""
    buffer = config.buffer
    groups = batches_held(buffer) * fresh_groups(buffer.groups_per_step, buffer.reuse)
    return groups * group_bytes(config)


def model_routes(config: Config) -> RouteShape:
    """Of the configured model. Raises ConfigError when it has no experts, or its config.json is not here."""
    return read_route_shape(_model_path(config))


def is_mixture(config: Config) -> bool:
    """Whether the model's tokens are sent to experts: by its config.json, or that which [model] shape names, or by
    [model.tiny] where it is not made yet. False where none of them says so, or can be read."""
    file = shape_file(config)
    return bool(config.model.tiny and config.model.tiny.experts) if file is None else has_experts(file)


def shape_file(config: Config) -> Path | None:
    """The model's config.json, or that which [model] shape names; None where there is neither yet."""
    shipped = CONFIGS / "shapes" / f"{config.model.shape}.json"
    return next((each for each in (_model_path(config) / "config.json", shipped) if each.is_file()), None)


def _model_path(config: Config) -> Path:
    from async_rl.run.model_cache import model_path  # which knows a config

    return model_path(config)


def _least_capacity(config: Config) -> int:
    """`batch_bytes`, or 0 where that depends on a model that is not here (or not made yet): the buffer, which reserves
    by it, must have its config.json."""
    sends_routes = config.algorithm.router_replay == "rollout"
    return 0 if sends_routes and not (_model_path(config) / "config.json").is_file() else batch_bytes(config)


# --- reading ---------------------------------------------------------------------------------------------------------


def shipped_configs() -> dict[str, Path]:
    """Configs that come with the package, by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}


def config_path(name: str) -> Path:
    """A file's path, or the shipped config of that name. Raises ConfigError."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"no config file {name!r}, and no shipped config of that name ({', '.join(shipped)}).{hint}")


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read, override, convert and check. Raises ConfigError."""
    path = config_path(name)
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for override in overrides:
        key, _, name = override.partition("=")
        if key.strip() == "algorithm.preset" and isinstance(section := table.get("algorithm"), Mapping):
            table["algorithm"] = under_preset(section, name.strip(" \"'"))
    for override in overrides:
        apply_override(table, override)
    run = table.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return config_from_table(table, str(path))


def config_from_table(table: Mapping[str, Any], where: str) -> Config:
    """Strict conversion of a parsed table. Raises ConfigError with the nearest known key for an unknown one."""
    if isinstance(section := table.get("algorithm"), Mapping):
        table = {**table, "algorithm": with_preset(section, where)}
    config: Config = convert_section(table, Config, where)
    check_config(config)
    return config


def apply_override(table: dict[str, Any], override: str) -> None:
    """`section.key=value` with a TOML value; a bare word is taken as a string. Raises ConfigError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override!r}: expected section.key=value, for example --set run.steps=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    table[parts[-1]] = value


_UNSET = (
    ("run", "eval"),
    ("model", "tiny"),
    ("trainer", "step_control"),
    ("inference", "group"),
    ("launch", "ray"),
    ("launch", "autoscale"),
)


def config_table(config: Config) -> dict[str, Any]:
    """The config as plain TOML values, without what is unset: what a run directory's config.toml holds."""
    table = msgspec.to_builtins(config)
    for section, key in _UNSET:
        if not table[section][key]:
            del table[section][key]
    return dict(table)

"""The section [inference]: which engine samples, on how many nodes, and how; for all nodes alike, or for groups.

With [[inference.group]] every node belongs to a group, which has from [inference] what it does not set itself:

    [inference]
    slots = 64

    [[inference.group]]
    name = "small"

    [[inference.group]]
    name = "large"
    engine = "vllm"
    slots = 256

A node knows its own group alone: its config is that of a run whose nodes are all like it (`config.with_group`).
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from async_rl.episode_config import EpisodesConfig
from async_rl.proof import LARGEST_BOUND
from async_rl.schema import ConfigError, Fraction, NonNegative, PositiveFloat, PositiveInt, Section, changed
from async_rl.scoring_config import ScoringSettings

EngineName = Literal["torch", "vllm", "sglang"]


class VllmConfig(Section, frozen=True, kw_only=True):
    """The table [inference.vllm]."""

    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of vLLM's AsyncEngineArgs, for example {gpu_memory_utilization = 0.6}; those of a group are
    added to them."""


class SglangConfig(Section, frozen=True, kw_only=True):
    """The table [inference.sglang]."""

    endpoint: str = ""
    """http://host:port of a server that is there already, for one node alone and on its machine, as adapters are files
    there; its key, where it has one, is read from the environment variable SGLANG_API_KEY. Empty: each node starts a
    server of its own."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Flags of sglang.launch_server without their dashes, for example {"mem-fraction-static" = 0.5}; true stands for a
    flag without a value. Those of a group are added to them, unless it has an endpoint."""


class NodeSettings(ScoringSettings, frozen=True, kw_only=True):
    """What groups of nodes may have each for itself."""

    engine: EngineName = "torch"
    engine_python: str = ""
    """The interpreter whose environment has the engine: it runs the node itself with vllm, the server with sglang.
    Empty is the one that runs everything else."""
    engine_timeout: PositiveFloat = 120.0
    """Seconds in which a vllm or sglang engine that has requests must sample something, or it counts as dead."""
    logprob_bound: NonNegative = 0.0
    """Nats by which a node's log-probabilities may differ from the trainer's under the same policy; 0: what its engine
    and the dtypes are known to need. From 0.05 on (half precision) a mixture of experts is judged by the mean."""
    nodes: PositiveInt = 1
    slots: PositiveInt = 64
    in_flight: Literal["finish", "continue", "recompute"] = "finish"
    handover: Literal["continue", "discard"] = "continue"
    """What becomes of samples that a node has begun when it leaves: another goes on from their tokens, or they are
    sampled anew."""
    max_context: PositiveInt = 512
    """Prompt and answer together, in tokens: what a slot's KV cache holds."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: Literal["auto", "never", "always"] = "auto"
    """Compile the torch engine's decode step, for models of Llama's family. auto: eager at first, and compiled (by a
    process of its own, and kept in the cache) once the node has sampled for long enough to pay for that. always:
    before the first step. Where it cannot be compiled, for want of a C++ compiler or so, it stays eager."""
    max_resident: Annotated[int, Meta(ge=2)] = 3
    flip_timeout: PositiveFloat = 60.0
    """Seconds that a new policy waits for a slot before the oldest one's requests are recomputed under it."""
    max_tokens_per_second: NonNegative = 0.0
    """A torch node samples no faster than this: a slower machine, for experiments; 0 is as fast as it can. Samples that
    wait for a slot count as those do that have one, so it comes to about half of this."""
    relay: bool = False
    """Pass policies on to other nodes: these dial this one, and the store sends a few copies whatever their number."""
    relay_endpoint: str = "tcp://127.0.0.1:*"
    """With `relay`: where a node listens for others. Beyond this machine that needs buffer.keys."""
    relay_address: str = ""
    """With `relay`: where others dial it, where that is not relay_endpoint, as with tcp://0.0.0.0:5710. The port `*` is
    the one that it listens at."""
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()


GroupName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$")]
"""The names of its nodes begin with it, and those of their logs."""

if TYPE_CHECKING:

    class GroupConfig(Section, frozen=True):
        name: str

else:
    # Every key of NodeSettings, but none has a value unless it was set.
    GroupConfig = msgspec.defstruct(
        "GroupConfig",
        [
            ("name", GroupName),
            *((field.name, field.type | UnsetType, UNSET) for field in msgspec.structs.fields(NodeSettings)),
        ],
        bases=(Section,), module=__name__, frozen=True, kw_only=True,
    )  # fmt: skip


class InferenceConfig(NodeSettings, frozen=True, kw_only=True):
    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 64
    eval_share: Fraction = 0.5
    episodes: EpisodesConfig = EpisodesConfig()
    group: tuple[GroupConfig, ...] = ()


class NodeGroup(NamedTuple):
    """Nodes that are alike. `name` is empty where the config names no groups; `inference` is all of their settings,
    without groups in it."""

    name: str
    inference: InferenceConfig

    @property
    def node_names(self) -> tuple[str, ...]:
        """Of those that a run starts by itself."""
        return tuple(f"{self.name or 'node'}-{index}" for index in range(self.inference.nodes))


def node_groups(inference: InferenceConfig) -> tuple[NodeGroup, ...]:
    """Every group with its settings resolved; one without a name where the config names none."""
    if not inference.group:
        return (NodeGroup("", inference),)
    alone = msgspec.structs.replace(inference, group=())
    return tuple(NodeGroup(group.name, _resolved(alone, group)) for group in inference.group)


def _resolved(alone: InferenceConfig, group: GroupConfig) -> InferenceConfig:
    own = _own(group)
    for key, common in (("vllm", alone.vllm), ("sglang", alone.sglang)):
        if key in own and not getattr(own[key], "endpoint", ""):
            own[key] = msgspec.structs.replace(own[key], arguments=common.arguments | own[key].arguments)
    return msgspec.structs.replace(alone, **own)


def node_count(inference: InferenceConfig) -> int:
    """Of all groups together."""
    return sum(group.inference.nodes for group in node_groups(inference))


def with_nodes(inference: InferenceConfig, group: str, nodes: int) -> InferenceConfig:
    """The same with so many nodes in this group ("": where the config names none)."""
    if not inference.group:
        return msgspec.structs.replace(inference, nodes=nodes)
    groups = tuple(
        msgspec.structs.replace(each, nodes=nodes) if each.name == group else each for each in inference.group
    )
    return msgspec.structs.replace(inference, group=groups)


FORECAST_KEYS = ("slots", "in_flight", "max_tokens_per_second")


def as_one_kind(inference: InferenceConfig) -> InferenceConfig:
    """All nodes as if they were of one group, for a forecast, which knows one kind of node. Raises ConfigError for
    groups that differ in what it rests on."""
    groups = [group.inference for group in node_groups(inference)]
    for key in FORECAST_KEYS:
        values = list(dict.fromkeys(getattr(group, key) for group in groups))
        if len(values) > 1:
            raise ConfigError(
                f"[[inference.group]] {key} = {', '.join(map(str, values))}: a forecast knows one kind of node: give "
                f"every group the same, or remove the groups: --set inference.group=[]"
            )
    longest = max(group.max_context for group in groups)
    return msgspec.structs.replace(groups[0], nodes=node_count(inference), max_context=longest)


def interpreter(inference: InferenceConfig) -> str:
    """The absolute path of the group's `engine_python`; of this process's, where it has none. Links are left as they
    are: a virtual environment's interpreter is one."""
    chosen = inference.engine_python
    return os.path.abspath(os.path.expanduser(chosen)) if chosen else sys.executable


def lives_elsewhere(inference: InferenceConfig) -> bool:
    """Whether the node itself, and not only a server of its own, runs in another interpreter."""
    return inference.engine == "vllm" and bool(inference.engine_python)


def describe_group(group: NodeGroup) -> str:
    """A line for people: "2 × torch, 64 slots each, in flight: finish"; of another engine also where it is."""
    inference = group.inference
    name = f"{group.name}: " if group.name else ""
    place = "" if inference.engine == "torch" else f", with {interpreter(inference)}"
    if inference.engine == "sglang" and inference.sglang.endpoint:
        place = f", at {inference.sglang.endpoint}"
    kind = f"{name}{inference.nodes} × {inference.engine}, {inference.slots} slots each"
    return f"{kind}, in flight: {inference.in_flight}{place}"


# --- checks ----------------------------------------------------------------------------------------------------------

ONLY_WITH: Mapping[str, tuple[EngineName, ...]] = {
    "compile": ("torch",),
    "max_tokens_per_second": ("torch",),  # the others sample in a loop of their own
    "engine_python": ("vllm", "sglang"),
    "engine_timeout": ("vllm", "sglang"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
}
"""Keys that only mean something with some engines."""

_ALL = ("finish", "continue", "recompute")
_ONE_COPY = ("continue", "recompute")
OFFERED: Mapping[EngineName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch": (_ALL, _ONE_COPY),
    "vllm": (_ALL, _ONE_COPY),
    "sglang": (("finish", "recompute"), _ONE_COPY),  # it binds a request to the name of its adapter
}
"""What each engine can do with requests in flight: with adapters, and where it has one copy of weights that change."""

SERVES_EXPERTS: frozenset[EngineName] = frozenset({"torch", "sglang"})
"""The engines that serve adapters on the experts of a mixture."""

NOT_FOR_VLLM = frozenset((
    "model", "tokenizer", "skip_tokenizer_init", "enable_lora", "max_loras", "max_cpu_loras", "logprobs_mode",
    "additional_config", "gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend", "worker_extension_cls",
    "max_logprobs", "dtype",
))  # fmt: skip
NOT_FOR_SGLANG = frozenset(("config", "model", "model-path", "host", "port", "api-key", "admin-api-key"))
"""What a node sets by itself, the backends among them, which vLLM would write into its `additional_config`; a server's
key is a new one each time, and in no file that others may read."""

ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?(/|$)")  # a host, and a port perhaps


def flag_name(name: str) -> str:
    """A flag of SGLang in one spelling, however the config has it."""
    return name.removeprefix("--").replace("_", "-")


def check_inference(inference: InferenceConfig, *, deterministic: bool) -> None:
    """The section as a whole. Raises ConfigError."""
    _check_meaning(inference)
    groups = node_groups(inference)
    for name, count in Counter(group.name for group in groups).items():
        if count > 1:
            raise ConfigError(f"[[inference.group]] name = {name!r} is there {count} times: give each group its own")
    if deterministic and inference.group:
        raise ConfigError(
            "[[inference.group]]: run.deterministic = true needs nodes that are all alike: remove the groups, or set "
            "run.deterministic = false"
        )
    _check_arguments("[inference]", inference.vllm, inference.sglang)
    for each in inference.group:
        _check_arguments(f"[[inference.group]] {each.name!r}:", *(_own(each).get(key) for key in ("vllm", "sglang")))
    served = [group.inference.sglang.endpoint for group in groups if group.inference.engine == "sglang"]
    for endpoint, count in Counter(endpoint.rstrip("/") for endpoint in served).items():
        if endpoint and count > 1:
            raise ConfigError(
                f"[inference.sglang] endpoint = {endpoint!r} is that of {count} groups: one node has a server to "
                "itself, since nodes take each other's adapters off it: give each group one of its own"
            )


def _check_arguments(where: str, vllm: VllmConfig | None, sglang: SglangConfig | None) -> None:
    """Also of tables that no group uses: a key would be written down with them."""
    tables = {
        "vllm": NOT_FOR_VLLM & set(vllm.arguments if vllm else ()),
        "sglang": NOT_FOR_SGLANG & {flag_name(name) for name in (sglang.arguments if sglang else ())},
    }
    for engine, taken in tables.items():
        if taken:
            names = ", ".join(sorted(taken))
            raise ConfigError(f"{where} {engine}.arguments: {names}: the node sets it by itself: leave it out")


def _check_meaning(inference: InferenceConfig) -> None:
    """No key is set for nothing: in [inference] it must mean something for one group at least."""
    engines = {group.inference.engine for group in node_groups(inference)}
    for key in changed(inference, list(ONLY_WITH)):
        if not engines & set(ONLY_WITH[key]):
            raise ConfigError(_without_meaning("[inference]", key, " and ".join(sorted(engines))))
    for group, resolved in zip(inference.group, node_groups(inference), strict=False):
        engine = resolved.inference.engine
        for key in _own(group):
            if engine not in ONLY_WITH.get(key, (engine,)):
                raise ConfigError(_without_meaning(f"[[inference.group]] {group.name!r}:", key, engine))


def _without_meaning(where: str, key: str, engine: str) -> str:
    only = _or(ONLY_WITH[key])
    return f"{where} {key} has no meaning with engine {engine}, only with {only}: remove it, or change engine"


def _or(values: Sequence[str]) -> str:
    return " or ".join(f'"{value}"' for value in values)


SENDS_ROUTES = ("torch", "sglang")


def check_group(
    inference: InferenceConfig,
    *,
    one_copy: bool,
    evaluates: bool,
    center_scores: int,
    sends_routes: bool,
    deterministic: bool,
) -> None:
    """The settings of one group's nodes; with whether the weights themselves change, run.eval_every, [algorithm]
    center_scores and router_replay (whether it is "rollout"), and run.deterministic. Raises ConfigError."""
    if inference.in_flight not in (offered := OFFERED[inference.engine][one_copy]):
        changes = "whole weights" if one_copy else "adapters"
        raise ConfigError(
            f'[inference] in_flight = "{inference.in_flight}": engine "{inference.engine}" cannot do that with '
            f"{changes}: set {_or(offered)}"
        )
    if evaluates and inference.in_flight == "finish" and inference.max_resident < 3:
        raise ConfigError(
            "[inference] max_resident must be at least 3 when evaluation is on (run.eval_every) and in_flight = "
            '"finish": one slot serves, one loads, one is pinned by evaluation'
        )
    if inference.max_new_tokens >= inference.max_context:
        raise ConfigError("[inference] max_new_tokens leaves no room for a prompt in max_context")
    if inference.logprob_bound > LARGEST_BOUND:
        raise ConfigError(
            f"[inference] logprob_bound = {inference.logprob_bound:g}: nothing wider than {LARGEST_BOUND:g} nats shows "
            "that a node serves what was trained"
        )
    if deterministic and inference.engine != "torch":
        raise ConfigError(
            f'[inference] engine = "{inference.engine}": run.deterministic = true needs steps of fixed shapes: set '
            'engine = "torch", or run.deterministic = false'
        )
    if center_scores:
        _check_centred(inference, center_scores)
    if sends_routes and inference.engine not in SENDS_ROUTES:
        raise ConfigError(
            f'[algorithm] router_replay = "rollout" needs the experts of every token, which engine '
            f'"{inference.engine}" does not tell: set [inference] engine = {_or(SENDS_ROUTES)}, or router_replay = '
            '"none"'
        )
    if inference.sglang.endpoint and inference.engine == "sglang":
        _check_endpoint(inference)


def _check_centred(inference: InferenceConfig, center_scores: int) -> None:
    wants = f"[algorithm] center_scores = {center_scores} needs"
    if inference.engine != "torch":
        raise ConfigError(
            f'{wants} the sampler\'s likeliest tokens at every token, which engine "{inference.engine}" does not give: '
            'set [inference] engine = "torch"'
        )
    if inference.handover != "discard":
        raise ConfigError(
            f"{wants} the sampler's likeliest tokens at every token, which are not handed over with samples that go on "
            'elsewhere: set [inference] handover = "discard"'
        )
    if inference.compile == "always":
        raise ConfigError(
            f'{wants} more of a decode step than the compiled one gives: set [inference] compile = "auto" or "never"'
        )


def _check_endpoint(inference: InferenceConfig) -> None:
    """A server that is there already belongs to one node, and was started by somebody else."""
    endpoint = inference.sglang.endpoint
    where = f"[inference.sglang] endpoint = {endpoint!r}"
    if not ENDPOINT.match(endpoint):
        raise ConfigError(f"{where}: write it as http://host:port")
    if inference.nodes > 1:
        raise ConfigError(
            f"{where}: one node has a server to itself, since nodes take each other's adapters off it: set nodes = 1, "
            "or make a group for each server"
        )
    for key, given in (("engine_python", inference.engine_python), ("sglang.arguments", inference.sglang.arguments)):
        if given:
            raise ConfigError(f"{where}: that server runs already: remove {key}, which are for one that a node starts")


def _own(group: GroupConfig) -> dict[str, Any]:
    """What a group sets itself."""
    values = {key: getattr(group, key) for key in group.__struct_fields__ if key != "name"}
    return {key: value for key, value in values.items() if value is not UNSET}

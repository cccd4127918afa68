"""The section [launch]: who starts a run's processes, on this machine or on a Ray cluster, and how many nodes.

    [launch]
    kind = "ray"

    [launch.ray]
    address = "10.0.0.1:6379"

    [launch.ray.inference]
    num_gpus = 1
    runtime_env = {pip = ["vllm==0.32.0"]}

    [launch.autoscale]
    max_nodes = 16
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from async_rl.inference_config import InferenceConfig, node_groups
from async_rl.schema import ConfigError, Count, Fraction, NonNegative, PositiveFloat, PositiveInt, Section


class RayPlace(Section, frozen=True, kw_only=True):
    """What one process of a pool asks Ray for."""

    num_cpus: NonNegative = 1.0
    """Without meaning on a cluster that is started here for the run: there cores are shared, as with kind = "local"."""
    num_gpus: NonNegative = 0.0
    resources: dict[str, Annotated[float, Meta(gt=0)]] = msgspec.field(default_factory=dict)
    """The cluster's own, by name."""
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict)
    """Ray's: {pip = […]}, {env_vars = {…}}, {py_executable = "…"}; whatever it makes has to have async-rl in it."""


class RayGroup(RayPlace, frozen=True, kw_only=True):
    """What a node of the [[inference.group]] of this name asks for, all of it."""

    name: str


_Place = TypeVar("_Place", bound=RayPlace)


class RayConfig(Section, frozen=True, kw_only=True):
    """The table [launch.ray]."""

    address: str = ""
    """Of the cluster, host:port or "auto"; this machine must be one of its. Empty: one is started here for the run."""
    placement_timeout: PositiveFloat = 600.0
    """Seconds in which a process must have been placed and its environment made, or it counts as failed."""
    spread_ranks: bool = False
    """Each rank of [trainer.parallel] is placed by itself and asks for what `trainer` says; else rank 0's machine has
    them all."""
    services: RayPlace = RayPlace(num_cpus=0.5)
    """Buffer and policy store, each."""
    trainer: RayPlace = RayPlace()
    inference: RayPlace = RayPlace()
    group: tuple[RayGroup, ...] = ()


class AutoscaleConfig(Section, frozen=True, kw_only=True):
    """The table [launch.autoscale]: its presence lets the launcher start and dismiss nodes."""

    max_nodes: PositiveInt
    min_nodes: PositiveInt = 1
    group: str = ""
    """Which [[inference.group]] changes; empty where the config names none."""
    every: PositiveFloat = 15.0
    """Seconds that each look at the pools covers."""
    looks: PositiveInt = 2
    """So many looks in a row must say the same."""
    cool_down: PositiveFloat = 60.0
    """Seconds after a change in which there is no other: new nodes have to show what they change."""
    trainer_idle: Fraction = 0.15
    """Of a trainer that waits for batches for more of its time, more nodes are wanted, if they have work to do."""
    nodes_busy: Fraction = 0.8
    """The share of their time that nodes have work, which a smaller pool would have to have at most."""


class LaunchConfig(Section, frozen=True, kw_only=True):
    kind: Literal["local", "ray"] = "local"
    grace: PositiveFloat = 10.0
    """Seconds between asking a pool to end and ending it."""
    restarts: Count = 10
    """How often each process that was killed is started again; the others go on meanwhile. One that was lost with its
    machine always is: that was not its doing."""
    pin: bool = False
    """Give the inference nodes the first half of this machine's cores, and the trainer and the services the others, so
    that the pools do not take turns on the same ones: for measurements. Linux only."""
    ray: RayConfig | None = None
    autoscale: AutoscaleConfig | None = None


def check_launch(launch: LaunchConfig, inference: InferenceConfig, *, ranks: int) -> None:
    """With the trainer's number of ranks. Raises ConfigError."""
    if launch.ray is not None:
        if launch.kind != "ray":
            raise ConfigError(f'[launch.ray] has no meaning with kind = "{launch.kind}": set "ray", or remove it')
        _check_ray(launch.ray, inference)
        if launch.ray.spread_ranks and ranks == 1:
            raise ConfigError("[launch.ray] spread_ranks = true has no meaning with one rank: see [trainer.parallel]")
    if launch.kind == "ray" and launch.pin:
        raise ConfigError('[launch] pin = true has no meaning with kind = "ray", which places by resources: remove it')
    if launch.autoscale is not None:
        _check_autoscale(launch.autoscale, inference)


def _check_ray(ray: RayConfig, inference: InferenceConfig) -> None:
    if ray.address.startswith("ray://"):
        raise ConfigError(
            f'[launch.ray] address = "{ray.address}": the launcher has to run on a machine of the cluster (log in '
            'there, or submit it as a Ray job): address = "auto"'
        )
    host, _, port = ray.address.rpartition(":")
    if ray.address not in ("", "auto") and not (host and port.isdecimal()):
        raise ConfigError(f'[launch.ray] address = "{ray.address}": expected host:port, or "auto"')
    known = {group.name for group in node_groups(inference)} - {""}
    names = [group.name for group in ray.group]
    for name in names:
        if name not in known:
            raise ConfigError(f"[[launch.ray.group]] name = {name!r}: there is no [[inference.group]] of that name")
        if names.count(name) > 1:
            raise ConfigError(f"[[launch.ray.group]] name = {name!r} is there {names.count(name)} times: keep one")


def _check_autoscale(scale: AutoscaleConfig, inference: InferenceConfig) -> None:
    if scale.min_nodes > scale.max_nodes:
        raise ConfigError(
            f"[launch.autoscale] min_nodes = {scale.min_nodes} is above max_nodes = {scale.max_nodes}: change one"
        )
    sizes = {group.name: group.inference.nodes for group in node_groups(inference)}
    if scale.group not in sizes:
        known = ", ".join(sizes)
        raise ConfigError(
            f'[launch.autoscale] group = "{scale.group}": '
            + (f"choose one of {known}" if known else "there is no [[inference.group]]: remove it")
        )
    if not scale.min_nodes <= sizes[scale.group] <= scale.max_nodes:
        raise ConfigError(
            f"[launch.autoscale] {scale.min_nodes} to {scale.max_nodes} nodes, and the run begins with "
            f"{sizes[scale.group]} ([inference] nodes): change one"
        )


def ray_of(launch: LaunchConfig) -> RayConfig:
    """The table, with its defaults where there is none."""
    ray = launch.ray or RayConfig()
    return ray if ray.address else _sharing_cores(ray)


def _sharing_cores(ray: RayConfig) -> RayConfig:
    """However many processes there are: shards, ranks, nodes that are added."""

    def shared(place: _Place) -> _Place:
        return msgspec.structs.replace(place, num_cpus=0.0)

    return msgspec.structs.replace(
        ray, services=shared(ray.services), trainer=shared(ray.trainer), inference=shared(ray.inference),
        group=tuple(map(shared, ray.group)),
    )  # fmt: skip


def place_of(ray: RayConfig, module: str, group: str) -> RayPlace:
    """What a process of this module (a node: of this group) asks for."""
    if module.startswith("trainer."):
        return ray.trainer
    if module.startswith("inference."):
        return next((each for each in ray.group if each.name == group), ray.inference)
    return ray.services


def bundle(place: RayPlace) -> dict[str, float]:
    """As Ray's placement has it."""
    sizes: Mapping[str, float] = {"CPU": place.num_cpus, "GPU": place.num_gpus, **place.resources}
    return {name: size for name, size in sizes.items() if size}


def describe_launch(launch: LaunchConfig) -> str:
    """A line for people."""
    words = "on this machine"
    if launch.kind == "ray":
        ray = ray_of(launch)
        places = {"services": ray.services, "trainer": ray.trainer, "nodes": ray.inference}
        places |= {group.name: group for group in ray.group}
        shapes = "; ".join(f"{name} {_shape(place)} each" for name, place in places.items())
        words = f"on the Ray cluster {ray.address or 'that is started here'}: {shapes}"
    if launch.autoscale is not None:
        words += f"; {launch.autoscale.min_nodes} to {launch.autoscale.max_nodes} nodes as needed"
    return words


def _shape(place: RayPlace) -> str:
    sizes = ", ".join(f"{size:g} {name}" for name, size in bundle(place).items()) or "nothing"
    return f"{sizes}{', in an environment of their own' if place.runtime_env else ''}"


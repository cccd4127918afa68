"""[launch] kind = "ray": a run's processes on the machines of a Ray cluster. The only module that imports Ray.

Ray places actors, one for each process, by what [launch.ray] says that its pool asks for, and makes its pool's
environment; the actor (host.py) starts the same process that the local launcher would, watches it, and tells what it
says. All else is the launcher's (pools.py), as on one machine. Of a run's data nothing goes through Ray.

Buffer, policy store and trainer are placed on this machine where it offers what they ask for, else anywhere; nodes are
spread. An actor belongs to this process: Ray ends it when this process is gone, and its child ends with it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.launch_config import RayConfig, RayPlace, bundle, place_of, ray_of
from async_rl.run.directory import RunDirectory
from async_rl.run.host import KEYS, Host, Look, Order, Started
from async_rl.run.launch import LaunchError, ProcessSpec, add_line, note
from async_rl.wire.keys import SERVICE
from async_rl.wire.security import is_local, with_host

LOOK_S = 1.0  # how long an actor with nothing new to say keeps a look waiting
UNAVAILABLE_S = 1.0  # between looks at an actor that Ray cannot reach for now
DIAL_S = 5.0
TELL_S = 10.0  # without a place, until its log says so
CLOSE_S = 5.0  # for an actor to take its files away
OBJECT_STORE_BYTES = 80 << 20  # of a cluster that is started here: Ray's least, as nothing goes through it
NODE_KEYS = ("node.secret", f"{SERVICE}.public")
THREADS = 8  # of an actor: a look waits in one, and signals must not wait behind it


class Meeting(NamedTuple):
    """Where ranks find each other: at rank 0."""

    address: str
    port: int


class RayHost(Host):
    """The actor."""

    def meeting(self) -> Meeting:
        return Meeting(ray.util.get_node_ip_address(), self.free_port())

    def start(self, order: Order) -> Started:
        self.address = ray.util.get_node_ip_address()
        return super().start(order)._replace(node=ray.get_runtime_context().get_node_id(), address=self.address)


class RayGround:
    """Joined to the cluster while it is open."""

    def __init__(self, config: Config) -> None:
        self._ray = ray_of(config.launch)
        self._launch = config
        self._handlers: dict[int, Any] = {}
        self.node = ""
        self.address = ""

    def __enter__(self) -> RayGround:
        """Raises AsyncRLError."""
        if ray.is_initialized():
            raise AsyncRLError('[launch] kind = "ray": this process is on a Ray cluster already: end that first')
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            _join(self._ray, self._launch)
            self.node = ray.get_runtime_context().get_node_id()
            self.address = ray.util.get_node_ip_address()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if ray.is_initialized():
            if self._ray.address:
                with suppress(Exception):  # nobody asks for room any more; a cluster that is gone gives none
                    request_resources(bundles=[])
            ray.shutdown()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # Ray sets its own

    def prepare(self, config: Config) -> Config:
        """The services listen at this machine's address where none is named, as every machine dials it. Raises
        AsyncRLError for endpoints that other machines of the cluster do not reach."""
        buffer = msgspec.structs.replace(
            config.buffer,
            endpoint=with_host(config.buffer.endpoint, self.address),
            store_endpoint=with_host(config.buffer.store_endpoint, self.address),
        )
        others = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]} - {self.address}
        for key in ("endpoint", "store_endpoint"):
            if others and is_local(endpoint := getattr(buffer, key)):
                raise AsyncRLError(_unreachable(key, endpoint, f"the cluster's {', '.join(sorted(others))}"))
        return msgspec.structs.replace(config, buffer=buffer)

    def starter(self, config: Config, directory: RunDirectory) -> RayStarter:
        return RayStarter(self, config, directory)

    def ask_for(self, places: Sequence[RayPlace]) -> None:
        """The cluster is to have room for these; one that grows by itself hears of it before anything waits for it."""
        if self._ray.address:
            with suppress(RayError):  # a wish, no more
                request_resources(bundles=[shape for place in places if (shape := bundle(place))])


def _join(settings: RayConfig, config: Config) -> None:
    """Raises AsyncRLError."""
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if ":" in settings.address:
        _check_listens(settings.address)
    try:
        if settings.address:
            ray.init(address=settings.address, namespace=f"async-rl-{config.run.name}", **common)
        else:
            os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else this machine does goes first
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **common)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        where = settings.address or "a cluster on this machine"
        raise AsyncRLError(
            f"[launch.ray] {where}: Ray cannot be joined ({' '.join(str(error).split())[:400]}): is this machine one "
            "of the cluster (`ray status` here says so), with the same version of Ray?"
        ) from error


def _check_listens(address: str) -> None:
    """Ray itself would try for minutes. Raises AsyncRLError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except (OSError, ValueError) as error:
        raise AsyncRLError(
            f'[launch.ray] address = "{address}": nobody listens there ({error}): `ray start --head` starts a cluster, '
            "and says its address"
        ) from error


def _place(settings: RayConfig, spec: ProcessSpec) -> RayPlace:
    arguments = dict(zip(spec.arguments, spec.arguments[1:], strict=False))
    return place_of(settings, spec.module, arguments.get("--group", ""))


class RayStarter:
    """Starts a run's processes as actors."""

    def __init__(self, ground: RayGround, config: Config, directory: RunDirectory) -> None:
        self.ground = ground
        self.settings = ray_of(config.launch)
        self.directory = directory
        self.local_only = {
            key: endpoint
            for key in ("endpoint", "store_endpoint")
            if is_local(endpoint := getattr(directory, key))
        }
        _tell_into(directory.logs / "ray.log")
        self._keys = Path(config.buffer.keys) if config.buffer.keys else None
        self.meeting: Meeting | None = None  # of the trainer's ranks, once rank 0 has a place
        self._ranks: Any = None  # their placement group
        self._places: dict[str, RayPlace] = {}  # of those that are there, or are to be
        self._actor = ray.remote(max_concurrency=THREADS, max_restarts=0)(RayHost)

    def start(self, spec: ProcessSpec, log: Path | None, again: bool) -> RayHandle:
        place = self._places[spec.name] = _place(self.settings, spec)
        self.ground.ask_for(list(self._places.values()))
        home = not spec.expendable
        if spec.world > 1 and spec.rank == 0:
            self.meeting = None  # of those before
        try:
            actor = self._actor.options(
                num_cpus=place.num_cpus,
                num_gpus=place.num_gpus,
                resources=place.resources or None,
                runtime_env=place.runtime_env or None,
                scheduling_strategy=self._where(spec, place),
            ).remote()
        except (ValueError, TypeError) as error:
            raise LaunchError(f"[launch.ray]: Ray does not take what {spec.name} asks for: {error}") from error
        order = Order(spec, again, self.directory.run_id, str(self.directory.path), {} if home else self._files())
        return RayHandle(self, spec.name, actor, order, place, log)

    def _where(self, spec: ProcessSpec, place: RayPlace) -> Any:
        """Ranks are placed all or none, on as few machines as hold them: of several machines."""
        if spec.world > 1 and self.settings.address:
            if self._ranks is None:
                self._ranks = placement_group([bundle(place)] * spec.world, strategy="PACK")
            return PlacementGroupSchedulingStrategy(self._ranks, spec.rank)
        return "SPREAD" if spec.expendable else NodeAffinitySchedulingStrategy(self.ground.node, soft=True)

    def gone(self, name: str) -> None:
        self._places.pop(name, None)
        self.ground.ask_for(list(self._places.values()))

    def _files(self) -> dict[str, bytes]:
        """What a node finds in its run directory."""
        directory = self.directory
        files = {path.name: path.read_bytes() for path in (directory.path / "run.json", directory.config_path)}
        files["token"] = directory.token.encode() + b"\n"
        if self._keys is not None:
            files |= {f"{KEYS}/{name}": (self._keys / name).read_bytes() for name in NODE_KEYS}
        return files


def _tell_into(log: Path) -> None:
    """Ray tells of lost machines in pages, on the terminal that shows the run's progress, and has no switch for it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, **_: add_line(log, "\n".join(map(str, data["lines"])))


class RayHandle:
    """A process on its way to a machine, or there. Everything is asked of the actor without waiting for the answer."""

    def __init__(
        self, starter: RayStarter, name: str, actor: Any, order: Order, place: RayPlace, log: Path | None
    ) -> None:
        self.lost = ""
        self._starter = starter
        self._name = name
        self._actor = actor
        self._place = place
        self._log = log
        self._asked = time.monotonic()
        self._told = False  # that it waits
        self._order = order
        alone = order.spec.world == 1
        self._meeting: Any = None if alone or order.spec.rank else actor.meeting.remote()
        self._starting: Any = actor.start.remote(order) if alone else None
        self._started: Started | None = None
        self._looking: Any = None
        self._look_at = 0.0
        self._offset = 0
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                self._advance()
            except ActorUnavailableError:  # for now, Ray says
                self._looking, self._look_at = None, time.monotonic() + UNAVAILABLE_S
            except ActorDiedError as error:
                self._died(error)
            except RayError as error:  # its environment cannot be made, or the like
                self._fail(" ".join(str(error).split()))
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is not None:
            return
        if self._started is None:
            self._end(-number)
        else:
            self._actor.send_signal.remote(number)

    def kill(self, patience: float) -> None:
        if self._started is not None and self._code is None:
            self._actor.kill.remote()
            deadline = time.monotonic() + patience
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if self._code is None:
            self._end(-signal.SIGKILL)

    # --- from one state to the next ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self._started is None:
            self._await_start()
        elif self._looking is None:
            if time.monotonic() >= self._look_at:
                self._looking = self._actor.look.remote(self._offset, LOOK_S)
        elif _is_there(self._looking):
            look: Look = ray.get(self._looking)
            self._offset += len(look.piece)
            self._write(look.piece)
            if look.code is not None:
                self._end(look.code)
            else:
                self._looking = self._actor.look.remote(self._offset, LOOK_S)

    def _await_start(self) -> None:
        limit = self._starter.settings.placement_timeout
        if self._starting is None:
            self._await_meeting()
        if self._starting is None or not _is_there(self._starting):
            waited = time.monotonic() - self._asked
            wanted = ", ".join(f"{size:g} {name}" for name, size in bundle(self._place).items()) or "nothing"
            if waited > limit:
                self._fail(
                    f"no machine of the Ray cluster had room for it ({wanted}) within {limit:g} s, or its environment "
                    "was not ready: `ray status` shows what there is; [launch.ray] says what to ask for, and how long"
                )
            elif waited > TELL_S and not self._told:
                self._told = True
                words = f"waits for a machine of the Ray cluster with room for it ({wanted}), {limit:g} s at most"
                add_line(self._log, words)
                self._tell(f"{self._name} {words}")
            return
        started: Started = ray.get(self._starting)
        if started.error:
            self._fail(f"{started.hostname} ({started.address}): {started.error}")
            return
        for key, endpoint in self._starter.local_only.items():
            if started.address != self._starter.ground.address:
                self._actor.kill.remote()
                self._fail(_unreachable(key, endpoint, f"{started.hostname} ({started.address}), where Ray placed it"))
                return
        self._started = started
        self._tell(f"{self._name} runs on {started.hostname} ({started.address}, Ray node {started.node[:8]})")

    def _await_meeting(self) -> None:
        """Of a rank: it starts when it is known where rank 0 is."""
        if self._meeting is not None and _is_there(self._meeting):
            self._starter.meeting = ray.get(self._meeting)
        if (meeting := self._starter.meeting) is not None:
            spec = self._order.spec
            torchrun = {
                "RANK": str(spec.rank), "WORLD_SIZE": str(spec.world), "LOCAL_RANK": "0",
                "MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port),
            }  # fmt: skip
            self._starting = self._actor.start.remote(self._order._replace(environment=torchrun))

    def _died(self, error: ActorDiedError) -> None:
        """Its machine is gone, or Ray ended the actor there (for want of memory, perhaps), and its child with it."""
        words = " ".join(str(error).split())
        if self._started is None:
            if "creation task" in words or "ModuleNotFoundError" in words:
                self._fail(f"Ray cannot run async-rl there: is it installed in the pool's environment? {words[-400:]}")
                return
            add_line(self._log, f"Ray ended the actor before it had started anything: {words[:400]}")
        elif self._started.node not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            self.lost = f"{self._started.hostname}, {self._started.address}, Ray node {self._started.node[:8]}"
        else:
            add_line(self._log, f"Ray ended the actor: {words[:400]}")
        self._code = -signal.SIGKILL
        self._starter.gone(self._name)

    def _fail(self, words: str) -> None:
        add_line(self._log, f"error: {words}")
        self._end(1)

    def _end(self, code: int) -> None:
        """The actor goes; it has taken away its files, or does now."""
        self._code = code
        self._starter.gone(self._name)
        if self._started is not None:
            with suppress(RayError):
                ray.wait([self._actor.close.remote()], timeout=CLOSE_S)
        ray.kill(self._actor)

    def _write(self, piece: bytes) -> None:
        if self._log is not None and piece:
            with self._log.open("ab") as file:
                file.write(piece)

    def _tell(self, words: str) -> None:
        note(self._starter.directory.logs, words)


def _is_there(answer: Any) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])


def _unreachable(key: str, endpoint: str, whom: str) -> str:
    return (
        f"[buffer] {key} = {endpoint} is not reached from {whom}: set [buffer] endpoint and store_endpoint to "
        '"tcp://*:*" (this machine\'s address, two free ports) and keys to a folder that `async-rl keys` makes '
        "(SECURITY.md)"
    )

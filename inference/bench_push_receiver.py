"""One receiver of the push benchmark: a process that is told to take an adapter, and says when it had it.

It is what a node is for a policy, without the sampling: the puller's thread, the slot layers of the torch engine in
half precision (adapters stay unmerged), two policy slots. The layers are small and the rank is large, so that 16 of
them fit on one machine: what a push costs depends on the bytes and on the number of tensors, not on the base model.

    bench ── Join, Take, Go, Leave ──> receiver        over a pipe, msgpack
    bench <── Ready, Taken, Failed ── receiver
"""

from __future__ import annotations

import mmap
import queue
import signal
import socket
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import TENSOR_PREFIX, read_adapter
from async_rl.run.process import die_with_parent
from async_rl.version import PolicyId
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import Source
from inference.adapter_match import A_SUFFIX, B_SUFFIX, match_adapter
from inference.policies import PolicyFetched, PolicyPuller
from inference.pulls import Relaying, place
from inference.relay import Relay
from inference.resident import ResidentPolicies
from inference.slot_linear import ActiveSlot, wrap_linears

PATIENCE_S = 120.0  # for anything that another process of the benchmark owes
SLOTS = 2  # one serves, one is filled
LAYERS, HIDDEN, KV, INTERMEDIATE = 28, 256, 128, 640
# [out, in] of a layer's modules. 28 layers of 7 modules are the 392 tensors of a 7B model's adapter.
ATTENTION = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (KV, HIDDEN), "v_proj": (KV, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
MLP = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
BYTES_PER_RANK = 2 * LAYERS * sum(sum(shape) for shape in (*ATTENTION.values(), *MLP.values()))

Way = Literal["store", "relay", "shared memory", "raw TCP"]


class PushError(AsyncRLError):
    """The benchmark cannot go on; the message says who waited for what."""


# --- what crosses the pipe -------------------------------------------------------------------------------------------


class Order(msgspec.Struct, array_like=True, tag=True):
    """Base of what a receiver is told; each is answered with Ready, or Failed."""


class Join(Order, array_like=True, tag=True):
    """Dial where pushes will come from: the policy store, or (`port` is not 0) the sender's own socket. With
    `relay_endpoint` volunteer as a relay that listens there, and that others dial at `relay_address` (empty: there)."""

    endpoint: str = ""
    run: str = ""
    token: str = ""
    port: int = 0
    relay_endpoint: str = ""
    relay_address: str = ""
    relay_timeout_s: float = 3.0


class Leave(Order, array_like=True, tag=True):
    """Hang up, and let go of all policies."""


class Take(Order, array_like=True, tag=True):
    """The next push comes this way and has so many bytes: answer Ready, and Taken when it is served."""

    way: Way
    nbytes: int
    version: int = 0


class Go(Order, array_like=True, tag=True):
    """The bytes are in the shared memory (the only order that is not answered by Ready)."""


class Answer(msgspec.Struct, array_like=True, tag=True):
    """Base of what a receiver says."""


class Ready(Answer, array_like=True, tag=True):
    pass


class Taken(Answer, array_like=True, tag=True):
    """When, in seconds on the machine's monotonic clock (one for all processes). Over the store: `fetched` when the
    puller handed over the file, its SHA-256 verified; `verified` when the tensors' digest was, too; `flipped` when
    they are in a policy slot and the slot is the serving one. The other ways verify nothing and have no slots: all
    three are when the bytes were in the receiver's own memory."""

    fetched: float
    verified: float
    flipped: float


class Failed(Answer, array_like=True, tag=True):
    error: str


AnyOrder = Join | Leave | Take | Go
AnyAnswer = Ready | Taken | Failed
_encoder = msgspec.msgpack.Encoder()


def tell(pipe: Connection, message: msgspec.Struct) -> None:
    pipe.send_bytes(_encoder.encode(message))


def hear(pipe: Connection, kind: Any) -> Any:
    return msgspec.msgpack.decode(pipe.recv_bytes(), type=kind)


# --- the policies it serves ------------------------------------------------------------------------------------------


class ServedModel:
    """A model's linear layers in bfloat16 with two policy slots; installs and flips as the torch engine does."""

    def __init__(self) -> None:
        self.active = ActiveSlot()
        self._resident = ResidentPolicies(SLOTS)
        model = nn.ModuleDict({"layers": nn.ModuleList(make_layer() for _ in range(LAYERS))})
        self.linears = wrap_linears(model, self.active, SLOTS)
        self.shapes = {name: (linear.out_features, linear.in_features) for name, linear in self.linears.items()}

    @property
    def serving(self) -> PolicyId | None:
        return self._resident.serving

    def install(self, policy: PolicyId, path: Path) -> float:
        """Verify and load into the slot that does not serve; returns when it was verified. Raises AsyncRLError."""
        for resident in [resident for resident in self._resident.uses if resident != self.serving]:
            self._resident.remove(resident)
        slot = self._resident.free_slot()
        tensors, config = read_adapter(path, expected_digest=policy.digest)
        verified = time.monotonic()
        adapters = match_adapter(tensors, config, self.shapes)
        for name, linear in self.linears.items():
            linear.load(slot, adapters.get(name))
        self._resident.add(policy)
        return verified

    def flip(self, policy: PolicyId) -> None:
        """From now on every layer computes with this policy."""
        self._resident.serve(policy)
        self.active.index = self._resident.slot(policy)

    def clear(self) -> None:
        """Forget all policies and free their memory."""
        self._resident = ResidentPolicies(SLOTS)
        for linear in self.linears.values():
            for slot in range(SLOTS):
                linear.load(slot, None)


def make_layer() -> nn.ModuleDict:
    layer = nn.ModuleDict()
    for part, shapes in (("self_attn", ATTENTION), ("mlp", MLP)):
        layer[part] = nn.ModuleDict({name: frozen_linear(shape) for name, shape in shapes.items()})
    return layer


def frozen_linear(shape: tuple[int, int]) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
    nn.init.ones_(linear.weight.requires_grad_(False))
    return linear


def make_adapter(nbytes: int, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (bfloat16) and PEFT config of an adapter of about `nbytes` for ServedModel: the nearest rank's."""
    rank = max(1, round(nbytes / BYTES_PER_RANK))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_features, in_features) in ServedModel().shapes.items():
        for suffix, shape in ((A_SUFFIX, (rank, in_features)), (B_SUFFIX, (out_features, rank))):
            values = torch.randint(-99, 99, shape, generator=generator, dtype=torch.int8)
            tensors[f"{TENSOR_PREFIX}{name}{suffix}"] = values.to(torch.bfloat16) / 1000
    return tensors, {"r": rank, "lora_alpha": rank, "target_modules": [*ATTENTION, *MLP]}


# --- the process -----------------------------------------------------------------------------------------------------


class Receiver:
    """`shared` is the memory that the sender fills (the whole of it may be too long); `room` bytes of own memory
    take what comes over it or over TCP."""

    def __init__(self, name: str, pipe: Connection, shared: mmap.mmap, room: int, folder: Path) -> None:
        self._name = name
        self._pipe = pipe
        self._folder = folder
        self._model = ServedModel()
        self._shared = memoryview(shared)
        self._own = memoryview(bytearray(room))
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._joined = ExitStack()

    def work(self) -> None:
        """Until the pipe is closed. Whatever goes wrong is told as Failed."""
        while True:
            try:
                order = hear(self._pipe, AnyOrder)
            except EOFError:
                return
            try:
                self._obey(order)
            except Exception as error:
                tell(self._pipe, Failed(f"{self._name}: {type(error).__name__}: {error}"))

    def _obey(self, order: AnyOrder) -> None:
        match order:
            case Join(port=0):
                self._join_store(order)
            case Join(port=port):
                self._socket = self._joined.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            case Leave():
                self._joined.close()
                self._model.clear()
            case Take():
                tell(self._pipe, Ready())
                tell(self._pipe, self._take(order))
                return
            case Go():
                raise PushError("told to copy without having been told what")
        tell(self._pipe, Ready())

    def _join_store(self, join: Join) -> None:
        link = Client(join.endpoint, run=join.run, token=join.token, role="node", name=self._name, peer="the store")
        self._joined.callback(link.close)
        link.connect(PATIENCE_S)
        self._inbox = queue.SimpleQueue()
        relaying = self._relaying(join) if join.relay_endpoint else None
        self._joined.callback(PolicyPuller(link, self._folder, self._inbox, relaying=relaying).close)

    def _relaying(self, join: Join) -> Relaying:
        server = Server(join.relay_endpoint, run=join.run, token=join.token, name=self._name)
        relay = Relay(server, join.relay_address or server.endpoint, join.relay_timeout_s)
        self._joined.callback(relay.close)

        def dial(source: Source) -> Client:
            peer = f"relay {source.relay}"
            return Client(source.endpoint, run=join.run, token=join.token, role="node", name=self._name, peer=peer)

        return Relaying(dial, join.relay_timeout_s, place(), relay)

    def _take(self, take: Take) -> Taken:
        if take.way in ("store", "relay"):
            return self._from_store(take.version)
        if take.way == "raw TCP":
            self._from_socket(self._own[: take.nbytes])
        else:
            self._from_shared(self._own[: take.nbytes])
        now = time.monotonic()
        return Taken(now, now, now)

    def _from_store(self, version: int) -> Taken:
        """Serve whatever the puller hands over, until it is the version asked for."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                item = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise PushError(f"waited {PATIENCE_S:.0f} s for policy version {version} from the store") from None
            if not isinstance(item, PolicyFetched):
                raise PushError(f"policy version {version} did not come: {item}")
            fetched = time.monotonic()
            verified = self._model.install(item.policy, item.path)
            item.path.unlink()
            self._model.flip(item.policy)
            if item.policy.version == version:
                return Taken(fetched, verified, time.monotonic())

    def _from_socket(self, into: memoryview) -> None:
        if self._socket is None:
            raise PushError("there is no connection to the sender")
        received = 0
        while received < len(into):
            count = self._socket.recv_into(into[received:])
            if not count:
                raise PushError(f"the sender hung up after {received} of {len(into)} bytes")
            received += count

    def _from_shared(self, into: memoryview) -> None:
        if not self._pipe.poll(PATIENCE_S) or not isinstance(hear(self._pipe, AnyOrder), Go):
            raise PushError(f"waited {PATIENCE_S:.0f} s for the word that the shared memory is filled")
        into[:] = self._shared[: len(into)]


def receiver_main(
    parent: int, name: str, pipe: Connection, shared: mmap.mmap, room: int, folder: Path, inherited: list[Connection]
) -> None:
    """A forked process's body: dies with the benchmark, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    for other in inherited:  # the sender's ends: as long as one is open here, its receiver hears no end
        other.close()
    torch.set_num_threads(1)
    Receiver(name, pipe, shared, room, folder).work()

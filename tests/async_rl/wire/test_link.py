"""The link over real sockets. Where silence is not the point the heartbeat is long, so that a busy machine does not
make a live peer look lost."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from async_rl.errors import AsyncRLError
from async_rl.wire import frames
from async_rl.wire.link import (
    Client,
    LinkClosed,
    LinkError,
    LinkRefused,
    LinkTimeout,
    PeerJoined,
    PeerLost,
    Received,
    Server,
)
from async_rl.wire.messages import MAGIC, SCHEMA, Draw, Envelope, Results, StatusRequest, Stop
from async_rl.wire.security import make_ipc_directory
from async_rl.wire.session import Report

HEARTBEAT_S = 0.1
QUICK: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S}
CALM: dict[str, Any] = {"heartbeat_s": 20.0}
LOOPBACK = "tcp://127.0.0.1:*"


class Served:
    """A server polled by a thread, which keeps its events; `answer` runs on each message, in that thread."""

    def __init__(
        self, endpoint: str = LOOPBACK, answer: Callable[[Server, Received], None] | None = None, **options: Any
    ):
        self.server = Server(endpoint, **{"run": "run-a", "token": "secret", "name": "buffer"} | CALM | options)
        self.endpoint = self.server.endpoint
        self.events: list[Any] = []
        self.answer = answer
        self.do: queue.SimpleQueue[Callable[[Server], None]] = queue.SimpleQueue()
        self.stopping = self.say_bye = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while not self.stopping:
            for event in self.server.poll(0.02):
                self.events.append(event)
                if self.answer is not None and isinstance(event, Received):
                    self.answer(self.server, event)
            while not self.do.empty():
                self.do.get()(self.server)
        if self.say_bye:
            self.server.close(30.0)
        else:  # as a killed process would: no goodbye
            self.server._peers.clear()
            self.server.close(0.0)

    def stop(self, say_bye: bool = True) -> None:
        self.say_bye = say_bye
        self.stopping = True
        self.thread.join(60)

    def messages(self) -> list[Any]:
        return [event.message for event in self.events if isinstance(event, Received)]

    def joins_and_losses(self) -> list[Any]:
        return [event for event in self.events if not isinstance(event, Received)]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        wait_for(condition, timeout_s, lambda: f"{self.events[-5:]} {self.server.counters}")


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0, state: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {timeout_s} s: {state()}"
        time.sleep(0.005)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Closes clients and servers after the test, the last one first."""
    things: list[Any] = []

    def keep(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        thing.stop() if isinstance(thing, Served) else thing.close(0.2)


def client(endpoint: str, **options: Any) -> Client:
    usual: dict[str, Any] = {"run": "run-a", "token": "secret", "role": "node", "name": "node-1", "peer": "the buffer"}
    return Client(endpoint, **usual | CALM | options)


def echo(server: Server, event: Received) -> None:
    server.send(event.peer, event.message, [bytes(blob) for blob in event.blobs])


def numbers(messages: list[Any]) -> list[int]:
    return [message.for_version for message in messages]


# --- talking ---------------------------------------------------------------------------------------------------------


def test_a_question_gets_its_answer_and_both_sides_know_who_spoke(closing: Any) -> None:
    served = closing(Served(answer=echo))
    node = closing(client(served.endpoint))
    node.connect(60)
    node.send(Draw(7), [b"abc", memoryview(b"defg")])
    received = node.receive(60, "an echo")
    assert received.peer == "buffer"
    assert received.message == Draw(7)
    assert [bytes(blob) for blob in received.blobs] == [b"abc", b"defg"]
    assert node.poll() is None
    assert served.events[0] == PeerJoined("node-1", "node")
    assert served.events[1].peer == "node-1"
    assert dict(served.server.peers) == {"node-1": "node"}
    node.close()
    served.wait_for(lambda: PeerLost("node-1", "node", "node-1 said goodbye", left=True) in served.events)
    assert dict(served.server.peers) == {}


def test_20_mb_go_there_and_back_unchanged_as_views(closing: Any) -> None:
    blob = os.urandom(20 << 20)
    served = closing(Served(answer=lambda server, event: server.send(event.peer, event.message, event.blobs)))
    node = closing(client(served.endpoint, window_bytes=1 << 20))
    node.connect(60)
    node.send(Stop("large"), [blob])
    received = node.receive(60, "the blob")
    assert isinstance(received.blobs[0], memoryview)
    assert received.blobs[0] == blob
    assert node.bytes_sent > len(blob)
    assert node.bytes_received > len(blob)


def test_a_forwarded_frame_is_not_copied_and_a_part_of_one_is_sent_as_that_part(closing: Any) -> None:
    blob = os.urandom(2 << 20)
    arrived: list[bool] = []

    def answer(server: Server, event: Received) -> None:
        whole = event.blobs[0]
        arrived.extend(frames.as_it_came(each) is not None for each in (whole, whole.cast("B"), whole[1:], blob))
        server.send(event.peer, event.message, [whole, whole[1:-1], bytes(whole[:3])])

    served = closing(Served(answer=answer))
    node = closing(client(served.endpoint))
    node.connect(60)
    node.send(Stop("large"), [blob])
    received = node.receive(60, "the blobs")
    assert arrived == [True, True, False, False]
    assert [bytes(each) for each in received.blobs] == [blob, blob[1:-1], blob[:3]]


def test_ipc_works_and_its_socket_is_removed_on_close(closing: Any) -> None:
    directory = make_ipc_directory()
    path = directory / "buffer"
    served = closing(Served(f"ipc://{path}", answer=echo))
    node = closing(client(served.endpoint))
    node.connect(60)
    node.send(Draw(1))
    assert node.receive(60, "an echo").message == Draw(1)
    with pytest.raises(LinkError, match="already in use"):
        Server(served.endpoint, run="run-a", token="secret", name="second")
    served.stop()
    assert not path.exists()
    directory.rmdir()


def test_many_clients_with_one_inbox_each_keep_their_order(closing: Any) -> None:
    served = closing(Served(answer=echo))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    nodes = [closing(client(served.endpoint, name=f"node-{i}", inbox=inbox)) for i in range(3)]
    for node in nodes:
        node.connect(60)
        for version in range(50):
            node.send(Draw(version))
    got = [inbox.get(timeout=60).message.for_version for _ in range(150)]
    assert sorted(got) == sorted(list(range(50)) * 3)
    for node in nodes:
        sent_by_node = [e.message for e in served.events if isinstance(e, Received) and e.peer == node.name]
        assert numbers(sent_by_node) == list(range(50))


# --- credit and acknowledgement --------------------------------------------------------------------------------------


def test_a_fast_sender_waits_for_a_slow_receiver_then_everything_drains(closing: Any) -> None:
    server = closing(Server(LOOPBACK, run="run-a", token="secret", name="buffer", window_bytes=20_000, **CALM))
    node = closing(client(server.endpoint, window_bytes=20_000))
    failures: list[LinkError] = []
    sent: list[int] = []

    def produce() -> None:
        node.connect(60)
        try:
            for version in range(200):
                node.send(Draw(version), [b"x" * 1000], timeout_s=0.5)
                sent.append(version)
        except LinkError as error:
            failures.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    first: list[Any] = []
    wait_for(lambda: bool(first.extend(server.poll(0.02))) or bool(first))
    producer.join(60)  # the server does not poll: nothing is acknowledged, nothing granted
    assert isinstance(failures[0], LinkTimeout)
    assert "the buffer at tcp://127.0.0.1" in str(failures[0])
    assert 30 <= len(sent) <= 60, "one window under way, one queued"
    assert isinstance(first[0], PeerJoined)
    got: list[Any] = [e.message for e in first[1:]]  # some may have come with it
    wait_for(lambda: bool(got.extend(e.message for e in server.poll(0.02))) or len(got) == len(sent))
    assert numbers(got) == sent


def test_a_message_is_acknowledged_only_when_the_caller_comes_back(closing: Any) -> None:
    server = closing(Server(LOOPBACK, run="run-a", token="secret", name="buffer", **CALM))
    node = closing(client(server.endpoint))
    threading.Thread(target=node.connect, args=(60,)).start()
    wait_for(lambda: any(isinstance(e, PeerJoined) for e in server.poll(0.02)))
    node.send(Draw(1))
    events: list[Any] = []
    wait_for(lambda: bool(events.extend(server.poll(0.02))) or bool(events))
    with pytest.raises(LinkTimeout, match="acknowledge 1 messages"):
        node.flush(0.15)
    server.acknowledge()
    server.poll(0.02)
    node.flush(60)


def test_a_client_that_does_not_read_is_not_sent_more_than_its_window(closing: Any) -> None:
    served = closing(Served())
    node = closing(client(served.endpoint, window_bytes=10_000))
    node.connect(60)
    for version in range(100):
        served.do.put(lambda server, version=version: server.send("node-1", Draw(version), [b"x" * 1000]))
    time.sleep(0.4)
    assert node.bytes_received < 15_000
    assert [node.receive(60, "a draw").message.for_version for _ in range(100)] == list(range(100))
    assert node.bytes_received > 100_000


# --- reconnecting ----------------------------------------------------------------------------------------------------


KILLED = """
import os, sys
import async_rl.wire.server
from async_rl.wire.link import Received, Server
async_rl.wire.server.KEEP_LOST_HEARTBEATS = 6000  # a node that stood still for seconds has its session yet
server = Server("tcp://127.0.0.1:*", run="run-a", token="secret", name="buffer", heartbeat_s=0.1)
print(server.endpoint, flush=True)
while True:
    for event in server.poll(1.0):
        if isinstance(event, Received) and event.message.for_version == 1:
            os.kill(os.getpid(), 9)  # received, not acknowledged
"""


@pytest.fixture
def keeps_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, a server that beats quickly does not forget the session of a peer that stood still."""
    monkeypatch.setattr("async_rl.wire.server.KEEP_LOST_HEARTBEATS", 6000)


@pytest.mark.usefixtures("keeps_lost")
def test_when_the_server_is_killed_and_restarted_what_was_unacknowledged_is_sent_again(closing: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    node = closing(client(endpoint, **QUICK))
    node.connect(60)
    node.send(Draw(0))
    node.flush(60)
    for version in range(1, 20):
        node.send(Draw(version))
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    second = closing(Served(endpoint, answer=echo))
    node.flush(60)
    assert numbers(second.messages()) == list(range(1, 20))
    assert node.sessions == 2
    assert [node.receive(60, "an echo").message.for_version for _ in range(19)] == list(range(1, 20))


def relay(
    front: zmq.Socket[bytes], back: zmq.Socket[bytes], stop: threading.Event, keep: Callable[[bytes], bool]
) -> None:
    """Passes frames between one client and the server, except those that `keep` refuses."""
    while not stop.is_set():
        for one, other in ((front, back), (back, front)):
            while one.poll(1):
                parts = one.recv_multipart()
                if one is front:
                    address, parts = parts[0], parts[1:]
                    relay_address[0] = address
                if keep(parts[0]):
                    other.send_multipart([relay_address[0], *parts] if other is front else parts)


relay_address: list[bytes] = [b""]


@pytest.mark.usefixtures("keeps_lost")
def test_what_is_lost_under_way_is_sent_again_and_delivered_once(closing: Any) -> None:
    served = closing(Served(answer=echo, **QUICK))
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(served.endpoint)
    count: Counter[str] = Counter()  # of each direction: how they alternate, a busy machine decides

    def keep(frame: bytes) -> bool:
        envelope = msgspec.msgpack.decode(frame, type=Envelope)
        count[envelope.sender] += envelope.seq > 0
        return envelope.seq == 0 or count[envelope.sender] % 7 != 3

    stop = threading.Event()
    thread = threading.Thread(target=relay, args=(front, back, stop, keep))
    thread.start()
    node = closing(client(f"tcp://127.0.0.1:{port}", **QUICK))
    node.connect(60)
    for version in range(20):
        node.send(Draw(version), [b"x"])  # with a blob, as what has none may travel in one frame with the next
    got = [node.receive(60, "an echo").message.for_version for _ in range(20)]
    assert got == list(range(20))
    assert numbers(served.messages()) == list(range(20))
    assert served.server.counters["gap"] > 0
    node.close(0.1)
    stop.set()
    thread.join()
    front.close(0)
    back.close(0)
    context.term()


def test_a_cut_connection_resumes_the_session_without_losing_or_repeating_anything(closing: Any) -> None:
    served = closing(Served(answer=echo))
    node = closing(client(served.endpoint))
    node.connect(60)
    for version in range(10):
        node.send(Draw(version))
    wait_for(lambda: len(served.messages()) > 0)

    cut = threading.Event()

    def forget_connection(server: Server) -> None:  # as when TCP breaks: the ROUTER knows a new connection only
        for peer in server._peers.values():
            del server._routes[peer.route or b""]
            peer.route = None
        cut.set()

    served.do.put(forget_connection)
    assert cut.wait(60)
    for version in range(10, 30):
        node.send(Draw(version))
    assert [node.receive(60, "an echo").message.for_version for _ in range(30)] == list(range(30))
    assert numbers(served.messages()) == list(range(30))
    assert node.sessions == 1
    assert served.server.counters["unknown_peer"] > 0


def test_a_restarted_client_takes_over_its_name_and_the_old_one_is_told(closing: Any) -> None:
    served = closing(Served())
    old = closing(client(served.endpoint))
    old.connect(60)
    old.send(Draw(1))
    old.flush(60)
    new = closing(client(served.endpoint))
    new.connect(60)
    new.send(Draw(2))
    new.flush(60)
    with pytest.raises(LinkRefused, match="started later"):
        old.receive(60, "anything")
    kinds = [type(event).__name__ for event in served.events]
    assert kinds == ["PeerJoined", "Received", "PeerLost", "PeerJoined", "Received"]
    assert numbers(served.messages()) == [1, 2]


FROZEN = """
import sys
from async_rl.wire.link import Client
from async_rl.wire.messages import Draw
node = Client(sys.argv[1], run="run-a", token="secret", role="node", name="frozen", peer="the buffer", heartbeat_s=0.2)
node.connect(60)
node.send(Draw(1))
print(node.receive(60, "a draw").message.for_version, flush=True)
node._silence_s = 60.0  # who closes while it says hello once more says no goodbye: it is to stay connected
node.connect(60)
node.close()
"""


def test_a_stopped_process_is_noticed_within_three_heartbeats_and_resumes_where_it_was(closing: Any) -> None:
    served = closing(Served(heartbeat_s=0.2))
    process = subprocess.Popen([sys.executable, "-c", FROZEN, served.endpoint], stdout=subprocess.PIPE, text=True)
    try:
        served.wait_for(lambda: len(served.messages()) == 1)
        process.send_signal(signal.SIGSTOP)
        served.wait_for(lambda: any(isinstance(event, PeerLost) for event in served.events))

        def go_on(server: Server) -> None:
            # Lost once more, on a busy machine, it could not say goodbye.
            server._heartbeat_s = server._peers["frozen"].silence_s = 60.0
            server.send("frozen", Draw(42))  # queued for the peer that is lost

        served.do.put(go_on)
        served.wait_for(served.do.empty)
        process.send_signal(signal.SIGCONT)
        served.wait_for(
            lambda: served.joins_and_losses()[-1] == PeerLost("frozen", "node", "frozen said goodbye", left=True)
        )
        assert process.communicate(timeout=60)[0] == "42\n"
    finally:
        process.kill()
        process.wait()
    assert "more than 0.6 s (3 heartbeats)" in served.joins_and_losses()[1].reason
    assert served.joins_and_losses()[2] == PeerJoined("frozen", "node", resumed=True)
    assert len(served.messages()) == 1


def test_a_busy_server_does_not_take_its_peers_for_lost(closing: Any) -> None:
    served = closing(Served())
    node = closing(client(served.endpoint))
    node.connect(60)
    held = threading.Event()

    def hold(server: Server) -> None:
        """For so long that a peer whose message was not read yet could be taken for lost."""
        held.set()
        assert server._socket.poll(60_000)
        for peer in server._peers.values():
            peer.heard -= 100.0
        server._next_sweep = 0.0

    served.do.put(hold)
    assert held.wait(60)
    node.send(Draw(1))
    node.flush(60)
    assert served.joins_and_losses() == [PeerJoined("node-1", "node")]


def test_a_peer_with_a_slower_heartbeat_is_not_taken_for_lost(closing: Any) -> None:
    served = closing(Served(heartbeat_s=0.05))
    slow = closing(client(served.endpoint, heartbeat_s=20.0))
    slow.connect(60)
    time.sleep(0.5)  # ten heartbeats of the server
    assert served.joins_and_losses() == [PeerJoined("node-1", "node")]


# --- refusals and time-outs ------------------------------------------------------------------------------------------


def test_a_wrong_run_is_refused_with_both_names(closing: Any) -> None:
    served = closing(Served())
    with pytest.raises(LinkRefused, match=r"serves run 'run-a', 'node-1' belongs to run 'run-b'"):
        closing(client(served.endpoint, run="run-b")).connect(60)
    assert served.events == []


def test_a_wrong_token_is_refused_without_showing_either(closing: Any) -> None:
    served = closing(Served())
    with pytest.raises(LinkRefused, match="token") as refusal:
        closing(client(served.endpoint, token="guess")).connect(60)
    assert "secret" not in str(refusal.value)
    assert "guess" not in str(refusal.value)
    assert served.server.counters["wrong_token"] == 1


def test_another_schema_is_refused_with_both_numbers(closing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = closing(Served())
    real = frames.link_frame

    def from_the_future(*arguments: Any) -> bytes:
        fields = list(msgspec.structs.astuple(msgspec.msgpack.decode(real(*arguments), type=Envelope)))
        return msgspec.msgpack.encode([MAGIC, SCHEMA + 1, *fields[2:], "a field that schema 1 does not have"])

    monkeypatch.setattr("async_rl.wire.client.link_frame", from_the_future)
    with pytest.raises(LinkRefused, match=rf"speaks wire schema {SCHEMA}, 'node-1' speaks {SCHEMA + 1}"):
        closing(client(served.endpoint)).connect(60)


def test_a_dead_endpoint_times_out_naming_peer_endpoint_and_what_was_awaited(closing: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    node = closing(client(endpoint))
    with pytest.raises(LinkTimeout, match="welcome from the buffer at " + endpoint):
        node.connect(0.3)
    with pytest.raises(LinkTimeout, match=r"waited 0.1 s for a batch from the buffer at " + endpoint):
        node.receive(0.1, "a batch")


def test_a_client_may_come_before_its_server(closing: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    node = closing(client(endpoint))
    node.send(Draw(1))
    with pytest.raises(LinkTimeout):
        node.connect(0.2)
    served = closing(Served(endpoint))
    node.connect(60)
    node.flush(60)
    assert numbers(served.messages()) == [1]


def test_a_server_that_stays_away_is_given_up_and_every_wait_ends(closing: Any) -> None:
    served = closing(Served(**QUICK))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting = closing(client(served.endpoint, name="waiting", **QUICK))
    listening = closing(client(served.endpoint, name="listening", **QUICK, inbox=inbox))
    waiting.connect(60)
    listening.connect(60)
    for each in (waiting, listening):
        each._lost_after_s = 0.6  # only now: on a busy machine the welcome itself may take longer
    served.stop(say_bye=False)
    with pytest.raises(LinkClosed, match="lost the buffer at tcp://"):
        waiting.receive(60, "a batch")
    assert isinstance(inbox.get(timeout=60), LinkClosed)
    with pytest.raises(LinkClosed):
        waiting.send(Draw(1))


def test_a_goodbye_arrives_after_what_was_said_before_it(closing: Any) -> None:
    served = closing(Served())
    node = closing(client(served.endpoint))
    node.connect(60)
    served.do.put(lambda server: server.send("node-1", Stop("done")))
    served.wait_for(lambda: served.do.empty())
    served.stop()
    assert node.receive(60, "the end").message == Stop("done")
    with pytest.raises(LinkClosed, match="goodbye: buffer is closing"):
        node.receive(60, "anything")
    with pytest.raises(LinkClosed, match="goodbye"):
        node.poll()


def test_a_disconnected_peer_reads_why_and_its_successor_is_welcome(closing: Any) -> None:
    served = closing(Served())
    node = closing(client(served.endpoint))
    node.connect(60)
    served.do.put(lambda server: server.disconnect("node-1", "its fingerprint differs: model abc, here def"))
    with pytest.raises(LinkRefused, match="fingerprint differs"):
        node.receive(60, "anything")
    assert dict(served.server.peers) == {}
    restarted = closing(client(served.endpoint))
    restarted.connect(60)


def test_sending_to_a_peer_that_never_joined_is_an_error(closing: Any) -> None:
    server = closing(Server(LOOPBACK, run="run-a", token="secret", name="buffer"))
    with pytest.raises(LinkError, match="no peer 'nobody'"):
        server.send("nobody", StatusRequest())


def test_a_taken_port_is_named_with_what_to_do(closing: Any) -> None:
    served = closing(Served())
    with pytest.raises(LinkError, match=rf"{served.endpoint}: address already in use; another run"):
        Server(served.endpoint, run="run-a", token="secret", name="second")


def test_an_address_open_to_other_machines_is_refused_at_both_ends() -> None:
    with pytest.raises(AsyncRLError, match="CURVE"):
        Server("tcp://0.0.0.0:5555", run="run-a", token="secret", name="buffer")
    with pytest.raises(AsyncRLError, match="CURVE"):
        client("tcp://10.0.0.1:5555")


# --- hostile and broken frames ---------------------------------------------------------------------------------------


def hostile_messages() -> list[list[bytes]]:
    nothing = Report(0, 0)
    data = frames.payload_of(Draw(666), [])
    hello = frames.Hello("node", "mallory", "guess", 0, 0, 1.0)
    envelope = [MAGIC, SCHEMA, "run-a", "mallory", 1, 0, 0, 0, "hello"]
    return [
        [b""],
        [b"garbage"],
        [b"\xc1" * 1000],
        [b"\x91" * 100_000],  # arrays within arrays
        [b"\xdd\xff\xff\xff\xff"],  # an array of four billion, without its elements
        [frames.head_frame("run-a", "node-1", 1, 1, nothing, data)],  # no session
        [frames.head_frame("run-a", "node-1", 2**64 - 1, 2**64 - 1, Report(2**64 - 1, 2**64 - 1), data)],
        [frames.head_frame("run-a", "node-1", 1, 1, nothing, data), b"a blob too many"],
        [frames.link_frame("run-a", "mallory", 1, nothing, hello)],  # wrong token
        [frames.link_frame("run-a", "node-1", 1, nothing, frames.Bye("goodbye in another's name"))],
        [frames.link_frame("run-a", "node-1", 1, nothing, frames.Welcome(1, 0, 1.0))],
        [msgspec.msgpack.encode([*envelope, {"not": "a hello"}])],
        [msgspec.msgpack.encode([*envelope, ["hello", "emperor", "mallory", "secret", 0, 0, 1.0]])],  # no such role
        [msgspec.msgpack.encode(["xyz", *envelope[1:], ["ping"]])],
        [msgspec.msgpack.encode([*envelope[:8], "hello", ["hello", "node", "n" * 2000, "secret", 0, 0, 1.0]])],
    ]


def test_garbage_from_a_stranger_costs_counters_and_nothing_else(closing: Any) -> None:
    served = closing(Served(answer=echo))
    node = closing(client(served.endpoint))
    node.connect(60)
    messages = hostile_messages()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(served.endpoint)
        for message in messages:
            stranger.send_multipart(message)
        served.wait_for(lambda: sum(served.server.counters.values()) == len(messages))
    node.send(Draw(1))
    assert node.receive(60, "an echo").message == Draw(1)
    assert served.joins_and_losses() == [PeerJoined("node-1", "node")]
    assert served.thread.is_alive()
    assert dict(served.server.peers) == {"node-1": "node"}
    assert {"undecodable", "unknown_peer", "wrong_token", "wrong_magic", "wrong_name"} <= set(served.server.counters)


def raw_member(endpoint: str, context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """A stranger that knows the token and has been welcomed as "raw", epoch 5, credit 1 MB."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(endpoint)
    hello = frames.Hello("node", "raw", "secret", 0, 0, 1.0)
    socket.send(frames.link_frame("run-a", "raw", 5, Report(0, 1 << 20), hello))
    answer = frames.read_link_message(frames.read_envelope(socket.recv(), 0))
    assert isinstance(answer, frames.Welcome)
    return socket


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ([b"garbage"], "undecodable"),
        (
            [msgspec.msgpack.encode([MAGIC, SCHEMA, "run-a", "raw", 5, 1, 0, 0, "Draw", ["Draw", "seven"]])],
            "undecodable_body",
        ),
    ],
)
def test_a_member_that_sends_what_cannot_be_read_is_refused_with_the_reason(
    closing: Any, broken: list[bytes], kind: str
) -> None:
    served = closing(Served())
    with zmq.Context() as context, raw_member(served.endpoint, context) as member:
        member.send_multipart(broken)
        envelope = frames.read_envelope(member.recv(), 0)
        assert kind in frames.read_link_message(envelope).reason
    served.wait_for(lambda: len(served.joins_and_losses()) == 2)
    assert kind in served.joins_and_losses()[1].reason
    assert served.server.counters[kind] == 1


def test_a_peer_disconnected_while_out_of_reach_reads_why_when_it_returns(closing: Any) -> None:
    served = closing(Served())
    with zmq.Context() as context:
        raw_member(served.endpoint, context).close(0)
        served.do.put(lambda server: server.disconnect("raw", "no longer wanted"))
        served.wait_for(lambda: not served.server.peers)
        with context.socket(zmq.DEALER) as again:
            again.setsockopt(zmq.LINGER, 0)
            again.setsockopt(zmq.RCVTIMEO, 60_000)
            again.connect(served.endpoint)
            hello = frames.Hello("node", "raw", "secret", 7, 0, 1.0)
            again.send(frames.link_frame("run-a", "raw", 5, Report(0, 1 << 20), hello))
            answer = frames.read_link_message(frames.read_envelope(again.recv(), 0))
    assert answer == frames.Refused("no longer wanted")


def test_a_member_that_ignores_its_credit_is_refused(closing: Any) -> None:
    server = closing(Server(LOOPBACK, run="run-a", token="secret", name="buffer", window_bytes=1000))
    events: list[Any] = []
    stop = threading.Event()

    def poll_without_coming_back() -> None:
        while not stop.is_set():
            server._drain()  # a burst that the caller has not finished with
            time.sleep(0.005)

    thread = threading.Thread(target=poll_without_coming_back)
    thread.start()
    with zmq.Context() as context, raw_member(server.endpoint, context) as member:
        payload = frames.payload_of(Results((msgspec.Raw(msgspec.msgpack.encode(b"x" * 990)),)), [])
        for seq in (1, 2, 3):
            member.send(frames.head_frame("run-a", "raw", 5, seq, Report(0, 1 << 20), payload))
        assert "overdrawn" in frames.read_link_message(frames.read_envelope(member.recv(), 0)).reason
    stop.set()
    thread.join()
    events.extend(server.poll(0.05))
    assert len([event for event in events if isinstance(event, Received)]) == 1
    assert any(isinstance(event, PeerLost) for event in events)


def test_a_socket_file_left_by_a_killed_server_does_not_block_the_next_one(closing: Any) -> None:
    directory = make_ipc_directory()
    path = directory / "buffer"
    code = (
        "import sys, os; from async_rl.wire.link import Server\n"
        "server = Server(sys.argv[1], run='run-a', token='secret', name='buffer')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, f"ipc://{path}"], check=False, timeout=100)
    assert path.exists(), "it was killed: the file is still there"
    served = closing(Served(f"ipc://{path}"))
    closing(client(served.endpoint)).connect(60)
    served.stop()
    directory.rmdir()

"""Who comes in, over real sockets: with which key, in which role, under which name."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rl.errors import AsyncRLError
from async_rl.wire import server as server_module
from async_rl.wire.door import shown
from async_rl.wire.frames import Ping, Unknown, head_frame, link_frame, payload_of, read_envelope, read_link_message
from async_rl.wire.keys import ALLOWED, DialKeys, ServiceKeys, dial_keys, make_keys
from async_rl.wire.link import Client, LinkRefused, LinkTimeout, PeerLost, Received, Server
from async_rl.wire.messages import Draw
from async_rl.wire.session import Report

TOKEN = "a-token-that-nobody-guesses"


class House:
    """A server that is polled by a thread, and who dials it."""

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        self.server = Server(
            endpoint, run="run-a", token=TOKEN, name="buffer", heartbeat_s=0.5,
            keys=ServiceKeys(keys) if keys is not None else None,
        )  # fmt: skip
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clients: list[Client] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping:
            for event in self.server.poll(0.02):
                self.events.put(event)
                if isinstance(event, Received):
                    self.server.send(event.peer, event.message)

    def client(self, role: Any = "node", name: str = "n", keys: DialKeys | None = None, **options: Any) -> Client:
        # It beats slowly, so that a busy machine does not make it look lost.
        usual = {"run": "run-a", "token": TOKEN, "peer": "the buffer", "heartbeat_s": 20.0}
        client = Client(self.server.endpoint, role=role, name=name, keys=keys, **usual | options)
        self._clients.append(client)
        return client

    def count(self, kind: str, awaited: int = 1) -> int:
        deadline = time.monotonic() + 60
        while self.server.counters[kind] < awaited and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.server.counters[kind]

    def close(self) -> None:
        for client in self._clients:
            client.close(0.2)
        self._stopping = True
        self._thread.join(60)
        self.server.close(0.1)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(keys: Path | None, endpoint: str = "tcp://127.0.0.1:*") -> House:
        made.append(House(endpoint, keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


def talks(client: Client) -> bool:
    client.connect(60)
    client.send(Draw(3))
    return bool(client.receive(60, "an echo").message == Draw(3))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", "ipc"])
def test_each_role_comes_in_with_its_own_key(house: Any, keys: Path, tmp_path: Path, endpoint: str) -> None:
    made = house(keys, f"ipc://{tmp_path / 's'}" if endpoint == "ipc" else endpoint)
    assert all(talks(made.client(role, role, dial_keys(keys, role))) for role in ("node", "trainer", "tool"))


def test_a_key_of_another_role_is_refused_at_once_and_counted(house: Any, keys: Path) -> None:
    made = house(keys)
    with pytest.raises(LinkRefused, match=r"as a trainer: its key is listed for node") as refused:
        made.client("trainer", "trainer", dial_keys(keys, "node")).connect(60)
    assert made.count("wrong_role_key") == 1
    assert dial_keys(keys, "node").public.decode() not in str(refused.value)


def test_a_key_listed_for_two_roles_may_play_both(house: Any, keys: Path) -> None:
    public = dial_keys(keys, "node").public.decode()
    with (keys / ALLOWED).open("a") as allowed:
        allowed.write(f"tool {public}  the node's machine may ask too\n")
    made = house(keys)
    assert talks(made.client("tool", "tool", dial_keys(keys, "node")))


def test_a_key_that_is_not_listed_gets_no_answer_and_is_counted(house: Any, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "own", ("node",))
    (tmp_path / "own" / "service.public").write_bytes((keys / "service.public").read_bytes())
    made = house(keys)
    with pytest.raises(LinkTimeout, match=r"CURVE may be the reason.*listed for node"):
        made.client("node", "n", dial_keys(tmp_path / "own", "node")).connect(0.7)
    assert made.count("unknown_key") >= 1
    with (keys / ALLOWED).open("a") as allowed:
        allowed.write((tmp_path / "own" / "node.public").read_text())
    assert talks(made.client("node", "n", dial_keys(tmp_path / "own", "node")))  # the service goes on meanwhile


def test_who_expects_another_service_sends_it_nothing(house: Any, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others")
    made = house(keys)
    with pytest.raises(LinkTimeout, match=r"CURVE may be the reason: .*service\.public"):
        made.client("node", "n", dial_keys(tmp_path / "others", "node")).connect(0.7)
    assert made.count("no_handshake") >= 1
    assert made.events.empty()


def test_who_has_no_keys_hears_that_it_may_need_some(house: Any, keys: Path) -> None:
    made = house(keys)
    with pytest.raises(LinkTimeout, match=r"buffer\.keys"):
        made.client().connect(0.7)
    assert made.count("no_handshake") >= 1


def test_who_has_keys_does_not_talk_to_a_service_without(house: Any, keys: Path) -> None:
    made = house(None)
    with pytest.raises(LinkTimeout, match="it must use keys at all"):
        made.client("node", "n", dial_keys(keys, "node")).connect(0.7)


def test_the_token_is_needed_all_the_same(house: Any, keys: Path) -> None:
    made = house(keys)
    with pytest.raises(LinkRefused, match="token") as refused:
        made.client("node", "n", dial_keys(keys, "node"), token="another").connect(60)
    assert made.count("wrong_token") == 1
    assert TOKEN not in str(refused.value)


def test_nobody_takes_the_name_of_a_client_of_another_role_or_key(house: Any, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "own", ("node",))
    (tmp_path / "own" / "service.public").write_bytes((keys / "service.public").read_bytes())
    with (keys / ALLOWED).open("a") as allowed:
        allowed.write((tmp_path / "own" / "node.public").read_text())
    made = house(keys)
    trainer, node = (made.client(role, role, dial_keys(keys, role)) for role in ("trainer", "node"))
    assert talks(trainer)
    assert talks(node)
    for name, dialled in (("trainer", dial_keys(keys, "node")), ("node", dial_keys(tmp_path / "own", "node"))):
        with pytest.raises(LinkRefused, match="name of another client"):
            made.client("node", name, dialled).connect(60)
    assert made.count("name_taken", 2) == 2
    assert talks(trainer)
    assert talks(node)
    assert talks(made.client("node", "node", dial_keys(keys, "node")))  # its own next start may
    seen = [made.events.get() for _ in range(made.events.qsize())]
    assert [event.peer for event in seen if isinstance(event, PeerLost)] == ["node"]


def test_what_speaks_no_zeromq_is_counted_and_holds_nobody_up(house: Any, keys: Path) -> None:
    made = house(keys)
    host, _, port = made.server.endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(2500):  # more than libzmq keeps unread by default
        with socket.create_connection((host, int(port)), 60) as raw:
            raw.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00XXXX" + b"\0" * 64)
    assert talks(made.client("node", "n", dial_keys(keys, "node")))
    assert made.count("no_handshake", 2500) == 2500


def test_a_service_beyond_this_machine_needs_keys(keys: Path) -> None:
    with pytest.raises(AsyncRLError, match="async-rl keys"):
        Server("tcp://0.0.0.0:*", run="run-a", token=TOKEN, name="buffer")
    with pytest.raises(AsyncRLError, match="async-rl keys"):
        Client("tcp://192.0.2.1:1", run="run-a", token=TOKEN, role="node", name="n", peer="the buffer")


def test_a_server_with_keys_that_cannot_bind_leaves_nothing_behind(house: Any, keys: Path) -> None:
    made = house(keys)
    before = threading.active_count()
    with pytest.raises(AsyncRLError, match="in use"):
        Server(made.server.endpoint, run="run-a", token=TOKEN, name="second", keys=ServiceKeys(keys))
    assert threading.active_count() <= before  # others of before may have ended meanwhile


def test_what_strangers_say_is_shown_short_and_harmless() -> None:
    assert shown("\x1b[2Jred\n") == r"'\x1b[2Jred\n'"
    assert len(shown("x" * 10_000)) < 100


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines", "\x1b[31m"])
def test_a_name_that_a_log_could_not_show_is_refused(house: Any, name: str) -> None:
    made = house(None)
    with pytest.raises(LinkRefused, match="printable"):
        made.client("node", name).connect(60)
    assert made.count("wrong_name") == 1


def test_libzmq_here_has_curve() -> None:
    assert zmq.has("curve")


def stranger(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


def test_a_large_frame_of_a_stranger_is_not_even_decoded(house: Any) -> None:
    """As one frame of small messages, a list of a million nothings would become a hundred times its size."""
    made = house(None)
    head = link_frame("run-a", "x", 1, Report(0, 0), Ping())[:-1]
    nothings = b"\x9c" + head[1:] + b"\x00\xdd" + (1_000_000).to_bytes(4, "big") + b"\xc0" * 1_000_000
    unknown = stranger(made.server.endpoint)
    for frames in ([nothings], [b"x", b"y"], [b"x" * 5000] * 3):
        unknown.send_multipart(frames)
        assert unknown.poll(60_000)
        answer = read_link_message(read_envelope(unknown.recv(), 0))
        assert isinstance(answer, Unknown)
    assert made.server.counters == {"unknown_peer": 3}
    unknown.close()


def test_a_frame_of_another_run_is_counted_as_such(house: Any) -> None:
    made = house(None)
    unknown = stranger(made.server.endpoint)
    unknown.send(head_frame("run-b", "x", 5, 1, Report(0, 0), payload_of(Draw(1), ())))
    assert made.count("wrong_run") == 1
    unknown.close()


def test_a_server_has_room_for_so_many_clients(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_PEERS", 2)
    made = house(None)
    assert talks(made.client(name="a"))
    assert talks(made.client(name="b"))
    with pytest.raises(LinkRefused, match="2 clients already"):
        made.client(name="c").connect(60)
    assert made.count("too_many") == 1
    assert talks(made.client(name="a"))  # in the place of the first


def test_what_a_client_leaves_unread_can_be_asked_for(house: Any) -> None:
    made = house(None)
    client = made.client()
    assert talks(client)
    assert made.server.backlog("nobody") == 0
    deadline = time.monotonic() + 60
    while made.server.backlog("n") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.server.backlog("n") == 0

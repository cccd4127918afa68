"""Nodes that relay: the real store, pullers and relays, each behind a real socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_house import PATIENCE_S, RELAY_TIMEOUT_S, RUN, TOKEN, House, Node, data_of, policy, wait_for

from async_rl.version import PolicyId
from async_rl.wire.keys import dial_keys, make_keys
from async_rl.wire.link import Client, LinkError, LinkTimeout, Server
from async_rl.wire.messages import BASE, CHUNK_BYTES, FACTORS, Chunk, Pull, StatusRequest, StoreStatus
from buffer import relays
from inference.relay import MAX_UNANSWERED, Relay, SharedFile

SIZE = 6 * CHUNK_BYTES + 12345


SLACK_S = 40.0  # what a busy machine may add; no fault here costs as much
LONG_S = 2 * SLACK_S  # a time-out that is not waited for


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """Where nobody is taken over for being slow, as on a busy machine anybody may be, nor lost for being silent."""
    monkeypatch.setattr(relays, "SLOW_FACTOR", 1e9)
    monkeypatch.setattr("async_rl.wire.server.silence_s", lambda *_: 300.0)
    made = House(tmp_path)
    yield made
    made.close()


@pytest.fixture
def calm(house: House) -> None:
    """No relay's time-out can come to pass."""
    house.relay_timeout_s = house.relays._timeout_s = LONG_S


def status(house: House) -> StoreStatus:
    tool = house.link("tool", "status")
    tool.send(StatusRequest())
    answer = tool.receive(PATIENCE_S, "the store's status").message
    tool.close(0.2)
    return answer


def volunteers(house: House, *names: str, timeout_s: float | None = None) -> list[Node]:
    """Nodes that the store knows as relays by now."""
    nodes = [house.relaying_node(name, timeout_s=timeout_s) for name in names]
    wait_for(lambda: set(names) <= set(house.relays.volunteers), "the volunteers to be known")
    return nodes


@pytest.mark.usefixtures("calm")
def test_however_many_nodes_there_are_the_store_sends_one_copy_and_all_have_every_byte(house: House) -> None:
    nodes = [*volunteers(house, "a", "b", "c"), house.relaying_node("leaf", volunteers=False)]
    for version in (1, 2):
        data = house.upload(version, data_of(version, SIZE))
        for node in nodes:
            node.expect(version, data)
    wait_for(lambda: status(house).relayed_bytes == 2 * 3 * SIZE, "the nodes' word that they have it")
    assert status(house).served_bytes == 2 * SIZE
    assert status(house).relays == ("a", "b", "c")
    assert status(house).bypasses == {}
    assert sum(node.relaying.relay.served_bytes for node in nodes[:3]) == 2 * 3 * SIZE


@pytest.mark.usefixtures("calm")
def test_a_chunk_is_passed_on_before_the_next_one_has_come(house: House) -> None:
    """The store sends no second chunk until the last node has the first one."""
    last = Path()

    def hold(pull: Pull) -> None:
        if pull.offset:
            deadline = time.monotonic() + PATIENCE_S
            while not any(path.stat().st_size >= CHUNK_BYTES for path in last.glob("1-*")):
                assert time.monotonic() < deadline
                time.sleep(0.01)

    nodes = volunteers(house, "a", "b", "c")
    house.store.before_pull = hold
    house.store.order = ["a", "b", "c"]
    last = nodes[2].folder
    data = house.upload(1, data_of(1, 3 * CHUNK_BYTES))
    for node in nodes:
        node.expect(1, data)


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_sizes_at_the_edge_of_a_chunk_are_relayed_whole(house: House, size: int) -> None:
    nodes = volunteers(house, "a", "b")
    data = house.upload(1, data_of(1, size))
    for node in nodes:
        node.expect(1, data)


@pytest.mark.usefixtures("calm")
def test_what_needs_several_files_is_relayed_file_by_file(house: House) -> None:
    nodes = [house.relaying_node(name, routed=True) for name in "ab"]
    wait_for(lambda: len(house.relays.volunteers) == 2, "the volunteers to be known")
    base, update = data_of(0, SIZE), data_of(1, SIZE)
    for version, data, kind in ((0, base, BASE), (1, update, FACTORS)):
        parent = policy(0) if version else None
        house.upload_as(policy(version), data, kind, parent)
        for node in nodes:
            fetched = node.next()
            assert fetched.policy == policy(version), fetched
            files = sorted(fetched.path.iterdir()) if fetched.path.is_dir() else [fetched.path]
            assert files[-1].read_bytes() == data
            fetched.discard()
    wait_for(lambda: status(house).relayed_bytes >= 2 * SIZE, "the nodes' word that they have it")


def test_with_keys_a_relay_lets_in_nodes_alone_and_its_children_know_it_by_its_own_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    house = House(tmp_path, keys=tmp_path / "keys")
    try:
        nodes = volunteers(house, "a", "b", timeout_s=LONG_S)
        data = house.upload(1, data_of(1, SIZE))
        for node in nodes:
            node.expect(1, data)
        wait_for(lambda: status(house).relayed_bytes == SIZE, "the second node's word")
        assert status(house).bypasses == {}
        relay = nodes[0].relaying.relay
        own = dial_keys(house.keys, "node")
        for role, server in (("trainer", own.public), ("node", own.server)):
            keys = dial_keys(house.keys, role)._replace(server=server)  # of no node; for another than this relay's
            stranger = Client(
                relay.address, run=RUN, token=TOKEN, role=role, name="stranger", peer="relay", keys=keys
            )  # fmt: skip
            with pytest.raises(LinkTimeout):
                stranger.connect(0.5)
            stranger.close(0.1)
    finally:
        house.close()


def test_a_relay_whose_key_the_store_does_not_know_any_more_is_passed_by(tmp_path: Path) -> None:
    """It said goodbye in the burst in which its child asked."""
    make_keys(tmp_path / "keys")
    house = House(tmp_path, keys=tmp_path / "keys")
    try:
        nodes = volunteers(house, "a", "b")
        house.store.order = ["a", "b"]
        house.server.key_of = lambda peer: ""  # type: ignore[method-assign]
        data = house.upload(1, data_of(1, SIZE))
        for node in nodes:
            node.expect(1, data)
        assert status(house).bypasses == {"unreachable": 1}
    finally:
        house.close()


def test_a_relay_hears_of_a_new_key_also_when_its_node_has_come_already(tmp_path: Path) -> None:
    """A machine that is let in dials again and again until then, so it joins before the store looks by the clock."""
    make_keys(tmp_path / "keys")
    house = House(tmp_path, keys=tmp_path / "keys")
    try:
        (relay,) = volunteers(house, "a", timeout_s=LONG_S)
        wait_for(lambda: relay.relaying.relay.keys.admits_some, "the list of keys")
        make_keys(tmp_path / "new", ("node",))
        public = (tmp_path / "new" / "node.public").read_text().split()[1]
        with (tmp_path / "keys" / "allowed").open("a") as allowed:
            allowed.write(f"node {public}\n")
        house.link("node", "another")
        wait_for(lambda: relay.relaying.relay.keys.roles(public) == {"node"}, "the relay to know the new key")
    finally:
        house.close()


# --- relays that fail ------------------------------------------------------------------------------------------------


def break_relay(node: Node, read: Callable[[SharedFile, int, int], bytes | None]) -> None:
    """From its third chunk on this relay does something else."""
    relay = node.relaying.relay
    pulls = relay.pulls

    def broken(policy: PolicyId) -> SharedFile:
        file = pulls(policy)
        sound = file.read
        file.read = lambda offset, count: (sound if offset < 2 * CHUNK_BYTES else read)(*(  # type: ignore[method-assign]
            (offset, count) if offset < 2 * CHUNK_BYTES else (file, offset, count)
        ))
        return file

    relay.pulls = broken


def pushed_past(house: House, broken: Node, child: Node) -> tuple[bytes, float]:
    """A push that goes through `broken`, which asks first; the seconds until its child has all of it."""
    house.store.order = ["broken", "child"]
    started = time.monotonic()
    data = house.upload(1, data_of(1, SIZE))
    child.expect(1, data)
    return data, time.monotonic() - started


def test_a_relay_that_alters_a_chunk_is_left_at_once_and_nothing_of_it_is_used(house: House) -> None:
    broken, child = volunteers(house, "broken", "child", timeout_s=LONG_S)
    break_relay(broken, lambda file, offset, count: b"x" * min(count, file.size - offset))
    _, seconds = pushed_past(house, broken, child)
    assert seconds < SLACK_S
    assert status(house).bypasses == {"damaged": 1}
    after = [pull.offset for pull in house.store.pulls].count(0)
    assert after == 1, "the child went on where it stopped"


def test_a_relay_that_falls_silent_costs_one_time_out_and_the_pull_goes_on_where_it_stopped(house: House) -> None:
    broken, child = volunteers(house, "broken", "child")
    broken.relaying.relay._word_s = 1e9  # not a word
    break_relay(broken, lambda file, offset, count: None)
    _, seconds = pushed_past(house, broken, child)
    assert RELAY_TIMEOUT_S <= seconds < RELAY_TIMEOUT_S + SLACK_S
    assert status(house).bypasses == {"silent": 1}
    assert [pull.offset for pull in house.store.pulls].count(0) == 1


def test_a_relay_that_plays_for_time_is_passed_by_when_others_are_done(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every time-out is kept: a chunk comes in each."""
    monkeypatch.setattr(relays, "SLOW_FACTOR", 2.0)
    broken, child = volunteers(house, "broken", "child")
    began = time.monotonic()

    def slowly(file: SharedFile, offset: int, count: int) -> bytes | None:
        due = began + 1.2 * (offset / CHUNK_BYTES - 1) * RELAY_TIMEOUT_S
        return SharedFile.read(file, offset, count) if time.monotonic() > due else None

    break_relay(broken, slowly)
    _, seconds = pushed_past(house, broken, child)
    assert 2 * RELAY_TIMEOUT_S <= seconds < 2 * RELAY_TIMEOUT_S + SLACK_S
    assert status(house).bypasses == {"slow": 1}


def test_a_relay_that_only_says_that_it_waits_is_believed_for_two_time_outs(house: House) -> None:
    broken, child = volunteers(house, "broken", "child")
    break_relay(broken, lambda file, offset, count: None)
    _, seconds = pushed_past(house, broken, child)
    assert 2 * RELAY_TIMEOUT_S <= seconds < 2 * RELAY_TIMEOUT_S + SLACK_S
    assert status(house).bypasses == {"silent": 1}


def test_below_a_relay_whose_own_source_dies_nobody_else_moves(house: House) -> None:
    """a dies; b finds out after a time-out and has another source; c, which pulls from b, has heard of b meanwhile."""
    a, b, c = volunteers(house, "broken", "b", "c")
    a.relaying.relay._word_s = 1e9
    break_relay(a, lambda file, offset, count: None)
    house.store.order = ["broken", "b", "c"]
    started = time.monotonic()
    data = house.upload(1, data_of(1, SIZE))
    b.expect(1, data)
    c.expect(1, data)
    assert time.monotonic() - started < RELAY_TIMEOUT_S + SLACK_S
    assert status(house).bypasses == {"silent": 1}
    assert house.relays.source("c", policy(1)) == "b"


def test_a_relay_that_nobody_can_reach_is_passed_by(house: House) -> None:
    broken, child = volunteers(house, "broken", "child")
    broken.relaying.relay.close()
    _, seconds = pushed_past(house, broken, child)
    assert RELAY_TIMEOUT_S <= seconds < RELAY_TIMEOUT_S + SLACK_S
    assert status(house).bypasses == {"unreachable": 1}


def test_a_relay_without_the_file_says_so_and_costs_no_time_out(house: House) -> None:
    broken, child = volunteers(house, "broken", "child", timeout_s=LONG_S)
    broken.relaying.relay.pulls = lambda policy: SharedFile()
    _, seconds = pushed_past(house, broken, child)
    assert seconds < SLACK_S
    assert status(house).bypasses == {"gone": 1}


def test_a_node_whose_disk_fails_keeps_no_file_for_others(house: House) -> None:
    """Names are gone and descriptors open, so they would fill the disk for as long as it runs."""
    (node,) = volunteers(house, "a")
    data = house.upload(1, data_of(1))
    node.expect(1, data)
    node.folder.rmdir()
    data = house.upload(2, data_of(2))
    node.expect_failure(2)
    node.folder.mkdir()
    node.expect(2, data)
    child = dialled(node.relaying.relay)
    for version, error in ((1, "this node does not have it"), (2, "")):
        child.send(Pull(policy(version), 0, CHUNK_BYTES))
        assert child.receive(PATIENCE_S, "a chunk").message.error == error
    child.close(0.2)


@pytest.mark.usefixtures("calm")
def test_a_policy_that_is_stored_in_another_form_is_had_of_nobody_who_has_the_first(house: House) -> None:
    """As by a trainer that goes on from a checkpoint. Nobody has sent wrong bytes."""
    old = volunteers(house, "a", "b")
    data = house.upload(1, data_of(1, SIZE))
    for node in old:
        node.expect(1, data)
    wait_for(lambda: status(house).relayed_bytes == SIZE, "the second node's word")
    whole = data_of(2, SIZE + CHUNK_BYTES)
    house.upload_as(policy(1), whole, "lora")
    for name in ("c", "d", "e"):
        house.relaying_node(name).expect(1, whole)
    assert status(house).liars == ()
    assert status(house).bypasses == {}


@pytest.mark.usefixtures("calm")
def test_a_store_that_is_started_anew_learns_who_relays_and_of_the_pulls_under_way(house: House) -> None:
    nodes = volunteers(house, "a", "b")
    data = house.upload(1, data_of(1, SIZE))
    for node in nodes:
        node.expect(1, data)
    house.kill()
    house.open(keep=True)
    house.replace_trainer()
    wait_for(lambda: set(house.relays.volunteers) == {"a", "b"}, "the volunteers to be known again")
    for node in nodes:
        node.expect(1, data)
    data = house.upload(2, data_of(2, SIZE))
    for node in nodes:
        node.expect(2, data)
    wait_for(lambda: status(house).relayed_bytes >= SIZE, "the nodes' word")


# --- what a relay answers --------------------------------------------------------------------------------------------


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    server = Server(f"ipc://{tmp_path / 'r'}", run=RUN, token=TOKEN, name="relay")
    made = Relay(server, server.endpoint, RELAY_TIMEOUT_S)
    yield made
    made.close()


def dialled(relay: Relay, role: str = "node", name: str = "child") -> Client:
    link = Client(relay.address, run=RUN, token=TOKEN, role=role, name=name, peer="relay")  # type: ignore[arg-type]
    link.connect(PATIENCE_S)
    return link


def test_a_relay_keeps_the_last_files_and_those_it_has_dropped_are_gone(relay: Relay, tmp_path: Path) -> None:
    child = dialled(relay)
    for version in range(6):
        path = tmp_path / str(version)
        path.write_bytes(data_of(version))
        file = relay.pulls(policy(version))
        file.begin(path, 1000, "s")
        file.verified(1000)
        path.unlink()
    for version in range(6):
        child.send(Pull(policy(version), 0, CHUNK_BYTES))
        got = child.receive(PATIENCE_S, "a chunk")
        if version < 2:
            assert "does not have it" in got.message.error
        else:
            assert (got.message.size, bytes(got.blobs[0])) == (1000, data_of(version))
    child.close(0.2)


def test_who_asks_on_and_on_is_cut_off_and_a_trainer_is_not_heard(relay: Relay) -> None:
    relay.pulls(policy(1))
    trainer = dialled(relay, "trainer", "trainer")
    trainer.send(Pull(policy(1), 0, CHUNK_BYTES))
    child = dialled(relay)
    for _ in range(MAX_UNANSWERED + 2):
        child.send(Pull(policy(1), 0, CHUNK_BYTES))
    with pytest.raises(LinkError, match="asks on and on"):
        child.flush(PATIENCE_S)
    assert all(asked.peer != "trainer" for asked in relay._asked)
    for link in (trainer, child):
        link.close(0.2)


def test_who_asks_far_too_often_and_leaves_ends_no_relay(relay: Relay, tmp_path: Path) -> None:
    """All of it arrives in one burst, in which it is cut off more than once, and is gone."""
    path = tmp_path / "file"
    path.write_bytes(data_of(1))
    file = relay.pulls(policy(1))
    burst = dialled(relay, name="burst")
    for _ in range(4 * MAX_UNANSWERED):
        burst.send(Pull(policy(1), 0, CHUNK_BYTES))
    burst.close(0.2)
    file.begin(path, 1000, "s")
    file.verified(1000)
    child = dialled(relay)
    child.send(Pull(policy(1), 0, CHUNK_BYTES))
    assert bytes(child.receive(PATIENCE_S, "a chunk").blobs[0]) == data_of(1)
    child.close(0.2)


def test_bytes_beyond_what_is_verified_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * CHUNK_BYTES))
    file = SharedFile()
    assert file.read(0, CHUNK_BYTES) is None
    file.begin(path, 3 * CHUNK_BYTES, "s")
    file.verified(2 * CHUNK_BYTES)
    assert len(file.read(CHUNK_BYTES, CHUNK_BYTES) or b"") == CHUNK_BYTES
    assert file.read(CHUNK_BYTES, CHUNK_BYTES + 1) is None
    with pytest.raises(LookupError):
        file.read(3 * CHUNK_BYTES + 1, CHUNK_BYTES)
    file.close()
    with pytest.raises(LookupError):
        file.read(0, 1)
    assert isinstance(Chunk(policy(1), 0, 0, ""), Chunk)

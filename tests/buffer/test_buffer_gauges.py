"""What the buffer and the store tell Prometheus, from a real replay and a real link, through a real scrape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scraping import scrape, targets

from async_rl.config import config_from_table
from async_rl.run.exporter import Exporter, Reading
from async_rl.version import PolicyId
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import StoreStatus
from buffer.events import EvalRequested, NodeLost
from buffer.gauges import StoreGauges
from buffer.observed import Observed

RUN, TOKEN = "r1", "t" * 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(f"ipc://{tmp_path / 's'}", run=RUN, token=TOKEN, name="buffer")
    yield made
    made.close()


def read(reading: Reading, folder: Path) -> dict[str, float]:
    exporter = Exporter()
    with exporter.serve(folder, "buffer", {}):
        exporter.publish(reading)
        samples = scrape(targets(folder)["buffer"]["address"])
    return {name: value for name, value in samples.items() if name.startswith("async_rl_")}


def observed() -> Observed:
    table = {"model": {"path": "unused"}, "task": {"kind": "digit_sort"}, "buffer": {"max_staleness": 1}}
    return Observed(config_from_table(table, "test"), 0.0)


def test_the_buffers_numbers_are_those_of_its_ledger_and_they_balance(tools, server: Server, tmp_path: Path) -> None:
    play, seen = tools.play(), observed()
    lost, kept = play.node("a", 4)
    play.deliver(kept, "a")
    play.apply(NodeLost("a", "gone"))
    (again,) = play.node("b", 2)
    play.deliver(again, "b")
    play.draw()
    play.confirm()
    play.want("b", 6)
    play.result(lost, 0, "a")  # too late
    seen.published(PolicyId("main", 1, "d1"), ["b"], now=10.0)
    seen.serving("b", PolicyId("main", 1, "d1"), now=10.3)
    seen.trouble = 2
    samples = read(seen.reading(play.replay, ["b", "joiner"], "trainer", server), tmp_path)
    ledger = play.replay.ledger
    assert (ledger["trained"], ledger["dropped.node_lost"], ledger["leased"]) == (4, 2, 4)
    assert samples["async_rl_buffer_issued_attempts_total"] == ledger["issued"] == 10
    assert samples["async_rl_buffer_trained_attempts_total"] == 4
    assert samples['async_rl_buffer_attempts{place="leased"}'] == 4
    assert samples['async_rl_buffer_dropped_attempts_total{reason="node_lost"}'] == 2
    parts = ("async_rl_buffer_attempts{", "async_rl_buffer_trained_attempts", "async_rl_buffer_dropped_attempts")
    assert sum(value for name, value in samples.items() if name.startswith(parts)) == 10
    assert samples['async_rl_buffer_outside_results_total{kind="trouble"}'] == 2
    states = {state: samples[f'async_rl_buffer_nodes{{state="{state}"}}'] for state in ("joining", "syncing", "ready")}
    assert states == {"joining": 1, "syncing": 0, "ready": 1}
    assert samples["async_rl_buffer_trainers"] == 1
    assert samples["async_rl_buffer_newest_version"] == samples["async_rl_buffer_confirmed_batches_total"] == 1
    assert samples["async_rl_buffer_push_seconds_sum"] == pytest.approx(0.3)
    assert samples['async_rl_buffer_push_seconds_bucket{le="0.25"}'] == 0
    assert samples['async_rl_buffer_push_seconds_bucket{le="0.5"}'] == 1


def test_what_trains_again_is_counted_beside_the_ledger(tools, server: Server, tmp_path: Path) -> None:
    play = tools.play(reuse=2)
    play.node("a")
    for _ in range(3):
        for lease in play.attest("a") + play.want("a", 10**6):
            play.deliver(lease)
        play.draw()
        play.confirm()
    samples = read(observed().reading(play.replay, ["a"], "trainer", server), tmp_path)
    assert samples["async_rl_buffer_trained_attempts_total"] == 6  # a new group of two in each batch
    assert samples["async_rl_buffer_reused_attempts_total"] == 4  # another in each but the first


def test_before_anything_was_published_there_is_no_newest_version(tools, server: Server, tmp_path: Path) -> None:
    play = tools.play()
    samples = read(observed().reading(play.replay, [], "", server), tmp_path)
    assert "async_rl_buffer_newest_version" not in samples
    assert samples["async_rl_buffer_trainers"] == 0


def test_every_place_of_the_ledgers_is_counted_somewhere(tools, server: Server, tmp_path: Path) -> None:
    play = tools.play()
    play.node("a", 4)
    play.apply(EvalRequested(play.policies[0], 3, play.rules.sampling, 10.0))
    reading = read(observed().reading(play.replay, ["a"], "trainer", server), tmp_path)
    assert reading["async_rl_buffer_evaluation_attempts"] == play.replay.eval_ledger["leased"] > 0
    places = {place.removeprefix("dropped.") for place in play.replay.ledger} - {"issued", "trained"}
    labels = {name.split('"')[1] for name in reading if name.startswith("async_rl_buffer_attempts{")}
    labels |= {name.split('"')[1] for name in reading if name.startswith("async_rl_buffer_dropped_attempts_total{")}
    assert labels == places


def test_the_stores_numbers_are_those_of_what_it_keeps_and_what_left(server: Server, tmp_path: Path) -> None:
    gauges, old, new = StoreGauges(), PolicyId("main", 6, "6" * 64), PolicyId("main", 7, "7" * 64)
    gauges.pulled(1000)
    gauges.pulled(24)
    client = Client(server.endpoint, run=RUN, token=TOKEN, role="node", name="n", peer="store")
    try:
        with pytest.raises(Exception, match="welcome"):
            client.connect(0.01)
        while not server.poll(0.05):
            pass
        relaying = StoreStatus(1024, 4096, ("n-0", "n-1"), {"silent": 3})
        samples = read(gauges.reading({old: 500, new: 524}, new, server, relaying), tmp_path)
    finally:
        client.close(0.1)
    assert samples["async_rl_store_policies"] == 2
    assert samples["async_rl_store_policy_bytes"] == samples["async_rl_store_served_bytes_total"] == 1024
    assert samples["async_rl_store_relays"] == 2
    assert samples["async_rl_store_relayed_bytes_total"] == 4096
    assert samples['async_rl_store_bypassed_relays_total{reason="silent"}'] == 3
    assert samples["async_rl_store_newest_version"] == 7
    assert samples["async_rl_store_pulls_total"] == 2
    assert samples['async_rl_link_received_bytes_total{link="store"}'] == server.bytes_received > 0

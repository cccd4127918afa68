"""What is trained is what was accepted, byte for byte, whatever happens to messages and connections on the way."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
from fake_work import FakeNode, FakeTrainer, Published, Service, finish, wait_for
from lossy_link import LossySocket, Rates, make_lossy
from tcp_proxy import TcpProxy

RATES = Rates(drop=0.05, duplicate=0.05, reorder=0.05)
NODES = 2


def cut_twice(proxy: TcpProxy, trainer: FakeTrainer, steps: int) -> None:
    for share in (0.3, 0.6):
        wait_for(lambda share=share: trainer.steps_done >= share * steps or not trainer.is_alive(), "steps", 600)  # type: ignore[misc]
        proxy.cut()


def train_over_a_bad_network(folder: Path, steps: int, timeout_s: float) -> None:
    injected: list[LossySocket] = []
    with (
        Service(folder, run={"steps": steps}) as buffer,
        TcpProxy(buffer.directory.endpoint) as proxy,
    ):
        published = Published()

        def arrange(link: object, seed: int) -> None:
            injected.append(make_lossy(link, RATES, seed))  # type: ignore[arg-type]

        def dial(role: str, name: str, seed: int):  # type: ignore[no-untyped-def]
            return buffer.dial(role, name, proxy.endpoint, functools.partial(arrange, seed=seed))  # type: ignore[arg-type]

        nodes = [
            FakeNode(dial("node", f"node-{i}", i), f"node-{i}", published, i, lambda rng: rng.randrange(8, 60))
            for i in range(NODES)
        ]
        trainer = FakeTrainer(dial("trainer", "trainer", 100), buffer.config, published)
        cutter = threading.Thread(target=cut_twice, args=(proxy, trainer, steps), daemon=True)
        for thread in (*nodes, trainer, cutter):
            thread.start()
        finish(trainer, *nodes, timeout_s=timeout_s)
        cutter.join(10)
        assert proxy.accepted >= 3 * (NODES + 1)  # each of the links came back twice
        assert all(sum(socket.done.values()) > 0 for socket in injected)
        check_nothing_lost_or_doubled(nodes, trainer, buffer)


def check_nothing_lost_or_doubled(nodes: list[FakeNode], trainer: FakeTrainer, buffer: Service) -> None:
    delivered = {key: data for node in nodes for key, data in node.delivered.items()}
    trained = dict(trainer.trained)
    config, status = buffer.config, trainer.final
    assert status is not None
    ledger = dict(status.ledger)
    assert len(trained) == len(trainer.trained), "an attempt was trained twice"
    assert len(trained) == config.run.steps * config.buffer.groups_per_step * config.buffer.group_size
    assert {key: delivered[key] for key in trained} == trained, "other bytes than were delivered"
    issued = ledger.pop("issued")
    assert ledger["trained"] == len(trained)
    assert sum(ledger.values()) == issued
    assert ledger["leased"] == ledger["ready"] == ledger["batched"] == 0
    # All that was delivered was accepted and trained, but for what the ledger or its margin names.
    refused = sum(count for place, count in ledger.items() if place.startswith("dropped.")) + sum(
        status.outside.values()
    )
    assert len(delivered.keys() - trained.keys()) <= refused
    if not refused:
        assert delivered == trained


@pytest.mark.sample
def test_a_run_over_a_bad_network_trains_what_it_accepted(tmp_path: Path) -> None:
    train_over_a_bad_network(tmp_path, steps=8, timeout_s=90)


@pytest.mark.faults
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0])
def test_a_long_run_over_a_bad_network_trains_what_it_accepted(tmp_path: Path, seed: int) -> None:
    train_over_a_bad_network(tmp_path, steps=60, timeout_s=500)


def test_a_damaged_message_costs_its_sender_the_link_and_nobody_else_anything(tmp_path: Path) -> None:
    """ZeroMQ over TCP damages nothing: who sends what cannot be read is broken, and is told so once."""
    published = Published()
    with Service(tmp_path, run={"steps": 10}) as buffer:
        broken: list[LossySocket] = []
        damaged = buffer.dial("node", "damaged", "", lambda link: broken.append(make_lossy(link, Rates(), 0)))
        nodes = [
            FakeNode(damaged, "damaged", published, 0, lambda rng: 16),
            FakeNode(buffer.dial("node", "sound"), "sound", published, 1, lambda rng: 16),
        ]
        trainer = FakeTrainer(buffer.dial("trainer", "trainer"), buffer.config, published, pause_s=0.1)
        for thread in (*nodes, trainer):
            thread.start()
        wait_for(lambda: trainer.steps_done >= 2, "two steps")
        broken[0]._rates = Rates(damage=1.0)
        trainer.join(60)
        assert trainer.error is None
        assert trainer.steps_done == 10
        nodes[0].join(10)
        assert "could not read what damaged sent" in str(nodes[0].error)
        nodes[1].end()
        check_nothing_lost_or_doubled(nodes, trainer, buffer)
        assert buffer.process.wait(20) == 0


def test_the_injector_is_seeded_and_does_what_it_says() -> None:
    class Passed:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def getsockopt(self, _option: int) -> int:
            return 3

        def send_multipart(self, parts: list[bytes], _flags: int) -> None:
            self.sent.append(parts[0])

    def sent(rates: Rates, seed: int) -> tuple[list[bytes], LossySocket]:
        passed = Passed()
        lossy = LossySocket(passed, rates, seed)  # type: ignore[arg-type]
        for number in range(2000):
            lossy.send(b"%d" % number)
        return passed.sent, lossy

    everything = [b"%d" % number for number in range(2000)]
    assert sent(Rates(), 1)[0] == everything
    first, lossy = sent(RATES, 1)
    assert first == sent(RATES, 1)[0] != sent(RATES, 2)[0]
    assert 50 <= lossy.done["drop"] <= 160
    assert len(set(first)) >= 2000 - lossy.done["drop"] - 1  # one may still be held back
    assert len(first) - len(set(first)) == lossy.done["duplicate"]
    swapped = sent(Rates(reorder=1.0), 1)[0]
    assert swapped[:4] == [b"1", b"0", b"3", b"2"]

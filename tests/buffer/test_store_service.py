"""What the store makes of who joins: whose pins count, and who is told what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_house import PATIENCE_S, House, data_of, policy, wait_for

from async_rl.version import PolicyId
from async_rl.wire.link import LinkTimeout
from async_rl.wire.messages import SNAPSHOT


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def test_the_pins_of_a_trainer_that_died_end_when_the_next_one_joins(house: House) -> None:
    house.upload(0, data_of(0))
    house.pin(0)
    for version in range(1, 5):
        house.upload(version, data_of(version))
    assert house.store._files.get(policy(0)) is not None
    house.replace_trainer()
    for version in (5, 6):
        house.upload(version, data_of(version))
    assert house.store._files.get(policy(0)) is None


def test_a_trainer_whose_link_was_cut_for_a_moment_keeps_its_pins(house: House) -> None:
    house.upload(0, data_of(0))
    house.pin(0)
    house._trainer.flush(PATIENCE_S)
    peer = house.server._peers["trainer"]
    house.server._lose(peer, "cut by the test")
    wait_for(lambda: not peer.lost, "the trainer to be heard again")
    for version in range(1, 5):
        house.upload(version, data_of(version))
    assert house.store._files.get(policy(0)) is not None


def test_a_snapshot_that_is_the_first_upload_of_all_is_announced_to_nobody(house: House) -> None:
    """A trainer that goes on from a checkpoint, with a store that has lost everything."""
    node = house.link("node", "node")
    house.upload_as(PolicyId(SNAPSHOT, 3, "5" * 64), b"all", SNAPSHOT)
    with pytest.raises(LinkTimeout):
        node.receive(0.3, "nothing")
    house.upload(3, b"a change")
    assert node.receive(PATIENCE_S, "the policy").message.policy == policy(3)

"""What a node that relays may be told, before it listens anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import Config, ConfigError, config_from_table
from async_rl.wire.security import with_port_of


def configured(keys: str = "", **inference: Any) -> Config:
    table = {"model": {"path": "m"}, "task": {"kind": "digit_sort"}, "buffer": {"keys": keys}, "inference": inference}
    return config_from_table(table, "test")


def test_relays_are_off_and_then_on_loopback() -> None:
    assert not configured().inference.relay
    assert configured(relay=True, nodes=3).inference.relay_endpoint == "tcp://127.0.0.1:*"
    configured(relay=True, relay_endpoint="tcp://0.0.0.0:5710", relay_address="tcp://10.0.0.7:*", keys="k")


def test_where_ray_places_nodes_each_machine_puts_its_own_address_in() -> None:
    table = {
        "model": {"path": "m"}, "task": {"kind": "digit_sort"}, "buffer": {"keys": "k"}, "launch": {"kind": "ray"},
        "inference": {"relay": True, "relay_endpoint": "tcp://*:*"},
    }  # fmt: skip
    config_from_table(table, "test")


@pytest.mark.parametrize(
    ("inference", "keys", "said"),
    [
        ({"relay_endpoint": "tcp://127.0.0.1:5"}, "", "has no meaning without relay = true"),
        ({"relay": True, "relay_endpoint": "tcp://10.0.0.1:*"}, "", "needs CURVE keys"),
        ({"relay": True, "relay_address": "tcp://10.0.0.1:*"}, "", "relay_address: .* needs CURVE keys"),
        ({"relay": True, "relay_endpoint": "10.0.0.1"}, "k", "is not an endpoint"),
        ({"relay": True, "relay_endpoint": "tcp://127.0.0.1:5", "nodes": 2}, "", "one place, and nodes = 2"),
        ({"relay": True, "relay_endpoint": "tcp://0.0.0.0:*"}, "k", "set relay_address as well"),
        ({"group": [{"name": "a", "relay": True, "relay_endpoint": "tcp://10.0.0.1:*"}]}, "", "group 'a'"),
    ],
)
def test_what_no_node_could_do_is_refused(inference: dict[str, Any], keys: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(keys, **inference)


def test_an_address_may_leave_the_port_to_where_the_relay_listens() -> None:
    assert with_port_of("tcp://node-7:*", "tcp://0.0.0.0:5710") == "tcp://node-7:5710"
    assert with_port_of("tcp://node-7:80", "tcp://0.0.0.0:5710") == "tcp://node-7:80"
    assert with_port_of("ipc:///tmp/s", "ipc:///tmp/s") == "ipc:///tmp/s"

"""What must hold of a node that passes policies on to others ([inference] relay), before it listens anywhere."""

from __future__ import annotations

from async_rl.errors import AsyncRLError
from async_rl.inference_config import InferenceConfig
from async_rl.schema import ConfigError, changed
from async_rl.wire.security import check_endpoint, is_wildcard


def check_relay(inference: InferenceConfig, *, encrypted: bool, placed: bool = False) -> None:
    """The settings of one group's nodes; `encrypted`: there are keys; `placed`: whoever starts a node puts its
    machine's address in place of a wildcard. Raises ConfigError."""
    if not inference.relay:
        for key in changed(inference, ("relay_endpoint", "relay_address")):
            raise ConfigError(f"[inference] {key} has no meaning without relay = true: remove it or set that")
        return
    _check(inference.relay_endpoint, "relay_endpoint", encrypted)
    if inference.relay_address:
        _check(inference.relay_address, "relay_address", encrypted)
    if is_wildcard(inference.relay_address or inference.relay_endpoint) and not placed:
        raise ConfigError(
            f"[inference] relay_endpoint = {inference.relay_endpoint!r} is every address of a machine, and none that "
            'others can dial: set relay_address as well, for example to "tcp://10.0.0.7:*", on each machine its own'
        )
    if inference.nodes > 1 and not inference.relay_endpoint.endswith(":*"):
        raise ConfigError(
            f"[inference] relay_endpoint = {inference.relay_endpoint!r} is one place, and nodes = {inference.nodes} on "
            'a machine need one each: end it with ":*", which is any free port'
        )


def _check(endpoint: str, key: str, encrypted: bool) -> None:
    try:
        check_endpoint(endpoint, encrypted)
    except AsyncRLError as error:
        raise ConfigError(f"[inference] {key}: {error}") from error

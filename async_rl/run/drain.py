"""`async-rl drain NODE`: an inference node leaves a run that goes on, and nothing that it has begun is lost.

The buffer tells the node and leases it nothing more; this waits until the node is gone, so that whoever called it may
switch the machine off.
"""

from __future__ import annotations

import os
import time

from async_rl.errors import AsyncRLError
from async_rl.run.view import STATUS_TIMEOUT, Address, fetch_status
from async_rl.wire.link import Client
from async_rl.wire.messages import Drain, DrainAnswer

POLL_S = 0.2
PATIENCE_S = 60.0  # beyond the grace that was named; the node's own is not known here


class DrainError(AsyncRLError):
    """The node cannot be told, or does not leave; the message says which."""


def drain(address: Address, node: str, grace_s: float | None) -> float:
    """Seconds until the node was gone. Raises DrainError, LinkError."""
    client = address.client(f"drain-{os.getpid()}")
    try:
        client.connect(STATUS_TIMEOUT)
        client.send(Drain(node, grace_s))
        started = time.monotonic()
        error = _answer(client)
        if error:
            raise DrainError(error)
        _await_leave(client, node, started + (grace_s or 0.0) + PATIENCE_S)
        return time.monotonic() - started
    finally:
        client.close(0.2)


def _answer(client: Client) -> str:
    """What the buffer says is wrong; empty when the node was told."""
    while True:
        message = client.receive(STATUS_TIMEOUT, "the buffer's answer").message
        if isinstance(message, DrainAnswer):
            return message.error


def _await_leave(client: Client, node: str, deadline: float) -> None:
    while (state := _state_of(client, node)) is not None:
        if time.monotonic() > deadline:
            raise DrainError(f"node {node} was told to leave and is still {state}: look at its log")
        time.sleep(POLL_S)


def _state_of(client: Client, node: str) -> str | None:
    return next((each.state for each in fetch_status(client).nodes if each.name == node), None)

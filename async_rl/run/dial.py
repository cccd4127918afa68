"""How a pool reaches the two services of its run, and how they listen."""

from __future__ import annotations

import queue

from async_rl.run.process import PoolContext
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import Role

GRACE_S = 10.0  # a wait ends by its own limit, with its own message, before the watchdog would


def listen(context: PoolContext, endpoint: str) -> Server:
    """A service's socket. Raises LinkError when the endpoint is taken, AsyncRLError when it is not allowed."""
    return Server(
        endpoint,
        run=context.directory.run_id,
        token=context.directory.token,
        name=context.name,
        heartbeat_s=context.config.buffer.heartbeat,
    )


def dial_services(
    context: PoolContext, role: Role, inbox: queue.SimpleQueue[object] | None = None
) -> tuple[Client, Client]:
    """Connected links to the buffer and to the policy store; what the buffer says goes to `inbox`, if there is one.
    Raises LinkTimeout after run.connect_timeout, and LinkRefused."""
    directory, config = context.directory, context.config
    links = []
    for endpoint, peer, box in (
        (directory.endpoint, "buffer", inbox),
        (directory.store_endpoint, "store", None),
    ):
        link = Client(
            endpoint,
            run=directory.run_id,
            token=directory.token,
            role=role,
            name=context.name,
            peer=peer,
            heartbeat_s=config.buffer.heartbeat,
            inbox=box,
        )
        with context.watchdog.expect(f"waits for a welcome from the {peer}", config.run.connect_timeout + GRACE_S):
            link.connect(config.run.connect_timeout)
        links.append(link)
    return links[0], links[1]

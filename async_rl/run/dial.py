"""How a pool reaches the two services of its run."""

from __future__ import annotations

import queue

from async_rl.run.process import PoolContext
from async_rl.wire.link import Client
from async_rl.wire.messages import Role


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
        link.connect(config.run.connect_timeout)
        links.append(link)
    return links[0], links[1]

"""How a pool reaches the two services of its run, and how they listen."""

from __future__ import annotations

import queue

from async_rl.config import keys_folder
from async_rl.errors import AsyncRLError
from async_rl.run.process import PoolContext
from async_rl.run.shard_links import BufferLink, ShardLinks
from async_rl.shards import shard_name
from async_rl.wire.keys import NodeDoorKeys, ServiceKeys, dial_keys
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import Role, Source
from async_rl.wire.security import shard_endpoint, where_to_dial

GRACE_S = 10.0  # a wait ends by its own limit, with its own message, before the watchdog would


def listen(context: PoolContext, endpoint: str) -> Server:
    """A service's socket. Raises LinkError when the endpoint is taken, AsyncRLError when it is not allowed, or when the
    keys are not as they should be."""
    folder = keys_folder(context.config)
    return Server(
        endpoint,
        run=context.directory.run_id,
        token=context.directory.token,
        name=context.name,
        heartbeat_s=context.config.buffer.heartbeat,
        keys=ServiceKeys(folder) if folder is not None else None,
    )


def listen_as_relay(context: PoolContext, endpoint: str) -> tuple[Server, NodeDoorKeys | None]:
    """A node's socket for other nodes; with keys it lets in nobody before the store has said whom. Raises as listen."""
    folder = keys_folder(context.config)
    keys = NodeDoorKeys(folder) if folder is not None else None
    heartbeat_s = context.config.buffer.heartbeat
    directory = context.directory
    server = Server(
        endpoint, run=directory.run_id, token=directory.token, name=context.name, heartbeat_s=heartbeat_s, keys=keys
    )
    return server, keys


def dial_relay(context: PoolContext, source: Source) -> Client:
    """A link to a relay, not connected yet. Raises AsyncRLError for an endpoint that is not allowed, or no key."""
    directory = context.directory
    keys = dial_keys(keys_folder(context.config), "node")
    return Client(
        source.endpoint, run=directory.run_id, token=directory.token, role="node", name=context.name,
        peer=f"relay {source.relay}", heartbeat_s=context.config.buffer.heartbeat,
        keys=keys.expecting(source.key) if keys is not None else None,
    )  # fmt: skip


def dial_services(
    context: PoolContext, role: Role, inbox: queue.SimpleQueue[object] | None = None
) -> tuple[BufferLink, Client]:
    """Connected links to the buffer and to the policy store; what the buffer says goes to `inbox`, if there is one.
    Raises LinkTimeout after run.connect_timeout, and LinkRefused."""
    directory, config = context.directory, context.config
    keys = dial_keys(keys_folder(config), role)
    shards = directory.endpoints
    if len(shards) != config.buffer.shards:
        raise AsyncRLError(
            f"this config has buffer.shards = {config.buffer.shards}, and the buffer of {directory.path} has "
            f"{len(shards)}: give each pool the same config"
        )
    if len(shards) > 1 and inbox is None:
        inbox = queue.SimpleQueue()
    links = []
    for endpoint, peer, box in (
        *(
            (where_to_dial(shard_endpoint(config.buffer.endpoint, shard), listening), shard_name(shard), inbox)
            for shard, listening in enumerate(shards)
        ),
        (where_to_dial(config.buffer.store_endpoint, directory.store_endpoint), "store", None),
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
            keys=keys,
        )
        with context.watchdog.expect(f"waits for a welcome from the {peer}", config.run.connect_timeout + GRACE_S):
            link.connect(config.run.connect_timeout)
        links.append(link)
    *buffer, store = links
    if inbox is None or len(buffer) == 1:
        return buffer[0], store
    return ShardLinks(buffer, inbox), store

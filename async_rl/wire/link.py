"""The link: acknowledged, credited, resumable messages between pools, over DEALER and ROUTER.

This is the door; the rooms behind it are session.py (the rules, pure), frames.py (the link's own messages, framing,
errors), client.py, which sits on dealer.py, and server.py (the shells).

Handshake. The client says Hello (role, name, token; the envelope carries run, schema, epoch, acknowledgement and
credit). The server answers Welcome, or Refused with a reason. A session belongs to one (client name, client epoch)
and has an epoch of the server's; both ends drop what carries another. After a silence or a new connection the client
says Hello again with the session it wants to resume, and both sides go on after what the other has received. When the
server does not know that session (it restarted, or gave the client up) it answers Unknown, and the client numbers what
was not acknowledged afresh. So messages are delivered in order and exactly once within a session, and at least once
across a restart of the server.
"""

from async_rl.wire.client import Client
from async_rl.wire.frames import (
    LinkClosed,
    LinkError,
    LinkRefused,
    LinkTimeout,
    PeerJoined,
    PeerLost,
    Received,
)
from async_rl.wire.server import Server

__all__ = [
    "Client",
    "LinkClosed",
    "LinkError",
    "LinkRefused",
    "LinkTimeout",
    "PeerJoined",
    "PeerLost",
    "Received",
    "Server",
]

"""What nodes send, as events: the head of each trajectory is read and checked, its arrays stay as they came."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from async_rl.trajectory import EncodedTrajectory, TrajectoryError, check_header, decode_trajectory
from async_rl.wire.link import Received
from async_rl.wire.messages import HandOver, Results
from async_rl.wire.payloads import to_keep, unpack_payloads
from buffer.events import ResultArrived

log = logging.getLogger("buffer")

NOTHING = memoryview(b"")
NOTE_CHARACTERS = 200  # nodes write no more


def read_results(received: Received, largest: int, holder: Callable[[int], str]) -> tuple[list[ResultArrived], int]:
    """The encoded trajectories of a message, and how many things in it could not be read. One of more than `largest`
    bytes, and one that contradicts itself, is an event with a problem: its attempt is known. Only of those that are
    under a lease of their sender (`holder` of its number) the payload is kept, here and in the journal."""
    message: Results | HandOver = received.message
    encoded = message.trajectories if isinstance(message, Results) else message.prefixes
    try:
        payloads = unpack_payloads(encoded, received.blobs)
    except ValueError as error:
        log.error("what node %s sampled cannot be read: %s", received.peer, error)
        return [], 1
    node, results, broken = received.peer, [], 0
    for payload in to_keep(payloads):
        result = read_attempt(node, payload, largest)
        if result is None:
            broken += 1
        elif holder(result.lease) == node:
            results.append(result)
        else:
            results.append(msgspec.structs.replace(result, payload=NOTHING))
    return results, broken


class _Named(msgspec.Struct, frozen=True, array_like=True):
    """How a Trajectory begins: which attempt it is of."""

    lease: int
    sample: int


_name_decoder = msgspec.msgpack.Decoder(_Named)


def read_attempt(node: str, payload: EncodedTrajectory, largest: int) -> ResultArrived | None:
    """The head of an encoded trajectory. Of a larger one than `largest` only the name is read, as it might decode to a
    hundred times its size. None for what cannot be read: it names no attempt."""
    try:
        if len(payload) > largest:
            named = _name_decoder.decode(payload)
            problem = f"{len(payload)} bytes, more than the {largest} that were reserved for it"
            return ResultArrived(node, named.lease, named.sample, "ok", 0.0, (), 0, NOTHING, problem)
        of = decode_trajectory(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.error("node %s sent a trajectory that cannot be decoded: %s", node, error)
        return None
    problem = ""
    try:
        check_header(of)
    except TrajectoryError as error:
        problem = str(error)
    kept = NOTHING if problem else payload
    return ResultArrived(
        node, of.lease, of.sample, of.status, of.reward, of.versions, of.n_tokens, kept, problem,
        of.note[:NOTE_CHARACTERS],
    )  # fmt: skip

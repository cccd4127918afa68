"""What nodes send, as events: the head of each trajectory is read and checked, its arrays stay as they came."""

from __future__ import annotations

import logging

import msgspec

from async_rl.trajectory import TrajectoryError, check_header, decode_trajectory
from async_rl.wire.link import Received
from async_rl.wire.messages import HandOver, Results
from async_rl.wire.payloads import to_keep, unpack_payloads
from buffer.events import ResultArrived

log = logging.getLogger("buffer")


def read_results(received: Received, largest: int) -> tuple[list[ResultArrived], int]:
    """The encoded trajectories of a message, and how many things in it could not be read. One of more than `largest`
    bytes, and one that contradicts itself, is an event with a problem: its attempt is known."""
    message: Results | HandOver = received.message
    encoded = message.trajectories if isinstance(message, Results) else message.prefixes
    try:
        payloads = unpack_payloads(encoded, received.blobs)
    except ValueError as error:
        log.error("what node %s sampled cannot be read: %s", received.peer, error)
        return [], 1
    read = [_result(received.peer, memoryview(payload), largest) for payload in to_keep(payloads)]
    results = [result for result in read if result is not None]
    return results, len(read) - len(results)


def _result(node: str, payload: memoryview, largest: int) -> ResultArrived | None:
    """None for what cannot be read: it names no attempt."""
    try:
        trajectory = decode_trajectory(payload)
    except msgspec.MsgspecError as error:
        log.error("node %s sent a trajectory that cannot be decoded: %s", node, error)
        return None
    problem = ""
    try:
        check_header(trajectory)
        if len(payload) > largest:
            problem = f"{len(payload)} bytes, more than the {largest} that were reserved for it"
    except TrajectoryError as error:
        problem = str(error)
    of = trajectory
    return ResultArrived(node, of.lease, of.sample, of.status, of.reward, of.versions, of.n_tokens, payload, problem)

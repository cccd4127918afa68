"""What nodes send, as events: the head of each trajectory is read and checked, its arrays stay as they came."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from async_rl.bundle import decode_bundle, is_bundle, is_sound, largest_alone, names_in, rise, taken_apart
from async_rl.trajectory import EncodedTrajectory, TrajectoryError, check_header, decode_trajectory
from async_rl.wire.link import Received
from async_rl.wire.messages import HandOver, Results
from async_rl.wire.payloads import to_keep, unpack_payloads
from buffer.events import NOBODYS, BundleArrived, ResultArrived

log = logging.getLogger("buffer")

NOTHING = memoryview(b"")
Result = ResultArrived | BundleArrived
NOTE_CHARACTERS = 200  # nodes write no more


def read_results(
    received: Received, largest: int, group_size: int, holder: Callable[[int], str]
) -> tuple[list[Result], int]:
    """The encoded trajectories of a message, and how many things in it could not be read. One of more than `largest`
    bytes, and one that contradicts itself, is an event with a problem: its attempt is known. Only of those that are
    under a lease of their sender (`holder` of its number) the payload is kept, here and in the journal; the others are
    nobody's, and must not become anybody's by a lease that is granted later."""
    message: Results | HandOver = received.message
    encoded = message.trajectories if isinstance(message, Results) else message.prefixes
    try:
        payloads = unpack_payloads(encoded, received.blobs)
    except ValueError as error:
        log.error("what node %s sampled cannot be read: %s", received.peer, error)
        return [], 1
    node, broken = received.peer, 0
    results: list[Result] = []
    for payload in to_keep(payloads):
        if isinstance(message, Results) and is_bundle(payload):
            read = read_bundle(node, payload, largest, group_size)
        else:
            alone = read_attempt(node, payload, largest)
            read = [] if alone is None else [alone]
        broken += not read
        results += [result if holder(result.lease) == node else nobodys(result) for result in read]
    return results, broken


def nobodys(result: Result) -> Result:
    if isinstance(result, BundleArrived):
        return msgspec.structs.replace(result, payload=NOTHING)
    return msgspec.structs.replace(result, payload=NOTHING, problem=result.problem or NOBODYS)


def attempts_of(result: Result) -> int:
    return len(result.samples) if isinstance(result, BundleArrived) else 1


def read_bundle(node: str, payload: EncodedTrajectory, largest: int, group_size: int) -> Sequence[Result]:
    """A bundle as one event; where there is something wrong with it, or an attempt of it might be too large alone, an
    event for each attempt, as if each had come so. Empty for what cannot be read: it names no attempt; and for what no
    node bundles, more than a group or an attempt twice: what it may cost here is what a group may."""
    try:
        named = names_in(payload)
        if len(named.samples) > group_size:
            raise ValueError(f"{len(named.samples)} samples of a group of {group_size}")
        room = largest * len(named.samples)
        if len(payload) > room:
            problem = f"a bundle of {len(payload)} bytes, more than the {room} that were reserved for it"
            return [spoilt(node, named.lease, sample, problem) for sample in named.samples]
        bundle = decode_bundle(payload)
        if is_sound(bundle) and largest_alone(bundle, len(payload)) <= largest:
            return (
                BundleArrived(
                    node, bundle.lease, bundle.samples, bundle.version, bundle.digest, bundle.rewards, bundle.n_tokens,
                    bundle.sampled, payload,
                ),
            )  # fmt: skip
        if not rise(bundle.samples):
            raise ValueError(f"its samples are not in order, each once: {bundle.samples}")
        read = [read_attempt(node, alone, largest) for alone in taken_apart(payload)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.error("node %s sent a bundle of trajectories that cannot be read: %s", node, error)
        return ()
    except TrajectoryError as error:
        return [spoilt(node, named.lease, sample, str(error)) for sample in named.samples]
    return [result for result in read if result is not None]


class _Named(msgspec.Struct, frozen=True, array_like=True):
    """How a Trajectory begins: which attempt it is of."""

    lease: int
    sample: int


_name_decoder = msgspec.msgpack.Decoder(_Named)


def spoilt(node: str, lease: int, sample: int, problem: str) -> ResultArrived:
    """Of an attempt of which no more than its name is known."""
    return ResultArrived(node, lease, sample, "ok", 0.0, (), 0, NOTHING, problem)


def read_attempt(node: str, payload: EncodedTrajectory, largest: int) -> ResultArrived | None:
    """The head of an encoded trajectory. Of a larger one than `largest` only the name is read, as it might decode to a
    hundred times its size. None for what cannot be read: it names no attempt."""
    try:
        if len(payload) > largest:
            named = _name_decoder.decode(payload)
            problem = f"{len(payload)} bytes, more than the {largest} that were reserved for it"
            return spoilt(node, named.lease, named.sample, problem)
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

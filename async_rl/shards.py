"""A buffer of several shards: which of them has what.

Shard i of N has the tickets n with n mod N = i, and its leases have the numbers l with l mod N = i. So a lease, and
with it every result and every disposition, names the shard that it belongs to, and nobody keeps a table.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from async_rl.wire.messages import BatchGroup, Disposition, NodeStatus, Status

Key = TypeVar("Key")
Payload = TypeVar("Payload")


def shard_name(shard: int) -> str:
    """Of its process, and so of its logs and of its end of a link: the first is called as the only one would be."""
    return f"buffer-{shard}" if shard else "buffer"


def shard_of(lease: int, shards: int) -> int:
    """The shard that has granted a lease."""
    return lease % shards


def home_shard(node: str, shards: int) -> int:
    """Where a node asks first: nodes that begin together do not all begin with one shard."""
    digest = hashlib.blake2b(node.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % shards


def split_dispositions(dispositions: Iterable[Disposition], shards: int) -> list[tuple[Disposition, ...]]:
    """What each shard is to hear of a batch, in the order of the shards."""
    parts: list[list[Disposition]] = [[] for _ in range(shards)]
    for disposition in dispositions:
        parts[shard_of(disposition.lease, shards)].append(disposition)
    return [tuple(part) for part in parts]


def whole_batch(
    parts: Sequence[tuple[Sequence[BatchGroup], Sequence[Payload]]],
    attempts_in: Callable[[Payload], int] = lambda payload: 1,
) -> tuple[list[BatchGroup], list[Payload]]:
    """The groups and payloads of a batch from its shards' parts: those that train for the first time by ticket, then
    the others by ticket. So the batch is the one that one buffer would have lent, where it lends by ticket. A part is
    its groups, and their payloads back to back. Raises as `by_group`."""
    if len(parts) == 1:
        return list(parts[0][0]), list(parts[0][1])
    found: list[tuple[tuple[bool, int], BatchGroup, Sequence[Payload]]] = []
    for groups, payloads in parts:
        for group, own in zip(groups, by_group(groups, payloads, attempts_in), strict=True):
            found.append(((group.uses > 0, group.ticket), group, own))
    found.sort(key=lambda each: each[0])
    return [group for _, group, _ in found], [payload for *_, own in found for payload in own]


def by_group(
    groups: Sequence[BatchGroup], payloads: Sequence[Payload], attempts_in: Callable[[Payload], int]
) -> list[Sequence[Payload]]:
    """Each group's payloads, which lie back to back, each of `attempts_in` attempts of one group. Raises ValueError
    when these do not fit together."""
    counts = list(map(attempts_in, payloads))
    declared = sum([group.size for group in groups])
    if declared != sum(counts):
        raise ValueError(f"{declared} trajectories declared, {sum(counts)} received")
    found: list[Sequence[Payload]] = []
    first = 0
    for group in groups:
        last, lacking = first, group.size
        while lacking > 0:
            lacking -= counts[last]
            last += 1
        if lacking:
            raise ValueError(f"a payload of {counts[last - 1]} trajectories is not of one group")
        found.append(payloads[first:last])
        first = last
    return found


def total(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """The sums, by name."""
    sums: Counter[Key] = Counter()
    for each in counts:
        sums.update(each)
    return dict(sums)


WAITS_FOR_A_TICKET = "the trainer waits"


def whole_status(parts: Sequence[Status]) -> Status:
    """One account of a run from those of its shards. What is counted is added up. What every node tells the first shard
    (what it serves, what it has shown) is as the first has it; what nodes say of themselves is the newest word."""
    first = parts[0]
    if len(parts) == 1:
        return first
    nodes: dict[str, list[NodeStatus]] = {}
    for part in parts:
        for node in part.nodes:
            nodes.setdefault(node.name, []).append(node)
    bounds = [part.adaptive_bound for part in parts if part.adaptive_bound is not None]
    return msgspec.structs.replace(
        first,
        nodes=tuple(_whole_node(nodes[name]) for name in sorted(nodes)),
        confirmed_batches=min(part.confirmed_batches for part in parts),
        ledger=total(part.ledger for part in parts),
        eval_ledger=total(part.eval_ledger for part in parts),
        outside=total(part.outside for part in parts),
        ready_groups=sum(part.ready_groups for part in parts),
        ready_bytes=sum(part.ready_bytes for part in parts),
        reserved_bytes=sum(part.reserved_bytes for part in parts),
        waiting=next((part.waiting for part in parts if part.waiting.startswith(WAITS_FOR_A_TICKET)), first.waiting),
        handovers=total(part.handovers for part in parts),
        sampled_lengths=total(part.sampled_lengths for part in parts),
        reused=total(part.reused for part in parts),
        messages=total(part.messages for part in parts),
        adaptive_bound=min(bounds) if bounds else None,
    )


def _whole_node(parts: Sequence[NodeStatus]) -> NodeStatus:
    newest = max(parts, key=lambda part: part.alive_s)
    return msgspec.structs.replace(
        parts[0],
        leased_samples=sum(part.leased_samples for part in parts),
        busy_fraction=newest.busy_fraction,
        sampled_tokens=newest.sampled_tokens,
        busy_s=newest.busy_s,
        alive_s=newest.alive_s,
        decode_steps=newest.decode_steps,
        limit=newest.limit,
    )

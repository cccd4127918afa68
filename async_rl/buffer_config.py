"""The section [buffer]: in which order what was sampled is trained, how old it may be, and what is done about the rest.

`lead` and `fresh_groups` are the two numbers that follow from it and that everyone who counts tickets needs.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from async_rl.schema import ConfigError, Count, Fraction, NonNegative, PositiveFloat, PositiveInt, Section, changed


class PoolsConfig(Section, frozen=True, kw_only=True):
    """Instances by the pass rate of all attempts so far, with the weight of each pool: one of `easy` is asked
    easy / normal times as often as one of `normal`. What was never asked is normal."""

    hard_below: Fraction = 0.2
    easy_above: Fraction = 0.8
    hard: NonNegative = 0.5
    normal: PositiveFloat = 1.0
    easy: NonNegative = 0.1


class BufferConfig(Section, frozen=True, kw_only=True):
    endpoint: str = "auto"
    store_endpoint: str = "auto"
    shards: PositiveInt = 1
    """How many processes the buffer runs as. Shard i has the tickets n with n mod shards = i, by the same rules, and
    the trainer draws an equal part of each batch from every one. Several: `endpoint` of a fixed port stands for as many
    ports in a row."""
    keys: str = ""
    """A folder made by `async-rl keys`: every link is encrypted, and only who is listed there comes in. Needed for
    addresses beyond this machine."""
    max_staleness: Count = 4
    groups_per_step: PositiveInt = 32
    group_size: PositiveInt = 8
    order: Literal["fifo", "windowed", "fresh", "replay"] = "fifo"
    """fifo: by ticket, and stragglers are waited for. windowed: a few tickets may overtake a straggler. fresh: the
    newest groups that are ready; those that stay behind until they are too old are dropped and leased again. replay:
    fifo, and each group may train in up to `reuse` batches."""
    window: PositiveInt = 1
    """With order "windowed": how many tickets the window spans."""
    reuse: PositiveInt = 1
    """With order "replay": in how many batches a group trains at most. A batch then needs groups_per_step / reuse new
    groups (rounded up), and the others were trained before."""
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    """wait: stragglers are waited for, in the order of the tickets, so that nothing becomes too old. drop: they are
    not, and what has missed the bound is dropped and leased again. mask: the same, but of what has missed it in part
    the fresh tokens train."""
    on_short_group: Literal["retry", "drop", "accept"] = "retry"
    zero_variance: Literal["keep", "refill"] = "keep"
    """What to do with a group whose rewards are all equal: train it all the same, or drop it and lease its ticket
    again with another instance."""
    adaptive: bool = False
    """Nodes work fewer versions ahead while the trainer reports that old data serves it badly, and more again, up to
    max_staleness, when it has been well for a while."""
    adaptive_ess: Fraction = 0.3
    """An effective sample size of the token ratios below this, as a fraction, is trouble."""
    adaptive_k3: PositiveFloat = 0.05
    """So is a k3 between sampling and trained policy above this, in nats a token."""
    retire_above: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Task instances of which at least this part of all attempts passed, over at least `retire_after` of them, are not
    asked again: 0.9, say. 0 is never. Needs a task with a finite set of instances, and so does difficulty."""
    retire_after: PositiveInt = 16
    difficulty: Literal["uniform", "weighted", "pools"] = "uniform"
    """weighted: instances are asked in proportion to p (1 - p), p being the pass rate as far as it is known; those
    never asked count as unknown, not as hopeless. pools: in proportion to the weight of their pool."""
    pools: PoolsConfig = PoolsConfig()
    """With difficulty "pools": which pass rates are hard, normal and easy, and their weights."""
    epochs: bool = False
    """Every training instance is asked once, in shuffled order, before any is asked again; without it each ticket
    draws one independently. Needs a task with a finite set of instances. Tasks of data sources (kind "dataset") are
    always asked so."""
    max_tries: PositiveInt = 8
    capacity_bytes: PositiveInt = 256 << 20
    heartbeat: PositiveFloat = 1.0
    """Seconds; a peer that is silent for three is gone."""
    lease_timeout: PositiveFloat = 600.0
    """Seconds after which a lease is taken back from a node that lives but does not deliver."""
    quarantine_limit: PositiveFloat = 30.0
    """Seconds for which a run goes on while every node is quarantined: one may come back under a later policy."""
    trainer_timeout: PositiveFloat = 300.0
    """Seconds that a trainer which has fallen silent, or was killed, has to come back."""
    relay_fanout: PositiveInt = 3
    """How many nodes pull a policy from one source at once, from the store likewise, while there are nodes that relay
    (inference.relay)."""
    relay_timeout: PositiveFloat = 3.0
    """Seconds without a chunk after which a node leaves its relay for another source, and that a node may wait for one
    that has room."""
    fsync: Literal["never", "interval", "always"] = "interval"
    """When the journal is synced to the disk. What is acknowledged survives the death of the process whatever this is;
    with "always" also the loss of power, with "interval" all but the last second of it."""


def fresh_groups(groups_per_step: int, reuse: int) -> int:
    """F: how many new groups a batch of B needs, each of which trains in up to `reuse` batches."""
    return math.ceil(groups_per_step / reuse)


def lead(buffer: BufferConfig) -> int:
    """K_a: how many versions ahead of a node's own version it may be given tickets (design: admission). fifo trains
    in ticket order, so K_a = K. windowed may train a ticket up to ceil((W-1)/B) batches after its place, and replay
    trains it again in R - 1 more, so the lead is that much smaller; negative when these cannot keep the bound. fresh
    drops what it has passed over for too long, and so has K_a = K."""
    return buffer.max_staleness - _delay(buffer)


def _delay(buffer: BufferConfig) -> int:
    """How many batches after its place a ticket may train, by the order alone."""
    if buffer.order == "windowed":
        return math.ceil((buffer.window - 1) / buffer.groups_per_step)
    return buffer.reuse - 1


def keeps_history(buffer: BufferConfig) -> bool:
    """Whether what came of a task instance decides if it is asked again."""
    return buffer.retire_above > 0 or buffer.difficulty != "uniform"


def batches_held(buffer: BufferConfig) -> int:
    """How many times the new groups of a batch the buffer must have room for: those of the next one, and with reuse
    those of the batch that is lent and of the K batches before it (buffer.reuse)."""
    return 1 + (buffer.max_staleness + 1 if buffer.reuse > 1 else 0)


def check_shards(buffer: BufferConfig) -> None:
    """Every shard draws an equal part of a batch, and has an equal part of the window. Raises ConfigError."""
    shards = buffer.shards
    fresh = fresh_groups(buffer.groups_per_step, buffer.reuse)
    parts = {
        f"groups_per_step = {buffer.groups_per_step}": buffer.groups_per_step,
        f"the {fresh} new groups of a batch (groups_per_step / reuse)": fresh,
    }
    if buffer.order == "windowed":
        parts[f"window = {buffer.window}"] = buffer.window
    for what, number in parts.items():
        if number % shards:
            raise ConfigError(
                f"[buffer] shards = {shards} does not divide {what}: every shard has an equal part of it: choose a "
                f"multiple of {shards}, or other shards"
            )


def check_buffer(buffer: BufferConfig) -> None:
    """Refuse what does not go together. Raises ConfigError."""
    check_shards(buffer)
    if buffer.order != "windowed" and buffer.window != 1:
        raise ConfigError(
            f'[buffer] window has no meaning with order = "{buffer.order}": remove it or set order = "windowed"'
        )
    if buffer.order != "replay" and buffer.reuse != 1:
        raise ConfigError(
            f'[buffer] reuse has no meaning with order = "{buffer.order}": remove it or set order = "replay"'
        )
    if buffer.order == "replay" and buffer.reuse == 1:
        raise ConfigError('[buffer] order = "replay" with reuse = 1 is fifo: set reuse to 2 or more, or order = "fifo"')
    if buffer.reuse > buffer.groups_per_step:
        raise ConfigError(
            f"[buffer] reuse = {buffer.reuse} is more than groups_per_step = {buffer.groups_per_step}: every "
            "batch has a new group, so none can train that often on average: make reuse smaller"
        )
    if buffer.on_stale != "wait" and buffer.order != "fifo":
        raise ConfigError(
            f'[buffer] order = "{buffer.order}" has no meaning with on_stale = "{buffer.on_stale}", which takes what '
            "is ready and waits for nobody: remove it"
        )
    if lead(buffer) < 0:
        what = (
            f"window = {buffer.window} with groups_per_step = {buffer.groups_per_step} may delay a ticket by"
            if buffer.order == "windowed"
            else f"reuse = {buffer.reuse} trains a group again in the next"
        )
        smaller = "window" if buffer.order == "windowed" else "reuse"
        raise ConfigError(
            f"[buffer] {what} {_delay(buffer)} batches, more than max_staleness = {buffer.max_staleness}: make "
            f"{smaller} smaller or the bound larger"
        )
    if buffer.adaptive and lead(buffer) < 2:
        smaller = {"windowed": "make window smaller, ", "replay": "make reuse smaller, "}.get(buffer.order, "")
        raise ConfigError(
            f"[buffer] adaptive needs nodes that work 2 versions ahead or more, and here they work {lead(buffer)} "
            f"ahead (max_staleness = {buffer.max_staleness}): {smaller}make max_staleness larger, or "
            "set adaptive = false"
        )
    if not buffer.adaptive and (unused := changed(buffer, ("adaptive_ess", "adaptive_k3"))):
        raise ConfigError(f"[buffer] {unused[0]} has no meaning without adaptive = true: remove it or set that")
    if not buffer.retire_above and changed(buffer, ["retire_after"]):
        raise ConfigError("[buffer] retire_after has no meaning without retire_above: remove it or set that")
    if buffer.difficulty != "pools" and (unused := changed(buffer, ["pools"])):
        raise ConfigError(f'[buffer] {unused[0]} has no meaning without difficulty = "pools": remove it or set that')
    if buffer.pools.hard_below > buffer.pools.easy_above:
        raise ConfigError(
            f"[buffer.pools] hard_below = {buffer.pools.hard_below:g} is above easy_above = "
            f"{buffer.pools.easy_above:g}: an instance would be in both pools"
        )

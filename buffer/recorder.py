"""The rules with a memory: every event that changes their state is in the journal before anybody hears of what follows
from it, and the journal alone makes the same state again.

Each segment of the journal begins with a `Base`, the state at that moment without its payloads, and goes on with the
events since, each with its time. Since the rules are a function of state, event and time, playing the events through
them again gives the state, the ledger, and every batch as it was lent.

    apply(event) ─> rules ─> append to the journal ─> effects are carried out ─> the burst is acknowledged
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from async_rl.run.killpoints import reached
from buffer.entries import entry_parts, read_entry
from buffer.events import AnyEvent, BatchConfirmed, Checkpointed, Effect, LendBatch, Ticked
from buffer.journal import (
    FILE_HEAD,
    RECORD_HEAD,
    Fsync,
    Journal,
    JournalError,
    Torn,
    cut,
    read_segment,
    segment_numbers,
)
from buffer.replay import Replay
from buffer.retention import Retention
from buffer.rules import Rules
from buffer.snapshot import dump, load

# Another segment begins, with a snapshot, after so many bytes of records, and not before they are much more than it, or
# less than what is held: making the snapshot takes time for each trajectory in it.
SEGMENT_BYTES = 256 << 20
SEGMENT_BASES = 4


class Base(msgspec.Struct, frozen=True, array_like=True):
    """What a segment begins with: whose run it is, the rules until then, and the state; an empty snapshot is that of
    nothing having happened. `before` is the size of the segment before it: an end mark says where a segment ends, but
    so do zeros that a disk put there."""

    run: str
    now: float
    rules: Rules
    snapshot: memoryview
    before: int


class Played(NamedTuple):
    """One event of the journal, played through the rules."""

    event: AnyEvent
    effects: list[Effect]


_encoder = msgspec.msgpack.Encoder()
_base_decoder = msgspec.msgpack.Decoder(Base)


class State:
    """The rules and what is noted beside them, as far as events decide it."""

    def __init__(self, rules: Rules) -> None:
        self.replay = Replay(rules)
        self.retention = Retention()

    def apply(self, event: AnyEvent, now: float) -> list[Effect]:
        before = self.replay.confirmed_batches
        confirms = isinstance(event, BatchConfirmed)
        wanted = self._asked_for() if confirms else set()
        effects = self.replay.apply(event, now)
        if confirms and self.replay.confirmed_batches > before:
            groups = self.replay.groups
            gone = wanted.difference(groups.pool.tickets).union(groups.emptied)
            self.retention.confirmed(gone, self.replay.confirmed_batches)
        return effects

    def _asked_for(self) -> set[int]:
        """Tickets that a confirmation may spend for good: those of the batch, and what else would be used again."""
        return {group.ticket for group in self.replay.lent or ()} | self.replay.groups.pool.tickets

    def segment_closed(self, number: int) -> None:
        self.retention.closed(number, self.replay.groups.unspent(), self.replay.confirmed_batches)


class Playback:
    """A journal that is played from its beginning; `state`, `now` and `number` are those after what was yielded last.
    Raises JournalError for a journal of another run, and for one that is broken anywhere but at its end."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.run = run
        self.state: State | None = None
        self.now = 0.0
        self.number = -1
        self.size = 0  # of the segment, as far as it was read
        self.torn: Torn | None = None

    def play(self) -> Iterator[Played]:
        for number in segment_numbers(self.folder):
            if self.torn is not None:
                raise JournalError(
                    f"the journal's file {self.torn.path} is broken at byte {self.torn.offset}, and others follow it: "
                    "restore it from a copy; else move the journal's folder away, and --resume from the checkpoint"
                )
            yield from self._play_segment(number)

    def _play_segment(self, number: int) -> Iterator[Played]:
        begun = False
        for payload in read_segment(self.folder, number):
            if isinstance(payload, Torn):
                self.torn = payload
            elif not begun:
                begun = True
                self._begin(number, payload)
            else:
                entry = self._decode(read_entry, payload, number)
                assert self.state is not None
                self.now = entry.now
                self.size += RECORD_HEAD.size + len(payload)
                yield Played(entry.event, self.state.apply(entry.event, entry.now))

    def _begin(self, number: int, payload: memoryview) -> None:
        """The first segment's state is what it says; for those that follow it is known already."""
        base: Base = self._decode(_base_decoder.decode, payload, number)
        if base.run != self.run:
            raise JournalError(
                f"the journal in {self.folder} is of run {base.run!r}, not of {self.run!r}: move it away"
            )
        if self.state is None:
            self.state = State(base.rules)
            if base.snapshot:
                self.state.replay = load(base.snapshot, base.rules)
        else:
            if base.before != self.size:
                raise JournalError(
                    f"segment {self.number} of the journal in {self.folder} was written up to byte {base.before}, and "
                    f"can be read up to byte {self.size}: restore it from a copy; else move the journal's folder away, "
                    "and --resume from the checkpoint"
                )
            self.state.segment_closed(self.number)
        self.now, self.number = base.now, number
        self.size = FILE_HEAD.size + RECORD_HEAD.size + len(payload)

    def _decode(self, decode: Callable[[memoryview], Any], payload: memoryview, number: int) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise JournalError(
                f"segment {number} of the journal in {self.folder} was written by another version of async-rl, or by "
                f"somebody else ({error}): move the folder away, and --resume from the checkpoint"
            ) from error


def recorded_batches(folder: Path, run: str, first: int) -> dict[int, LendBatch]:
    """Every batch from `first` on as it was lent the last time, from the journal alone, its payloads as views of the
    files. Raises JournalError. Costs as much as a recovery."""
    lent: dict[int, LendBatch] = {}
    for played in Playback(folder, run).play():
        for effect in played.effects:
            if isinstance(effect, LendBatch) and effect.batch >= first:
                lent[effect.batch] = effect
    return lent


class Recorder:
    """Owns the rules of a service. Raises JournalError where it cannot read or write."""

    def __init__(self, folder: Path, run: str, rules: Rules, fsync: Fsync, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._run, self._segment_bytes = folder, run, segment_bytes
        playback = Playback(folder, run)
        self.recovered_events = sum(1 for _ in playback.play())
        self.torn = playback.torn
        if self.torn:
            cut(self.torn)
        self.now = playback.now
        """When the last event was applied, on the clock of those before it: that of this life goes on from there."""
        self._state = playback.state or State(rules)
        self._full_at = 0
        self._ended = False
        self._journal = Journal(folder, fsync)
        self._journal.read_until = playback.number
        self._begin_segment(playback.number + 1, playback.size)
        if playback.number >= 0:
            self._state.segment_closed(playback.number)
        self._delete_leftovers()

    @property
    def replay(self) -> Replay:
        return self._state.replay

    def apply(self, event: AnyEvent, now: float) -> list[Effect]:
        """What follows may be carried out once this has returned. A look at the clock that changed nothing is not
        worth a record."""
        parked = bool(self.replay.handovers.parked)  # who is held by nobody is cancelled without an effect
        effects = self._state.apply(event, now)
        if not self._ended and (effects or parked or not isinstance(event, Ticked)):
            self._append(event, now)
        return effects

    def apply_unrecorded(self, event: AnyEvent, now: float) -> list[Effect]:
        """For the last event of a run that will be resumed from what it was before. What comes after it is not recorded
        either: here it meets a run that has ended, and there it would meet one that has not. (A result that is refused
        here, and whose payload is not kept for that, would be a good one there.)"""
        self._ended = True
        return self._state.apply(event, now)

    def recorded(self, first: int) -> dict[int, LendBatch]:
        """See `recorded_batches`."""
        self._journal.read_until = self._journal.number
        return recorded_batches(self._folder, self._run, first)

    def close(self) -> None:
        self._journal.close()

    def _append(self, event: AnyEvent, now: float) -> None:
        reached("buffer.before-append")
        self._journal.append(*entry_parts(event, now))
        self.now = now
        reached("buffer.after-append")
        if isinstance(event, Checkpointed):
            self._delete(self._state.retention.covered(self.replay.covered))
        if self._journal.size >= max(self._full_at, self.replay.ready_bytes):
            closed = self._journal.number
            self._begin_segment(closed + 1, self._journal.size)
            self._state.segment_closed(closed)

    def _begin_segment(self, number: int, before: int) -> None:
        base = Base(self._run, self.now, self.replay.rules, self._snapshot(), before)
        self._journal.begin(number, _encoder.encode(base))
        reached("buffer.segment-begun")
        size = self._journal.size
        self._full_at = size + max(self._segment_bytes, SEGMENT_BASES * size)

    def _snapshot(self) -> memoryview:
        return memoryview(dump(self.replay))

    def _delete_leftovers(self) -> None:
        """What was not needed any more when the process died before it could delete it."""
        self._state.retention.covered(self.replay.covered)
        kept = {*self._state.retention.needed, self._journal.number}
        self._delete([number for number in segment_numbers(self._folder) if number not in kept])

    def _delete(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._journal.delete(number)
            reached("buffer.segment-deleted")

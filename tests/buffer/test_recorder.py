"""The rules with a memory: killed anywhere, they go on as if nothing had been, and every batch is lent as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.buffer_config import PoolsConfig
from async_rl.data.order import Source
from async_rl.version import PolicyId, VersionRun
from buffer.events import (
    BatchConfirmed,
    BufferStarted,
    Checkpointed,
    DrawRequested,
    EndRun,
    EvalRequested,
    GrantLease,
    HandedPrefix,
    LendBatch,
    LendRecorded,
    NodeAttested,
    NodeJoined,
    NodeLost,
    PrefixesHandedOver,
    ResultArrived,
    ResultRefused,
    RunFinished,
    Ticked,
    TrainerJoined,
)
from buffer.journal import RECORD_HEAD, JournalError, read_segment, segment_numbers, segment_path
from buffer.recorder import Recorder, recorded_batches
from buffer.snapshot import dump

RUN = "run"
ADAPTIVE = {"adaptive": True, "max_staleness": 3}
HISTORY = {"instances": 40, "retire_above": 0.9, "retire_after": 4, "weighted": True}
EPOCHS = {
    "instances": 40, "retire_above": 0.9, "retire_after": 4, "pools": PoolsConfig(),
    "sources": (Source(7, 2, 0), Source(33, 3, 0)),
}  # fmt: skip
ORDERS = pytest.mark.parametrize(
    "order",
    [{}, {"newest_first": True}, {"reuse": 2, "max_staleness": 3}, HISTORY, ADAPTIVE, EPOCHS],
    ids=["fifo", "fresh", "replay", "history", "adaptive", "epochs"],
)


class Memory:
    """Puts a journal under a `Play`."""

    def __init__(self, play: Any, folder: Path, segment_bytes: int = 1 << 20) -> None:
        self.play, self.folder, self.segment_bytes = play, folder, segment_bytes
        self.lent: dict[int, LendBatch] = {}
        self.ledgers: list[dict[str, int]] = []
        self._open()
        play.apply = self.apply
        publish = play.publish
        play.publish = lambda: publish(f"{len(play.policies):064x}")  # digests that can be read again

    def _open(self) -> None:
        self.recorder = Recorder(self.folder, RUN, self.play.rules, "never", self.segment_bytes)
        self.play.replay = self.recorder.replay

    def apply(self, event: Any) -> list[Any]:
        effects = self.recorder.apply(event, self.play.now)
        self.ledgers.append(self.recorder.replay.ledger)
        self.lent |= {effect.batch: effect for effect in effects if isinstance(effect, LendBatch)}
        return effects

    def die(self, cut: int = 0, killed: bool = False) -> None:
        """And be started again; the last `cut` bytes that were written are lost. When killed, a file that was written
        over still has what it held before behind its end."""
        if killed:
            os.close(self.recorder._journal._file)
        else:
            self.recorder.close()
        last = segment_path(self.folder, segment_numbers(self.folder)[-1])
        if cut:
            with last.open("r+b") as file:
                file.truncate(max(0, last.stat().st_size - cut))
        self._open()

    def state(self) -> bytes:
        """A look at the clock first: what it moves without an effect is not in the journal."""
        self.apply(Ticked())
        return dump(self.recorder.replay)


def step(play: Any) -> None:
    """One batch sampled, drawn and confirmed by a node and a trainer that keep up."""
    for lease in play.attest("a") + play.want("a", 10**6):
        play.deliver(lease, payload=memoryview(bytes(1000)))
    assert play.draw()
    for effect in play.confirm(ess=0.1):  # trouble, which moves an adaptive bound
        if isinstance(effect, GrantLease):
            play.deliver(effect.lease, payload=memoryview(bytes(1000)))


def test_what_comes_after_the_end_of_a_run_that_is_resumed_is_as_if_it_had_not_come(tools, tmp_path):
    """Here such a result is refused, and none of it kept; a resumed run would take what is left for a good one."""
    play = tools.play()
    memory = Memory(play, tmp_path)
    (lease, _) = play.node("a", 4)
    before = memory.state()
    memory.recorder.apply_unrecorded(RunFinished("stopped at version 0"), play.now)
    assert [type(effect) for effect in play.result(lease, 0, payload=memoryview(b""))] == [ResultRefused]
    play.apply(NodeLost("a", "the run is over"))
    memory.die()
    assert memory.state() == before


def test_a_buffer_that_dies_goes_on_with_the_same_leases_groups_and_books(tools, tmp_path):
    play = tools.play()
    memory = Memory(play, tmp_path)
    first, second = play.node("a", 4)
    play.deliver(first)
    play.result(second, 0)
    before = memory.state()
    memory.die()
    assert memory.state() == before
    play.result(second, 1)
    assert [group.ticket for group in play.draw()[0].groups] == [0, 1]
    assert play.replay.ledger["batched"] == 4


def test_what_is_cancelled_while_nobody_holds_it_is_so_after_a_restart_too(tools, tmp_path):
    """Its deadline passes without an effect: there is no node to tell."""
    play = tools.play(lease_timeout=60.0)
    memory = Memory(play, tmp_path)
    lease, other = play.node("a", 4)
    runs = (VersionRun(0, play.policies[0].digest, 3),)
    for each in (lease, other):
        prefixes = tuple(HandedPrefix(sample, runs, memoryview(b"begun")) for sample in each.samples)
        memory.apply(PrefixesHandedOver("a", each.lease, prefixes))
    assert len(play.replay.handovers.parked) == 2
    play.now = 61.0
    assert memory.apply(Ticked()) == []
    books = play.replay.ledger
    assert books["dropped.cancelled"] == 4
    memory.die()
    assert play.replay.ledger == books  # before another look at the clock


@ORDERS
def test_a_trainer_that_goes_back_is_lent_the_same_batches_again_and_the_ledger_does_not_move(tools, tmp_path, order):
    play = tools.play(**order)
    memory = Memory(play, tmp_path)
    play.node("a")
    memory.apply(TrainerJoined("trainer", "life", {}, 0))
    for _ in range(4):
        step(play)
    memory.die()
    memory.apply(TrainerJoined("trainer", "another life", {}, 1))
    before = play.replay.ledger, play.replay.reused
    recorded = memory.recorder.recorded(1)
    for batch in (1, 2, 3):
        assert memory.apply(DrawRequested(batch)) == [LendRecorded(batch)]
        assert as_bytes(recorded[batch]) == as_bytes(memory.lent[batch])
        assert memory.apply(BatchConfirmed(batch, ())) == []  # a repeated confirmation is not looked at
    assert (play.replay.ledger, play.replay.reused) == before
    step(play)
    assert play.replay.confirmed_batches == 5


def as_bytes(lent: LendBatch) -> LendBatch:
    return msgspec.structs.replace(lent, payloads=tuple(bytes(payload) for payload in lent.payloads))


def test_a_trainer_may_not_go_back_beyond_its_checkpoint_or_ahead_of_the_journal(tools, tmp_path):
    for version, words in ((1, "a checkpoint of version 2 has been written"), (4, "ends after 3 batches")):
        play = tools.play()
        memory = Memory(play, tmp_path / str(version))
        play.node("a")
        for _ in range(3):
            step(play)
        memory.apply(Checkpointed(2))
        (error,) = tools.errors(memory.apply(TrainerJoined("trainer", "life", {}, version)))
        assert words in error


@ORDERS
def test_segments_are_deleted_once_a_checkpoint_covers_them_and_the_rest_is_enough(tools, tmp_path, order):
    """All that may still be lent comes out of what is left with its payload, groups that train again included."""
    play = tools.play(steps=100, **order)
    memory = Memory(play, tmp_path, segment_bytes=3000)
    play.node("a")
    sizes = []
    for version in range(1, 40):
        step(play)
        memory.apply(Checkpointed(max(0, version - 2)))
        sizes.append(len(segment_numbers(tmp_path)))
    assert segment_numbers(tmp_path)[0] > 1
    assert max(sizes) <= 4 + play.rules.reuse
    before, bound = memory.state(), play.replay.bound
    assert play.rules.adaptive == (bound.bound < play.rules.max_staleness)
    memory.die()
    assert (memory.state(), play.replay.bound) == (before, bound)
    recorded = recorded_batches(tmp_path, RUN, 37)
    assert {number: as_bytes(lent) for number, lent in recorded.items()} == {
        number: as_bytes(memory.lent[number]) for number in (37, 38)
    }
    step(play)
    assert all(len(payload) == 1000 for payload in memory.lent[39].payloads)


def test_a_run_that_ended_in_an_error_goes_on_by_new_rules(tools, tmp_path):
    play = tools.play(max_tries=1)
    memory = Memory(play, tmp_path)
    lease, _ = play.node("a", 4)
    assert tools.errors(play.result(lease, 0, status="env_failed", versions=(), payload=memoryview(b"")))
    memory.die()
    assert tools.errors(memory.apply(BufferStarted(play.rules))) == []
    memory.apply(BufferStarted(play.rules._replace(max_tries=9, steps=77)))
    assert play.want("a", 5)[0].ticket == 0
    assert play.replay.groups.queue.total == 77 * play.rules.groups_per_step


def test_the_history_of_instances_may_begin_and_end_with_a_new_life(tools, tmp_path):
    """What is open goes on under the number that its instance was given when there was no history."""
    play = tools.play(steps=100, max_staleness=3)
    memory = Memory(play, tmp_path)
    play.node("a")
    step(play)
    leased = play.attest("a") + play.want("a", 10**6)
    history = play.rules._replace(instances=4, weighted=True, retire_above=0.5, retire_after=4)
    for rules in (history, play.rules, history, history._replace(retire_above=0.0)):
        memory.die()
        assert tools.errors(memory.apply(BufferStarted(rules))) == []
        for lease in leased:
            play.deliver(lease, reward=1.0)
        play.draw()
        play.confirm()
        leased = play.attest("a") + play.want("a", 10**6)
        assert leased
        assert all(lease.instance < 4 for lease in leased) == bool(rules.instances)
    assert tools.errors(memory.apply(BufferStarted(play.rules._replace(instances=5)))) == [
        "the journal was written by other rules: the task had 4 training instances, and has 5: the history behind "
        "buffer.retire_above and buffer.difficulty is of the old ones (one start with both off lets it begin anew): "
        "resume with the old ones, or begin a new run"
    ]


def test_reservations_have_the_size_of_the_rules_that_hold(tools, tmp_path):
    play = tools.play()
    memory = Memory(play, tmp_path)
    play.node("a", 4)
    reserved = play.replay.reserved_bytes
    assert reserved == 2 * play.rules.group_bytes
    memory.apply(BufferStarted(play.rules._replace(group_bytes=3 * play.rules.group_bytes)))
    assert play.replay.reserved_bytes == 3 * reserved


def test_rules_that_tickets_were_made_by_may_not_change(tools, tmp_path):
    play = tools.play()
    memory = Memory(play, tmp_path)
    play.node("a", 4)
    memory.die()
    (error,) = tools.errors(memory.apply(BufferStarted(play.rules._replace(group_size=3))))
    assert "group_size was 2, and is 3" in error


def test_a_journal_of_another_run_and_one_broken_in_its_midst_are_refused(tools, tmp_path):
    play = tools.play(steps=100)
    memory = Memory(play, tmp_path, segment_bytes=2000)
    play.node("a")
    while len(segment_numbers(tmp_path)) < 2:
        step(play)
    memory.recorder.close()
    with pytest.raises(JournalError, match="is of run 'run', not of 'other'"):
        Recorder(tmp_path, "other", play.rules, "never")
    number = segment_numbers(tmp_path)[0]
    first = segment_path(tmp_path, number)
    whole = first.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(JournalError, match=r"broken at byte \d+, and others follow"):
        Recorder(tmp_path, RUN, play.rules, "never")
    last = len(list(read_segment_bytes(tmp_path, number, whole))[-1])
    first.write_bytes(whole[: -last - RECORD_HEAD.size])
    with pytest.raises(JournalError, match=rf"written up to byte {len(whole)}, and can be read up to byte \d+"):
        Recorder(tmp_path, RUN, play.rules, "never")
    first.write_bytes(whole)
    Recorder(tmp_path, RUN, play.rules, "never").close()


def read_segment_bytes(folder: Path, number: int, data: bytes) -> list[Any]:
    segment_path(folder, number).write_bytes(data)
    return list(read_segment(folder, number))


@ORDERS
@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rng=st.randoms(use_true_random=False))
def test_whatever_happened_the_journal_gives_the_state_after_one_of_its_last_events(
    tools, tmp_path_factory, order, rng
):
    """Killed at any event, with the end of the file lost or not; segments begin and go all the time."""
    changes = {"zero_variance": "refill", "lease_timeout": 5.0, "capacity_bytes": 4000, **order}
    play = tools.play(steps=1000, max_tries=10**6, **changes)
    memory = Memory(play, tmp_path_factory.mktemp("journal"), segment_bytes=rng.choice([500, 5000, 10**6]))
    play.publish()
    memory.apply(TrainerJoined("trainer", "life", {}, 0))
    for _ in range(100):
        play.now += rng.random()
        something(play, memory, rng)
        if rng.random() < 0.1:
            before, cut = memory.state(), rng.choice([0, 0, 1, 40])
            memory.die(cut, killed=rng.random() < 0.5)
            assert memory.recorder.replay.ledger in memory.ledgers
            if not cut:
                assert memory.state() == before
    counts = play.replay.ledger
    assert counts["issued"] == sum(count for place, count in counts.items() if place != "issued")
    memory.apply(RunFinished("done"))
    assert [play.replay.ledger[place] for place in ("leased", "ready", "batched")] == [0, 0, 0]


def something(play: Any, memory: Memory, rng: Any) -> None:
    node = rng.choice("abc")
    match rng.randrange(9):
        case 0:
            joined = NodeJoined(node, 2, 0.0, rng.choice("xy"), rng.randrange(3))
            memory.apply(rng.choice([joined, NodeLost(node, "test")]))
        case 1:
            memory.apply(NodeAttested(node, rng.choice([*play.policies, PolicyId("main", 0, "f" * 64)])))
        case 2:
            play.want(node, rng.randrange(60))
        case 3:
            play.draw()
            if play.replay.lent is not None and rng.random() < 0.7:
                play.confirm(rng.choice(["trained", "stale", "refused"]), rng.choice([None, 0.1, 0.9]))
        case 4:
            memory.apply(EvalRequested(rng.choice(play.policies), rng.randrange(4), play.rules.sampling, 3.0))
        case 5:
            memory.apply(Checkpointed(rng.randint(0, play.replay.confirmed_batches)))
        case _:
            known = [*play.replay.leases.open, 0, play.replay.leases.next_lease]
            lease = play.replay.leases.open.get(rng.choice(known))
            policy = rng.choice(play.policies)
            effects = memory.apply(
                ResultArrived(
                    node=lease.node if lease and rng.random() < 0.9 else node,
                    lease=lease.lease if lease else rng.choice(known),
                    sample=rng.randrange(2),
                    status=rng.choice(["ok", "ok", "ok", "env_failed", "aborted"]),
                    reward=float(rng.randrange(2)),
                    versions=(VersionRun(policy.version, policy.digest, 3),),
                    n_tokens=3,
                    payload=memoryview(bytes(rng.randrange(500))),
                )
            )
            assert not [effect for effect in effects if isinstance(effect, EndRun)]

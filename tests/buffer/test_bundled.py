"""A bundle is worth what its attempts are worth alone: in the books, in what is refused, and in what is lent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from buffer_house import answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.bundle import attempts_in, bundled, decode_bundle, taken_apart, trajectories_of
from async_rl.trajectory import Packed, encode_trajectory
from async_rl.version import PolicyId
from async_rl.wire.link import Received
from async_rl.wire.messages import HandOver, Lease, Results, SamplingParams, dispositions_of
from buffer.arrivals import read_results
from buffer.bundled import alone
from buffer.entries import entry_parts, read_entry
from buffer.events import (
    BatchConfirmed,
    BundleArrived,
    DrawRequested,
    EvalRequested,
    LendBatch,
    ResultArrived,
    ResultRefused,
    ResultsArrived,
)
from buffer.instances import Instances

LARGEST = 2000
POLICY = PolicyId("main", 0, "d0")


def encoded(lease: Lease, samples: Sequence[int], policy: PolicyId) -> bytes:
    (packed,) = bundled([Packed(answer(lease, sample, policy, reward=0.5 * sample)) for sample in samples])
    return packed.joined()


def bundle(lease: Lease, samples: Sequence[int], policy: PolicyId = POLICY, node: str = "a") -> BundleArrived:
    """As the rules are told of it."""
    (found,), broken = read(encoded(lease, samples, policy))
    assert broken == 0
    assert isinstance(found, BundleArrived)
    return msgspec.structs.replace(found, node=node)


def numbered(lease: int) -> Lease:
    return Lease(lease, 0, 0, 0, "train", (), (), 0, SamplingParams(1.0, 8))


def read(data: bytes, holder: str = "a", kind: type = Results) -> tuple[list[Any], int]:
    message = kind((msgspec.Raw(data),))
    return read_results(Received("a", message, [], "node"), LARGEST, 70, lambda lease: holder)


def lent(effects: Sequence[Any]) -> list[tuple[Any, list[bytes]]]:
    """Each batch's groups, and its attempts as they are encoded alone."""
    return [
        (effect.groups, [encode_trajectory(of) for payload in effect.payloads for of in trajectories_of(payload)])
        for effect in effects
        if isinstance(effect, LendBatch)
    ]


def others(effects: Sequence[Any]) -> list[Any]:
    return [effect for effect in effects if not isinstance(effect, LendBatch)]


# --- in the rules ----------------------------------------------------------------------------------------------------


def test_a_group_that_came_whole_is_lent_as_the_one_payload_that_it_came_in(tools):
    play = tools.play(group_size=4)
    first, second = play.node("a", wanted=8)
    for lease in (first, second):
        play.apply(bundle(lease, lease.samples))
    assert (play.replay.ledger["ready"], play.replay.ready_groups) == (8, 2)
    (batch,) = play.draw(0)
    assert [(group.ticket, group.size, group.arrived) for group in batch.groups] == [(0, 4, (0,) * 4), (1, 4, (0,) * 4)]
    assert batch.payloads == tuple(encoded(lease, lease.samples, POLICY) for lease in (first, second))
    play.confirm()
    assert play.replay.ledger["trained"] == 8


def test_a_group_may_come_in_parts_bundled_and_alone(tools):
    play = tools.play(group_size=5, groups_per_step=1)
    (lease,) = play.node("a", wanted=5)
    for samples in ((1, 4), (0, 2)):
        play.apply(bundle(lease, samples))
    play.result(lease, 3, payload=memoryview(encode_trajectory(answer(lease, 3, POLICY))))
    (batch,) = play.draw(0)
    assert [attempts_in(payload) for payload in batch.payloads] == [2, 2, 1]
    assert [of.sample for payload in batch.payloads for of in trajectories_of(payload)] == [0, 2, 1, 4, 3]
    assert batch.groups[0].size == len(batch.groups[0].held_s) == 5


def test_a_mask_of_more_bits_than_a_number_has_is_kept_too(tools):
    play = tools.play(group_size=70, groups_per_step=1)
    (lease,) = play.node("a", wanted=70)
    play.apply(bundle(lease, lease.samples[:69]))
    play.apply(bundle(lease, lease.samples[68:]))  # one of them is closed: the other is taken
    assert play.replay.ledger["ready"] == 70
    assert play.replay.outside == {"late": 1}


def test_all_equal_rewards_are_seen_in_a_bundle(tools):
    play = tools.play(zero_variance="refill")
    lease, _ = play.node("a", wanted=4)
    event = bundle(lease, lease.samples)
    play.apply(msgspec.structs.replace(event, rewards=(1.0, 1.0)))
    assert play.replay.ledger["dropped.zero_variance"] == 2


def test_a_bundle_after_the_end_is_late_by_each_of_its_attempts(tools):
    play = tools.play()
    lease, _ = play.node("a", wanted=4)
    event = bundle(lease, lease.samples)
    play.replay.end("enough", [])
    refused = [effect for effect in play.apply(event) if isinstance(effect, ResultRefused)]
    assert [(each.lease, each.sample) for each in refused] == [(lease.lease, 0), (lease.lease, 1)]
    assert play.replay.outside == {"late": 2}


def test_an_evaluated_bundle_counts_each_answer(tools):
    play = tools.play()
    play.node("a")
    (lease,) = tools.leases(play.apply(EvalRequested(play.policies[0], 1, SamplingParams(0.0, 8), 60.0)))
    answers = bundle(lease, (0, 1))
    play.apply(answers)  # the second was never asked for
    assert (play.replay.eval_ledger["evaluated"], play.replay.outside) == (1, {"late": 1})


class Twins:
    """Two buffers that live through the same; one is told of bundles, and one of their attempts."""

    def __init__(self, tools: Any, **rules: Any) -> None:
        self.tools = tools
        self.plays = [tools.play(group_size=4, **rules) for _ in range(2)]
        self.leases: list[tuple[str, Lease]] = []
        for node in ("a", "b"):
            self.do(lambda play, node=node: play.node(node, wanted=8) and [])

    def do(self, deed: Any) -> None:
        told = [deed(play) for play in self.plays]
        assert lent(told[0]) == lent(told[1])
        assert others(told[0]) == others(told[1])
        one, other = [play.replay for play in self.plays]
        for what in ("ledger", "eval_ledger", "outside", "refused", "reused", "ready_groups", "ended"):
            assert getattr(one, what) == getattr(other, what), what
        assert one.progress() == other.progress()
        self.open = sorted(one.leases.open)

    @property
    def first(self) -> Any:
        return self.plays[0]

    def record(self, number: int) -> Any:
        return self.first.replay.leases.find(number)

    def holder(self, number: int) -> str:
        return self.first.replay.leases.holder(number)

    def histories(self) -> list[Instances]:
        return [play.replay.groups.instances for play in self.plays]

    def deliver(self, event: BundleArrived) -> None:
        events = (ResultsArrived((event,)), ResultsArrived(tuple(alone(event, taken_apart))))
        told = [play.apply(each) for play, each in zip(self.plays, events, strict=True)]
        self.do(lambda play: told[self.plays.index(play)])


RULES = [
    {},
    {"max_staleness": 2, "window": 3},
    {"reuse": 2, "max_staleness": 2},
    {"deterministic": True},
    {"on_stale": "drop"},
    {"on_stale": "mask"},
    {"zero_variance": "refill"},
    {"on_short_group": "drop"},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules) or "plain")
@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_happens_a_bundle_does_what_its_attempts_do_alone(tools, rules, data):
    twins = Twins(tools, **rules)
    first = twins.first
    for _ in range(data.draw(st.integers(1, 12))):
        deed = data.draw(st.sampled_from(["deliver"] * 4 + ["draw", "confirm", "publish", "attest", "want"]))
        if deed == "deliver" and twins.open:
            number = data.draw(st.sampled_from([*twins.open, 99]))
            record = first.replay.leases.find(number)
            samples = data.draw(st.sets(st.integers(0, 4), min_size=2, max_size=4)) if record else {0, 1}
            policy = data.draw(st.sampled_from([*first.policies, PolicyId("main", 1, "unknown")]))
            holder = record.holder.name if record else "a"
            node = data.draw(st.sampled_from([holder] * 4 + ["a", "b"]))
            event = bundle(numbered(number), sorted(samples), policy, node)
            kept = data.draw(st.booleans()) or node == holder
            twins.deliver(event if kept else msgspec.structs.replace(event, payload=memoryview(b"")))
        elif deed == "draw" and not first.replay.ended:
            twins.do(lambda play: play.apply(DrawRequested(play.replay.confirmed_batches)))
        elif deed == "confirm" and first.replay.lent is not None:
            twins.do(lambda play: play.confirm())
        elif deed == "publish" and "deterministic" not in rules:
            twins.do(lambda play: play.publish() and [])
        elif deed == "attest":
            node = data.draw(st.sampled_from(["a", "b"]))
            twins.do(lambda play, node=node: play.attest(node) and [])
        elif deed == "want":
            node, total = data.draw(st.sampled_from(["a", "b"])), data.draw(st.integers(8, 40))
            twins.do(lambda play, node=node, total=total: play.want(node, total) and [])


def test_a_bundle_that_is_older_than_its_lease_is_refused_attempt_by_attempt(tools):
    twins = Twins(tools, max_staleness=2)
    old = twins.first.policies[0]
    twins.do(lambda play: play.publish() and [])
    twins.do(lambda play: play.attest("a") and [])
    twins.do(lambda play: play.want("a", 16) and [])
    newest = twins.open[-1]
    assert twins.record(newest).min_version == 1
    twins.deliver(bundle(numbered(newest), (0, 2), old))
    assert twins.first.replay.refused == {"too_old": 2}


def test_a_bundle_that_comes_too_late_for_the_bound_is_dropped(tools):
    """With a window as wide as this the others overtake, two steps long."""
    twins = Twins(tools, on_stale="drop", window=40, lead=1)
    straggler = twins.open[0]
    for _ in range(2):
        while twins.first.replay.ready_groups < 2:
            for node in ("a", "b"):
                twins.do(lambda play, node=node: play.attest(node) and [])
                twins.do(lambda play, node=node: play.want(node, 80) and [])
            number = twins.open[-1]
            version = twins.first.policies[twins.record(number).min_version]
            twins.deliver(bundle(numbered(number), (0, 1, 2, 3), version, twins.holder(number)))
        twins.do(lambda play: play.apply(DrawRequested(play.replay.confirmed_batches)))
        twins.do(lambda play: play.confirm())
    twins.deliver(bundle(numbered(straggler), (0, 1), POLICY, twins.holder(straggler)))
    assert twins.first.replay.ledger["dropped.stale"] == 2


def test_a_bundle_of_one_answer_is_evaluated_too(tools):
    play = tools.play()
    play.node("a")
    (lease,) = tools.leases(play.apply(EvalRequested(play.policies[0], 1, SamplingParams(0.0, 8), 60.0)))
    two = bundle(lease, (0, 1))
    one = msgspec.structs.replace(decode_bundle(two.payload), samples=(0,), rewards=(1.0,), n_tokens=(5,))
    one = msgspec.structs.replace(one, sampled=(3,), finishes=("stop",), arrays=one.arrays[:45])
    (found,), _ = read(msgspec.msgpack.encode(one))
    play.apply(found)
    assert play.replay.eval_ledger["evaluated"] == 1


def test_what_the_trainer_refuses_of_a_bundle_is_not_used_again(tools):
    twins = Twins(tools, reuse=2, max_staleness=2, groups_per_step=4)
    for number in twins.open[:2]:
        twins.deliver(bundle(numbered(number), (0, 1, 2, 3), POLICY, twins.holder(number)))
    twins.do(lambda play: play.apply(DrawRequested(0)))
    twins.do(lambda play: play.publish() and [])
    twins.do(refuse_one)
    pool = twins.first.replay.groups.pool
    assert sorted(kept.group.good for kept in pool._kept.values()) == [3, 4]


def refuse_one(play: Any) -> list[Any]:
    attempts = [(record.lease, sample) for group in play.replay.lent for record in group.leases for sample in range(4)]
    outcomes = ["refused", *["trained"] * (len(attempts) - 1)]
    told = [(*each, outcome) for each, outcome in zip(attempts, outcomes, strict=True)]
    return play.apply(BatchConfirmed(0, dispositions_of(told)))


def test_a_bundle_teaches_the_history_of_instances_what_its_attempts_would(tools):
    twins = Twins(tools, instances=5, weighted=True)
    for number in list(twins.open):
        twins.deliver(bundle(numbered(number), (0, 1, 2, 3), POLICY, twins.holder(number)))
    learned = [instances.choose(ticket, 0) for instances in twins.histories() for ticket in range(50)]
    assert learned[:50] == learned[50:]
    assert learned[:50] != [Instances(twins.first.rules).choose(ticket, 0) for ticket in range(50)]


def test_in_a_deterministic_run_a_bundle_of_a_newer_version_than_its_leases_is_refused(tools):
    twins = Twins(tools, deterministic=True)
    twins.do(lambda play: play.publish() and [])
    twins.do(lambda play: play.attest("a") and [])
    number = next(number for number in twins.open if twins.holder(number) == "a")
    twins.deliver(bundle(numbered(number), (0, 1), twins.first.policies[1]))
    assert twins.first.replay.refused == {"wrong_policy": 2}


# --- as it is read, and written down ---------------------------------------------------------------------------------

LEASE = Lease(7, 0, 0, 0, "train", (0, 1, 2), (1, 2, 3), 0, SamplingParams(1.0, 8))


def test_a_bundle_is_read_as_one_event_with_its_payload_as_it_came():
    sent = encoded(LEASE, (0, 2), POLICY)
    (found,), broken = read(sent)
    assert isinstance(found, BundleArrived)
    assert (found.node, found.lease, found.samples, found.version, found.digest) == ("a", 7, (0, 2), 0, "d0")
    assert (found.rewards, found.sampled, found.payload, broken) == ((0.0, 1.0), (3, 3), sent, 0)


def test_of_a_bundle_that_is_not_its_senders_nothing_is_kept():
    (found,), _ = read(encoded(LEASE, (0, 2), POLICY), holder="b")
    assert (found.samples, found.payload) == ((0, 2), b"")


def test_one_attempt_that_contradicts_itself_does_not_spoil_the_others():
    bad = msgspec.structs.replace(decode_bundle(encoded(LEASE, (0, 1, 2), POLICY)), sampled=(3, 9, 3))
    found, broken = read(msgspec.msgpack.encode(bad))
    assert broken == 0
    assert all(isinstance(each, ResultArrived) for each in found)
    assert [(each.sample, bool(each.problem)) for each in found] == [(0, False), (1, True), (2, False)]
    assert "9 version stamps" in found[1].problem


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"n_tokens": (5, 6, 5)}, "135 bytes of arrays declares 144"), ({"rewards": (1.0,)}, "columns of other lengths")],
)
def test_where_no_attempt_can_be_told_from_the_others_each_has_the_problem(changes, problem):
    bad = msgspec.structs.replace(decode_bundle(encoded(LEASE, (0, 1, 2), POLICY)), **changes)
    found, broken = read(msgspec.msgpack.encode(bad))
    assert ([each.sample for each in found], broken) == ([0, 1, 2], 0)
    assert all(problem in each.problem and each.payload == b"" for each in found)


def test_of_a_bundle_that_is_too_large_only_the_names_are_read():
    large = msgspec.structs.replace(
        decode_bundle(encoded(LEASE, (0, 2), POLICY)), components=({"x" * 5000: 1.0}, {})
    )
    found, broken = read(msgspec.msgpack.encode(large))
    assert [(each.lease, each.sample, each.payload) for each in found] == [(7, 0, b""), (7, 2, b"")]
    assert all("more than the 4000" in each.problem for each in found)
    assert broken == 0


def test_an_attempt_of_a_bundle_that_would_be_too_large_alone_is_refused_and_the_others_are_not():
    large = msgspec.structs.replace(decode_bundle(encoded(LEASE, (0, 2), POLICY)), components=({"x" * 2500: 1.0}, {}))
    found, _ = read(msgspec.msgpack.encode(large))
    assert [(each.sample, "more than the 2000" in each.problem) for each in found] == [(0, True), (2, False)]
    assert all(len(each.payload) <= LARGEST for each in found)


@pytest.mark.parametrize("samples", [(0, 0), (2, 0), tuple(range(71))])
def test_what_no_node_bundles_is_not_looked_at(samples):
    """An attempt many times, or more than a group: each would have what all share, and room for a whole attempt."""
    one = decode_bundle(encoded(LEASE, (0, 2), POLICY))
    columns = {name: getattr(one, name)[:1] * len(samples) for name in ("rewards", "n_tokens", "sampled", "finishes")}
    forged = msgspec.structs.replace(one, samples=samples, arrays=bytes(45 * len(samples)), **columns)
    assert read(msgspec.msgpack.encode(forged)) == ([], 1)


@pytest.mark.parametrize("samples", [(0, 1), (0,)])
def test_what_came_before_its_lease_does_not_become_good_by_it(tools, samples):
    """A node that is not admitted yet may guess its first lease's number, and what it says is held until it is."""
    play = tools.play()
    data = encoded(LEASE, (0, 1), POLICY) if len(samples) > 1 else encode_trajectory(answer(LEASE, 0, POLICY))
    (early,), _ = read(data, holder="")
    lease, _ = play.node("a", wanted=4)
    play.apply(msgspec.structs.replace(early, lease=lease.lease))
    assert play.replay.ledger["ready"] == 0
    assert play.replay.refused == {"problem": len(samples)}


def test_what_all_attempts_share_cannot_be_large_lest_it_is_once_for_each_of_them():
    large = msgspec.structs.replace(decode_bundle(encoded(LEASE, (0, 2), POLICY)), engine="x" * 1000)
    assert read(msgspec.msgpack.encode(large)) == ([], 1)


@pytest.mark.parametrize("cut", [8, 20, 60])
def test_what_cannot_be_read_is_counted_and_no_more(cut):
    assert read(encoded(LEASE, (0, 2), POLICY)[:-cut]) == ([], 1)


def test_a_bundle_has_no_place_in_a_hand_over():
    assert read(encoded(LEASE, (0, 2), POLICY), kind=HandOver) == ([], 1)


def test_a_bundle_comes_back_out_of_the_journal_as_it_was():
    event = ResultsArrived((bundle(LEASE, (0, 2)), bundle(LEASE, (1, 2))))
    entry = read_entry(memoryview(b"".join(entry_parts(event, 3.0))))
    assert entry.event == event

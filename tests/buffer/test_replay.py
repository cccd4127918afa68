"""Each rule of the replay buffer, played by hand; the books are audited after every event (see conftest)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Disposition, Progress
from buffer.events import (
    BatchConfirmed,
    DrawRequested,
    EvalRequested,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeLost,
    NodeWanted,
    ResultArrived,
    ResultRefused,
    Resumed,
    RunFinished,
    Ticked,
)

# --- nodes and admission ---------------------------------------------------------------------------------------------


def test_only_a_node_that_attested_a_registered_policy_is_given_work(tools):
    play = tools.play()
    state = lambda: play.replay.nodes_view()["a"].state  # noqa: E731
    play.apply(NodeJoined("a", 4))
    assert state() == "joining"
    policy = play.publish()
    assert state() == "syncing"
    assert play.want("a", 4) == []
    assert tools.leases(play.apply(NodeAttested("a", PolicyId("main", 0, "another digest")))) == []
    assert (state(), play.replay.outside) == ("syncing", {"unregistered_policy": 1})
    granted = tools.leases(play.apply(NodeAttested("a", policy)))
    assert (state(), [lease.ticket for lease in granted]) == ("ready", [0, 1])
    assert all(lease.min_version == 0 and lease.samples == (0, 1) for lease in granted)


def test_admission_goes_by_the_nodes_own_version_not_by_the_trainers(tools):
    play = tools.play(max_staleness=0)
    assert [lease.ticket for lease in play.node("a", 100)] == [0, 1]
    play.publish()
    assert play.want("a", 200) == []
    assert [lease.ticket for lease in play.attest("a")] == [2, 3]


def test_a_whole_group_is_leased_for_one_sample_asked_for_and_no_second(tools):
    play = tools.play(group_size=5)
    assert [lease.samples for lease in play.node("a", 1, slots=2)] == [(0, 1, 2, 3, 4)]
    assert play.want("a", 5) == []
    assert len(play.want("a", 6)) == 1


def test_groups_spread_over_the_nodes_that_wait(tools):
    play = tools.play(max_staleness=4, capacity_bytes=2000)
    first = play.node("a", 99)
    assert play.node("b", 99) == []  # no room, so both wait
    for lease in first:
        play.deliver(lease, payload=bytes(500))
    assert tools.granted(play.apply(DrawRequested(0))) == [("a", 2), ("b", 3)]


def test_a_lost_nodes_samples_go_to_another_with_the_same_instance_and_seeds_before_new_tickets(tools):
    play = tools.play()
    first, second = play.node("a", 4)
    play.result(first, 1)
    play.node("b")
    assert [lease.ticket for lease in play.want("b", 2)] == [2]
    play.apply(NodeLost("a", "silent"))
    assert play.replay.ledger["dropped.node_lost"] == 3
    again, whole, new = play.want("b", 99)
    assert (again.ticket, again.samples, again.instance, again.try_) == (0, (0,), first.instance, 0)
    assert again.seeds == first.seeds[:1]
    assert (whole.ticket, whole.seeds, new.ticket) == (1, second.seeds, 3)


def test_a_node_that_joins_again_starts_anew_and_its_old_leases_are_closed(tools):
    play = tools.play()
    lease, _ = play.node("a", 4)
    play.apply(NodeJoined("a", 8))
    view = play.replay.nodes_view()["a"]
    assert (view.state, view.wanted, view.granted, view.leased_samples) == ("syncing", 0, 0, 0)
    (refused,) = play.deliver(lease)[:1]
    assert isinstance(refused, ResultRefused)
    assert play.replay.outside["late"] == 2


def test_words_of_unknown_nodes_change_nothing(tools):
    play = tools.play()
    play.publish()
    for event in (NodeWanted("ghost", 9), NodeLost("ghost", ""), NodeAttested("ghost", play.policies[0])):
        assert play.apply(event) == []
    assert play.replay.outside == {"unknown_node": 3}


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_for_closed_unknown_or_foreign_attempts_change_nothing_and_are_counted_outside(tools):
    play = tools.play()
    lease, _ = play.node("a", 4)
    play.node("b")
    play.result(lease, 0)
    before = play.replay.ledger
    for changes in ({}, {"sample": 7}, {"lease": 99}, {"lease": -1}, {"sample": 1, "node": "b"}):
        event = {"sample": 0, **changes}
        (effect,) = play.apply(
            ResultArrived(
                node=event.get("node", "a"), lease=event.get("lease", lease.lease), sample=event["sample"], status="ok",
                reward=0.0, versions=(VersionRun(0, "d0", 5),), n_tokens=5, payload=b"x",
            )
        )  # fmt: skip
        assert isinstance(effect, ResultRefused)
        assert play.replay.ledger == before
    assert play.replay.outside == {"late": 2, "unknown_attempt": 2, "wrong_node": 1}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"problem": "sizes differ"}, "problem"),
        ({"versions": ()}, "nothing_sampled"),
        ({"versions": (VersionRun(1, "never published", 5),)}, "unregistered"),
        ({"versions": (VersionRun(2, "d1-unattested", 5),)}, "unattested"),
        ({"versions": (VersionRun(1, "d1", 3), VersionRun(0, "d0", 2))}, "too_old"),
    ],
)
def test_a_result_that_cannot_be_believed_is_refused_and_its_sample_retried_with_a_new_seed(tools, changes, kind):
    play = tools.play()
    play.publish()
    play.node("a")
    play.publish()
    play.publish("d1-unattested")
    play.attest("a", 1)
    lease, _ = play.want("a", 4)
    assert lease.min_version == 1
    play.want("a", 5)
    effects = play.result(lease, 0, **changes)
    assert len(tools.of(ResultRefused, effects)) == 1
    assert play.replay.ledger["dropped.refused"] == 1
    assert play.replay.refused == {kind: 1}
    play.result(lease, 1)
    (again,) = [each for each in play.want("a", 99) if each.ticket == 0]
    assert (again.samples, again.instance) == ((0,), lease.instance)
    assert again.seeds[0] not in lease.seeds


@pytest.mark.parametrize("status", ["env_failed", "aborted"])
def test_what_fails_on_its_node_is_retried_until_the_tries_are_used_up_and_then_ends_the_run(tools, status):
    play = tools.play(max_tries=3)
    lease, _ = play.node("a", 4)
    wanted = 4
    for failure in range(3):
        effects = play.result(lease, 0, status=status, versions=(), payload=b"")
        if failure < 2:
            wanted += 1
            (lease,) = play.want("a", wanted)
            assert (lease.ticket, lease.samples) == (0, (0,))
    (error,) = tools.errors(effects)
    assert error.startswith("ticket 0 has failed 3 times, which is buffer.max_tries")
    assert str(lease.instance) in error
    reason = {"env_failed": "env_failed", "aborted": "cancelled"}[status]
    assert reason in error
    assert play.replay.ledger[f"dropped.{reason}"] == 3
    assert play.want("a", 99) == []


def test_a_lease_that_is_not_delivered_in_time_is_cancelled_and_leased_again(tools):
    play = tools.play(lease_timeout=60.0)
    lease, other = play.node("a", 4)
    play.deliver(other)
    play.result(lease, 0)
    play.node("b")
    play.want("b", 1)
    play.now = 59.9
    assert tools.cancelled(play.apply(Ticked())) == []
    play.now = 60.0
    assert tools.cancelled(play.apply(Ticked())) == [("a", lease.lease), ("b", other.lease + 1)]
    assert play.replay.ledger["dropped.cancelled"] == 3
    (again, *_) = play.want("b", 99)
    assert (again.ticket, again.samples, again.seeds) == (0, (1,), lease.seeds[1:])


# --- groups ----------------------------------------------------------------------------------------------------------


def test_equal_rewards_are_trained_or_refilled_with_another_instance(tools):
    kept, refilled = tools.play(zero_variance="keep"), tools.play(zero_variance="refill")
    for play in (kept, refilled):
        lease, _ = play.node("a", 4)
        play.deliver(lease, reward=1.0)
    assert kept.replay.ready_groups == 1
    assert refilled.replay.ready_groups == 0
    assert refilled.replay.ledger["dropped.zero_variance"] == 2
    again = refilled.want("a", 5)[0]
    assert (again.ticket, again.try_, again.samples) == (0, 1, (0, 1))
    assert again.instance != lease.instance


@pytest.mark.parametrize(("rule", "ready", "dropped"), [("accept", 1, 0), ("drop", 0, 2), ("retry", 0, 0)])
def test_a_group_with_a_failed_environment_is_accepted_dropped_or_completed(tools, rule, ready, dropped):
    play = tools.play(group_size=3, on_short_group=rule)
    lease, _ = play.node("a", 6)
    play.result(lease, 0, status="env_failed", versions=(), payload=b"")
    play.result(lease, 1)
    play.result(lease, 2)
    assert play.replay.ready_groups == ready
    assert play.replay.ledger["dropped.short_group"] == dropped
    if rule != "accept":
        again = play.want("a", 7)[0]
        assert (again.ticket, again.samples) == (0, (0, 1, 2) if rule == "drop" else (0,))
        assert (again.instance == lease.instance) == (rule == "retry")


def test_a_run_that_ends_over_a_reward_that_always_fails_says_what_failed(tools):
    play = tools.play(group_size=2, max_tries=2)
    (lease,) = play.node("a", 2)
    play.result(lease, 0, status="env_failed", versions=(), payload=b"", note="reward 'judge': busy")
    (again,) = play.want("a", 3)
    assert (again.ticket, again.samples) == (lease.ticket, (0,))
    play.result(again, 0, status="env_failed", versions=(), payload=b"", note="reward 'judge': refused")
    assert "env_failed: on a: reward 'judge': refused" in play.replay.groups.exhausted
    assert play.replay.ledger["dropped.env_failed"] == 2


def test_accept_needs_two_good_samples(tools):
    play = tools.play(group_size=2, on_short_group="accept")
    lease, _ = play.node("a", 4)
    play.result(lease, 0, status="env_failed", versions=(), payload=b"")
    play.result(lease, 1)
    assert play.replay.ready_groups == 0
    assert play.replay.ledger["dropped.short_group"] == 1


# --- the draw --------------------------------------------------------------------------------------------------------


def test_a_draw_that_cannot_be_served_is_remembered_and_repeated_unchanged_until_confirmed(tools):
    play = tools.play()
    first, second = play.node("a", 4)
    assert play.draw() == []
    play.deliver(second)
    effects = play.deliver(first)
    (lent,) = tools.of(LendBatch, effects)
    assert [(group.ticket, group.size) for group in lent.groups] == [(0, 2), (1, 2)]
    assert lent.payloads == (b"0/0", b"0/1", b"1/0", b"1/1")
    assert (lent.batch, lent.for_version) == (0, 0)
    for lease in play.want("a", 99):
        play.deliver(lease)
    assert play.draw() == [lent]
    play.confirm()
    assert play.replay.confirmed_batches == 1
    assert play.replay.ledger["trained"] == 4
    assert [group.ticket for group in play.draw()[0].groups] == [2, 3]


def test_a_draw_for_another_version_ends_the_run_with_both_values(tools):
    play = tools.play()
    (error,) = tools.errors(play.apply(DrawRequested(3)))
    assert "version 3" in error
    assert "0 batches are confirmed" in error


@pytest.mark.parametrize("outcome", ["refused", "stale"])
def test_a_ticket_in_a_confirmed_batch_is_spent_whatever_became_of_its_attempts(tools, outcome):
    play = tools.play()
    for lease in play.node("a", 4):
        play.deliver(lease)
    play.draw()
    play.confirm(outcome)
    assert play.replay.ledger[f"dropped.{outcome}"] == 4
    assert [lease.ticket for lease in play.want("a", 8)] == [2, 3]
    assert play.replay.progress().open_tickets == {2: 0, 3: 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[1:], "is missing"),
        (lambda items: [replace(items[0], samples=(0,)), *items[1:]], "is missing"),
        (lambda items: [replace(items[0], samples=()), *items[1:]], "lease 0 is named without a sample"),
        (lambda items: [*items, Disposition(99, (), "trained")], "lease 99 is named without a sample"),
        (lambda items: [replace(items[0], samples=(0, 1, 1)), *items[1:]], "attempt 0/1 is named twice"),
        (lambda items: [replace(items[0], samples=(0, 1, 2)), *items[1:]], "attempt 0/2 is not in it"),
        (lambda items: [replace(items[0], samples=(-1, 0, 1)), *items[1:]], "attempt 0/-1 is not in it"),
        (lambda items: [*items, Disposition(99, (0,), "trained")], "attempt 99/0 is not in it"),
        (lambda items: [*items, items[0]], "named twice"),
    ],
)
def test_a_confirmation_must_name_exactly_the_attempts_lent(tools, change, message):
    play = tools.play()
    granted = play.node("a", 4)
    for lease in granted:
        play.deliver(lease)
    play.draw()
    items = [Disposition(lease.lease, lease.samples, "trained") for lease in granted]
    (error,) = tools.errors(play.apply(BatchConfirmed(0, tuple(change(items)))))
    assert message in error
    assert play.replay.ledger["batched"] == 4


def test_a_confirmation_that_comes_twice_changes_nothing_and_one_of_nothing_ends_the_run(tools):
    play = tools.play()
    for lease in play.node("a", 4):
        play.deliver(lease)
    play.draw()
    play.confirm()
    before = play.replay.ledger
    assert play.apply(BatchConfirmed(0, ())) == []
    assert (play.replay.ledger, play.replay.outside) == (before, {"repeated_confirm": 1})
    assert "none is lent" in tools.errors(play.apply(BatchConfirmed(1, ())))[0]


def test_what_is_too_old_after_a_version_change_is_swept_and_its_tickets_open_again(tools):
    """With a lead beyond the bound (never configured), data can go stale while it waits: what was finished under
    version 0 must all be dropped once the trainer is beyond the bound, and the trainer waits for fresh data."""
    play = tools.play(max_staleness=0, lead=50, groups_per_step=1)
    granted = play.node("a", 20)
    for lease in granted:
        play.deliver(lease)
    assert play.replay.ready_groups == 10  # all of the run's tickets, sampled ahead under version 0
    play.draw()
    play.confirm()
    assert play.replay.ready_groups == 0
    assert play.replay.ledger["dropped.stale"] == 18
    assert play.draw() == []
    play.attest("a")
    (again,) = play.want("a", 21)
    assert (again.ticket, again.min_version) == (1, 1)
    lent = tools.of(LendBatch, play.deliver(again))
    assert [group.ticket for batch in lent for group in batch.groups] == [1]


# --- capacity --------------------------------------------------------------------------------------------------------


def test_full_means_that_nothing_more_is_leased_until_a_batch_is_drawn(tools):
    play = tools.play(capacity_bytes=2000, max_staleness=4)
    granted = play.node("a", 99)
    assert [lease.ticket for lease in granted] == [0, 1]
    for lease in granted:
        play.deliver(lease, payload=bytes(500))
    assert play.replay.ready_bytes == 2000
    assert play.want("a", 200) == []
    assert "room in the buffer" in play.replay.waiting(0.0)
    play.draw()
    assert play.replay.ready_bytes == 0
    assert play.replay.reserved_bytes == 2000


def test_the_lowest_open_ticket_is_admitted_over_capacity_when_the_trainer_needs_it(tools):
    play = tools.play(capacity_bytes=1)
    (first,) = play.node("a", 99)
    (second,) = tools.leases(play.deliver(first, payload=bytes(500)))
    assert tools.leases(play.deliver(second, payload=bytes(500))) == []  # the batch is complete: no more is needed
    effects = play.apply(DrawRequested(0))
    assert [lease.ticket for lease in tools.leases(effects)] == [2]


# --- the ends --------------------------------------------------------------------------------------------------------


def test_when_the_run_finishes_everything_open_is_cancelled_and_counted(tools):
    play = tools.play()
    first, second, third, fourth = play.node("a", 8)
    for lease in (first, second, third):
        play.deliver(lease)
    play.draw()
    effects = play.apply(RunFinished("done"))
    assert tools.cancelled(effects) == [("a", fourth.lease)]
    ledger = play.replay.ledger
    assert (ledger["leased"], ledger["ready"], ledger["batched"], ledger["dropped.cancelled"]) == (0, 0, 0, 8)
    assert play.want("a", 99) == []
    play.deliver(fourth)
    assert play.replay.outside == {"late": 2}
    assert play.replay.ledger == ledger
    assert play.replay.waiting(0.0) == "nobody waits: done"


def test_a_resumed_run_goes_on_with_its_tickets_tries_and_totals_and_knows_no_old_lease(tools):
    play = tools.play(zero_variance="refill")
    first, second, third, fourth = play.node("a", 8)
    play.deliver(third, reward=1.0)  # ticket 2 gets another try
    play.deliver(first)
    play.deliver(second)
    play.draw()
    play.confirm()
    progress = play.replay.progress()
    assert progress.open_tickets == {2: 1, 3: 0}

    resumed = tools.play(zero_variance="refill")
    resumed.apply(Resumed(progress))
    assert resumed.replay.confirmed_batches == 1
    ledger = resumed.replay.ledger
    assert (ledger["issued"], ledger["trained"], ledger["dropped.cancelled"]) == (8, 4, 2)
    resumed.publish()
    resumed.publish()
    granted = resumed.node("a", 99)
    assert [(lease.ticket, lease.try_) for lease in granted] == [(2, 1), (3, 0), (4, 0), (5, 0)]
    assert min(lease.lease for lease in granted) == progress.next_lease
    resumed.result(fourth, 0)
    assert resumed.replay.outside == {"late": 1}
    assert granted[1].seeds == fourth.seeds
    resumed.deliver(granted[0])
    resumed.deliver(granted[1])
    assert [group.ticket for group in resumed.draw()[0].groups] == [2, 3]


def test_a_checkpoint_of_another_batch_size_or_into_a_buffer_in_use_is_refused(tools):
    play = tools.play()
    for lease in play.node("a", 4):
        play.deliver(lease)
    play.draw()
    play.confirm()
    progress = play.replay.progress()
    (error,) = tools.errors(tools.play(groups_per_step=3).apply(Resumed(progress)))
    assert "2 spent tickets after 1 batches" in error
    assert "in use" in tools.errors(play.apply(Resumed(progress)))[0]


# --- anything at all -------------------------------------------------------------------------------------------------


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from(["retry", "drop", "accept"]))
def test_the_books_balance_whatever_nodes_say_and_in_whatever_order(tools, rng, on_short_group):
    """Duplicates, forgeries, foreign results, attestations that jump back, deaths in mid-lease, time running out, and
    a trainer that draws twice: `Play` audits after every event."""
    play = tools.play(
        max_tries=10**6, on_short_group=on_short_group, zero_variance="refill", lease_timeout=5.0, capacity_bytes=3000
    )
    play.publish()
    for _ in range(150):
        play.now += rng.random()
        node = rng.choice("abc")
        match rng.randrange(9):
            case 0:
                play.apply(rng.choice([NodeJoined(node, 2), NodeLost(node, "test"), Ticked()]))
            case 1:
                play.apply(NodeAttested(node, rng.choice([*play.policies, PolicyId("main", 0, "forged")])))
            case 2:
                play.want(node, rng.randrange(60))
            case 3:
                play.draw()
                if play.replay.lent is not None and rng.random() < 0.7 and play.replay.confirmed_batches < 8:
                    play.confirm(rng.choice(["trained", "stale", "refused"]))
            case 4:
                play.apply(EvalRequested(rng.choice(play.policies), rng.randrange(4), play.rules.sampling, 3.0))
            case _:
                known = [*play.replay.leases.open, 0, play.replay.leases.next_lease]
                lease = play.replay.leases.open.get(rng.choice(known))
                policy = rng.choice(play.policies)
                play.apply(
                    ResultArrived(
                        node=lease.node if lease and rng.random() < 0.9 else node,
                        lease=lease.lease if lease else rng.choice(known),
                        sample=rng.randrange(2),
                        status=rng.choice(["ok", "ok", "ok", "env_failed", "aborted"]),
                        reward=float(rng.randrange(2)),
                        versions=(VersionRun(policy.version, rng.choice([policy.digest] * 9 + ["forged"]), 3),),
                        n_tokens=3,
                        payload=bytes(rng.randrange(500)),
                    )
                )
    assert not play.replay.ended
    play.apply(RunFinished("done"))
    open_places = ("leased", "ready", "batched")
    assert [play.replay.ledger[place] for place in open_places] == [0, 0, 0]
    assert play.replay.eval_ledger["leased"] == 0


# --- who waits -------------------------------------------------------------------------------------------------------


def test_waiting_says_who_waits_for_whom(tools):
    play = tools.play(group_size=8)
    say = lambda: play.replay.waiting(0.0)  # noqa: E731
    assert say() == "the buffer waits for the trainer to draw batch 0"
    play.draw()
    assert say() == "the trainer waits for ticket 0 (not leased: no node is ready, none has joined)"
    lease = play.node("node-1", 1)[0]
    for sample in range(5):
        play.result(lease, sample, "node-1")
    assert say() == "the trainer waits for ticket 0 (leased to node-1, 5 of 8 samples)"
    for sample in range(5, 8):
        play.result(lease, sample, "node-1")
    assert say() == "the trainer waits for ticket 1 (not leased: none of 1 nodes at version 0 or newer asks for work)"
    play.deliver(play.want("node-1", 9)[0], "node-1")
    assert say() == "the buffer waits for the trainer to confirm batch 0"
    play.want("node-1", 99)
    assert say() == "nodes wait for tickets, and so for the trainer to confirm batch 0"


def test_a_checkpoint_whose_account_does_not_add_up_is_refused(tools):
    good = {"next_ticket": 2, "open_tickets": {}, "confirmed_batches": 1, "next_lease": 2, "eval_ledger": {}}
    for spoilt in (
        {"ledger": {"issued": 4, "trained": 3}},
        {"ledger": {"issued": 4, "anything": 4}},
        {"ledger": {}, "eval_ledger": {"issued": 1}},
        {"ledger": {}, "next_ticket": 3, "open_tickets": {7: 0}},
    ):
        resumed = tools.play(groups_per_step=2)
        resumed.apply(Resumed(Progress(**good | spoilt)))
        assert "add up" in resumed.replay.ended

"""What metrics.jsonl and samples.jsonl say about a batch is what the batch was."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from async_rl.bundle import bundled
from async_rl.config import BufferConfig, Config
from async_rl.proof import Proof, make_proof, probe_tokens
from async_rl.trajectory import Packed, Segment, Timings, Trajectory, encode_trajectory, pack_segments
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, Disposition, NodeMismatch, Status
from async_rl.wire.seen import NOTHING_SEEN, Seen
from buffer.events import NodeAttested, NodeJoined, PolicyRegistered
from buffer.observed import Observed
from buffer.recorder import Recorder
from buffer.rules import rules_from_config
from trainer.backend import StepResult
from trainer.batches import TrainingBatch, prepare
from trainer.records import (
    LENGTH_QUANTILES,
    batch_record,
    health,
    pools_record,
    sample_records,
    samples_due,
    seen_in,
)

FOR_VERSION = 5
GROUPS = (BatchGroup(0, 0, 100, 2), BatchGroup(1, 0, 101, 2))


def trajectory(lease: int, sample: int, *runs: tuple[int, int]) -> Trajectory:
    """A prompt of two tokens, then `runs` of (version, count)."""
    new = sum(count for _, count in runs)
    headers, arrays = pack_segments(
        [
            Segment(
                np.arange(2 + new, dtype=np.int32),
                np.where(np.arange(2 + new) < 2, 0.0, -0.5).astype(np.float32),
                (np.arange(2 + new) < 2).astype(np.uint8),
                tuple(VersionRun(version, f"{version:064x}", count) for version, count in runs),
                "stop",
            )
        ]
    )
    return Trajectory(lease, sample, "ok", float(sample), headers, arrays, timings=Timings(1.0, 2.0, 0.5 * sample))


def batch(groups: tuple[BatchGroup, ...], *trajectories: Trajectory) -> TrainingBatch:
    return of_payloads(groups, [encode_trajectory(one) for one in trajectories])


def of_payloads(groups: tuple[BatchGroup, ...], encoded: list[bytes]) -> TrainingBatch:
    payloads = tuple(map(msgspec.Raw, encoded))
    return prepare(
        Received("buffer", Batch(3, FOR_VERSION, groups, payloads), []),
        Config(buffer=BufferConfig(max_staleness=4)),
        100,
    )


def two_groups() -> TrainingBatch:
    groups = (
        BatchGroup(0, 0, 7, 2, arrived=(3, 4), held_s=(2.0, 1.0), leased_s=6.0),
        BatchGroup(1, 0, 8, 2, arrived=(5, 5), held_s=(0.25, 0.5), leased_s=4.0),
    )
    return batch(
        groups,
        trajectory(1, 0, (2, 1), (3, 1)), trajectory(1, 1, (4, 3)), trajectory(2, 0, (5, 4)), trajectory(2, 1, (4, 1)),
    )  # fmt: skip


def test_an_attempts_age_is_split_where_it_arrived() -> None:
    record = batch_record(two_groups())
    assert record["in_flight_ages"] == [2, 2]  # 3-2, 4-4, 5-5, 5-4
    assert record["in_queue_ages"] == [2, 1, 1]  # 5-3, 5-4, 0, 0


def test_a_batchs_rollout_lasts_from_its_first_lease_to_its_last_arrival() -> None:
    record = batch_record(two_groups())
    assert record["rollout_s"] == 6.0 - 0.25
    assert (record["queued_s"], record["sampling_s"], record["scoring_s"]) == (1.0, 2.0, 0.25)
    assert record["held_s"] == np.mean([2.0, 1.0, 0.25, 0.5])


def test_a_group_that_trains_again_is_counted_as_such_and_its_journey_is_not_told_twice() -> None:
    fresh = BatchGroup(9, 0, 7, 2, arrived=(3, 4), held_s=(2.0, 1.0), leased_s=6.0)
    again = BatchGroup(2, 0, 8, 2, arrived=(2, 2), held_s=(50.0, 60.0), leased_s=90.0, uses=1)
    attempts = [trajectory(1, 0, (2, 1), (3, 1)), trajectory(1, 1, (4, 3))]
    alone = batch_record(batch((fresh,), *attempts))
    both = batch_record(batch((fresh, again), *attempts, trajectory(2, 0, (1, 4)), trajectory(2, 1, (2, 2))))
    assert (alone["trained"], alone["reused"]) == (2, 0)
    assert (both["trained"], both["reused"]) == (4, 2)
    same = ("trained_lengths", "rollout_s", "held_s", "in_flight_ages", "in_queue_ages", "length_quantiles")
    assert {key: both[key] for key in same} == {key: alone[key] for key in same}
    assert both["staleness_max"] == 4  # what trains again counts as old as it is now


def test_lengths_are_kept_as_quantiles_of_sampled_tokens() -> None:
    quantiles = batch_record(two_groups())["length_quantiles"]
    assert len(quantiles) == LENGTH_QUANTILES + 1
    assert (quantiles[0], quantiles[-1]) == (1, 4)
    assert quantiles == sorted(quantiles)


def test_a_kept_trajectory_names_the_version_of_every_sampled_token() -> None:
    first, second = sample_records(two_groups(), step=9)
    assert (first["step"], first["ticket"], second["ticket"]) == (9, 0, 1)
    assert first["segments"][0]["versions"] == [None, None, 2, 3]
    assert second["segments"][0]["tokens"] == [0, 1, 2, 3, 4, 5]
    assert second["segments"][0]["logprobs"] == [0.0, 0.0, -0.5, -0.5, -0.5, -0.5]


def test_the_health_of_a_step_is_that_of_its_token_ratios_and_unknown_where_none_trained() -> None:
    step = StepResult({"tokens": 12.0, "ess_token": 0.4, "ess": 0.9, "k3": 0.02}, [], skipped=False)
    assert health(step) == (0.4, 0.02)
    assert health(StepResult({"tokens": 0.0, "ess_token": 1.0, "k3": 0.0}, [], skipped=True)) == (None, None)


def buffers_view(life: str, mismatches: int, pushes: int) -> Status:
    measures = tuple(NodeMismatch("node", version, 0.1, version / 1000) for version in range(mismatches))
    return Status(
        1.0, (), "ready", None, 0, 3, {}, {}, {}, 0, 0, 0, "nobody waits", tuple(map(float, range(pushes))), 4,
        pushes=pushes, mismatches=measures[-4:], mismatch_count=mismatches, life=life,
    )  # fmt: skip


def test_what_was_recorded_of_a_buffer_is_not_recorded_again_and_a_new_ones_pushes_begin_at_nothing() -> None:
    def recorded(status: Status, seen: Seen) -> tuple[list[int], list[float]]:
        view = pools_record(status, seen)
        return [version for _, version, *_ in view["mismatches"]], view["push_ms"]

    first, later = buffers_view("a", 2, 3), buffers_view("a", 3, 5)
    assert recorded(first, Seen()) == ([0, 1], [0.0, 1.0, 2.0])
    kept = msgspec.convert(msgspec.to_builtins(seen_in(first)), Seen)  # as in a checkpoint
    assert recorded(first, kept) == ([], [])
    assert recorded(later, kept) == ([2], [3.0, 4.0])
    assert recorded(buffers_view("b", 1, 1), kept) == ([0], [0.0])
    assert recorded(buffers_view("b", 3, 4), kept) == ([2], [0.0, 1.0, 2.0, 3.0])  # with the journal of the first


def test_a_buffer_that_was_killed_and_recovered_shows_no_mismatch_twice(tmp_path: Path) -> None:
    """Its journal makes the mismatches again; the pushes are of a process."""
    config = Config(buffer=BufferConfig(max_staleness=4))
    tokens = probe_tokens(7, 50)

    def shown(version: int) -> Proof:
        return make_proof(tokens, [np.full(len(each) - 1, -3.0 - version, np.float32) for each in tokens], ("q_proj",))

    def lives_and_shows(*versions: int, seen: Seen = NOTHING_SEEN) -> Status:
        recorder, observed = Recorder(tmp_path, "run", rules_from_config(config), "never"), Observed(config, 0.0)
        for version in versions:
            policy = PolicyId("main", version, f"{version:064x}")
            recorder.apply(PolicyRegistered(policy, shown(version)), version)
            recorder.apply(NodeJoined("node", 8, 1e-3), version)
            observed.published(policy, ["node"], version)
            recorder.apply(NodeAttested("node", policy, shown(version)), version)
            observed.serving("node", policy, version)
        status, rest = (observed.status(recorder.replay, {}, "trainer", 9.0, each) for each in (Seen(), seen))
        assert recorded(rest, seen) == recorded(status, seen)  # what the trainer asks for is all that it needs
        recorder.close()
        return status

    def recorded(status: Status, seen: Seen) -> tuple[list[int], int]:
        view = pools_record(status, seen)
        return [version for _, version, *_ in view["mismatches"]], len(view["push_ms"])

    first = lives_and_shows(0, 1, 2)
    assert recorded(first, Seen()) == ([0, 1, 2], 3)
    second = lives_and_shows(seen=seen_in(first))
    assert recorded(second, seen_in(first)) == ([], 0)
    third = lives_and_shows(3, seen=seen_in(second))
    assert third.life != first.life
    assert recorded(third, seen_in(second)) == recorded(third, seen_in(first)) == ([3], 1)


def test_the_first_and_the_last_step_are_always_kept() -> None:
    for steps in (1, 7, 20, 33, 200):
        due = [step for step in range(steps) if samples_due(step, steps)]
        assert due[0] == 0
        assert due[-1] == steps - 1
        assert len(due) <= 40


def test_a_batch_of_bundles_is_what_one_of_their_attempts_is() -> None:
    attempts = [trajectory(lease, sample, (5, 3 + sample)) for lease in (7, 8) for sample in (0, 1)]
    alone = batch(GROUPS, *attempts)
    bundles = [each.joined() for each in bundled([Packed(one) for one in attempts])]
    assert len(bundles) == 2
    together = of_payloads(GROUPS, bundles)
    assert batch_record(together) == batch_record(alone)
    assert together.dispositions == alone.dispositions == (
        Disposition(7, (0, 1), "trained"),
        Disposition(8, (0, 1), "trained"),
    )
    for mine, theirs in zip(together.samples, alone.samples, strict=True):
        for name in ("tokens", "behaviour", "mask", "ages"):
            assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
        assert (mine.advantage, mine.attempt, mine.group) == (theirs.advantage, theirs.attempt, theirs.group)


def test_what_was_refused_is_not_kept_to_look_at() -> None:
    """Its mask may not be what its stamps say, so that nobody knows which version sampled a token."""
    attempts = [trajectory(lease, sample, (5, 3)) for lease in (7, 8) for sample in (0, 1)]
    arrays = bytearray(attempts[0].arrays)
    arrays[-3:] = b"\1\1\0"
    attempts[0] = msgspec.structs.replace(attempts[0], arrays=memoryview(arrays))
    attempts[2:] = [msgspec.structs.replace(each, reward=float("nan")) for each in attempts[2:]]
    drawn = batch(GROUPS, *attempts)
    assert drawn.outcomes == ("refused", "trained", "refused", "refused")
    assert [(each["lease"], each["sample"]) for each in sample_records(drawn, 0)] == [(7, 1)]
    assert batch_record(drawn)["dropped"] == 3

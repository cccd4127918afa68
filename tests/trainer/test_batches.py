"""From a drawn batch to samples: what trains, what does not, and who says so."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gradient_batches import make_backend, make_model

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import BufferConfig, Config, InferenceConfig
from async_rl.credit_config import CreditConfig
from async_rl.errors import AsyncRLError
from async_rl.routes import RouteShape, route_extras
from async_rl.trajectory import MaskReason, Segment, Trajectory, encode_trajectory, pack_segments
from async_rl.version import VersionRun
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, decode_body, encode_body
from async_rl.wire.payloads import BLOB_BYTES
from trainer.batches import TrainingBatch, penalised, prepare, with_reference_kl

FOR_VERSION, K, VOCABULARY = 9, 4, 32
LIMIT = 20  # tokens of an answer
NIL = msgspec.Raw(b"\xc0")


def segment(*runs: tuple[int, int], n_prompt: int = 2, **changes: Any) -> Segment:
    """`n_prompt` prompt tokens, then for each (version, count) as many sampled ones."""
    n_sampled = sum(count for _, count in runs)
    mask = np.repeat(np.array([MaskReason.PROMPT, MaskReason.SAMPLED], np.uint8), [n_prompt, n_sampled])
    values: dict[str, Any] = {
        "tokens": np.arange(len(mask), dtype=np.int32) % VOCABULARY,
        "logprobs": np.where(mask == 0, np.float32(-0.5), np.float32(0)),
        "mask": mask,
        "versions": tuple(VersionRun(version, f"{version:064x}", count) for version, count in runs),
        "finish": "stop",
    }
    return Segment(**(values | changes))


def trajectory(lease: int, sample: int, reward: float, *parts: Segment, **changes: Any) -> Trajectory:
    headers, arrays = pack_segments(parts or [segment((FOR_VERSION, 3))])
    values = {"status": "ok", "segments": headers, "arrays": arrays, "node": "node-1"}
    return Trajectory(lease=lease, sample=sample, reward=reward, **(values | changes))


def lend(*groups: list[Trajectory], sizes: list[int] | None = None) -> Received:
    """The batch as it reaches the trainer: forwarded by the buffer, through the codec."""
    payloads = [encode_trajectory(one) for group in groups for one in group]
    heads = tuple(
        BatchGroup(ticket, 0, 100 + ticket, size)
        for ticket, size in enumerate(sizes if sizes is not None else map(len, groups))
    )
    inline = tuple(msgspec.Raw(data) if len(data) <= BLOB_BYTES else NIL for data in payloads)
    blobs = [memoryview(data) for data in payloads if len(data) > BLOB_BYTES]
    return Received("buffer", decode_body(encode_body(Batch(3, FOR_VERSION, heads, inline))), blobs)


def prepared(received: Received, on_stale: str = "wait", **credit: Any) -> TrainingBatch:
    config = Config(
        buffer=BufferConfig(max_staleness=K, on_stale=on_stale),
        inference=InferenceConfig(max_new_tokens=LIMIT),
        algorithm=AlgorithmConfig(**credit),
    )
    return prepare(received, config, VOCABULARY)


def outcomes(batch: TrainingBatch) -> dict[tuple[int, int], str]:
    return {(of.lease, sample): of.outcome for of in batch.dispositions for sample in of.samples}


def grpo(*rewards: float) -> list[float]:
    values = np.array(rewards)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()


def test_a_batch_becomes_one_sample_per_segment_with_everything_in_its_place() -> None:
    two_segments = trajectory(1, 1, 0.0, segment((8, 2), (9, 1)), segment((7, 4), n_prompt=3), node="node-2")
    batch = prepared(lend([trajectory(1, 0, 1.0), two_segments], [trajectory(2, 0, 5.0), trajectory(2, 1, 3.0)]))
    assert outcomes(batch) == dict.fromkeys([(1, 0), (1, 1), (2, 0), (2, 1)], "trained")
    assert [(sample.attempt, sample.group) for sample in batch.samples] == [(0, 0), (1, 0), (1, 0), (2, 1), (3, 1)]
    assert [sample.advantage for sample in batch.samples] == pytest.approx([1, -1, -1, 1, -1], abs=1e-5)
    first, second = batch.samples[1:3]
    assert first.tokens.tolist() == [0, 1, 2, 3, 4]
    assert first.mask.tolist() == [1, 1, 0, 0, 0]
    assert first.behaviour.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert first.ages[2:].tolist() == [1, 1, 0]
    assert second.ages[3:].tolist() == [2, 2, 2, 2]
    assert batch.rewards.tolist() == [1, 0, 5, 3]
    assert batch.tokens == 5 + 5 + 7 + 5 + 5
    assert batch.nodes == {"node-1": 3, "node-2": 1}
    assert batch.ages.dtype == np.int32
    assert batch.ages.tolist() == [0, 0, 0, 1, 1, 0, 2, 2, 2, 2, *[0] * 6]


def test_at_the_bound_a_trajectory_trains_and_one_version_older_it_is_stale() -> None:
    at_bound = trajectory(1, 0, 1.0, segment((FOR_VERSION - K, 3)))
    beyond = trajectory(1, 1, 0.0, segment((FOR_VERSION - K - 1, 3)))
    batch = prepared(lend([at_bound, beyond, trajectory(1, 2, 0.0)]))
    assert outcomes(batch) == {(1, 0): "trained", (1, 1): "stale", (1, 2): "trained"}
    assert len(batch.samples) == 2
    assert batch.ages.max() == K
    assert batch.rewards.tolist() == [1, 0]


def test_one_old_token_in_any_segment_makes_the_whole_trajectory_stale() -> None:
    old_start = trajectory(1, 0, 1.0, segment((FOR_VERSION - K - 1, 1), (FOR_VERSION, 30)))
    old_segment = trajectory(1, 1, 1.0, segment((FOR_VERSION, 30)), segment((0, 1)))
    batch = prepared(lend([old_start, old_segment]))
    assert set(outcomes(batch).values()) == {"stale"}
    assert (batch.samples, batch.tokens, batch.nodes) == ([], 0, {})
    assert batch.ages.shape == batch.rewards.shape == (0,)


def test_with_mask_only_the_fresh_tokens_train_and_what_has_none_is_stale() -> None:
    oldest = FOR_VERSION - K
    mixed = trajectory(7, 0, 1.0, segment((oldest - 1, 3), (oldest, 2)))
    stale, fresh = trajectory(7, 1, 0.0, segment((oldest - 1, 4))), trajectory(7, 2, 0.0, segment((FOR_VERSION, 2)))
    batch = prepared(lend([mixed, stale, fresh]), "mask")
    assert list(batch.outcomes) == ["trained", "stale", "trained"]
    prompt, too_old, trains = MaskReason.PROMPT, MaskReason.STALE, MaskReason.SAMPLED
    assert batch.samples[0].mask.tolist() == [prompt] * 2 + [too_old] * 3 + [trains] * 2
    assert batch.ages.tolist() == [K, K, 0, 0]
    assert prepared(lend([mixed, stale, fresh]), "drop").outcomes == ("stale", "stale", "trained")


def test_advantages_are_those_of_what_is_left_of_each_group() -> None:
    """A stale reward of 100 would turn every other advantage of its group negative."""
    stale = trajectory(1, 0, 100.0, segment((0, 3)))
    rest = [trajectory(1, 1, 1.0), trajectory(1, 2, 0.0), trajectory(1, 3, 0.0)]
    other = [trajectory(2, 0, 2.0), trajectory(2, 1, 4.0)]
    batch = prepared(lend([stale, *rest], other))
    assert [sample.advantage for sample in batch.samples] == pytest.approx(grpo(1, 0, 0) + grpo(2, 4))
    # Attempts are numbered without gaps over what trains, groups as they were drawn.
    assert [(sample.attempt, sample.group) for sample in batch.samples] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_group_that_is_all_stale_leaves_its_neighbours_alone() -> None:
    stale = [trajectory(1, sample, 1.0, segment((0, 3))) for sample in range(2)]
    batch = prepared(lend(stale, [trajectory(2, 0, 1.0), trajectory(2, 1, 0.0)]))
    assert [(sample.group, round(sample.advantage, 4)) for sample in batch.samples] == [(1, 1.0), (1, -1.0)]


NAN_LOGPROB = np.array([0, 0, -0.5, math.nan, -0.5], np.float32)
IMPOSSIBLE = np.array([0, 0, -0.5, -math.inf, -0.5], np.float32)  # a token that its sampler could not have sampled
BROKEN = {
    "a log-probability that is no number": trajectory(7, 3, 1.0, segment((9, 3), logprobs=NAN_LOGPROB)),
    "a log-probability of minus infinity": trajectory(7, 3, 1.0, segment((9, 3), logprobs=IMPOSSIBLE)),
    "too few version stamps": trajectory(7, 3, 1.0, segment((9, 3), versions=(VersionRun(9, "9" * 64, 2),))),
    "a first token that nothing predicts": trajectory(7, 3, 1.0, segment((9, 3), n_prompt=0)),
    "bytes that are not there": trajectory(7, 3, 1.0, arrays=memoryview(b"short")),
    "a reward that is no number": trajectory(7, 3, math.nan),
    "a token that the model does not have": trajectory(7, 3, 1.0, segment((9, 3), tokens=np.full(5, VOCABULARY))),
    "nothing sampled": trajectory(7, 3, 1.0, segment()),
    "an attempt that failed": trajectory(7, 3, 0.0, status="env_failed", segments=(), arrays=memoryview(b"")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_trajectory_is_refused_and_named_with_its_node_and_the_rest_trains(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "learner"):
        batch = prepared(lend([trajectory(7, 2, 1.0), BROKEN[what], trajectory(7, 4, 0.0)]))
    assert outcomes(batch) == {(7, 2): "trained", (7, 3): "refused", (7, 4): "trained"}
    assert [sample.advantage for sample in batch.samples] == pytest.approx(grpo(1, 0))
    (record,) = caplog.records
    assert "attempt 7/3" in record.getMessage()
    assert "node-1" in record.getMessage()


def test_large_trajectories_come_as_blobs_in_their_places() -> None:
    n_sampled = BLOB_BYTES // 9 + 1
    large = [trajectory(1, sample, float(sample), segment((9, n_sampled + sample))) for sample in (1, 3)]
    received = lend([trajectory(1, 0, 0.0), large[0], trajectory(1, 2, 2.0), large[1]])
    assert [bytes(raw) == b"\xc0" for raw in received.message.trajectories] == [False, True, False, True]
    batch = prepared(received)
    assert batch.rewards.tolist() == [0, 1, 2, 3]
    assert [len(sample.tokens) for sample in batch.samples] == [5, n_sampled + 3, 5, n_sampled + 5]
    # Their arrays are views of the received frame: nothing of that size is copied.
    assert np.shares_memory(batch.samples[1].tokens, np.frombuffer(received.blobs[0], np.uint8))


def test_a_blob_that_is_missing_is_an_error_that_names_the_batch() -> None:
    received = lend([trajectory(1, 0, 0.0, segment((9, BLOB_BYTES)))])
    with pytest.raises(AsyncRLError, match="batch 3: a trajectory cannot be decoded"):
        prepared(msgspec.structs.replace(received, blobs=[]))


@pytest.mark.parametrize("sizes", [[1, 2], [2, 3], []])
def test_a_wrong_number_of_trajectories_is_an_error_with_both_numbers(sizes: list[int]) -> None:
    groups = [[trajectory(lease, sample, 1.0) for sample in range(2)] for lease in (1, 2)]
    with pytest.raises(AsyncRLError, match=f"batch 3: {sum(sizes)} trajectories declared, 4 received"):
        prepared(lend(*groups, sizes=sizes))


def test_what_is_no_trajectory_is_an_error_that_names_the_batch() -> None:
    received = lend([trajectory(1, 0, 1.0)])
    broken = msgspec.structs.replace(received.message, trajectories=(msgspec.Raw(b"\x93\x01\x02\x03"),))
    with pytest.raises(AsyncRLError, match="batch 3: a trajectory cannot be decoded"):
        prepared(msgspec.structs.replace(received, message=broken))


# --- what an answer is worth -----------------------------------------------------------------------------------------


def test_long_answers_lose_reward_before_advantages_and_metrics_keep_what_was_earned() -> None:
    lengths = (4, 16, 18, 20)
    batch = prepared(
        lend([trajectory(1, sample, 1.0, segment((9, length))) for sample, length in enumerate(lengths)]),
        overlong_buffer=4, overlong_penalty=2.0,
    )  # fmt: skip
    assert batch.rewards.tolist() == [1, 1, 1, 1]
    assert batch.shaped.tolist() == [1, 1, 0, -1]
    assert [sample.advantage for sample in batch.samples] == pytest.approx(grpo(1, 1, 0, -1))


def test_a_truncated_answer_counts_and_trains_unless_it_is_masked() -> None:
    cut = trajectory(1, 0, 0.0, segment((9, 2)), segment((9, 3), finish="length"))
    cut_before = trajectory(1, 1, 1.0, segment((9, 2), finish="length"), segment((9, 3)))
    groups = [cut, cut_before, trajectory(1, 2, 1.0)]
    kept, masked = prepared(lend(groups)), prepared(lend(groups), truncated="mask")
    assert kept.truncated == masked.truncated == 1
    assert [sample.mask.tolist() for sample in kept.samples[:2]] == [[1, 1, 0, 0], [1, 1, 0, 0, 0]]
    truncated = int(MaskReason.TRUNCATED)
    assert [sample.mask.tolist() for sample in masked.samples[:2]] == [
        [1, 1] + [truncated] * 2,
        [1, 1] + [truncated] * 3,
    ]
    # Its reward still counts in the mean of its group, and it was trained for the ledger.
    assert [sample.advantage for sample in masked.samples] == [sample.advantage for sample in kept.samples]
    assert set(outcomes(masked).values()) == {"trained"}
    assert len(masked.ages) == len(kept.ages) - 5


def test_normalised_advantages_have_deviation_one_over_the_batch() -> None:
    groups = [[trajectory(1, 0, 4.0), trajectory(1, 1, 0.0)], [trajectory(2, 0, 1.0), trajectory(2, 1, 0.0)]]
    batch = prepared(lend(*groups), advantage="dr_grpo", advantage_normalisation="batch")
    plain = np.array([2.0, -2.0, 0.5, -0.5])
    assert [sample.advantage for sample in batch.samples] == pytest.approx(plain / plain.std(), rel=1e-5)


def test_the_distance_to_the_reference_is_taken_from_the_reward_of_each_attempt() -> None:
    pair = [trajectory(1, 0, 1.0, segment((9, 2)), segment((9, 1))), trajectory(1, 1, 1.0)]
    batch = prepared(lend(pair), advantage="dr_grpo")
    assert [sample.advantage for sample in batch.samples] == [0, 0, 0]
    # What the reference says of the prompt, or of an old token, is nobody's business.
    reference = [
        np.array(values, np.float32) for values in ([7, 7, -1.5, -0.5], [7, 7, -2.5], [7, 7, -0.5, -0.5, -0.25])
    ]
    credit = CreditConfig(advantage="dr_grpo", reference_kl="k1", reference_kl_place="reward", reference_kl_weight=0.1)
    after = penalised(batch, reference, credit)
    assert after.shaped.tolist() == pytest.approx([1 - 0.1 * 3.0, 1 + 0.1 * 0.25])
    assert [sample.advantage for sample in after.samples] == pytest.approx([-0.1625, -0.1625, 0.1625])
    assert after.rewards.tolist() == [1, 1]
    gaps = np.array([-1, 0, -2, 0, 0, 0.25])
    assert after.reference_kl == pytest.approx((np.exp(gaps) - 1 - gaps).mean())


def test_a_token_that_does_not_train_counts_in_the_distance_of_its_answer(tmp_path: Path) -> None:
    """Cut, or with an old beginning: what it is compared with must have paid for the same."""
    make_model(tmp_path)
    backend = make_backend(tmp_path, AlgorithmConfig(), "float32")
    credit = CreditConfig(advantage="dr_grpo", reference_kl="k1", reference_kl_place="reward", reference_kl_weight=0.5)
    answers = [
        trajectory(1, 0, 1.0, segment((9, 3), finish="length")),
        trajectory(1, 1, 1.0, segment((FOR_VERSION - K - 1, 2), (9, 2))),
        trajectory(1, 2, 0.0),
    ]
    masked = prepared(lend(answers), advantage="dr_grpo", truncated="mask", on_stale="mask")
    reasons = {reason for sample in masked.samples for reason in sample.mask.tolist()}
    assert reasons >= {int(MaskReason.TRUNCATED), int(MaskReason.STALE)}
    after = with_reference_kl(masked, backend, credit)
    after_prompt = [(np.arange(len(sample.tokens)) < 2).astype(np.uint8) for sample in masked.samples]
    unmasked = [sample._replace(mask=mask) for sample, mask in zip(masked.samples, after_prompt, strict=True)]
    plain = backend.reference(unmasked)
    penalty = [(sample.behaviour[2:] - each[2:]).sum() for sample, each in zip(masked.samples, plain, strict=True)]
    assert after.shaped == pytest.approx(masked.rewards - 0.5 * np.array(penalty), rel=1e-5)
    assert [sample.mask.tolist() for sample in after.samples] == [sample.mask.tolist() for sample in masked.samples]


def test_a_batch_of_nothing_has_no_distance() -> None:
    batch = prepared(lend([trajectory(1, 0, 1.0, segment((0, 3)))]))
    assert penalised(batch, [], CreditConfig()) == batch


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_behaviour_logprob_that_is_not_finite_is_refused_and_the_trajectory_named(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    logprobs = np.array([0, 0, -0.5, value, -0.5], np.float32)
    with caplog.at_level(logging.ERROR, "learner"):
        batch = prepared(lend([trajectory(7, 3, 1.0, segment((9, 3), logprobs=logprobs)), trajectory(7, 4, 0.0)]))
    assert outcomes(batch)[7, 3] == "refused"
    assert "attempt 7/3, segment 0: a behaviour log-probability is missing, not finite or positive" in caplog.text


@pytest.mark.parametrize("change", [-1, 1])
def test_behaviour_logprobs_that_are_short_or_too_many_are_refused_and_the_trajectory_named(
    change: int, caplog: pytest.LogCaptureFixture
) -> None:
    logprobs = np.full(5 + change, -0.5, np.float32)
    with caplog.at_level(logging.ERROR, "learner"):
        batch = prepared(lend([trajectory(7, 3, 1.0, segment((9, 3), logprobs=logprobs)), trajectory(7, 4, 0.0)]))
    assert outcomes(batch)[7, 3] == "refused"
    assert "attempt 7/3: " in caplog.text


def test_the_reference_pass_is_made_only_where_the_reward_pays_for_it(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path, AlgorithmConfig(), "float32")
    batch = prepared(lend([trajectory(1, 0, 1.0), trajectory(1, 1, 0.0)]), advantage="dr_grpo")
    reward = CreditConfig(advantage="dr_grpo", reference_kl="k1", reference_kl_place="reward", reference_kl_weight=0.5)
    after = with_reference_kl(batch, backend, reward)
    reference = np.array([each[2:].sum() for each in backend.reference(batch.samples)])
    assert after.shaped == pytest.approx(batch.rewards - 0.5 * (3 * -0.5 - reference), rel=1e-5)
    for elsewhere in (CreditConfig(), CreditConfig(reference_kl="k3")):
        assert with_reference_kl(batch, backend, elsewhere) is batch


# --- centred scores --------------------------------------------------------------------------------------------------

TOP = 4
CENTRED = {"center_scores": TOP, "treatment": "uncorrected"}


def with_top(change: str = "") -> Segment:
    """Two prompt tokens and three sampled ones with the sampler's four likeliest, broken in one way."""
    n, k = 5, 3 if change == "fewer" else TOP
    ids = np.tile(np.arange(7, 7 + k, dtype=np.int32), (n, 1))
    logprobs = np.log(np.tile(np.array([0.5, 0.25, 0.125, 0.0625][:k], np.float32), (n, 1)))
    ids[:2], logprobs[:2] = 0, 0  # as engines send it: nothing was sampled there
    if change in ("outside", "negative"):
        ids[3, 1] = VOCABULARY if change == "outside" else -1
    if change == "twice":
        ids[4, 0] = ids[4, 3]
    if change in ("not a number", "infinite", "too likely", "above one"):
        logprobs[2, 0] = {"not a number": np.nan, "infinite": -np.inf, "too likely": np.log(0.6), "above one": 200.0}[
            change
        ]
    extras: dict[str, Any] = {"top_ids": ids, "top_logprobs": logprobs}
    if change == "dtype":
        extras["top_logprobs"] = logprobs.astype(np.float64)
    if change == "missing":
        del extras["top_ids"]
    return segment((FOR_VERSION, 3), extras={} if change == "none" else extras)


def test_the_samplers_likeliest_tokens_reach_the_sample_as_they_were_sent() -> None:
    given = with_top()
    batch = prepared(lend([trajectory(7, 2, 1.0, given), trajectory(7, 3, 0.0, given)]), **CENTRED)
    assert set(outcomes(batch).values()) == {"trained"}
    for sample in batch.samples:
        assert sample.top is not None
        assert np.array_equal(sample.top.ids, given.extras["top_ids"])
        assert np.array_equal(sample.top.logprobs, given.extras["top_logprobs"])
    assert all(sample.top is None for sample in prepared(lend([trajectory(7, 2, 1.0, given)])).samples)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("none", "top_ids is missing"), ("missing", "top_ids is missing"), ("dtype", "top_logprobs is float64"),
        ("fewer", r"top_ids is int32 \[5, 3\], and \[algorithm\] center_scores = 4 needs int32 \[5, 4\]"),
        ("outside", "are not all in the vocabulary"), ("negative", "are not all in the vocabulary"),
        ("twice", "a token twice"), ("not a number", "is not finite"), ("infinite", "is not finite"),
        ("too likely", "add up to 1.0375"), ("above one", "add up to"),
    ],
)  # fmt: skip
def test_likeliest_tokens_that_contradict_themselves_are_refused_with_the_attempts_name(
    change: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = [trajectory(7, 2, 1.0, with_top()), trajectory(7, 3, 0.0, with_top(change))]
    batch = prepared(lend(attempts), **CENTRED)
    assert outcomes(batch) == {(7, 2): "trained", (7, 3): "refused"}
    assert re.search(rf"attempt 7/3: .*{says}", caplog.text)


# --- routes ----------------------------------------------------------------------------------------------------------

ROUTES = RouteShape(layers=2, routed=(1,), experts=4, each=2)


def with_routes(change: str = "") -> Segment:
    """Two prompt tokens and three sampled ones, of which all but the last went to two of four experts."""
    routes = route_extras(np.array([[[-1, -1], [3, t % 3]] for t in range(4)]), 5)["routes"]
    if change == "outside":
        routes[2, 1, 0] = 4
    return segment((FOR_VERSION, 3), extras={} if change == "none" else {"routes": routes})


def test_routes_reach_the_sample_where_they_are_replayed_and_what_has_none_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = [trajectory(7, n, float(n), with_routes(change)) for n, change in enumerate(("", "none", "outside"))]
    config = Config(algorithm=AlgorithmConfig(router_replay="rollout"))
    batch = prepare(lend(attempts), config, VOCABULARY, ROUTES)
    assert outcomes(batch) == {(7, 0): "trained", (7, 1): "refused", (7, 2): "refused"}
    assert "attempt 7/1: routes is missing" in caplog.text
    assert "attempt 7/2: routes from -1 to 4 are not all among the model's 4 experts" in caplog.text
    (sample,) = batch.samples
    assert sample.routes is not None
    assert sample.routes[:, 1].tolist() == [[3, 0], [3, 1], [3, 2], [3, 0], [-1, -1]]
    live = prepare(lend(attempts[:1]), Config(), VOCABULARY)
    assert live.samples[0].routes is None  # they may be sent, and are not used

"""What a simulation assumes of the world: distributions, the speeds of both pools, and what goes wrong.

Everything is plain data, given by hand or fitted from a real run (buffer.fit). Times are in virtual seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

BLOCK = 1024  # numbers drawn at a time: one by one a draw costs a microsecond, in blocks a hundredth of it


class Constant(msgspec.Struct, frozen=True, tag=True):
    value: float

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        return np.full(count, self.value)

    @property
    def mean(self) -> float:
        return self.value


class Lognormal(msgspec.Struct, frozen=True, tag=True):
    """Long-tailed, as answer lengths are, and cut at `most`."""

    median: float
    sigma: float
    most: float = math.inf

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        return np.minimum(self.most, self.median * rng.lognormal(0.0, self.sigma, count))

    @property
    def mean(self) -> float:
        """E[min(X, most)]."""
        whole = self.median * math.exp(self.sigma**2 / 2)
        if math.isinf(self.most):
            return whole
        if not self.sigma:
            return min(whole, self.most)
        z = math.log(self.most / self.median) / self.sigma
        return whole * _normal_cdf(z - self.sigma) + self.most * (1.0 - _normal_cdf(z))


class Values(msgspec.Struct, frozen=True, tag=True):
    """One of these, each as likely as the next: observations, or a table of quantiles."""

    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        return rng.choice(np.asarray(self.values, dtype=np.float64), count)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


Distribution = Constant | Lognormal | Values


def numbers(distribution: Distribution, rng: np.random.Generator) -> Iterator[float]:
    """One draw after the other, for ever."""
    while True:
        yield from distribution.draw(rng, BLOCK).tolist()


def uniform(rng: np.random.Generator) -> Iterator[float]:
    """In [0, 1), one after the other, for ever."""
    while True:
        yield from rng.random(BLOCK).tolist()


class Speed(NamedTuple):
    """A decode step of a node takes `step_s + row_s * rows`, prefills included. With `tokens_per_second` not 0 the node
    is capped as `inference.max_tokens_per_second` does it: a step takes at least (samples in the engine, those that
    wait for a row included) / tokens_per_second."""

    step_s: float = 0.02
    row_s: float = 0.0
    tokens_per_second: float = 0.0


class TrainerSpeed(NamedTuple):
    """From one draw to the next, in the order in which the learner does it.

    The batch needs `lend_s` to come; a step on n sampled tokens takes a draw of `step_s` plus n * `token_s`; then the
    batch is confirmed. After `export_s` the new policy is registered, after `upload_s` stored, and after `rest_s` (and
    `checkpoint_s`, at every `checkpoint_every`-th version) the trainer draws again. With more than one of `workers`
    the time from batch to stored policy is divided by their number: an assumption, for there is one trainer today."""

    step_s: Distribution = Constant(1.0)
    token_s: float = 0.0
    lend_s: float = 0.0
    export_s: Distribution = Constant(0.0)
    upload_s: Distribution = Constant(0.0)
    rest_s: Distribution = Constant(0.0)
    checkpoint_s: float = 0.0
    checkpoint_every: int = 0
    workers: int = 1


class Scenario(NamedTuple):
    """The world. Probabilities are per sample unless said otherwise; all default to a world without faults."""

    seed: int = 0
    nodes: int = 4
    slots: int = 8
    joins: tuple[tuple[float, int], ...] = ()
    """(seconds, how many): nodes that join later."""
    lengths: Distribution = Constant(50.0)
    """Sampled tokens of an attempt."""
    prompt_tokens: float = 0.0
    overhead_bytes: float = 160.0
    """Of an encoded trajectory besides its tokens."""
    speed: Speed = Speed()
    slowest: float = 1.0
    """A node's own factor on its decode steps is drawn uniformly from [1, slowest]."""
    delivery_s: Distribution = Constant(0.0)
    """From the end of an attempt until its result is with the buffer: scoring and two messages."""
    push_s: Distribution = Constant(0.1)
    """From the registration of a policy, or the end of the push before it, until a node serves it."""
    trainer: TrainerSpeed = TrainerSpeed()
    in_flight: Literal["finish", "continue", "recompute"] = "finish"
    whole_groups: bool = False
    """A lease's samples end together, when the longest of them does, and are one event; until then they take the rows
    that they would have taken on the average. Against single samples (measured over 36 worlds) the yield is within
    10 % at bound 4, and at bounds 0 and 1, where everyone waits for the last group, up to a quarter less."""
    node_life_s: float = 0.0
    """Mean of a node's exponential life; 0 is for ever. The last node that serves does not die."""
    notice_s: float = 3.0
    """From a death until the buffer knows of it (three heartbeats)."""
    rejoin_s: float = 10.0
    """From a death until a node of the same name joins again; may be shorter than notice_s."""
    undead: float = 0.0
    """Share of deaths that are none: the buffer gives the node up at once, and its results still come."""
    refused: float = 0.0
    env_failed: float = 0.0
    aborted: float = 0.0
    hangs: float = 0.0
    """Samples that never end, until their lease is cancelled."""
    zero_variance: float = 0.0
    """Share of task instances whose rewards are all equal."""
    skipped: float = 0.0
    """Share of batches of which the trainer refuses everything."""
    troubled: float = 0.0
    """Share of steps after which the trainer reports that what it got was too far from what it trains."""
    draw_timeout_s: float = 10_000.0
    """The trainer waits so long for one batch; then the run is stuck, and ends with who waited for whom."""
    eval_every: int = 0
    eval_n: int = 0
    eval_samples: int = 1
    eval_sets: int = 1
    eval_timeout_s: float = 30.0


def samples_asked(slots: int, group_size: int) -> int:
    """How many samples a node wants to hold: its slots, and a few more so that a freed slot need not wait for a lease
    (inference.node). A lease is of a whole group, so it may get all but one of a group more."""
    return slots + max(group_size, slots // 4)


class Shapes:
    """How long the samples of a lease are, as (decode tokens until the last ends, rows on the average, tokens of one):
    drawn in blocks. `single()` is one sample; `whole(n)` is n samples that end together."""

    def __init__(self, lengths: Distribution, group_size: int, slots: int, rng: np.random.Generator) -> None:
        self._lengths = lengths
        self._group_size = group_size
        self._slots = slots
        self._rng = rng
        self._single = numbers(lengths, rng)
        self._groups = self._blocks(group_size)

    def single(self) -> tuple[int, float, int]:
        tokens = max(1, round(next(self._single)))
        return tokens, 1.0, tokens

    def whole(self, samples: int) -> tuple[int, float, int]:
        return next(self._groups if samples == self._group_size else self._blocks(samples))

    def _blocks(self, samples: int) -> Iterator[tuple[int, float, int]]:
        while True:
            drawn = np.maximum(1, np.rint(self._lengths.draw(self._rng, BLOCK * samples))).reshape(BLOCK, samples)
            totals = drawn.sum(axis=1)
            # No more rows than the node has: what does not fit takes its turn.
            longest = np.maximum(drawn.max(axis=1), np.ceil(totals / self._slots))
            tokens = np.maximum(1, np.rint(totals / samples))
            yield from zip(
                longest.astype(np.int64).tolist(), (totals / longest).tolist(), tokens.astype(np.int64).tolist(),
                strict=True,
            )  # fmt: skip


def as_table(value: Any) -> Any:
    """A scenario, or a part of one, as plain JSON values."""
    if hasattr(value, "_asdict"):
        return {key: as_table(item) for key, item in value._asdict().items()}
    return msgspec.to_builtins(value)

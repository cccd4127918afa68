"""From a run directory to a scenario: the lengths and speeds that a real run had.

    metrics.jsonl, a step's line   length_quantiles -> lengths; train_s, cycle_s, upload_ms, step_s -> the trainer
    metrics.jsonl, "pools" lines   busy_s, decode_steps, sampled_tokens -> a decode step's cost; push_ms -> pushes

Each value is the measured distribution, thinned; what a run cannot show is said in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.inference_config import as_one_kind
from async_rl.run.metrics import Record, read_metrics, steps_of
from async_rl.trajectory import BYTES_PER_TOKEN
from buffer.scenario import Constant, Speed, TrainerSpeed, Values, samples_asked

FloatArray = npt.NDArray[np.float64]

WARMUP_STEPS = 3  # of the trainer, which are slower than the rest (memory, caches, kernels)
LEAST_STEPS = 8  # in a run that a fit is made of
KEPT_VALUES = 256  # of a distribution
LINK_S = 0.002  # a result's way to the buffer and a lease's way back, or a batch's way, when nothing else is known
READY_WAIT = 0.1  # of a trainer's cycle: who waits less for a batch found it ready
LEAST_SPREAD = 0.15  # relative spread below which the effect of rows, or of tokens, cannot be told from a constant


class FitError(AsyncRLError):
    """A run directory that says too little; the message says what is missing."""


class Measured(NamedTuple):
    """What a run had. `speed` is of one node; under a cap that held it back only the cap is known of it (`capped`).
    `steps_per_s`, `tokens_per_s`, `staleness` and `trainer_idle` are the run's own, after `settled` steps."""

    directory: str
    config: Config
    lengths: Values
    prompt_tokens: float
    overhead_bytes: float
    speed: Speed
    capped: bool
    delivery_s: Constant
    push_s: Values
    trainer: TrainerSpeed
    steps_per_s: float
    tokens_per_s: float
    staleness: float
    trainer_idle: float
    notes: tuple[str, ...]


def settled(steps: int, max_staleness: int) -> int:
    """How many first steps to leave out of a mean: until the batches are as old as they will be, twice over."""
    return min(steps // 3, 2 * (max_staleness + 1))


def read_run(directory: Path) -> Measured:
    """Raises FitError, and the errors of reading a config or metrics."""
    metrics = directory / "metrics.jsonl"
    if not metrics.exists():
        raise FitError(f"--from {directory}: no metrics.jsonl there: name the directory of a run")
    config = load_config(str(directory / "config.toml"))
    config = msgspec.structs.replace(config, inference=as_one_kind(config.inference))
    records = read_metrics(metrics)
    steps = steps_of(records)
    pools = [record["pools"] for record in records if "pools" in record]
    return fit(str(directory), config, steps, pools)


def fit(directory: str, config: Config, steps: Sequence[Record], pools: Sequence[Record]) -> Measured:
    """The same from records: of steps, and of the pools. Raises FitError."""
    _check(directory, steps, pools)
    warm = steps[WARMUP_STEPS:]
    notes: list[str] = []
    speed, capped = _speed(_work(pools), config, notes)
    attempts = float(sum(step["trained"] for step in warm))
    tokens = float(sum(step["tokens"] for step in warm))
    prompt = (sum(step["batch_tokens"] for step in warm) - tokens) / attempts
    first = settled(len(steps), config.buffer.max_staleness)
    span = steps[-1]["time_s"] - steps[first - 1]["time_s"]
    after = steps[first:]
    trained = sum(step["tokens"] for step in after)
    return Measured(
        directory=directory,
        config=config,
        lengths=_lengths(warm),
        prompt_tokens=prompt,
        overhead_bytes=_overhead(pools, config.buffer.group_size, prompt + tokens / attempts),
        speed=speed,
        capped=capped,
        delivery_s=Constant(float(np.mean([step["scoring_s"] for step in warm])) + LINK_S),
        push_s=_pushes(pools),
        trainer=_trainer(steps, config.trainer.checkpoint_every, notes),
        steps_per_s=len(after) / span,
        tokens_per_s=trained / span,
        staleness=sum(step["staleness_mean"] * step["tokens"] for step in after) / trained,
        trainer_idle=sum(step["draw_wait_s"] for step in after) / span,
        notes=tuple(notes),
    )


def _check(directory: str, steps: Sequence[Record], pools: Sequence[Record]) -> None:
    if len(steps) < LEAST_STEPS:
        raise FitError(f"--from {directory}: {len(steps)} steps are too few to fit anything: {LEAST_STEPS} or more")
    for key in ("length_quantiles", "cycle_s", "train_s", "upload_ms", "scoring_s"):
        if key not in steps[-1]:
            raise FitError(f"--from {directory}: its steps do not tell {key}: it was written by an older version")
    if not any(pool["push_ms"] for pool in pools):
        raise FitError(f'--from {directory}: no push was recorded in its "pools" lines: it was too short')


def _thin(values: FloatArray | Sequence[float]) -> Values:
    """At most KEPT_VALUES: the means of as many equal parts of the ordered values, so that the whole mean stays."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered) > KEPT_VALUES:
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        bounds = np.linspace(0, len(ordered), KEPT_VALUES + 1)
        ordered = np.diff(np.interp(bounds, np.arange(len(sums)), sums)) * KEPT_VALUES / len(ordered)
    return Values(tuple(ordered.tolist()))


# --- attempts ---------------------------------------------------------------------------------------------------------


def _lengths(steps: Sequence[Record]) -> Values:
    """Each step's quantiles, the outermost with half the weight (the trapezoid rule), pooled."""
    inner = [length for step in steps for length in step["length_quantiles"][1:-1]]
    outer = [length for step in steps for length in (step["length_quantiles"][0], step["length_quantiles"][-1])]
    return _thin([float(length) for length in (*inner, *inner, *outer)])


def _overhead(pools: Sequence[Record], group_size: int, tokens: float) -> float:
    """Bytes of an encoded trajectory besides its tokens."""
    attempts = group_size * sum(pool["ready_groups"] for pool in pools)
    if not attempts:
        return 0.0
    held = float(sum(pool["ready_bytes"] for pool in pools))
    return float(max(0.0, held / attempts - tokens * BYTES_PER_TOKEN))


# --- nodes ------------------------------------------------------------------------------------------------------------


def _work(pools: Sequence[Record]) -> FloatArray:
    """What each node did from one look to the next: rows (busy seconds, decode steps, sampled tokens)."""
    before: dict[str, Mapping[str, float]] = {}
    rows = []
    for pool in pools:
        for node in pool["nodes"]:
            old = before.get(node["name"])
            if old is not None and node["decode_steps"] > old["decode_steps"]:
                rows.append([node[key] - old[key] for key in ("busy_s", "decode_steps", "sampled_tokens")])
            before[node["name"]] = node
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def _speed(work: FloatArray, config: Config, notes: list[str]) -> tuple[Speed, bool]:
    """busy = step_s * steps + row_s * tokens, by least squares, neither below 0; and whether the cap explains it all:
    a decode step takes no longer than the cap allows it for as many samples as a node ever holds."""
    busy, steps, tokens = work.T
    if not steps.sum():
        raise FitError('the "pools" lines show no node at work: the run was too short')
    inference, group_size = config.inference, config.buffer.group_size
    cap, held = inference.max_tokens_per_second, samples_asked(inference.slots, group_size) + group_size - 1
    if cap and busy.sum() / steps.sum() <= held / cap:
        return Speed(step_s=0.0, tokens_per_second=cap), True
    rows = tokens / steps
    mean = float(busy.sum() / steps.sum())
    spread = float(np.sqrt(np.average((rows - np.average(rows, weights=steps)) ** 2, weights=steps)) / rows.mean())
    if spread < LEAST_SPREAD:
        notes.append(
            f"the nodes always decoded about {rows.mean():.0f} samples at once, so a decode step is taken to cost "
            f"{mean * 1e3:.3g} ms for other numbers too"
        )
        return Speed(step_s=mean, tokens_per_second=cap), False
    (step_s, row_s), *_ = np.linalg.lstsq(np.stack([steps, tokens], axis=1), busy, rcond=None)
    if row_s < 0:
        step_s, row_s = mean, 0.0
    elif step_s < 0:
        step_s, row_s = 0.0, busy.sum() / tokens.sum()
    return Speed(step_s=float(step_s), row_s=float(row_s), tokens_per_second=cap), False


def _pushes(pools: Sequence[Record]) -> Values:
    """Seconds from a policy's registration until a node serves it."""
    return _thin([value / 1e3 for pool in pools for value in pool["push_ms"]])


# --- the trainer ------------------------------------------------------------------------------------------------------


def _trainer(steps: Sequence[Record], checkpoint_every: int, notes: list[str]) -> TrainerSpeed:
    """Durations between the learner's own time stamps; `rest` is what a whole step takes beyond waiting and cycle."""
    warm = steps[WARMUP_STEPS:]
    train, tokens, cycle, wait = (_column(warm, key) for key in ("train_s", "tokens", "cycle_s", "draw_wait_s"))
    upload = _column(warm, "upload_ms") / 1e3
    whole = _column(warm, "time_s") - _column(steps[WARMUP_STEPS - 1 : -1], "time_s")
    rest = np.maximum(0.0, whole - wait - cycle)
    # A step's own line is written after it, so what lies between two lines belongs to the one before.
    saves = np.array([bool(checkpoint_every) and step["version"] % checkpoint_every == 0 for step in warm])
    plain = rest[~saves] if (~saves).any() else rest
    token_s = _seconds_per_token(train, tokens, notes)
    # The shortest wait is the way of a batch that was ready, if there ever was one.
    was_ready = wait.min() < READY_WAIT * np.median(cycle)
    return TrainerSpeed(
        step_s=_thin(train - token_s * tokens),
        token_s=token_s,
        lend_s=float(wait.min()) if was_ready else LINK_S,
        export_s=_thin(np.maximum(0.0, cycle - train - upload)),
        upload_s=_thin(upload),
        rest_s=_thin(plain),
        checkpoint_s=max(0.0, float(rest[saves].mean() - plain.mean())) if saves.any() else 0.0,
        checkpoint_every=checkpoint_every,
    )


def _column(steps: Sequence[Record], key: str) -> FloatArray:
    return np.array([step[key] for step in steps], dtype=np.float64)


def _seconds_per_token(train: FloatArray, tokens: FloatArray, notes: list[str]) -> float:
    """Least squares, where batches differ enough in size; else a step is taken to cost what its tokens cost."""
    proportional = float(train.sum() / tokens.sum())
    if tokens.std() < LEAST_SPREAD * tokens.mean():
        notes.append(
            f"the batches were all of about {tokens.mean():.0f} sampled tokens; larger and smaller ones are taken to "
            f"cost the same for each token ({proportional * 1e3:.3g} ms)"
        )
        return proportional
    return float(np.clip(np.polyfit(tokens, train, 1)[0], 0.0, proportional))

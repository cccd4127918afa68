"""`metrics.jsonl`: one JSON object a line, one line a training step; written by the trainer, read by everyone else.

A step's keys: step (from 0), version (that it made: step + 1), digest (of the policy that it published), data (a digest
of what it trained on), time_s (since the trainer began), reward (mean over
the batch's attempts), staleness_max, staleness_mean (versions), tokens (trained), train_tokens_per_s, draw_wait_s,
train_s, step_s, loss, k3, ess, and whatever else the loss reports. An evaluation is an object under the key "eval"
(several in a list under "evals" as well), in a step's line or in a line of its own: version, set (its name), reward
(mean@k over instances), interval (95 %), n (samples that it is of), instances, samples (of each), cancelled, and pass:
by k, {value, interval, n (instances)}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from async_rl.errors import AsyncRLError

Record = dict[str, Any]


class MetricsError(AsyncRLError):
    """A metrics file with a line in its midst that is not a JSON object; the message names the line."""


class MetricsWriter:
    """Appends records; each is with the operating system when `write` returns, so a reader sees whole steps. A torn
    last line, left by a writer that was killed, is cut off first, and with `keep_before_step` every step from that
    one on: a run that goes on from a checkpoint makes them again."""

    def __init__(self, path: Path, keep_before_step: int | None = None) -> None:
        _tidy(path, keep_before_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Numbers that JSON has no words for (NaN, infinities) become null."""
        self._file.write(json.dumps(_finite(record), separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsTail:
    """Reads what was appended since the last look; a line without its end waits for the next one. A file that took
    another's place (a trainer went back to its checkpoint) is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_number = 0
        self._offset = 0
        self._line = 0

    def read(self) -> list[Record]:
        """New records; none while the file does not exist. Raises MetricsError."""
        try:
            with self.path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file_number:
                    self._file_number, self._offset, self._line = number, 0, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for text in whole.splitlines():
            self._line += 1
            records.append(_parse(text, self.path, self._line))
        return records


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a file; a torn last line is left out. Raises MetricsError."""
    return MetricsTail(path).read()


def steps_of(records: Iterable[Record]) -> list[Record]:
    """The training steps, in order. After a resume the steps since the checkpoint are there twice: the later counts."""
    by_step = {int(record["step"]): record for record in records if "reward" in record}
    return [by_step[step] for step in sorted(by_step)]


def eval_sets_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The evaluations that have a reward (of one with n = 0 there is none), of each set by version; of two at one
    version the later counts. The set that came first is the first of them."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        for item in record.get("evals") or ([record["eval"]] if record.get("eval") else []):
            by_version = found.setdefault(set_of(item), {})
            if item["reward"] is not None:
                by_version[int(item["version"])] = item
    return {name: [some[version] for version in sorted(some)] for name, some in found.items() if some}


def evals_of(records: Iterable[Record]) -> list[Record]:
    """The evaluations of the first set alone."""
    return next(iter(eval_sets_of(records).values()), [])


def set_of(evaluation: Record) -> str:
    """The set's name; of a run from before there were several, the one that there was."""
    return str(evaluation.get("set", "eval"))


def eval_numbers(evaluation: Record) -> dict[str, float]:
    """An evaluation as flat numbers by name: reward, reward_low, reward_high, n, …, pass@4, pass@4_low, pass@4_high."""
    numbers = {key: value for key, value in evaluation.items() if isinstance(value, int | float) and key != "version"}
    means = {"reward": evaluation, **{f"pass@{k}": each for k, each in evaluation.get("pass", {}).items()}}
    for name, each in means.items():
        if name != "reward" and each["value"] is not None:
            numbers[name] = each["value"]
        if interval := each.get("interval"):
            numbers[f"{name}_low"], numbers[f"{name}_high"] = interval
    return numbers


def _parse(text: bytes, path: Path, line: int) -> Record:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise MetricsError(f"{path}, line {line}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise MetricsError(f"{path}, line {line}: expected a JSON object, found {type(record).__name__}")
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _tidy(path: Path, keep_before_step: int | None) -> None:
    """Whole lines of the steps to keep (all, for None); written beside and renamed, so none is lost on the way."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n")]
    if keep_before_step is not None:
        steps = [_parse(line, path, number).get("step") for number, line in enumerate(kept, 1)]
        kept = [line for line, step in zip(kept, steps, strict=True) if step is None or step < keep_before_step]
    if kept != lines:
        partial = path.with_name(path.name + ".part")
        partial.write_bytes(b"".join(kept))
        partial.replace(path)

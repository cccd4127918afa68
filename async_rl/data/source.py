"""Rows of one data source: files of this machine or a data set of a hub, read with the `datasets` library.

    files      `path`: a file, a folder of files of one format, or a pattern; JSON lines, Parquet, Arrow or CSV
    hub        `name`, with `config` and `revision` as the hub knows them
    streamed   read forward, nothing kept but a few blocks of rows (async_rl.data.stream); needs `size`

Filters are asked of each row in the order of the files, so row n is the same on every machine that has the same data.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from async_rl.data.stream import ForwardRows
from async_rl.errors import AsyncRLError
from async_rl.imports import imported
from async_rl.schema import ConfigError, Count, PositiveFloat, PositiveInt, Section

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
NOT_ROWS = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})  # beside Arrow files that datasets saved
BATCH = 1000  # rows that a filter reads at once

Row = dict[str, Any]
Keep = Callable[[Row], bool]


class FilterConfig(Section, frozen=True, kw_only=True):
    """What a row must meet; a missing value meets nothing. Either conditions on `column`, all of which must hold, or a
    `function`."""

    column: str = ""
    min_length: Count | None = None
    max_length: Count | None = None
    """Characters of a text, items of a list."""
    min: float | None = None
    max: float | None = None
    values: tuple[str | int | float | bool, ...] | None = None
    """One of these."""
    function: str = ""
    """"module:name" of yours: called with the row as a dict, true to keep it. Installed, or in a folder of
    PYTHONPATH, on every machine that reads the data."""


class SourceConfig(Section, frozen=True, kw_only=True):
    path: str = ""
    """Local files, the same path on every machine. Either this or `name`."""
    name: str = ""
    """A data set of the hub, "openai/gsm8k" say."""
    config: str = ""
    """Which configuration of it, "main" say."""
    revision: str = ""
    split: str = "train"
    """Of `name`: what is trained on; the library's own slices too: "train[:90%]"."""
    eval_split: str = ""
    eval_path: str = ""
    """What is evaluated on, of `name` and of `path`."""
    eval_rows: Count = 0
    """Only so many rows of that; without it the first so many rows of what is trained on are kept for evaluation."""
    size: Count = 0
    """Train on so many rows, the first that the filters leave; 0: on all of them. A source with fewer is refused, so
    with a size nobody but the nodes has to look at the data. Needed with streaming."""
    weight: PositiveFloat | None = None
    """Its part of the tickets, against the other sources' weights: set it for all of them or for none. For none, every
    instance of all sources is asked equally often."""
    prompt: str = ""
    """The column of the question, a text. Either this or `messages`."""
    messages: str = ""
    """The column of a list of chat messages, each with role and content."""
    answer: str = ""
    """The column of the right answer, if there is one."""
    data: tuple[str, ...] = ()
    """Columns that rewards are given beside the answer."""
    filter: tuple[FilterConfig, ...] = ()
    streaming: bool = False
    block: PositiveInt = 1000
    """Rows that are shuffled together, and held in memory, with streaming."""

    @property
    def wanted(self) -> list[str]:
        """The columns that an instance is made of."""
        return [column for column in (self.prompt, self.messages, self.answer, *self.data) if column]


class Rows(Protocol):
    """`size` rows by number."""

    size: int

    def __getitem__(self, number: int) -> Row: ...


class TableRows:
    """Rows that can be read in any order: a table in memory-mapped files, and which of it is left by the filters."""

    def __init__(self, table: Any, kept: Sequence[int] | None) -> None:
        self._table = table
        self._kept = kept
        self.size: int = len(table) if kept is None else len(kept)

    def __getitem__(self, number: int) -> Row:
        return dict(self._table[number if self._kept is None else self._kept[number]])


# --- checks ----------------------------------------------------------------------------------------------------------


def check_source(source: SourceConfig, where: str) -> None:
    """Refuse what does not go together. Raises ConfigError."""
    problem = next(_problems(source), "")
    if problem:
        raise ConfigError(f"{where}: {problem}")


def _problems(source: SourceConfig) -> Iterator[str]:
    if bool(source.path) == bool(source.name):
        yield "give either `path` (files of this machine) or `name` (a data set of the hub)"
    if bool(source.prompt) == bool(source.messages):
        yield "give either `prompt` (the column of a text) or `messages` (the column of a list of chat messages)"
    default = SourceConfig()
    for key in ("config", "revision", "split", "eval_split"):
        if source.path and getattr(source, key) != getattr(default, key):
            yield f"{key} is of data sets of the hub: remove it, or give `name` in place of `path`"
    if source.path and source.eval_path and Path(source.path) == Path(source.eval_path):
        yield "eval_path is what is trained on: name another, or set eval_rows alone, which keeps rows for evaluation"
    if source.name and source.eval_split == source.split:
        yield "eval_split is what is trained on: name another, or set eval_rows alone, which keeps rows for evaluation"
    if source.name and source.eval_path:
        yield "eval_path is of files: remove it, or give `path` in place of `name`"
    if source.weight is not None and not math.isfinite(source.weight):
        yield f"weight = {source.weight} is no number that turns can be shared out by"
    if source.streaming and not source.size:
        yield "streaming = true needs `size`, how many rows an epoch has: nobody counts a stream"
    if source.streaming and (source.eval_split or source.eval_path) and not source.eval_rows:
        yield "streaming = true needs `eval_rows`, how many rows to evaluate on: nobody counts a stream"
    if not source.streaming and source.block != default.block:
        yield "block has no meaning without streaming = true: all rows are shuffled together"
    for each in source.filter:
        yield from _filter_problems(each)


def _filter_problems(each: FilterConfig) -> Iterator[str]:
    conditions = [each.min_length, each.max_length, each.min, each.max, each.values]
    has_condition = any(condition is not None for condition in conditions)
    if bool(each.column) == bool(each.function):
        yield "a filter has either `column` with conditions or `function`"
    if each.column and not has_condition:
        yield f"the filter of column {each.column!r} has no condition: give min_length, max_length, min, max or values"
    if each.function and has_condition:
        yield f"the filter by {each.function} has conditions of a column: make them a filter of their own"


def check_columns(wanted: Iterable[str], there: Sequence[str], where: str) -> None:
    """One error for all that are missing, with those that there are. Raises ConfigError."""
    missing = [column for column in dict.fromkeys(wanted) if column not in there]
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], there, n=1)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    named = ", ".join(map(repr, missing))
    raise ConfigError(
        f"{where}: no column{'s' * (len(missing) > 1)} {named}; there are {', '.join(map(repr, there))}{advice}"
    )


# --- filters ---------------------------------------------------------------------------------------------------------


def keeps(filters: Sequence[FilterConfig], where: str) -> Keep | None:
    """Whether a row is left by all filters; None where there are none. Raises ConfigError for a function that cannot
    be imported."""
    if not filters:
        return None
    functions = [_function(each.function, where) if each.function else _condition(each) for each in filters]
    return lambda row: all(function(row) for function in functions)


def _condition(each: FilterConfig) -> Keep:
    def holds(row: Row) -> bool:
        value = row[each.column]
        if value is None:
            return False
        return (
            (each.min_length is None or len(value) >= each.min_length)
            and (each.max_length is None or len(value) <= each.max_length)
            and (each.min is None or value >= each.min)
            and (each.max is None or value <= each.max)
            and (each.values is None or value in each.values)
        )

    return holds


def _function(path: str, where: str) -> Keep:
    function = imported(path, f"{where}: the filter {path!r}")
    return lambda row: bool(function(row))


# --- reading ---------------------------------------------------------------------------------------------------------


def open_rows(source: SourceConfig, split: Literal["train", "eval"], where: str) -> Rows | None:
    """The rows of a split, None where there is nothing to evaluate on. Raises ConfigError for data that is not there or
    lacks a column, and AsyncRLError when the library is missing."""
    apart = bool(source.eval_split or source.eval_path)
    if split == "eval":
        if not apart and not source.eval_rows:
            return None
        return _rows(source, apart, 0, source.eval_rows or None, where)
    return _rows(source, False, 0 if apart else source.eval_rows, source.size or None, where)


def _rows(source: SourceConfig, evaluation: bool, skipped: int, size: int | None, where: str) -> Rows:
    """Rows [skipped, skipped + size) of what the filters leave, all from `skipped` on where size is None."""
    data = _load(source, evaluation, where)
    keep = keeps(source.filter, where)
    columns = data.column_names or list(next(iter(data), {}))  # nobody may have told a stream's
    asked = [each.column for each in source.filter if each.column]
    check_columns([*source.wanted, *asked], columns, where)
    if source.streaming:
        assert size is not None  # check_source has seen to it
        return ForwardRows(lambda: _passing(data, keep, source, skipped, where), size, source.block, where)
    kept = None if keep is None else _kept(data, keep, None if any(f.function for f in source.filter) else asked, where)
    total = len(data) if kept is None else len(kept)
    end = total if size is None else skipped + size
    if end > total or end <= skipped:
        wanted = f"{size} rows" if size else "any row"
        what = f" after {skipped} kept for evaluation" if skipped else ""
        raise ConfigError(
            f"{where}: there are {total} rows{' that its filters leave' * (keep is not None)}, too few for {wanted}"
            f"{what}: the data is another, or `size`, `eval_rows` or the filters are too strict"
        )
    data = data.select_columns(source.wanted)
    if kept is not None:
        return TableRows(data, kept[skipped:end])
    return TableRows(data, range(skipped, end) if (skipped, end) != (0, total) else None)


def _passing(data: Any, keep: Keep | None, source: SourceConfig, skipped: int, where: str) -> Iterator[Row]:
    """A stream from its start, as the filters leave it."""
    left = data if keep is None else (row for row in data if _asked(keep, row, where))
    for row in itertools.islice(left, skipped, None):
        yield {column: row[column] for column in source.wanted}


def _kept(data: Any, keep: Keep, columns: list[str] | None, where: str) -> list[int]:
    """Which rows the filters leave; only `columns` are read, all where a function may look at any."""
    table = data if columns is None else data.select_columns(list(dict.fromkeys(columns)))
    kept: list[int] = []
    first = 0
    for batch in table.iter(batch_size=BATCH):
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        kept += [first + n for n, row in enumerate(rows) if _asked(keep, row, where)]
        first += len(rows)
    return kept


def _asked(keep: Keep, row: Row, where: str) -> bool:
    try:
        return keep(row)
    except Exception as error:  # a function of the user's, or a length of a number
        raise ConfigError(f"{where}: a filter failed on a row: {type(error).__name__}: {error}") from error


def _load(source: SourceConfig, evaluation: bool, where: str) -> Any:
    """The library's own object. Raises ConfigError, or AsyncRLError when the library is missing."""
    try:
        import datasets  # here and not above: optional, and seconds to import
    except ModuleNotFoundError as error:
        raise AsyncRLError(
            f'[task] kind = "dataset" needs a package that is not installed here ({error.name}): '
            "pip install '.[tasks]' in the checkout"
        ) from error
    datasets.disable_progress_bars()
    options: dict[str, Any] = {"streaming": source.streaming}
    if source.path:
        files = data_files(source.eval_path if evaluation and source.eval_path else source.path, where)
        kind, options["data_files"], options["split"] = FORMATS[Path(files[0]).suffix], {"train": files}, "train"
    else:
        kind = source.name
        options["split"] = source.eval_split if evaluation and source.eval_split else source.split
        options |= {"name": source.config or None, "revision": source.revision or None}
    try:
        return datasets.load_dataset(kind, **options)
    except Exception as error:  # whatever the library, its readers or the network have to say
        said = str(error).strip().splitlines() or [""]
        raise ConfigError(f"{where}: cannot be read: {type(error).__name__}: {said[0]}") from error


def data_files(path: str, where: str) -> list[str]:
    """The files of a path, a folder or a pattern, in the order of their names. Raises ConfigError."""
    there = Path(path).expanduser()
    found = [there] if there.is_file() else sorted(there.iterdir()) if there.is_dir() else []
    found = found or [Path(name) for name in sorted(glob.glob(str(there), recursive=True))]
    files = [each for each in found if each.is_file() and each.name not in NOT_ROWS and each.suffix in FORMATS]
    formats = {FORMATS[each.suffix] for each in files}
    if len(formats) != 1:
        what = f"files of {' and '.join(sorted(formats))}" if formats else "no such file"
        raise ConfigError(
            f"{where}: {what}: `path` is a file, a folder of files of one format, or a pattern of their names, ending "
            f"in {', '.join(FORMATS)}"
        )
    return [str(each.resolve()) for each in files]

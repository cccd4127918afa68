"""What `async-rl doctor` found: judged as in a run, told as a table, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from async_rl.proof import LARGEST_BOUND, Mismatch, Proof, compare
from async_rl.run.parity_files import Served, Trained

HEADS = ("engine", "trained in", "served in", "base max", "mean", "canary max", "mean", "bound", "verdict")
NUMBERS = range(3, 8)  # columns of them
NONE = "–"
NO_CANARY = "none"  # of policies that are weights of the whole model


class Measure(msgspec.Struct, frozen=True):
    """Of d, the difference of log-probabilities of the same tokens: the largest |d| and the mean in nats, and k3."""

    max_dlogp: float
    mean_dlogp: float
    k3: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One engine against the trainer. `problems` is empty when all is well; of an engine that could not be asked
    `bound` is None."""

    group: str
    engine: str
    trainer_dtype: str
    engine_dtype: str
    bound: float | None = None
    base: Measure | None = None
    canary: Measure | None = None
    has_canary: bool = True
    prompt_tokens: int | None = None
    problems: tuple[str, ...] = ()
    versions: dict[str, str] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`model` and `task` in words; `kind`: [trainer] kind; `versions`: of the trainer's packages."""

    name: str
    model: str
    task: str
    kind: str
    seed: int
    versions: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def is_well(self) -> bool:
        return not any(row.problems for row in self.rows)


def judged(row: Row, trained: Trained, served: Served) -> Row:
    """The row with what was measured, and what is wrong."""
    bound = min(served.bound, LARGEST_BOUND)
    base, base_problem = _judge("base", trained.base, served.base, bound, b"")
    canary, canary_problem = None, ""
    if trained.canary is not None:
        of_base = trained.canary.base
        canary, canary_problem = _judge("canary", trained.canary, served.canary or "it was not shown", bound, of_base)
    advice = what_to_check(bool(base_problem), bool(canary_problem))
    found = (base_problem, canary_problem, advice, served.tokenizer_problem)
    return msgspec.structs.replace(
        row, bound=bound, base=base, canary=canary, has_canary=trained.canary is not None,
        prompt_tokens=served.prompt_tokens, problems=tuple(each for each in found if each),
        versions=served.versions,
    )  # fmt: skip


def _judge(name: str, trained: Proof, served: Proof | str, bound: float, base: bytes) -> tuple[Measure | None, str]:
    if isinstance(served, str):
        return None, f"{name}: {served}"
    verdict = compare(trained, served, bound, base)
    return _measure(verdict.mismatch), f"{name}: {verdict.cause}" if verdict.cause else ""


def _measure(mismatch: Mismatch | None) -> Measure | None:
    return mismatch and Measure(mismatch.max_dlogp, mismatch.mean_dlogp, mismatch.k3)


def what_to_check(base_differs: bool, canary_differs: bool) -> str:
    """Where to look, by which of the two policies is beyond the bound."""
    if base_differs:
        return (
            "check, as the base model itself differs: that both load the same weights ([model] path); that the head is "
            "tied to the embeddings in both or in neither (tie_word_embeddings); the dtypes ([model] dtype, "
            "[inference] dtype), of which bfloat16 needs a bound of 0.4; and what else the engine rounds or quantises"
        )
    if canary_differs:
        return (
            "check, as the base model agrees and the adapter does not: that the engine scales it by alpha / rank; that "
            "it applies it to all modules, in the layout of PEFT; and that its largest rank allows [trainer] rank"
        )
    return ""


# --- words -----------------------------------------------------------------------------------------------------------


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, as HEADS."""
    canary = (NO_CANARY, NO_CANARY) if not row.has_canary else _numbers(row.canary)
    bound = NONE if row.bound is None else f"{row.bound:g}"
    verdict = "agrees" if not row.problems else "WRONG" if row.bound is not None else "FAILED"
    dtypes = (row.trainer_dtype, row.engine_dtype)
    return (name_of(row), *dtypes, *_numbers(row.base), *canary, bound, verdict)


def name_of(row: Row) -> str:
    """The engine, and the group where that is called otherwise."""
    return f"{row.group} ({row.engine})" if row.group not in ("", row.engine) else row.engine


def _numbers(measure: Measure | None) -> tuple[str, str]:
    return (NONE, NONE) if measure is None else (f"{measure.max_dlogp:.1e}", f"{measure.mean_dlogp:.1e}")


def problem_lines(rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong with each engine, a line each."""
    for row in rows:
        for problem in row.problems:
            yield f"{name_of(row)}, {row.engine_dtype}: {problem}"


def text(report: Report) -> str:
    """For a terminal: the table, what is wrong, and the prompt."""
    rows = [HEADS, *(cells(row) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index in NUMBERS else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    counts = sorted({row.prompt_tokens for row in report.rows if row.prompt_tokens})
    prompts = (
        [f"the first instance of the task is a prompt of {' or '.join(map(str, counts))} tokens"] if counts else []
    )
    return "\n".join([*lines, *problem_lines(report.rows), *prompts])


def page(report: Report) -> str:
    """In Markdown."""
    lines = [
        "# Served against trained",
        "",
        "Written by `async-rl doctor CONFIG --json FILE --markdown FILE`: log-probabilities of the same tokens, by the "
        "trainer and by each engine, in nats. *base* is policy version 0, which a fresh adapter leaves as the "
        "checkpoint is; *canary* is an adapter of noise in every target. max and mean are of |Δ log p|.",
        "",
        f"Config: {report.name}. Model: {report.model}. Task: {report.task}. Trainer: kind {report.kind}. "
        f"Seed {report.seed}.",
        "",
        *_markdown(HEADS, [cells(row) for row in report.rows]),
        "",
        *[f"- {line}" for line in problem_lines(report.rows)],
        *([] if report.is_well else [""]),
        "Packages:",
        "",
        f"- trainer: {_versions(report.versions)}",
        *_packages(report.rows),
        "",
    ]
    return "\n".join(lines)


def _packages(rows: Sequence[Row]) -> Iterator[str]:
    for engine in dict.fromkeys(row.engine for row in rows):
        known: dict[str, str] = {}
        for row in rows:
            known |= row.versions if row.engine == engine else {}
        yield f"- {engine}: {_versions(known) or 'could not be asked'}"


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]

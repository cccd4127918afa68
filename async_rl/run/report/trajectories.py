"""Some trajectories as people can read them: every token with its text, coloured by its age."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.run.metrics import Record
from async_rl.run.report.plot import age_colour
from async_rl.run.report.run_data import RunData

SHOWN_STEPS, SHOWN_PER_STEP = 5, 2
SHOWN_TOKENS = 600  # of a segment: each is an element of the page
MOST_SWATCHES = 9  # in the legend

Decode = Callable[[Sequence[int]], list[str]]


class Decoder(NamedTuple):
    """Token ids to their texts; `note` says why these are ids and not texts, if they are."""

    decode: Decode
    note: str = ""


def make_decoder(model_path: str) -> Decoder:
    """From the model's tokenizer.json when it and the library `tokenizers` are there."""
    path = Path(model_path) / "tokenizer.json"
    if not model_path or not path.is_file():
        return Decoder(_ids, f"Token ids, as there is no {path} on this machine.")
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError:
        return Decoder(_ids, "Token ids, as the library `tokenizers` is not installed.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        return Decoder(_ids, f"Token ids, as {path} cannot be read: {error}")

    def decode(tokens: Sequence[int]) -> list[str]:
        # A stream, not one by one: spaces depend on neighbours, and one character may take several tokens.
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in tokens]

    return Decoder(decode)


def _ids(tokens: Sequence[int]) -> list[str]:
    return [f"{token} " for token in tokens]


def chosen(samples: Sequence[Record]) -> list[Record]:
    """The first SHOWN_PER_STEP of SHOWN_STEPS steps, from the first to the last that has some. After a resume a step
    may be there twice: the later counts."""
    by_step: dict[int, dict[tuple[int, int], Record]] = {}
    for record in samples:
        by_step.setdefault(int(record["step"]), {})[record["ticket"], record["sample"]] = record
    steps = sorted(by_step)
    count = min(SHOWN_STEPS, len(steps))
    picked = [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]
    return [record for step in picked for record in list(by_step[step].values())[:SHOWN_PER_STEP]]


def trajectories_html(run: RunData, decoder: Decoder) -> str:
    """A legend, then an <article> for each chosen trajectory; everything that came from files is escaped."""
    records = chosen(run.samples)
    if not records:
        return '<p class="empty">None was kept yet.</p>'
    ages = sorted({age for record in records for age in _ages(record)})
    note = f'<p class="note">{html.escape(decoder.note)}</p>' if decoder.note else ""
    articles = "\n".join(_article(record, run.bound, decoder.decode) for record in records)
    return f'{note}{_legend(ages, run.bound)}\n<div class="articles">{articles}</div>'


def _ages(record: Record) -> Iterator[int]:
    for segment in record["segments"]:
        yield from (record["step"] - version for version in segment["versions"] if version is not None)


def _legend(ages: Sequence[int], bound: int) -> str:
    if len(ages) > MOST_SWATCHES:
        last = len(ages) - 1
        ages = [ages[round(index * last / (MOST_SWATCHES - 1))] for index in range(MOST_SWATCHES)]
    swatches = "".join(
        f'<span style="background:{age_colour(age, bound)}">age {age}{" (fresh)" if age == 0 else ""}</span>'
        for age in ages
    )
    return f'<p class="legend"><span class="given">given, not sampled</span>{swatches}</p>'


def _article(record: Record, bound: int, decode: Decode) -> str:
    ages = list(_ages(record))
    age = f"age {min(ages)} to {max(ages)}" if ages and min(ages) < max(ages) else f"age {ages[0]}" if ages else ""
    reward = record.get("reward")
    facts = [
        f"step {record['step']}",
        f"ticket {record['ticket']}",
        str(record["node"]),
        age,
        ", ".join(str(segment["finish"]) for segment in record["segments"]),
        *(f"{name} {_plain(value)}" for name, value in (record.get("components") or {}).items()),
    ]
    head = " · ".join(html.escape(fact) for fact in facts if fact)
    body = "".join(
        f'<p class="tokens">{_tokens(segment, record["step"], bound, decode)}</p>' for segment in record["segments"]
    )
    return f"<article><header><b>reward {html.escape(_plain(reward))}</b> <span>{head}</span></header>{body}</article>"


def _tokens(segment: Record, step: int, bound: int, decode: Decode) -> str:
    tokens = segment["tokens"][:SHOWN_TOKENS]
    texts = decode(tokens)
    rows = list(zip(texts, segment["versions"], segment["logprobs"], strict=False))
    parts = []
    for sampled, group in groupby(rows, key=lambda row: row[1] is not None):
        if sampled:
            parts += [_token(words, version, logprob, step, bound) for words, version, logprob in group]
        else:  # one element for all of them: there is nothing to tell of each
            parts.append(f'<span class="given">{_visible("".join(row[0] for row in group))}</span>')
    left = len(segment["tokens"]) - len(tokens) + int(segment.get("omitted") or 0)
    return "".join(parts) + (f'<span class="note"> … {left:,} more tokens</span>' if left else "")


def _token(words: str, version: int, logprob: float | None, step: int, bound: int) -> str:
    probability = f", log-probability {logprob:.3f}" if logprob is not None else ""
    facts = f"version {version}, age {step - version} at step {step}{probability}"
    shade = age_colour(step - version, bound)
    return f'<span class="t" style="background:{shade}" data-facts="{facts}">{_visible(words)}</span>'


def _visible(words: str) -> str:
    """Escaped, with line ends that can be seen; never empty, so that it can be pointed at."""
    return html.escape(words).replace("\n", "⏎\n") or "▫"


def _plain(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"

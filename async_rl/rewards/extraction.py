r"""Where in a text the answer stands: behind the last `####`, in the last `\boxed{…}`, or where a pattern says.

An answer is never looked for in the whole of a solution: what stands there on the way (a sum, a year) would count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from async_rl.schema import ConfigError

MARK = "####"
NUMBER = re.compile(r"([-−+$*=\s]*)(\d[\d,]*(?:\.\d+)?|\.\d+)")
BOXED = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
LAST_BOXES = 16  # that are looked at: each that is not closed is read to the end of the text
WHOLE = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[-+]?\.\d+")
RATIO = re.compile(r"([-+]?\d+)\s*/\s*([1-9]\d*)")
MAX_DIGITS = 4000  # of a number: Python turns no longer ones from text into integers

Extract = Literal["auto", "mark", "boxed", "whole"]
"""auto: behind the mark or in the box, whichever comes last."""


def final_number(text: str) -> str | None:
    """The number that follows the last mark, in one spelling: without thousands' commas, a currency, a plus sign,
    stars of bold type, an equals sign, or zeros that say nothing. None when there is no mark, or no number right behind
    it."""
    _, mark, rest = text.rpartition(MARK)
    found = NUMBER.match(rest) if mark else None
    if found is None:
        return None
    whole, _, part = found[2].replace(",", "").partition(".")
    number = (whole.lstrip("0") or "0") + (f".{part.rstrip('0')}" if part.strip("0") else "")
    return f"-{number}" if re.search("[-−]", found[1]) and number != "0" else number


def behind_mark(text: str) -> tuple[int, str] | None:
    """Where the last mark stands, and the rest of its line, or the next one when that is empty."""
    place = text.rfind(MARK)
    lines = text[place + len(MARK) :].strip().splitlines() if place >= 0 else []
    return (place, lines[0].strip()) if lines else None


def in_box(text: str) -> tuple[int, str] | None:
    r"""Where the last \boxed or \fbox stands that is closed, and what is in it: braces of its own are balanced, and
    without braces it is one word, as in `\boxed 5`."""
    for found in reversed(list(BOXED.finditer(text))[-LAST_BOXES:]):
        start = found.end()
        if text[start : start + 1] != "{":
            word = re.match(r"[^\s$]+", text[start:])
            if word:
                return found.start(), word[0]
            continue
        depth, escaped = 0, False
        for place in range(start, len(text)):
            character = text[place]
            depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
            escaped = character == "\\" and not escaped
            if depth == 0:
                return found.start(), text[start + 1 : place].strip()
    return None


def extract(text: str, how: Extract) -> str | None:
    """The answer that the text gives, or None."""
    if how == "whole":
        return text.strip() or None
    places = {"mark": (behind_mark,), "boxed": (in_box,), "auto": (behind_mark, in_box)}[how]
    found = [each for each in (find(text) for find in places) if each is not None]
    return (max(found)[1] or None) if found else None


def extractor(how: Extract | None, pattern: str, default: Extract, where: str) -> Callable[[str], str | None]:
    """`extract`, or the last match of a regular expression: its first group, where it has one. Raises ConfigError."""
    if not pattern:
        return lambda text: extract(text, how or default)
    compiled = expression(pattern, where)
    if how is not None:
        raise ConfigError(f"{where}: either extract or pattern says where the answer stands: remove one of them")

    def last(text: str) -> str | None:
        found = list(compiled.finditer(text))
        return found[-1][1 if compiled.groups else 0] if found else None

    return last


def expression(pattern: str, where: str) -> re.Pattern[str]:
    """Raises ConfigError."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{where}: pattern = {pattern!r} is no regular expression: {error}") from error


def number_of(text: str) -> Fraction | None:
    """The number that a text is, exactly: 1,200 or −3.50 or 3/4, with a currency in front or a percent sign or full
    stop behind it; None when it is anything else."""
    text = text.strip().strip("$*").replace("−", "-").replace("\\$", "").replace("\\!", "").replace("{,}", ",")
    text = re.sub(r"^([-+]?)\$", r"\1", text.replace("\\%", "%")).removesuffix(".").removesuffix("%").strip()
    if len(text) > MAX_DIGITS:
        return None
    if WHOLE.fullmatch(text):
        return Fraction(text.replace(",", "").removesuffix("."))
    ratio = RATIO.fullmatch(text)
    return Fraction(int(ratio[1]), int(ratio[2])) if ratio else None

"""What every section of a configuration is made of: strict structs, bounded numbers, and the error they end in; and
how a table becomes one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from async_rl.errors import AsyncRLError

PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class ConfigError(AsyncRLError):
    """A configuration that cannot run; the message says what, where and what to do."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""


def changed(section: Section, keys: Sequence[str]) -> list[str]:
    """Which of these keys are not at their default."""
    default = type(section)()
    return [key for key in keys if getattr(section, key) != getattr(default, key)]


_TRUNCATES = (
    "it cuts the distribution that tokens are sampled from to its likeliest ones. Their behaviour log-probabilities "
    "would be those of the cut distribution, the trainer's those of the whole one, because it does not know which "
    "tokens were left; every importance ratio would be biased. Remove it: sampling is at `temperature` alone"
)
_LEASED = "it comes with every lease, from whichever node the buffer asks: set it in [inference], for all of them"
GROUP = "[inference.group]"  # as it is written, in brackets of its own
REFUSED = {
    **{(section, key): _TRUNCATES for section in ("inference", GROUP) for key in ("top_p", "top_k", "min_p")},
    **{(GROUP, key): _LEASED for key in ("temperature", "max_new_tokens")},
    (GROUP, "eval_share"): "the buffer shares out evaluation among all nodes: set it in [inference]",
}
"""Keys that people know from elsewhere, by section, and why there is none here."""


def convert_section(table: Any, kind: type[Any], where: str) -> Any:
    """`table` as the struct `kind`, with unknown keys and wrong types turned into one ConfigError."""
    _refuse_unknown_keys(table, kind, where, "")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(str(error))}") from error


def _refuse_unknown_keys(table: Any, kind: type[Any], where: str, section: str) -> None:
    """Walk table and struct together; the first unknown key ends it, with the nearest known one as advice."""
    if not isinstance(table, Mapping):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if (section, key) in REFUSED:
            raise ConfigError(f"{where}: [{section}] {key} = {value!r} is refused: {REFUSED[section, key]}")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            advice = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(fields)}"
            place = f"[{section}]" if section else "the top level"
            raise ConfigError(f"{where}: unknown key `{key}` in {place}: {advice}")
        inner = f"{section.strip('[]')}.{key}" if section else key
        for candidate in (fields[key], *get_args(fields[key])):
            if not (isinstance(candidate, type) and issubclass(candidate, Section)):
                continue
            if isinstance(value, list | tuple):
                for each in value:
                    _refuse_unknown_keys(each, candidate, where, f"[{inner}]")
            else:
                _refuse_unknown_keys(value, candidate, where, inner)


def _readable(message: str) -> str:
    """msgspec's "Expected `int` >= 1 - at `$.run.steps`" with the path as people write it."""
    return message.replace("at `$.", "at `").replace("`$`", "the top level")

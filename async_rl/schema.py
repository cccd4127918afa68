"""What every section of a configuration is made of: strict structs, bounded numbers, and the error they end in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

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
REFUSED = {("inference", key): _TRUNCATES for key in ("top_p", "top_k", "min_p")}
"""Keys that people know from elsewhere, by section, and why there is none here."""

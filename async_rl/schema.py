"""What every section of a configuration is made of: strict structs, bounded numbers, and the error they end in."""

from __future__ import annotations

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

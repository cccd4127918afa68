"""What a config names as "module:name", be it ours or one's own."""

from __future__ import annotations

import importlib
from typing import Any

from async_rl.schema import ConfigError


def imported(path: str, what: str) -> Any:
    """The object that `path` names. `what` begins the message. Raises ConfigError, however the module fails."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise ConfigError(
            f'{what} cannot be loaded: {type(error).__name__}: {error}. It is "module:name"; the module must be '
            "installed, or its folder named in PYTHONPATH, and be importable"
        ) from error

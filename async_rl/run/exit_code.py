"""How every command ends: 0; 1 with one message for what its user can mend; 130 for Ctrl-C."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable

from async_rl.errors import AsyncRLError


def exit_code(command: Callable[[], int | None], debug: bool = False) -> int:
    """Of running `command`, which may return one of its own. With `debug` an error comes with its traceback."""
    try:
        return command() or 0
    except AsyncRLError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT

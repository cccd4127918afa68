"""The calls of a server that are on their way: until one has ended, what it uses stays where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from inference.engine import EngineError

LAST_CALL_S = 5.0  # how long an adapter that is to be unloaded waits for a call that is just ending


class Flight:
    """A call of `adapter` (None: of the weights as they are)."""

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter
        self.ended = asyncio.Event()


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Also returns when it was not set in time."""
    try:
        await asyncio.wait_for(event.wait(), max(seconds, 0))
    except TimeoutError:
        return


async def wait_for_calls(flights: Mapping[str, Flight], adapter: str) -> None:
    """Until none uses the adapter. Raises EngineError when one does not end."""
    for name, flight in list(flights.items()):
        if flight.adapter == adapter:
            await wait(flight.ended, LAST_CALL_S)
            if not flight.ended.is_set():
                raise EngineError(f"adapter {adapter} is used by call {name}: it is unloaded when that has ended")

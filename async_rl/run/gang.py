"""The ranks of one trainer, each a process of the launcher's: what becomes of one is what becomes of all.

A rank that was killed, or whose machine is gone, takes the others along: they cannot go on in the middle of a step, and
end one after the other with words of their own. So the launcher waits a moment for them, ends who is left, looks for
the one that was the cause, and starts all of them again from the newest checkpoint; or none, where no rank asks for it.
"""

from __future__ import annotations

from collections.abc import Collection

from async_rl.run.launch import Exit

SETTLE = 5.0  # seconds from the first rank's end in which the others may end by themselves


class Gang:
    """Pure: time is what it is told."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = list(names)
        self.fallen: dict[str, Exit] = {}
        self._since = 0.0

    def fell(self, ended: Exit, now: float) -> None:
        if not self.fallen:
            self._since = now
        self.fallen[ended.name] = ended

    def is_settled(self, now: float, left: Collection[str]) -> bool:
        """Whether it can be judged, with these ranks still there: nobody else will end by himself."""
        return bool(self.fallen) and (not left or now - self._since > SETTLE)

    def cause(self) -> Exit | None:
        """The end that calls for another start of all, if any does: first what was lost, then what was killed; one that
        says itself that it could not go on may only have seen another end."""
        calling = [ended for ended in self.fallen.values() if ended.calls_for_another]
        return min(calling, key=lambda ended: (not ended.lost, ended.code > 0), default=None)

"""The ledger: every attempt ever issued is in exactly one place, at every instant.

    training:    issued = leased + ready + batched + trained + sum(dropped.*)
    evaluation:  issued = leased + evaluated + sum(dropped.*)

`leased` is with a node; `ready` is held here, whether its group is complete or not; `batched` is lent to the trainer.
A re-lease is a new attempt. What is trained is trained for good: the ledger forgets an attempt's name when it reaches
an end, so nothing can move it again. Results for closed or unknown attempts never come here; they are counted outside.
"""

from __future__ import annotations

from collections.abc import Mapping

Attempt = tuple[int, int]
"""(lease, sample)"""

TRAINING: Mapping[str, tuple[str, ...]] = {
    "leased": (
        "ready", "dropped.stale", "dropped.cancelled", "dropped.node_lost", "dropped.env_failed", "dropped.refused",
    ),
    "ready": ("batched", "dropped.stale", "dropped.cancelled", "dropped.zero_variance", "dropped.short_group"),
    "batched": ("trained", "dropped.stale", "dropped.cancelled", "dropped.refused"),
}  # fmt: skip
EVALUATION: Mapping[str, tuple[str, ...]] = {
    "leased": ("evaluated", "dropped.cancelled", "dropped.node_lost", "dropped.env_failed", "dropped.refused"),
}


class LedgerError(AssertionError):
    """A move that the rules do not know: a bug in the buffer, never a peer's fault."""


class Ledger:
    """Counts by place, and the place of every attempt that is not at an end."""

    def __init__(self, moves: Mapping[str, tuple[str, ...]]) -> None:
        self._moves = {(start, end) for start, ends in moves.items() for end in ends}
        self._open_places = frozenset(moves)
        places = [*moves, *sorted({end for ends in moves.values() for end in ends} - set(moves))]
        self._counts = dict.fromkeys(["issued", *places], 0)
        self._place: dict[Attempt, str] = {}

    def issue(self, attempt: Attempt) -> None:
        """A new attempt, leased."""
        if attempt in self._place:
            raise LedgerError(f"attempt {attempt} is issued twice")
        self._place[attempt] = "leased"
        self._counts["issued"] += 1
        self._counts["leased"] += 1

    def move(self, attempt: Attempt, start: str, end: str) -> None:
        """Raises LedgerError when the attempt is not at `start`, or the rules know no such move."""
        place = self._place.get(attempt)
        if place != start or (start, end) not in self._moves:
            raise LedgerError(f"attempt {attempt}, {place or 'closed or unknown'}, cannot move from {start} to {end}")
        if end in self._open_places:
            self._place[attempt] = end
        else:
            del self._place[attempt]
        self._counts[start] -= 1
        self._counts[end] += 1

    def counts(self) -> dict[str, int]:
        """A copy: `issued`, each place, and `dropped.<reason>`."""
        return dict(self._counts)

    @property
    def balances(self) -> bool:
        return self._counts["issued"] == sum(self._counts.values()) - self._counts["issued"]

    def resume(self, counts: Mapping[str, int]) -> None:
        """Totals of a checkpoint. What was open then is lost with its names: dropped as cancelled."""
        for place, count in counts.items():
            target = "dropped.cancelled" if place in self._open_places else place
            self._counts[target] = self._counts.get(target, 0) + count

"""The ledger: every attempt ever issued is in exactly one place, at every instant.

    training:    issued = leased + ready + batched + trained + sum(dropped.*)
    evaluation:  issued = leased + evaluated + sum(dropped.*)

`leased` is with a node; `ready` is held here, whether its group is complete or not; `batched` is lent to the trainer.
A re-lease is a new attempt. What is trained is trained for good: the ledger forgets an attempt when it reaches an end,
so nothing can move it again. Results for closed or unknown attempts never come here; they are counted outside.

An attempt is (lease, sample). All attempts of a lease share one `Account`, and move together where they can: a set of
samples is a bit mask, so that a whole group costs what one attempt costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TRAINING: Mapping[str, tuple[str, ...]] = {
    "leased": (
        "ready", "dropped.stale", "dropped.cancelled", "dropped.node_lost", "dropped.env_failed", "dropped.refused",
    ),
    "ready": (
        "batched", "dropped.stale", "dropped.cancelled", "dropped.zero_variance", "dropped.short_group",
        "dropped.retired",
    ),
    "batched": ("trained", "dropped.stale", "dropped.cancelled", "dropped.refused"),
}  # fmt: skip
EVALUATION: Mapping[str, tuple[str, ...]] = {
    "leased": ("evaluated", "dropped.cancelled", "dropped.node_lost", "dropped.env_failed", "dropped.refused"),
}


class LedgerError(AssertionError):
    """A move that the rules do not know: a bug in the buffer, never a peer's fault."""


def members(mask: int) -> tuple[int, ...]:
    """The samples of a mask, in order: bit s is sample s."""
    return tuple([sample for sample in range(mask.bit_length()) if mask >> sample & 1])


def mask_of(samples: Iterable[int]) -> int:
    """The reverse, for distinct samples."""
    return sum([1 << sample for sample in samples])


class Account:
    """Where the attempts of one lease are: a mask of samples for each place that is not an end. Made by
    `Ledger.issue`, changed by `Ledger.move`, and by nothing else."""

    __slots__ = ("batched", "lease", "leased", "ready")

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self.leased = 0
        self.ready = 0
        self.batched = 0


class Ledger:
    """Counts by place."""

    def __init__(self, moves: Mapping[str, tuple[str, ...]]) -> None:
        self._moves = {(start, end): end in moves for start, ends in moves.items() for end in ends}
        self._open_places = frozenset(moves)
        places = [*moves, *sorted({end for ends in moves.values() for end in ends} - set(moves))]
        self._counts = dict.fromkeys(["issued", *places], 0)

    def issue(self, account: Account, samples: int) -> None:
        """New attempts of a new lease, leased. Raises LedgerError when the lease had some before."""
        if account.leased or account.ready or account.batched or samples <= 0:
            raise LedgerError(f"attempts {members(samples)} of lease {account.lease} are issued twice, or are none")
        account.leased = samples
        count = samples.bit_count()
        self._counts["issued"] += count
        self._counts["leased"] += count

    def move(self, account: Account, samples: int, start: str, end: str) -> None:
        """Raises LedgerError when one of the attempts is not at `start`, or the rules know no such move; nothing has
        changed then."""
        there: int = getattr(account, start, 0)
        stays_open = self._moves.get((start, end))
        if stays_open is None or samples & ~there or not samples:
            raise LedgerError(self._impossible(account, samples, start, end))
        setattr(account, start, there ^ samples)
        if stays_open:
            setattr(account, end, getattr(account, end) | samples)
        count = samples.bit_count()
        self._counts[start] -= count
        self._counts[end] += count

    def _impossible(self, account: Account, samples: int, start: str, end: str) -> str:
        places = {place: members(getattr(account, place)) for place in sorted(self._open_places)}
        return (
            f"attempts {account.lease}/{members(samples)} cannot move from {start} to {end}: of this lease, "
            + ", ".join(f"{places[place] or 'none'} are {place}" for place in places)
            + ", and the others closed or unknown"
        )

    def counts(self) -> dict[str, int]:
        """A copy: `issued`, each place, and `dropped.<reason>`."""
        return dict(self._counts)

    @property
    def balances(self) -> bool:
        return self._counts["issued"] == sum(self._counts.values()) - self._counts["issued"]

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether these could be the totals of a ledger like this one."""
        return counts.keys() <= self._counts.keys() and 2 * counts.get("issued", 0) == sum(counts.values())

    def resume(self, counts: Mapping[str, int]) -> None:
        """Totals of a checkpoint. What was open then is lost with its leases: dropped as cancelled."""
        for place, count in counts.items():
            target = "dropped.cancelled" if place in self._open_places else place
            self._counts[target] = self._counts.get(target, 0) + count

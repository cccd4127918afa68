"""Capacity: credit in bytes, reserved before a group is sampled, so that full means back-pressure, never loss."""

from __future__ import annotations


def fits(held_bytes: int, group_bytes: int, capacity_bytes: int) -> bool:
    """Whether one more group, at its largest, still fits beside what is held and reserved."""
    return held_bytes + group_bytes <= capacity_bytes


class Credit:
    """Bytes reserved for groups being sampled, and held by ready ones.

    A ticket holds a reservation of `group_bytes` from its first lease until its group is ready; then its real size
    counts until it is drawn. A ticket that is leased again (node lost, sample failed, zero variance) has kept its
    reservation and asks for none; one that was ready and has become too old asks anew, and till then what is left of
    it counts at its size. Lent payloads do not count: at most one batch beside the capacity is in memory.
    With reuse (buffer.reuse) a group counts as `kept` from its first draw until it can be used no more.

    The exemption: the lowest open ticket is admitted without credit while fewer than F ready groups may be drawn. That
    is what prevents the deadlock in which the ready groups wait for one that has no room. Its price: a ticket that
    needs the exemption has fewer than F eligible groups below it and everything above it was admitted with credit, so
    with a capacity of at least one batch, and with reuse pool and lent batch beside it (which the configuration
    demands), reserved + ready + kept stay within capacity as long as no payload is larger than promised; with less
    capacity they stay within that. What `fresh`, and on_stale other than wait, drop when it was ready opens a low
    ticket again after higher ones had their credit. Of the exempt tickets that are still being sampled each is lower
    than those before it and was ready when the first was admitted: F of them at most, beside fewer than F ready ones.
    So there the sum may pass capacity by what is reserved for fewer than 2 F groups."""

    def __init__(self, capacity_bytes: int, group_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.group_bytes = group_bytes
        self.reserved_bytes = 0
        self.ready_bytes = 0
        self.kept_bytes = 0

    @property
    def held_bytes(self) -> int:
        """All that counts."""
        return self.reserved_bytes + self.ready_bytes + self.kept_bytes

    @property
    def admits_one_more(self) -> bool:
        """Whether a ticket without a reservation may be leased, the exemption above apart."""
        return fits(self.held_bytes, self.group_bytes, self.capacity_bytes)

    def adopt(self, capacity_bytes: int, group_bytes: int) -> None:
        """Go on with other sizes; what is reserved is reserved at the new one."""
        self.reserved_bytes = self.reserved_bytes // self.group_bytes * group_bytes
        self.capacity_bytes, self.group_bytes = capacity_bytes, group_bytes

    def reserve(self, in_place_of: int = 0) -> None:
        """For a group that is leased, of which so many bytes counted as they are."""
        self.ready_bytes -= in_place_of
        self.reserved_bytes += self.group_bytes

    def became_ready(self, payload_bytes: int) -> None:
        self.reserved_bytes -= self.group_bytes
        self.ready_bytes += payload_bytes

    def dropped(self, payload_bytes: int) -> None:
        """A group without a reservation lost so much to its age."""
        self.ready_bytes -= payload_bytes

    def drawn(self, payload_bytes: int, keep: bool) -> None:
        self.ready_bytes -= payload_bytes
        self.kept_bytes += payload_bytes if keep else 0

    def released(self, payload_bytes: int) -> None:
        """Of what was kept, this can be used no more."""
        self.kept_bytes -= payload_bytes

"""What was recorded already of a buffer's history, so that it need not be told again.

A status with all pushes and mismatches that the buffer has kept grows with the run, to some 300 kB once decoded; asked
for every second it left the trainer's memory a kilobyte larger a step (fragments, in which nothing lives any more).
"""

from __future__ import annotations

import msgspec


class Seen(msgspec.Struct, frozen=True):
    """How many mismatches of a buffer were recorded, and how many pushes of its process, its `life`. It is in the
    trainer's checkpoints, so that one that goes on records those since then, and none before it twice."""

    life: str = ""
    pushes: int = 0
    mismatches: int = 0

    def since(self, now: Seen) -> tuple[int, int]:
        """How many of the pushes, and of the mismatches, that a buffer has counted by `now` are new.

        A buffer that was started again counts pushes from 0; its mismatches it has from its journal, in the same order.
        Fewer of them than were seen are those of a buffer without that journal, and all new."""
        pushes = now.pushes - (self.pushes if self.life == now.life else 0)
        mismatches = now.mismatches - (self.mismatches if now.mismatches >= self.mismatches else 0)
        return max(0, pushes), mismatches


NOTHING_SEEN = Seen()

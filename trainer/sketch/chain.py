"""The policies of a run as a chain of updates: what the next policy file has to say.

Between two exports the steps taken are kept as the integers that were applied. Their file is written when it is asked
for; a checkpoint keeps it, so that a trainer that goes on can publish it once more, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from async_rl.policy.factors import Factors
from async_rl.policy.update_file import (
    Step,
    Storage,
    read_base,
    read_kind,
    read_update,
    write_base,
    write_update,
)


class Link(NamedTuple):
    """The steps that lead on from the policy with the digest `parent`."""

    parent: str
    steps: tuple[Step, ...]


Kept = tuple[str | None, Link | None, tuple[Step, ...]]


class Chain:
    """`base` gives the digest of the weights as they are before the first step, from which the first policy comes: it
    reads all of them, so it is called only once that is about to be needed. `storage` is the dtype in which weights
    are kept, by receivers too."""

    def __init__(self, base_seed: int, storage: Storage, base: Callable[[], str]) -> None:
        self.base_seed = base_seed
        self.storage: Storage = storage
        self._base = base
        self._digest: str | None = None
        self._last: Link | None = None  # what its file said; None: it was the base's
        self._taken: tuple[Step, ...] = ()

    @property
    def digest(self) -> str:
        """Of the policy that was exported last; of the base, before the first export."""
        if self._digest is None:
            self._digest = self._base()
        return self._digest

    @property
    def exported(self) -> bool:
        """Whether all that was taken is in the policy with `digest`."""
        return not self._taken

    def before_moving(self) -> None:
        """Call it before weights move."""
        _ = self.digest

    def take(self, step: Step) -> None:
        """A step that was applied since the last export."""
        self._taken += (step,)

    def export(self, path: Path, update: int) -> str:
        """Write what was taken since the last export, an update without tensors if nothing was; before the first step
        of all, the base. `update` is the number of the next step. Returns the policy's digest."""
        if self._last is None and self.exported:
            return write_base(path, self.digest)
        link = Link(self.digest, self._taken or (Step(update, update, {}),))
        self._digest = self._write(path, link)
        self._last, self._taken = link, ()
        return self._digest

    def kept(self) -> Kept:
        """All that changes, for `restore`."""
        return self._digest, self._last, self._taken

    def restore(self, kept: Kept) -> None:
        self._digest, self._last, self._taken = kept

    def save(self, path: Path) -> None:
        """Write the file of the policy as it is now, whether it was exported or not."""
        link = Link(self.digest, self._taken) if self._taken else self._last
        if link is None:
            write_base(path, self.digest)
        else:
            self._write(path, link)

    def _write(self, path: Path, link: Link) -> str:
        *before, last = link.steps
        return write_update(
            path,
            base_seed=self.base_seed,
            update=last.update,
            parent=link.parent,
            factors=last.factors,
            storage=self.storage,
            drawn=last.drawn,
            before=tuple(before),
        )


def read_link(path: Path, device: torch.device) -> Link:
    """What `Chain.save` wrote, its factors on `device`; without steps for the base's. Raises PolicyFileError."""
    if read_kind(path) == "base":
        return Link(read_base(path).digest, ())
    update = read_update(path)
    steps = []
    for step in update.steps:
        # Copies, not views of a file that may go.
        own = {name: Factors(*(each.to(device, copy=True) for each in both)) for name, both in step.factors.items()}
        steps.append(step._replace(factors=own))
    return Link(update.parent, tuple(steps))

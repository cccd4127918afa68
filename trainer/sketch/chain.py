"""The policies of a run as a chain of updates: what the next policy file has to say.

Between two exports the steps taken are kept as the integers that were applied. Their file is written when it is asked
for; a checkpoint keeps it, so that a trainer that goes on can publish it once more, to the byte.
"""

from __future__ import annotations

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


class Chain:
    """`base` is the digest of the weights in the checkpoint, from which the first policy comes; `storage` the dtype in
    which weights are kept, by receivers too."""

    def __init__(self, base_seed: int, storage: Storage, base: str) -> None:
        self.base_seed = base_seed
        self.storage: Storage = storage
        self.digest = base  # of the policy that was exported last
        self._last: Link | None = None  # what its file said; None: it was the base's
        self._taken: tuple[Step, ...] = ()

    @property
    def exported(self) -> bool:
        """Whether all that was taken is in the policy with `digest`."""
        return not self._taken

    def take(self, step: Step) -> None:
        self._taken += (step,)

    def export(self, path: Path, update: int) -> str:
        """Write what was taken since the last export, an update without tensors if nothing was; before the first step
        of all, the base. `update` is the number of the next step. Returns the policy's digest."""
        if self._last is None and self.exported:
            return write_base(path, self.digest)
        link = Link(self.digest, self._taken or (Step(update, update, {}),))
        self.digest = self._write(path, link)
        self._last, self._taken = link, ()
        return self.digest

    def kept(self) -> tuple[str, Link | None, tuple[Step, ...]]:
        """All that changes, for `restore`."""
        return self.digest, self._last, self._taken

    def restore(self, kept: tuple[str, Link | None, tuple[Step, ...]]) -> None:
        self.digest, self._last, self._taken = kept

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


def read_link(path: Path, device: torch.device) -> tuple[str, tuple[Step, ...]]:
    """What `Chain.save` wrote: the digest from which it leads on, and its steps on `device` (none for the base's).
    Raises PolicyFileError."""
    if read_kind(path) == "base":
        return read_base(path).digest, ()
    update = read_update(path)
    # Copies, not views of a file that may go.
    return update.parent, tuple(
        step._replace(
            factors={
                name: Factors(factors.q.to(device, copy=True), factors.s.to(device, copy=True))
                for name, factors in step.factors.items()
            }
        )
        for step in update.steps
    )

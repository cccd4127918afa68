"""A process's folder on this machine's own disk, for files that nobody wants once it has ended.

It lies in the system's temporary directory, not in the run's: a node may be on another machine, where that is reached
over a network. A process that is killed leaves its folder behind, and a policy in it may be as large as the model. So
whoever makes one first takes away those that nobody holds, of whatever run: a lock on the folder holds it, of which the
kernel lets go when the process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from async_rl.errors import AsyncRLError

log = logging.getLogger("scratch")

PREFIX = "async-rl-scratch-"
ELSEWHERE = "files-elsewhere"  # in the folder: a line for each
ATTEMPTS = 10  # another process may take a new folder for a leftover, until it is held


class Scratch:
    """Makes `path` (mode 0700) in `root` (the system's temporary directory), which is there until `remove`. Raises
    AsyncRLError when no folder can be made."""

    def __init__(self, root: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if root is None else root
        remove_leftovers(root)
        self.path, self._held = _make(root)

    def take_along(self, files: Iterable[str]) -> None:
        """These lie elsewhere, and go with the folder."""
        with (self.path / ELSEWHERE).open("a") as names:
            names.writelines(f"{file}\n" for file in files)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._held)


def remove_leftovers(root: Path) -> None:
    """Take away the folders in `root` which processes of this user left there."""
    for path in root.glob(f"{PREFIX}*"):
        held = _hold(path)
        if held is not None:
            log.info("%s is taken away: the process that made it was killed", path)
            _remove(path)
            os.close(held)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # most have no files elsewhere
        for file in (path / ELSEWHERE).read_text().splitlines():
            Path(file).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _make(root: Path) -> tuple[Path, int]:
    for _ in range(ATTEMPTS):
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError as error:
            raise AsyncRLError(f"{root}: no folder can be made there ({error.strerror})") from error
        held = _hold(path)
        if held is None:
            continue
        if path.exists():
            return path, held
        os.close(held)
    raise AsyncRLError(f"{root}: every folder that is made there is taken away at once: set TMPDIR to another place")


def _hold(path: Path) -> int | None:
    """The descriptor of a folder of this user that nobody else held; None for any other."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None  # it is gone, no folder, or not ours
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(folder).st_uid == os.getuid():
            return folder
    except OSError:
        pass  # its process lives
    os.close(folder)
    return None

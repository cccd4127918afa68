"""What one cell may use."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """All of them hold for a cell, which is one program and whatever it starts; `cpu_s` and `memory_mb` for each of
    its processes, so that together they may use `processes` times as much."""

    wall_s: float = 12.0
    cpu_s: int = 4
    memory_mb: int = 256
    """Address space; a bare interpreter has some 30 MB of it."""
    disk_mb: int = 16
    """All files together: they lie in memory, and are gone with the cell."""
    processes: int = 8
    """Processes and threads, the first one among them."""
    files: int = 64
    """Open at once, in each process."""
    output_bytes: int = 1 << 16
    """Of what it prints on stdout and on stderr, each; one that prints more is ended."""

    @property
    def killed_at_cpu_s(self) -> int:
        """Where a process is killed that will not end at `cpu_s`."""
        return self.cpu_s + 1


DEFAULT = Limits()

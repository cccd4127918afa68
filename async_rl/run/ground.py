"""Where a run's processes live, as [launch] kind says: what `async-rl run` has to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import LocalStarter, Starter


class Ground(Protocol):
    def prepare(self, config: Config) -> Config:
        """The config with what only the ground knows, before the run directory is made. Raises AsyncRLError."""

    def starter(self, config: Config, directory: RunDirectory) -> Starter: ...


class LocalGround:
    """This machine."""

    def prepare(self, config: Config) -> Config:
        return config

    def starter(self, config: Config, directory: RunDirectory) -> Starter:
        return LocalStarter()


def check_ground(config: Config) -> None:
    """Raises AsyncRLError when what [launch] kind needs is not installed here."""
    if config.launch.kind == "ray" and find_spec("ray") is None:
        raise AsyncRLError(
            '[launch] kind = "ray" needs ray, not installed here: in the checkout, pip install \'.[ray]\''
        )


@contextmanager
def open_ground(config: Config) -> Iterator[Ground]:
    """While it is open, processes can be started there; nothing of them is left afterwards. Raises AsyncRLError."""
    if config.launch.kind == "local":
        yield LocalGround()
        return
    check_ground(config)
    from async_rl.run.ray_ground import RayGround

    with RayGround(config) as ground:
        yield ground

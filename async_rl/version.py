"""Policy identity, and the three rules of age that every pool shares.

A policy version counts batches in the lineage of the weights: 0 is the base policy, and every confirmed batch
publishes the next one (a skipped batch with the digest unchanged). A version alone does not say which weights:
after a trainer restart version 7 may be trained again and come out different. So identity is always
(name, version, digest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

# What a peer sends becomes part of file names, so the alphabet is checked when a message is decoded.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Version = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # SHA-256


class PolicyId(msgspec.Struct, frozen=True, array_like=True):
    """One immutable set of weights: `name` is "main" until there are several policies in a run."""

    name: Name
    version: Version
    digest: Digest

    def short(self) -> str:
        """The form that people read in logs: `7-1a2b3c4d`."""
        return f"{self.version}-{self.digest[:8]}"


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive sampled tokens that (version, digest) produced, stamped by the engine at sampling."""

    version: int
    digest: str
    count: int


def tokens_of(runs: Sequence[VersionRun]) -> int:
    """How many sampled tokens these runs are over."""
    return sum([run.count for run in runs])


def oldest_version(runs: Sequence[VersionRun]) -> int:
    """The version of the oldest sampled token; raises ValueError when nothing was sampled."""
    return min(run.version for run in runs)


def judged_version(runs: Sequence[VersionRun], on_stale: str) -> int:
    """The version by whose age an attempt is dropped as stale: that of its oldest token, or with `on_stale` "mask",
    where the fresh tokens of an older attempt train, of its newest. Raises ValueError when nothing was sampled."""
    return max(run.version for run in runs) if on_stale == "mask" else oldest_version(runs)


def token_versions(runs: Sequence[VersionRun]) -> npt.NDArray[np.int32]:
    """One version per sampled token, in order: int32 of length sum(count)."""
    return np.repeat(
        np.array([run.version for run in runs], dtype=np.int32),
        np.array([run.count for run in runs], dtype=np.int64),
    )


def staleness(for_version: int, token_version: int) -> int:
    """Age of a token in versions: the version from which its training step starts, less its own."""
    return for_version - token_version


def is_stale(for_version: int, token_version: int, max_staleness: int) -> bool:
    """Whether a token is too old to train. The trainer enforces the bound with this function, for every attempt, and
    masks single tokens by the same bound (the guarantee); the buffer calls it to avoid sending what would be dropped
    (an optimisation)."""
    return staleness(for_version, token_version) > max_staleness

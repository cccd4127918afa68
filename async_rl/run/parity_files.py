"""What the two halves of `async-rl doctor` leave in a folder: trainer.parity writes, inference.parity reads and writes,
async_rl.run.doctor compares. As in a run, no engine sees the trainer's numbers before it has shown its own: it reads
the policies, whose files and identities these are."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.proof import Proof
from async_rl.version import PolicyId

POLICIES, TRAINED = "policies.json", "trained.json"
T = TypeVar("T")


class PolicyFile(msgspec.Struct, frozen=True):
    """`name` in the folder."""

    policy: PolicyId
    name: str


class Policies(msgspec.Struct, frozen=True):
    """`base` is version 0: a fresh adapter, or the checkpoint's own weights. A trainer whose policies are weights of
    the whole model makes no canary."""

    base: PolicyFile
    canary: PolicyFile | None = None


class Trained(msgspec.Struct, frozen=True):
    """What the trainer has of both. `versions` of the packages that computed it, by name."""

    base: Proof
    canary: Proof | None
    versions: dict[str, str]


class Served(msgspec.Struct, frozen=True):
    """What an engine has of both, each a proof or why there is none; `bound` in nats; `prompt_tokens` of the first
    instance of the task, and what is wrong with the tokenizer or the chat template, if anything."""

    engine: str
    bound: float
    base: Proof | str
    canary: Proof | str | None
    prompt_tokens: int
    tokenizer_problem: str
    versions: dict[str, str]


def package_versions(*names: str) -> dict[str, str]:
    """Of those that are installed here."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.encode(value))


def read(path: Path, kind: type[T]) -> T:
    """Raises AsyncRLError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"{path} cannot be read: {error}") from error

"""Checkpoints that a crash cannot half-make, and that say so when something else broke them.

A checkpoint is a folder `v00000042` whose content is written under a temporary name, listed with sizes and SHA-256 in
`manifest.json`, flushed to disk and renamed. The rename is the moment at which it exists. What is found on the way
back is checked against the manifest; a broken one is named and the next older one taken.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.killpoints import reached

MANIFEST = "manifest.json"
LEARNER = "learner.json"
KEEP = 2  # the newest, and one to fall back on should it turn out broken
TEMPORARY = ".partial-"
REPLACED = ".replaced-"


class CheckpointError(AsyncRLError):
    """A checkpoint that cannot be used; the message names it and says why."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every other file of the folder by name."""

    version: int
    files: dict[str, FileEntry]


class Found(NamedTuple):
    """The newest valid checkpoint: its folder, policy version and the learner's own state; `skipped` says, newest
    first, which newer ones are broken and how."""

    folder: Path
    version: int
    state: dict[str, Any]
    skipped: tuple[str, ...]


def write_checkpoint(root: Path, version: int, save: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
    """Make `root`/v<version>: `save` (a backend's) fills the empty folder that it is given, and `state` (plain JSON
    values) goes beside it as the learner's. On return it is on disk, and only the newest two valid ones are left. When
    `save` raises nothing has changed. A checkpoint of the same version is replaced."""
    root.mkdir(parents=True, exist_ok=True)
    finish_replacing(root)
    for leftover in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    partial = root / f"{TEMPORARY}{_name(version)}"
    partial.mkdir()
    try:
        save(partial)
        reached("trainer.in-checkpoint")
        (partial / LEARNER).write_bytes(msgspec.json.format(msgspec.json.encode(dict(state))))
        files = {path.name: FileEntry(path.stat().st_size, _sha256(path)) for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(version, files))))
        sync(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    final = root / _name(version)
    put_in_place(partial, final)
    _prune(root, newest=final)
    return final


def find_latest(root: Path) -> Found | None:
    """The newest checkpoint under `root` whose every byte is as it was written, or None when there is none at all.
    Raises CheckpointError when there are some but all are broken."""
    if root.is_dir():
        finish_replacing(root)
    skipped: list[str] = []
    for folder in checkpoints(root):
        try:
            manifest = check_checkpoint(folder)
            state = msgspec.json.decode((folder / LEARNER).read_bytes(), type=dict[str, Any])
        except (CheckpointError, OSError, msgspec.DecodeError) as error:
            skipped.append(str(error))
            continue
        return Found(folder, manifest.version, state, tuple(skipped))
    if skipped:
        raise CheckpointError(f"{root}: no usable checkpoint: " + "; ".join(skipped))
    return None


def check_checkpoint(folder: Path, *, contents: bool = True) -> Manifest:
    """The manifest, after every file was compared with it: size, and with `contents` SHA-256. Raises CheckpointError
    naming the first file that is wrong."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MANIFEST} cannot be read: {error}") from error
    if folder.name != _name(manifest.version):
        raise CheckpointError(f"checkpoint {folder}: its manifest is of version {manifest.version}")
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder}: {name} is missing")
        if path.stat().st_size != entry.bytes:
            raise CheckpointError(f"checkpoint {folder}: {name} has {path.stat().st_size} bytes of {entry.bytes}")
        if contents and _sha256(path) != entry.sha256:
            raise CheckpointError(f"checkpoint {folder}: {name} has other bytes than were written")
    return manifest


def oldest_version(root: Path) -> int:
    """Of the oldest checkpoint that is kept. Raises CheckpointError where there is none."""
    folders = checkpoints(root)
    if not folders:
        raise CheckpointError(f"{root}: no checkpoint")
    return int(folders[-1].name[1:])


def _name(version: int) -> str:
    return f"v{version:08d}"


def checkpoints(root: Path) -> list[Path]:
    """Checkpoints, newest first, valid or not."""
    found = [path for path in root.glob("v*") if path.is_dir() and path.name[1:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[1:]), reverse=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename, moving a folder of the same name aside first: a directory cannot be renamed over a full one."""
    aside = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _fsync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def finish_replacing(root: Path) -> None:
    """After a crash between the two renames of a replacement: put the old one back."""
    for aside in root.glob(f"{REPLACED}*"):
        final = root / aside.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def _prune(root: Path, newest: Path) -> None:
    """Keep the newest valid two. Sizes only are compared here, as hashing everything at each checkpoint is dear.
    Whatever is newer than the one just written belongs to a lineage that was given up, and goes too."""
    kept = 1
    for folder in checkpoints(root):
        if folder == newest:
            continue
        older = int(folder.name[1:]) < int(newest.name[1:])
        if older and kept < KEEP and _is_whole(folder):
            kept += 1
        else:
            shutil.rmtree(folder)


def _is_whole(folder: Path) -> bool:
    try:
        check_checkpoint(folder, contents=False)
    except CheckpointError:
        return False
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Every file of it is on the disk, and the folder that names them."""
    for path in (*folder.iterdir(), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

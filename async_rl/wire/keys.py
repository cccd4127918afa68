"""CURVE keys as files: who may dial a run's services, with which key, in which role.

DIR/ (0700), made by `async-rl keys DIR`; every key file is one line, `NAME KEY`, the key in Z85 (40 characters):

    service.secret   0600   of buffer and policy store; stays on their machine, and so does `allowed`
    service.public   0644   every machine that dials needs it
    node.secret      0600   so have trainer and tool; a machine needs those of the roles that it plays, and no others
    node.public      0644   as a line of `allowed`
    allowed          0644   who is admitted: lines `ROLE KEY`, what follows the key is a note, `#` begins a comment

A machine of its own key: `async-rl keys DIR --role node` there, and its node.public appended to `allowed` here. The
services read `allowed` again when it has changed. No key is ever part of an error message.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq
from zmq.utils import z85

from async_rl.errors import AsyncRLError
from async_rl.wire.messages import Role
from async_rl.wire.security import write_new

log = logging.getLogger("async_rl.keys")

DIALLING: tuple[Role, ...] = ("node", "trainer", "tool")
SERVICE = "service"
ALLOWED = "allowed"
SECRET_OF = "secret-of-"  # begins a secret file's line, so that it is not taken for a public one
MAX_FILE_BYTES = 1 << 20
KEY_CHARACTERS = 40

Allowed = Mapping[str, frozenset[str]]
"""Roles by public key."""


class KeyFileError(AsyncRLError):
    """A key file that is missing, open to others, or malformed; the message names it and never the key."""


class DoorKeys(Protocol):
    """What a server needs: its secret key, and who may come in."""

    secret: bytes

    def roles(self, key: str) -> frozenset[str]: ...

    def keys_of(self, role: str) -> frozenset[str]: ...


class DialKeys(NamedTuple):
    """What a client needs: whom it expects, and who it is. Never to be printed."""

    folder: Path
    server: bytes
    public: bytes
    secret: bytes

    def expecting(self, key: str) -> DialKeys:
        """For another server: the one of this public key (Z85), which a peer has told. Raises AsyncRLError when it is
        no key."""
        if not _is_key(key):
            raise AsyncRLError("the server's public key is not known, so it cannot be dialled")
        return self._replace(server=key.encode())

    def __repr__(self) -> str:
        return f"DialKeys({self.folder})"


class ServiceKeys:
    """A service's secret, and who may dial it. `roles(key)` reads `allowed` again when the file has changed; one that
    cannot be read then is reported, and the last good one goes on to hold. Called from one thread at a time or from
    several: what it keeps is replaced in one assignment."""

    def __init__(self, folder: Path) -> None:
        """Raises KeyFileError."""
        self.folder = folder
        self.secret = _secret(folder, SERVICE)
        self._path = folder / ALLOWED
        self._seen, self._allowed = self._stamp(), read_allowed(self._path)

    def roles(self, key: str) -> frozenset[str]:
        """The roles that a public key (Z85) may say hello in; none for one that is not listed."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._allowed = read_allowed(self._path)
            except KeyFileError as error:
                log.error("%s: the list read before goes on to hold", error)
        return self._allowed.get(key, frozenset())

    def keys_of(self, role: str) -> frozenset[str]:
        """All public keys (Z85) that may say hello in a role."""
        self.roles("")  # reads the file again when it has changed
        return frozenset(key for key, roles in self._allowed.items() if role in roles)

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_size)

    def __repr__(self) -> str:
        return f"ServiceKeys({self.folder})"


class NodeDoorKeys:
    """Of a node that others dial (inference.relay): its own secret serves, and who may come in is what the store has
    said: those that may come there as a node. Raises KeyFileError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = _secret(folder, "node")
        self._nodes: frozenset[str] = frozenset()

    @property
    def admits_some(self) -> bool:
        return bool(self._nodes)

    def admit(self, keys: Iterable[str]) -> None:
        """These, and no others."""
        self._nodes = frozenset(keys)

    def roles(self, key: str) -> frozenset[str]:
        """As ServiceKeys.roles."""
        return frozenset({"node"}) if key in self._nodes else frozenset()

    def keys_of(self, role: str) -> frozenset[str]:
        """As ServiceKeys.keys_of."""
        return self._nodes if role == "node" else frozenset()

    def __repr__(self) -> str:
        return f"NodeDoorKeys({self.folder})"


# --- making ----------------------------------------------------------------------------------------------------------


def make_keys(folder: Path, roles: tuple[Role, ...] = ()) -> None:
    """A whole set, or the pairs of some roles alone. Raises KeyFileError when one of the files is there already."""
    names: tuple[str, ...] = roles or (SERVICE, *DIALLING)
    files = [f"{name}.{kind}" for name in names for kind in ("secret", "public")] + ([] if roles else [ALLOWED])
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise KeyFileError(f"{folder}: {', '.join(taken)} is there already: choose another folder, or remove them")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        public = {name: _make_pair(folder, name) for name in names}
        if not roles:
            write_new(folder / ALLOWED, allowed_text({role: public[role] for role in DIALLING}), 0o644)
    except OSError as error:
        raise KeyFileError(f"{error.filename or folder}: keys cannot be written ({error.strerror})") from error


def allowed_text(public: Mapping[str, str]) -> str:
    head = (
        "# Who may dial the buffer and the policy store: ROLE PUBLIC-KEY, and after it a note, if you like.\n"
        f"# Roles: {', '.join(DIALLING)}. Append a line for each machine that has a key of its own.\n"
    )
    return head + "".join(f"{role} {key}\n" for role, key in public.items())


def where_keys_go(folder: Path, roles: tuple[Role, ...] = ()) -> str:
    """What a person has to do with what `make_keys` made."""
    if roles:
        public = ", ".join(f"{role}.public" for role in roles)
        return (
            f"made in {folder}; append {public} to the file `{ALLOWED}` of the services' keys, and copy their "
            f"{SERVICE}.public to {folder}"
        )
    return "\n".join(
        [
            f"made in {folder}, for the machine of buffer and policy store; to the others copy, into a folder there:",
            f"  {SERVICE}.public and node.secret      inference nodes",
            f"  {SERVICE}.public and trainer.secret   the trainer",
            f"  {SERVICE}.public and tool.secret      `async-rl status`",
            f"and start every pool with --set buffer.keys={folder} (the folder's path on its own machine)",
        ]
    )


def _make_pair(folder: Path, name: str) -> str:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    write_new(folder / f"{name}.secret", f"{SECRET_OF}{name} {secret}\n", 0o600)
    write_new(folder / f"{name}.public", f"{name} {public}\n", 0o644)
    return public


# --- reading ---------------------------------------------------------------------------------------------------------


def dial_keys(folder: Path | None, role: Role) -> DialKeys | None:
    """What a client of this role dials with; None without a folder. Raises KeyFileError."""
    if folder is None:
        return None
    secret = _secret(folder, role)
    server = _key(folder / f"{SERVICE}.public", SERVICE)
    try:
        return DialKeys(folder, server, zmq.curve_public(secret), secret)
    except zmq.ZMQError as error:  # 40 good characters that are no number of 256 bits
        raise KeyFileError(f"{folder / role}.secret: the key in it is malformed: copy the file again") from error


def hint(keys: DialKeys | None, role: Role) -> str:
    """What keys may have to do with it when nobody answers: a service says nothing to whom it does not know."""
    if keys is None:
        return "If it asks for CURVE keys, give this side some: buffer.keys (with `async-rl status`: --keys)."
    return (
        f"CURVE may be the reason: {keys.folder / SERVICE}.public must be that of its keys, the public key of "
        f"{role}.secret must be listed for {role} in their file `{ALLOWED}`, and it must use keys at all (buffer.keys)."
    )


def read_allowed(path: Path) -> Allowed:
    """Raises KeyFileError naming the line that is wrong."""
    roles: dict[str, set[str]] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] not in DIALLING:
            what = "a secret key, which belongs in no list" if words[0].startswith(SECRET_OF) else "no role"
            raise KeyFileError(
                f"{path}, line {number}: it begins with {what}: write `ROLE KEY`, {' or '.join(DIALLING)} first"
            )
        if len(words) < 2 or not _is_key(words[1]):
            raise KeyFileError(f"{path}, line {number}: no public key ({KEY_CHARACTERS} characters) after {words[0]}")
        roles.setdefault(words[1], set()).add(words[0])
    return {key: frozenset(names) for key, names in roles.items()}


def _secret(folder: Path, name: str) -> bytes:
    return _key(folder / f"{name}.secret", SECRET_OF + name, private=True)


def _key(path: Path, name: str, private: bool = False) -> bytes:
    words = _text(path, private).split()
    if len(words) != 2 or words[0] != name or not _is_key(words[1]):
        raise KeyFileError(
            f"{path}: it should be one line, `{name} KEY` with a key of {KEY_CHARACTERS} characters, and is not: copy "
            "the file again, or make new keys with `async-rl keys`"
        )
    return words[1].encode()


def _text(path: Path, private: bool = False) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise KeyFileError(
            f"{path}: cannot be read ({error.strerror}): `async-rl keys {path.parent}` makes a set of keys; on another "
            "machine, copy it from there (see SECURITY.md: which file goes where)"
        ) from error
    if private and mode & 0o077:
        raise KeyFileError(
            f"{path}: this secret key can be read by others (mode {mode:04o}): make a new one, or `chmod 600 {path}` "
            "if you are alone on this machine"
        )
    return data.decode(errors="replace")


def _is_key(word: str) -> bool:
    if len(word) != KEY_CHARACTERS or not word.isascii():
        return False
    try:
        return len(z85.decode(word)) == 32
    except Exception:  # pyzmq has no error of its own for a wrong character or too large a number
        return False

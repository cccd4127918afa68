"""Who may talk to a run: its token, and the addresses that are safe without encryption.

Without CURVE keys (keys.py, door.py) a link stays on this machine: ipc in a directory that only its owner can enter, or
tcp on loopback, where the token keeps out the machine's other users.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from pathlib import Path

from async_rl.errors import AsyncRLError

TOKEN_BYTES = 32
WILDCARDS = ("*", "0.0.0.0", "[::]")  # "every address of this machine"
SOCKET_PATH_LIMIT = 107  # sun_path of a unix socket is 108 bytes with its closing zero
SOCKET_NAME_ROOM = 24  # left for the name of a socket within a directory


def new_token() -> str:
    """32 random bytes, as hex."""
    return secrets.token_hex(TOKEN_BYTES)


def write_token(path: Path, token: str) -> None:
    """Write the token so that only its owner can read it, replacing what was there; never readable in between."""
    path.unlink(missing_ok=True)
    write_new(path, token + "\n")


def write_new(path: Path, text: str, mode: int = 0o600) -> None:
    """A new file; never open to others in between, whatever the umask."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)


def read_token(path: Path) -> str:
    """Raises AsyncRLError when the file is missing, empty, or readable by others than its owner."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read().strip()
    except OSError as error:
        raise AsyncRLError(
            f"{path}: the run's token cannot be read ({error.strerror}): copy it from the run directory of the machine "
            "where the run was started"
        ) from error
    if mode & 0o077:
        raise AsyncRLError(
            f"{path}: the run's token can be read by others (mode {mode:04o}), so anyone here may join the run: make a "
            f"new one, or `chmod 600 {path}` if you are alone on this machine"
        )
    if not token:
        raise AsyncRLError(f"{path}: the file is empty, it should hold the run's token")
    return token


def check_endpoint(endpoint: str, encrypted: bool = False) -> None:
    """Allow ipc, and tcp on loopback, or anywhere when it is `encrypted`. Raises AsyncRLError for any other address."""
    scheme, separator, address = endpoint.partition("://")
    if scheme == "ipc" and separator and address:
        if len(os.fsencode(address)) > SOCKET_PATH_LIMIT:
            raise AsyncRLError(
                f"{endpoint}: the path of a unix socket may have {SOCKET_PATH_LIMIT} bytes, this one has "
                f"{len(os.fsencode(address))}: use a shorter directory"
            )
        return
    if scheme != "tcp" or not separator:
        raise AsyncRLError(f"{endpoint!r} is not an endpoint: use ipc://PATH or tcp://127.0.0.1:PORT")
    host, colon, port = address.rpartition(":")
    if not colon or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)):
        raise AsyncRLError(f"{endpoint!r} has no port: use tcp://{address}:PORT, or :* for any free one")
    if not encrypted and not _is_loopback(host):
        raise AsyncRLError(
            f"{endpoint}: {host} can be reached from other machines, which needs CURVE keys: make them with `async-rl "
            "keys DIR` and set buffer.keys to DIR (SECURITY.md says which file goes where); or use tcp on 127.0.0.1, "
            "or ipc"
        )


def is_local(endpoint: str) -> bool:
    """Whether only processes of the machine that listens there reach it ("auto" is ipc)."""
    scheme, _, address = endpoint.partition("://")
    return scheme != "tcp" or _is_loopback(address.rpartition(":")[0])


def with_host(endpoint: str, host: str) -> str:
    """A wildcard is replaced by this address, which is dialled as it is listened at."""
    scheme, _, address = endpoint.partition("://")
    listens, _, port = address.rpartition(":")
    if scheme != "tcp" or listens not in WILDCARDS:
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def reachable(endpoint: str) -> str:
    """Where a service that listens at `endpoint` is dialled on its own machine: a wildcard is no address to dial."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or host not in WILDCARDS:
        return endpoint
    return f"tcp://{'[::1]' if host.startswith('[') else '127.0.0.1'}:{port}"


def where_to_dial(configured: str, listening: str) -> str:
    """A pool dials what its own config names when that is an address of another machine (which may be known here under
    another name than there), else where the service says that it listens."""
    scheme, _, address = configured.partition("://")
    host, _, port = address.rpartition(":")
    named = scheme == "tcp" and port != "*" and host not in WILDCARDS and not _is_loopback(host)
    return configured if named else reachable(listening)


def with_port_of(address: str, listening: str) -> str:
    """`tcp://HOST:*` with the port of where a service listens; any other address as it is."""
    return address.removesuffix("*") + listening.rpartition(":")[2] if address.endswith(":*") else address


def is_wildcard(endpoint: str) -> bool:
    """Whether a service that listens there can be dialled under several addresses, none of which is that one."""
    scheme, _, address = endpoint.partition("://")
    return scheme == "tcp" and address.rpartition(":")[0] in WILDCARDS


def shard_endpoint(endpoint: str, shard: int) -> str:
    """Where a shard of the buffer listens, by what the config says of the first: ports in a row. "auto" and free ports
    stay what they are; an ipc socket has the shard's number behind it."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if not shard or not address or port == "*":
        return endpoint
    if scheme == "tcp" and port.isdecimal():
        return f"tcp://{host}:{int(port) + shard}"
    return f"{endpoint}-{shard}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def make_ipc_directory(parent: Path | None = None) -> Path:
    """A new directory that only its owner can enter (mode 0700), with a path short enough for sockets inside; below
    `parent`, by default the system's temporary directory. The caller removes it. Raises AsyncRLError."""
    root = parent if parent is not None else Path(tempfile.gettempdir())
    if parent is None and len(os.fsencode(root)) > SOCKET_PATH_LIMIT - 2 * SOCKET_NAME_ROOM:
        root = Path("/tmp")  # some systems and schedulers set a TMPDIR too long for sockets
    try:
        directory = Path(tempfile.mkdtemp(prefix="arl-", dir=root))  # mkdtemp makes it 0700
    except OSError as error:
        raise AsyncRLError(f"{root}: no directory for sockets can be made there ({error.strerror})") from error
    if len(os.fsencode(directory)) > SOCKET_PATH_LIMIT - SOCKET_NAME_ROOM:
        directory.rmdir()
        raise AsyncRLError(
            f"{root}: the path is too long for unix sockets ({SOCKET_PATH_LIMIT} bytes): use a shorter one"
        )
    return directory

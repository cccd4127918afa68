from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from async_rl.errors import AsyncRLError
from async_rl.wire.security import check_endpoint, make_ipc_directory, new_token, read_token, write_token


def test_tokens_are_long_and_never_alike() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_a_token_file_is_readable_by_its_owner_only_and_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old and open")
    path.chmod(0o644)
    write_token(path, "abc")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == "abc"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_token(path, "abc")
    path.chmod(mode)
    with pytest.raises(AsyncRLError, match="chmod 600"):
        read_token(path)


def test_a_missing_or_empty_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AsyncRLError, match="nowhere"):
        read_token(tmp_path / "nowhere")
    write_token(tmp_path / "empty", "")
    with pytest.raises(AsyncRLError, match="empty"):
        read_token(tmp_path / "empty")


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///tmp/x/buffer", "tcp://127.0.0.1:5555", "tcp://127.8.9.1:*", "tcp://[::1]:1", "tcp://localhost:0"],
)
def test_endpoints_that_stay_on_this_machine_are_allowed(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "[::]", "node7.example.org", "eth0", "127.0.0.1.example.org"]
)
def test_addresses_that_other_machines_reach_need_keys(host: str) -> None:
    with pytest.raises(AsyncRLError, match="async-rl keys"):
        check_endpoint(f"tcp://{host}:5555")


@pytest.mark.parametrize(
    "endpoint", ["inproc://x", "udp://127.0.0.1:1", "127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc://"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(AsyncRLError, match=r"ipc://PATH|:PORT"):
        check_endpoint(endpoint)


def test_a_socket_path_too_long_for_the_system_is_refused() -> None:
    with pytest.raises(AsyncRLError, match="107"):
        check_endpoint("ipc:///" + "x" * 107)


def test_the_ipc_directory_is_private_and_short(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short:  # pytest's own may be too long already
        directory = make_ipc_directory(Path(short))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(AsyncRLError, match="too long"):
        make_ipc_directory(deep)
    assert list(deep.iterdir()) == []

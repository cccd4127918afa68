"""Key files: what is made, who may read it, and what is said of one that is not as it should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from async_rl.wire.keys import ALLOWED, DIALLING, KeyFileError, ServiceKeys, dial_keys, make_keys, read_allowed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    old = os.umask(0o002)
    make_keys(tmp_path / "keys")
    os.umask(old)
    return tmp_path / "keys"


def key_in(path: Path) -> str:
    return path.read_text().split()[1]


def every_key(folder: Path) -> set[str]:
    return {key_in(path) for path in folder.iterdir() if path.suffix}


def test_secrets_are_their_owners_alone_and_the_folder_too(folder: Path) -> None:
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}
    assert modes == {ALLOWED: "0o644"} | {
        f"{name}.{kind}": mode
        for name in ("service", *DIALLING)
        for kind, mode in (("secret", "0o600"), ("public", "0o644"))
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_a_role_dials_with_is_its_own_pair_and_the_services_public_key(folder: Path) -> None:
    keys = dial_keys(folder, "node")
    assert keys.server.decode() == key_in(folder / "service.public")
    assert keys.public.decode() == key_in(folder / "node.public")
    assert zmq.curve_public(keys.secret) == keys.public
    assert zmq.curve_public(ServiceKeys(folder).secret) == keys.server


def test_each_role_is_allowed_its_own_key_and_no_stranger_any(folder: Path) -> None:
    services = ServiceKeys(folder)
    for role in DIALLING:
        assert services.roles(key_in(folder / f"{role}.public")) == {role}
    assert services.roles(zmq.curve_keypair()[0].decode()) == frozenset()


def test_a_key_appended_by_hand_is_let_in_and_one_taken_out_no_more(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "machine-7", ("node",))
    assert {path.name for path in (tmp_path / "machine-7").iterdir()} == {"node.secret", "node.public"}
    line = (tmp_path / "machine-7" / "node.public").read_text()
    services, before = ServiceKeys(folder), (folder / ALLOWED).read_text()
    (folder / ALLOWED).write_text(before + line.rstrip() + "   machine 7, second rack # until May\n")
    assert services.roles(line.split()[1]) == {"node"}
    (folder / ALLOWED).write_text(before)
    assert services.roles(line.split()[1]) == frozenset()


def test_a_list_that_became_unreadable_lets_in_whom_it_did_and_nobody_else(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    services = ServiceKeys(folder)
    stranger = zmq.curve_keypair()[0].decode()
    (folder / ALLOWED).write_text(f"node {stranger}\nnode half-a-key\n")
    assert services.roles(stranger) == frozenset()
    assert services.roles(key_in(folder / "node.public")) == {"node"}
    assert "line 2" in caplog.text
    assert stranger not in caplog.text


def test_keys_are_never_made_over_others(folder: Path) -> None:
    before = every_key(folder)
    with pytest.raises(KeyFileError, match="there already"):
        make_keys(folder)
    with pytest.raises(KeyFileError, match=r"node\.secret"):
        make_keys(folder, ("node",))
    assert every_key(folder) == before


@pytest.mark.parametrize("name", ["node.secret", "service.public"])
def test_a_missing_file_is_named_with_the_command_that_makes_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(KeyFileError, match=rf"{name}: .*async-rl keys"):
        dial_keys(folder, "node")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_secret_open_to_others_is_refused(folder: Path, mode: int) -> None:
    (folder / "service.secret").chmod(mode)
    with pytest.raises(KeyFileError, match=r"chmod 600 .*service\.secret"):
        ServiceKeys(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-2],
        lambda text: text * 2,
        lambda text: text.replace("node", "trainer"),
        lambda text: text.split()[0] + " " + "é" * 40,
        lambda text: text.split()[0] + " " + "#" * 40,  # above the largest number that 5 characters may be
        lambda text: "\0\xff\x80" + text,
    ],
)
def test_a_malformed_key_is_refused_by_its_files_name_and_never_shown(folder: Path, spoil: object) -> None:
    path = folder / "node.secret"
    text = path.read_text()
    path.write_text(spoil(text))  # type: ignore[operator]
    with pytest.raises(KeyFileError, match=r"node\.secret") as refused:
        dial_keys(folder, "node")
    assert text.split()[1][:8] not in str(refused.value)


@pytest.mark.parametrize("line", ["node", "nodes KEY", "node KE", "secret-of-node KEY", "KEY node"])
def test_a_wrong_line_of_the_list_is_named_by_its_number(folder: Path, line: str) -> None:
    key = key_in(folder / "node.public")
    (folder / ALLOWED).write_text("# a comment\n\n" + line.replace("KEY", key) + "\n")
    with pytest.raises(KeyFileError, match="line 3") as refused:
        read_allowed(folder / ALLOWED)
    assert key not in str(refused.value)


def test_keys_are_not_in_what_is_printed_of_them(folder: Path) -> None:
    shown = f"{dial_keys(folder, 'tool')!r} {dial_keys(folder, 'tool')} {ServiceKeys(folder)!r}"
    assert not any(key in shown for key in every_key(folder))

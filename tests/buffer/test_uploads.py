"""A policy file that comes in parts: whole or not at all, whatever comes between them and whoever dies amid them."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_house import PATIENCE_S, House, data_of, policy, wait_for

from async_rl.errors import AsyncRLError
from async_rl.wire import frames, parts
from async_rl.wire.link import LinkRefused, LinkTimeout
from async_rl.wire.messages import Upload
from async_rl.wire.parts import parts_of
from buffer import partial
from buffer.policy_files import PolicyFiles
from trainer import publish
from trainer.publish import Publisher, publish_limit_s, upload_limit_s

SIZE = 100_000


def part(data: bytes, offset: int, count: int, version: int = 1, **changed: object) -> tuple[Upload, memoryview]:
    """Of a policy's file. Only the last names the SHA-256."""
    is_last = offset + count >= len(data)
    fields = {
        "kind": "lora",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest() if is_last else "",
    } | changed
    return Upload(policy(version), offset=offset, **fields), memoryview(data)[offset : offset + count]


def left(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


# --- the files -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    size=st.integers(0, 5000), cuts=st.sets(st.integers(1, 4999)), sync=st.integers(1, 6000), older=st.integers(0, 9000)
)
def test_a_file_is_what_its_parts_are_however_it_is_cut_and_whatever_it_is_written_over(
    size: int, cuts: set[int], sync: int, older: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    files = PolicyFiles(folder, "run1", 4)
    (folder / "expired.part").write_bytes(b"o" * older)
    data = random.Random(size).randbytes(size)
    places = [0, *sorted(cut for cut in cuts if cut < size), size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial, "SYNC_BYTES", sync)
        entries = [files.add(*part(data, start, end - start)) for start, end in pairwise(places)]
    assert entries[:-1] == [None] * (len(entries) - 1)
    assert entries[-1] is not None
    assert files.newest == entries[-1]
    assert files.read(policy(1), 0, size + 1) == data
    assert left(folder) == [".jsonl", ".policy"]


def test_nothing_of_a_file_is_served_or_named_before_its_last_part(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    data = data_of(1)
    assert files.add(*part(data, 0, 999)) is None
    assert files.newest is files.get(policy(1)) is files.read(policy(1), 0, 9) is None
    assert left(tmp_path) == [".part"]
    assert files.add(*part(data, 999, 1)) == files.newest


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (part(bytes(1000), 500, 100), "a part at byte 500 came, and should at 400"),
        (part(bytes(1000), 300, 100), "a part at byte 300 came, and should at 400"),
        (part(bytes(1000), 400, 0), "an empty part came, with 400 of 1000 bytes here"),
        (part(bytes(1000), 400, 600, size=500), "amid those of policy"),
        (part(bytes(1000), 400, 600, kind="snapshot"), "amid those of policy"),
        (part(bytes(1000), 400, 600, parent=policy(0)), "amid those of policy"),
        (part(bytes(1000), 400, 600, version=2), "amid those of policy"),
        (part(bytes(1000), 400, 600, sha256="0" * 64), "not those announced"),
        (part(bytes(1000), 400, 600, sha256=""), "not those announced"),
        ((part(bytes(1000), 400, 600)[0], memoryview(bytes(601))), "more than the 1000 bytes"),
        (part(bytes(1000), 0, 600, size=599), "more than the 599 bytes"),
        (part(bytes(1000), 1 << 47, 600, size=1 << 47), "amid those of policy"),
    ],
)
def test_a_part_that_does_not_follow_is_refused_with_the_whole_file(
    message: tuple[Upload, memoryview], says: str, tmp_path: Path
) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    data = bytes(1000)
    assert files.add(*part(data, 0, 400)) is None
    with pytest.raises(ValueError, match=says):
        files.add(*message)
    assert files.newest is None
    assert [path for path in tmp_path.iterdir() if path.suffix != ".jsonl"] == []
    assert files.add(*part(data, 400, 600)) is None  # and what still comes of it is of nothing
    assert files.newest is None
    assert files.add(*part(data, 0, 1000)) is not None


def test_a_file_that_begins_anew_or_gives_way_to_another_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    for version, mark in ((1, b"a"), (1, b"b"), (2, b"c")):
        assert files.add(*part(mark * 1000, 0, 400, version)) is None
    assert left(tmp_path) == [".part"]
    assert files.add(*part(b"c" * 1000, 400, 600, 2)) is not None
    assert files.read(policy(2), 0, 1001) == b"c" * 1000
    assert files.get(policy(1)) is None
    assert left(tmp_path) == [".jsonl", ".policy"]


def test_a_size_costs_nothing_until_its_bytes_come(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    assert files.add(*part(b"x", 0, 1, size=(1 << 48) - 1)) is None
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 1


def test_the_same_file_again_in_parts_is_stored_once(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "run1", 4)
    data = data_of(1)
    first = files.add(*part(data, 0, 1000))
    assert files.add(*part(data, 0, 600)) is None
    assert files.add(*part(data, 600, 400)) == first
    assert left(tmp_path) == [".jsonl", ".policy"]
    assert PolicyFiles(tmp_path, "run1", 4, keep=True).newest == first
    assert left(tmp_path) == [".jsonl", ".policy"]


# --- over a link -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def adapter(folder: Path, version: int, size: int = SIZE) -> Path:
    """A safetensors file as far as its header says."""
    path = folder / f"{version}.safetensors"
    body = data_of(version, size)
    head = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    return path


def publisher(house: House) -> Publisher:
    return Publisher(house._trainer, house._trainer)


def test_a_published_file_is_stored_whole_announced_once_and_never_held_whole(
    house: House, small_parts: None, tmp_path: Path
) -> None:
    node = house.node()
    path = adapter(tmp_path, 1)
    held: list[int] = []
    add = house.store._files.add
    house.store._files.add = lambda upload, data: held.append(data.nbytes) or add(upload, data)  # type: ignore[method-assign]
    assert publisher(house).store(policy(1), path) == path.stat().st_size
    node.expect(1, path.read_bytes())
    assert max(held) == 1000
    assert sum(held) == path.stat().st_size


def test_a_file_may_be_larger_than_a_frame(small_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq hangs up on who sends a frame of more than 1 GiB, which whole weights are from 0.27B parameters on."""
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4000)
    house = House(tmp_path)
    path = adapter(tmp_path, 1)
    publisher(house).store(policy(1), path)
    assert house.file(1).read_bytes() == path.read_bytes()
    house.close()


def test_a_store_that_dies_amid_an_upload_gets_the_whole_of_it_again(
    house: House, small_parts: None, tmp_path: Path
) -> None:
    path = adapter(tmp_path, 1, 20 * SIZE)
    add, came, half_there, found = house.store._files.add, itertools.count(1), threading.Event(), []

    def watched(upload: Upload, data: memoryview) -> object:
        if next(came) == 1000:
            house._killed = True  # by its own thread, which ends after this burst: who kills it may be slow to
            house.stopping.set()
            half_there.set()
        return add(upload, data)

    def die() -> None:
        half_there.wait(PATIENCE_S)
        house.kill()
        found.extend(house.files.iterdir())
        house.open(keep=True)

    house.store._files.add = watched  # type: ignore[method-assign]
    death = threading.Thread(target=die)
    death.start()
    publisher(house).store(policy(1), path)
    death.join(PATIENCE_S)
    assert not death.is_alive()
    assert [path.suffix for path in found] == [".part"]
    assert house.file(1).read_bytes() == path.read_bytes()
    assert left(house.files) == [".jsonl", ".policy"]


def while_no_store_is_there(house: House, says: Callable[[], object]) -> None:
    """What the trainer says then is the first that the next store hears of it."""
    house.kill()
    saying = threading.Thread(target=says)
    saying.start()
    wait_for(lambda: bool(house._trainer._session.unacknowledged), "the trainer to have spoken")
    house.open(keep=True)
    saying.join(PATIENCE_S)
    assert not saying.is_alive()


def with_one_pinned(house: House, folder: Path, pinned: int) -> Publisher:
    """Of the versions 0 to 4, of which the bound of 1 alone keeps 2 to 4."""
    made = publisher(house)
    for version in range(5):
        made.store(policy(version), adapter(folder, version))
        if version == pinned:
            made.pin(policy(version), True)
    made._store.flush(PATIENCE_S)
    return made


def kept(house: House) -> set[int]:
    return {identity.version for identity in house.store._files.sizes}


def test_an_upload_that_the_next_store_has_before_the_pins_costs_nobody_a_pinned_policy(
    house: House, tmp_path: Path
) -> None:
    trainer = with_one_pinned(house, tmp_path, 0)
    assert kept(house) == {0, 2, 3, 4}
    while_no_store_is_there(house, lambda: trainer.store(policy(5), adapter(tmp_path, 5)))
    assert kept(house) == {0, 2, 3, 4, 5}
    trainer.store(policy(6), adapter(tmp_path, 6))
    assert kept(house) == {0, 4, 5, 6}


def test_a_pin_that_ends_while_no_store_is_there_costs_nobody_another(house: House, tmp_path: Path) -> None:
    trainer = with_one_pinned(house, tmp_path, 0)
    trainer.pin(policy(2), True)
    trainer._store.flush(PATIENCE_S)
    while_no_store_is_there(house, lambda: trainer.pin(policy(2), False))
    for version in (5, 6):
        trainer.store(policy(version), adapter(tmp_path, version))
    assert kept(house) == {0, 4, 5, 6}


def test_a_trainer_that_dies_amid_an_upload_leaves_nothing_in_the_way_of_the_next(house: House, tmp_path: Path) -> None:
    data = data_of(1, SIZE)
    for start in (0, 10_000):
        message, blob = part(data, start, 10_000)
        house._trainer.send(message, [bytes(blob)])
    house._trainer.flush(PATIENCE_S)
    wait_for(lambda: list(house.files.glob("*.part")) != [], "the begin of the file")
    house.replace_trainer()
    wait_for(lambda: list(house.files.glob("*.part")) == [], "the begin of the file to go")
    path = adapter(tmp_path, 1)
    publisher(house).store(policy(1), path)
    assert house.file(1).read_bytes() == path.read_bytes()


def test_a_trainer_whose_parts_do_not_follow_is_told_so_and_put_out(house: House) -> None:
    data = data_of(1, SIZE)
    for start in (0, 20_000):
        message, blob = part(data, start, 10_000)
        house._trainer.send(message, [bytes(blob)])
    with pytest.raises(LinkRefused, match="a part at byte 20000 came, and should at 10000"):
        house._trainer.receive(PATIENCE_S, "an answer")
    assert list(house.files.iterdir()) == []


def test_a_file_that_is_one_message_is_still_taken(house: House) -> None:
    data = data_of(1, SIZE)
    house.upload(1, data)
    assert house.file(1).read_bytes() == data


def test_a_file_that_becomes_shorter_while_it_is_sent_is_an_error(tmp_path: Path, small_parts: None) -> None:
    path = adapter(tmp_path, 1)
    sending = parts_of(path, Upload(policy(1), "lora", path.stat().st_size, ""))
    next(sending)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(AsyncRLError, match="who else writes"):
        list(sending)


def test_what_a_trainer_waits_at_most_grows_with_the_file_and_the_watchdog_waits_longer() -> None:
    assert upload_limit_s(0) == 60
    assert upload_limit_s(54 << 30) == pytest.approx(60 + 5798, abs=1)
    assert all(publish_limit_s(size) >= upload_limit_s(size) + 60 for size in (0, 1 << 30, 1 << 40))


def test_a_store_that_takes_nothing_in_is_named_with_what_was_sent(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publish, "STORE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(publish, "SLOWEST_BYTES_PER_S", 1e5)  # else less than that may be left of the whole limit
    path = adapter(tmp_path, 1, 40 << 20)
    goes_on = threading.Event()
    house.store._files.add = lambda upload, data: goes_on.wait(PATIENCE_S) and None  # type: ignore[method-assign]
    with pytest.raises(LinkTimeout, match=rf"waited 0.5 s for store .*of 419431.. bytes of policy {policy(1).short()}"):
        publisher(house).store(policy(1), path)
    goes_on.set()

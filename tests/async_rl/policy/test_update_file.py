"""The files of the kinds sketch and full: what was written is read, digests chain, and anything else is one error."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.policy import update_file
from async_rl.policy.factors import Factors, encode
from async_rl.policy.projection import projection_key
from async_rl.policy.tensor_file import PolicyFileError, read_header, read_tensors, write_tensors
from async_rl.policy.update_file import (
    Step,
    apply_update,
    chain_digest,
    read_base,
    read_kind,
    read_snapshot,
    read_update,
    weights_digest,
    write_base,
    write_snapshot,
    write_update,
)

BASE = "0" * 64
NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.gate_proj")


def change(seed: int = 0) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 4), (2, 3, 4))
    return {name: encode(torch.randn(shape, generator=generator)) for name, shape in zip(NAMES, shapes, strict=True)}


def written(path: Path, seed: int = 0) -> str:
    norm = {"model.norm.weight": torch.arange(7.0)}
    return write_update(path, base_seed=3, update=9, parent=BASE, factors=change(seed), dense=norm, drawn=8)


def test_an_update_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "update"
    digest = written(path)
    update = read_update(path, digest)
    assert (update.base_seed, update.update, update.drawn, update.parent) == (3, 9, 8, BASE)
    assert (update.digest, update.storage, update.before) == (digest, "float32", ())
    assert list(tmp_path.iterdir()) == [path]
    for name, factors in change().items():
        assert torch.equal(update.factors[name].q, factors.q)
        assert torch.equal(update.factors[name].s, factors.s)
    assert torch.equal(update.dense["model.norm.weight"], torch.arange(7.0))
    assert read_kind(path) == "factors"


def test_several_steps_between_two_versions_are_applied_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "update"
    before = (Step(4, 4, change(1)), Step(5, 4, {NAMES[0]: change(2)[NAMES[0]]}))
    digest = write_update(
        path, base_seed=3, update=6, parent=BASE, factors=change(3), storage="bfloat16", before=before
    )
    update = read_update(path, digest)
    assert [(step.update, step.drawn, sorted(step.factors)) for step in update.steps] == [
        (4, 4, list(NAMES)),
        (5, 4, [NAMES[0]]),
        (6, 6, list(NAMES)),
    ]
    at_once = {NAMES[0]: torch.ones(5, 8).bfloat16(), NAMES[1]: torch.ones(2, 3, 8).bfloat16()}
    singly = {name: weight.clone() for name, weight in at_once.items()}
    apply_update(update, at_once)
    for step in update.steps:
        one = update._replace(before=(), update=step.update, drawn=step.drawn, factors=step.factors)
        apply_update(one, singly)
    assert all(torch.equal(at_once[name], singly[name]) for name in NAMES)
    assert not torch.equal(at_once[NAMES[0]], torch.ones(5, 8).bfloat16())


def test_a_receiver_without_a_weight_is_told_before_anything_changes(tmp_path: Path) -> None:
    written(tmp_path / "update")
    weights = {NAMES[0]: torch.ones(5, 8)}
    with pytest.raises(PolicyFileError, match=r"the model has no \['model.layers.1"):
        apply_update(read_update(tmp_path / "update"), weights)
    assert torch.equal(weights[NAMES[0]], torch.ones(5, 8))


def test_the_digest_of_an_update_is_of_its_parent_and_of_all_that_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "update"

    def digest(**other: Any) -> str:
        return write_update(path, **({"base_seed": 3, "update": 9, "parent": BASE, "factors": change()} | other))

    assert digest() == digest()
    others = [
        digest(),
        digest(parent="1" * 64),
        digest(base_seed=4),
        digest(update=10),
        digest(drawn=8),
        digest(storage="bfloat16"),
        digest(factors=change(1)),
        digest(factors={NAMES[0]: change()[NAMES[0]]}),
        digest(dense={"norm": torch.ones(1)}),
        digest(before=(Step(8, 8, {}),)),
    ]
    assert len(set(others)) == len(others)
    assert digest() == chain_digest(BASE, "703824a3d4f50f6a09c0c06be1a05b2ea57d98eb7be9dcadfaf06706f13fb54d")


def test_an_update_that_moves_nothing_leaves_the_policy_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "update"
    assert write_update(path, base_seed=3, update=9, parent=BASE, factors={}) == BASE
    assert read_update(path, BASE).factors == {}
    apply_update(read_update(path), {})


def test_a_snapshot_holds_the_weights_under_the_policys_digest(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    tensors = {
        "a.weight": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(0, 4),
        "d": torch.ones(()),
    }
    own = weights_digest(tensors)
    assert write_snapshot(path, tensors, None, update=5) == own
    assert read_snapshot(path, own).digest == own
    assert write_snapshot(path, tensors, "a" * 64, update=5) == "a" * 64
    snapshot = read_snapshot(path, "a" * 64)
    assert (snapshot.weights, snapshot.update) == (own, 5)
    assert {name: (t.dtype, t.shape) for name, t in snapshot.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in tensors.items())
    assert read_kind(path) == "snapshot"


def test_a_base_names_the_weights_that_a_checkpoint_has_to_have(tmp_path: Path) -> None:
    path = tmp_path / "base"
    digest = weights_digest({"a": torch.ones(2)})
    assert write_base(path, digest) == digest
    assert read_base(path).digest == digest
    assert read_kind(path) == "base"


def test_a_weights_digest_is_of_names_dtypes_shapes_and_bytes() -> None:
    ones = torch.ones(2, 3)
    head = json.dumps(["w", "torch.float32", [2, 3]], separators=(",", ":")).encode()
    assert weights_digest({"w": ones}) == hashlib.sha256(head + ones.numpy().tobytes()).hexdigest()
    assert weights_digest({"w": ones.T.contiguous().T}) == weights_digest({"w": ones})
    others = [{"v": ones}, {"w": ones.bfloat16()}, {"w": ones.reshape(3, 2)}, {"w": 2 * ones}, {"v": ones, "w": ones}]
    assert len({weights_digest(tensors) for tensors in [{"w": ones}, *others]}) == 6


def test_the_files_are_safetensors_files_both_ways(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.arange(5, dtype=torch.int16), "c/d": torch.randn(2, 3).bfloat16()}
    write_tensors(tmp_path / "ours", tensors, {"key": "word"})
    theirs = safetensors.torch.load((tmp_path / "ours").read_bytes())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"key": "word"}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"key": "word"})
    header = read_header(tmp_path / "theirs")
    assert header.metadata == {"key": "word"}
    ours = read_tensors(tmp_path / "theirs", header)
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())


def test_changing_what_was_read_does_not_change_the_file(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "snapshot", {"a": torch.ones(3)}, None, 0)
    read_snapshot(tmp_path / "snapshot").tensors["a"].zero_()
    assert read_snapshot(tmp_path / "snapshot").tensors["a"].sum() == 3


def readers(path: Path) -> None:
    """Every reader: none may do anything but return or raise PolicyFileError."""
    for read in (read_kind, read_base, read_snapshot, read_update):
        with pytest.raises(PolicyFileError):
            read(path)


@pytest.mark.parametrize("kept", [0, 4, 8, 60, -200, -1])
def test_a_cut_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "update"
    written(path)
    path.write_bytes(path.read_bytes()[:kept])
    readers(path)


def test_a_file_with_something_behind_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "update"
    written(path)
    path.write_bytes(path.read_bytes() + b"x")
    readers(path)


def test_a_changed_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "update"
    written(path)
    whole = bytearray(path.read_bytes())
    for place in range(int.from_bytes(whole[:8], "little") + 8, len(whole), 13):
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(PolicyFileError):
            read_update(path)


def test_another_policy_than_the_announced_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "update")
    write_snapshot(tmp_path / "snapshot", {"a": torch.ones(3)}, None, 0)
    for read, name in ((read_update, "update"), (read_snapshot, "snapshot")):
        with pytest.raises(PolicyFileError, match="is not the announced ffffffff"):
            read(tmp_path / name, "f" * 64)


def test_one_sort_of_file_is_not_taken_for_another(tmp_path: Path) -> None:
    written(tmp_path / "factors")
    write_snapshot(tmp_path / "snapshot", {"a": torch.ones(3)}, None, 0)
    write_base(tmp_path / "base", BASE)
    reads: dict[str, Callable[[Path], object]] = {"base": read_base, "snapshot": read_snapshot, "factors": read_update}
    for name, read in reads.items():
        for other in reads:
            if other != name:
                with pytest.raises(PolicyFileError, match="not a"):
                    read(tmp_path / other)


def test_an_adapter_is_not_a_policy_file_of_this_sort(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "adapter", metadata={"adapter_config": "{}"})
    readers(tmp_path / "adapter")
    readers(tmp_path / "missing")


def header_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def rewritten(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """The same file with another header; the tensors' bytes stay."""
    raw = path.read_bytes()
    header = header_of(path)
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :])


Q, S = f"0/{NAMES[0]}/q", f"0/{NAMES[0]}/s"


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update({new: header.pop(old)})


def policy(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        header["__metadata__"]["policy"] = json.dumps(json.loads(header["__metadata__"]["policy"]) | changes)

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        renamed(Q, "0/../../etc/passwd/q"),
        renamed(Q, "/0/a/q"),
        renamed(Q, "0//q"),
        renamed(Q, "0/a\x00b/q"),
        renamed(Q, "0/" + "a" * 200 + "/q"),
        renamed(Q, "1/a/q"),
        renamed(Q, "0/a/q"),
        renamed(S, "0/a/s"),
        renamed(Q, "dense/a/b"),
        renamed(Q, "dense/a"),
        renamed("dense/model.norm.weight", "norm"),
        lambda header: header[Q].update(dtype="F16"),
        lambda header: header[Q].update(dtype="BF16"),
        lambda header: header[Q].update(dtype="I64"),
        lambda header: header[Q].update(shape=[4, 5]),
        lambda header: header[Q].update(shape=[20]),
        lambda header: header[Q].update(shape=[5, 4, 1]),
        lambda header: header[Q].update(shape=[1 << 40, 1 << 40]),
        lambda header: header[Q].update(shape=[-5, -4]),
        lambda header: header[Q].update(shape=[5, 4.0]),
        lambda header: header[Q].update(data_offsets=[0, 1 << 47]),
        lambda header: header[Q].update(data_offsets=header[S]["data_offsets"]),
        lambda header: header[Q].update(extra=1),
        lambda header: header.pop(Q),
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].update(policy="[" * 100000),
        lambda header: header["__metadata__"].update(policy=3),
        policy(kind="pickle"),
        policy(base_seed=-1),
        policy(base_seed=4),
        policy(steps=[]),
        policy(steps=[[9, 9]]),
        policy(steps=[[9, 8]] * 2000),
        policy(storage="float16"),
        policy(parent="../../x"),
        policy(digest="0" * 64),
        policy(more=1),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "update"
    written(path)
    rewritten(path, lambda header: None)
    read_update(path)
    rewritten(path, edit)
    with pytest.raises(PolicyFileError):
        read_update(path)


@pytest.mark.parametrize(
    "factors",
    [
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, 3.0])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, -1.0])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, 0.0])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, float("nan")])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, float("inf")])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, 2.0**-101])),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.tensor([1.0, 2.0**101])),
        Factors(torch.full((2, 3), -32768, dtype=torch.int16), torch.ones(2)),
        Factors(torch.ones(2, 513, dtype=torch.int16), torch.ones(2)),
        Factors(torch.ones(2, 0, dtype=torch.int16), torch.ones(2)),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.ones(3)),
        Factors(torch.ones(2, 3), torch.ones(2)),
        Factors(torch.ones(2, 3, dtype=torch.int16), torch.ones(2).bfloat16()),
    ],
)
def test_factors_that_no_encoder_gives_are_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: Factors
) -> None:
    refused_both_ways(tmp_path / "update", monkeypatch, {"a": factors}, {})


def test_a_dense_parameter_that_is_not_finite_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_both_ways(tmp_path / "update", monkeypatch, {}, {"a": torch.tensor([1.0, float("nan")])})


def refused_both_ways(
    path: Path, monkeypatch: pytest.MonkeyPatch, factors: dict[str, Factors], dense: dict[str, torch.Tensor]
) -> None:
    write = functools.partial(write_update, path, base_seed=0, update=0, parent=BASE, factors=factors, dense=dense)
    with pytest.raises(PolicyFileError, match="cannot be written"):
        write()
    assert not path.exists()
    with monkeypatch.context() as other:  # a writer that looks at nothing
        for check in ("_check_layout", "_check_values"):
            other.setattr(update_file, check, lambda *_: None)
        write()
    with pytest.raises(PolicyFileError, match="update: "):
        read_update(path)


@pytest.mark.parametrize("name", ["../a", "", "a b", "a/../b", "a\n"])
def test_what_could_not_be_read_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyFileError):
        write_snapshot(tmp_path / "x", {name: torch.ones(1)}, None, 0)
    with pytest.raises(PolicyFileError):
        write_update(tmp_path / "x", base_seed=-1, update=0, parent=BASE, factors=change())
    with pytest.raises(PolicyFileError):
        write_snapshot(tmp_path / "x", {"a": torch.ones(1, dtype=torch.int64)}, None, 0)
    assert list(tmp_path.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.data())
def test_a_file_with_bytes_put_anywhere_is_read_whole_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "update"
    digest = written(path)
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path.write_bytes(raw)
    with contextlib.suppress(PolicyFileError):
        assert read_update(path).digest == digest


def test_a_receiver_that_has_the_file_alone_makes_the_trainers_weights(tmp_path: Path) -> None:
    """Twenty updates in a row: read, applied with the key that the file names, to the same bits as the trainer's."""
    from async_rl.policy.factors import apply_

    weights = {NAMES[0]: torch.randn(5, 33)}
    received = {NAMES[0]: weights[NAMES[0]].clone()}
    digest = weights_digest(weights)
    for number in range(20):
        factors = {NAMES[0]: encode(torch.randn(5, 4))}
        apply_(weights[NAMES[0]], factors[NAMES[0]], projection_key(3, number, NAMES[0]))
        written = write_update(tmp_path / "u", base_seed=3, update=number, parent=digest, factors=factors)
        update = read_update(tmp_path / "u", written)
        assert update.parent == digest
        apply_update(update, received)
        digest = written
    assert torch.equal(weights[NAMES[0]], received[NAMES[0]])

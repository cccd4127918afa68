"""The policy files of the kinds "sketch" and "full": what the trainer uploads, and the nodes apply.

Three sorts, all safetensors, told apart by the JSON under "policy" in the metadata:
- *base*: version 0. No tensors; it says which weights the checkpoint has to have.
- *snapshot*: all parameters, self-contained.
- *factors*: what was added to the weights since the parent policy. Several optimiser steps may lie between two
  versions; each has factors of its own, of a projection of its own.

Identity: the base and the snapshots of kind "full" are named by weights_digest. An update is named by a chain,
D_v = SHA-256(D_{v−1} ‖ content digest); one that moved nothing has no tensors, and keeps its parent's digest. A
snapshot of a policy in such a chain carries that digest, and beside it the digest of the weights that are in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from async_rl.policy.factors import LARGEST_EXPONENT, SMALLEST_EXPONENT, Factors, apply_
from async_rl.policy.projection import MAX_RANK, projection_key
from async_rl.policy.rounding import rounding_key
from async_rl.policy.tensor_file import (
    FileHeader,
    PolicyFileError,
    TensorInfo,
    hash_tensors,
    read_header,
    read_tensors,
    write_tensors,
)

POLICY_KEY = "policy"
MAX_STEPS = 1024  # optimiser steps in one update
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Counter = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Storage = Literal["float32", "bfloat16"]
STORAGE: dict[Storage, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepSeed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`update` keys the rounding of a step, `drawn` its projection: the update at which that was drawn."""

    update: Counter
    drawn: Counter


class _Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="base"):
    digest: Digest


class _Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="snapshot"):
    digest: Digest
    weights: Digest
    update: Counter


class _Factors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="factors"):
    base_seed: Counter
    parent: Digest
    digest: Digest
    storage: Storage
    steps: Annotated[tuple[StepSeed, ...], Meta(min_length=1, max_length=MAX_STEPS)]


_Head = _Base | _Snapshot | _Factors


class Step(NamedTuple):
    """One optimiser step: the factors by projection name (see projection_key)."""

    update: int
    drawn: int
    factors: dict[str, Factors]


class Update(NamedTuple):
    """From the weights named `parent` to those named `digest`, kept in `storage`. `update` and `factors` are those of
    the last step, `drawn` the update at which its projection was drawn, `before` the steps before it; `dense` are
    parameters that are sent whole."""

    base_seed: int
    update: int
    parent: str
    digest: str
    factors: dict[str, Factors]
    dense: dict[str, torch.Tensor]
    storage: Storage
    drawn: int
    before: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which they are applied."""
        return (*self.before, Step(self.update, self.drawn, self.factors))


class Snapshot(NamedTuple):
    """All parameters; `weights` is their own digest, `digest` the policy's, `update` the number of the optimiser step
    that comes next. Tensors are views of the mapped file."""

    digest: str
    weights: str
    update: int
    tensors: dict[str, torch.Tensor]


class Base(NamedTuple):
    """The model as it is in the checkpoint, and the digest which its weights have to have."""

    digest: str


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 in hex over sorted (name, dtype, shape, bytes) of all parameters, as they are stored."""
    digest = hashlib.sha256()
    hash_tensors(digest, tensors)
    return digest.hexdigest()


def chain_digest(parent: str, content: str) -> str:
    """SHA-256 in hex of two digests in hex behind one another: the policy that `content` makes of `parent`."""
    return hashlib.sha256((parent + content).encode()).hexdigest()


def apply_update(update: Update, weights: Mapping[str, torch.Tensor]) -> None:
    """Apply an update in place. `weights`: by projection name the weight, or the block of rows of a fused one,
    [..., out, in] in the update's storage dtype, whole; and the parameters of `dense` by their names. Raises
    PolicyFileError before anything has changed if a name is missing, AsyncRLError if shapes or dtypes do not fit."""
    steps = update.steps
    wanted = {name for step in steps for name in step.factors} | set(update.dense)
    if not wanted <= set(weights):
        raise PolicyFileError(f"update {update.update}: the model has no {sorted(wanted - set(weights))[:3]}")
    for step in steps:
        for name, factors in step.factors.items():
            key = projection_key(update.base_seed, step.drawn, name)
            rounding = rounding_key(update.base_seed, step.update, name) if update.storage == "bfloat16" else None
            apply_(weights[name], factors, key, rounding=rounding)
    with torch.no_grad():
        for name, tensor in update.dense.items():
            weights[name].copy_(tensor)


def write_base(path: Path, digest: str) -> str:
    """Write the file of version 0, for weights with this weights_digest; returns it."""
    _write(path, _Base(digest), {})
    return digest


def write_snapshot(path: Path, tensors: Mapping[str, torch.Tensor], digest: str | None, update: int) -> str:
    """Write all parameters, as they are before step `update`; returns the policy's digest: `digest`, or for None the
    weights' own. Which version that is, the store knows: a version may be several optimiser steps, or none."""
    weights = weights_digest(tensors)
    _write(path, _Snapshot(digest or weights, weights, update), tensors)
    return digest or weights


def write_update(
    path: Path,
    *,
    base_seed: int,
    update: int,
    parent: str,
    factors: Mapping[str, Factors],
    dense: Mapping[str, torch.Tensor] | None = None,
    storage: Storage = "float32",
    drawn: int | None = None,
    before: tuple[Step, ...] = (),
) -> str:
    """Write what leads from the policy `parent` to the next, and return that one's digest. `drawn`: the update at which
    the projection was drawn, if not this one; `before`: earlier steps since `parent`. Raises PolicyFileError, and
    writes nothing, for what nobody would read."""
    steps = (*before, Step(update, update if drawn is None else drawn, dict(factors)))
    tensors = _step_tensors(steps) | {f"dense/{name}": tensor for name, tensor in (dense or {}).items()}
    try:
        _check_layout(tensors, len(steps))
        _check_values(tensors)
    except ValueError as error:
        raise PolicyFileError(f"{path}: cannot be written: {error}") from error
    seeds = tuple(StepSeed(step.update, step.drawn) for step in steps)
    digest = _next_digest(base_seed, parent, storage, seeds, tensors)
    _write(path, _Factors(base_seed, parent, digest, storage, seeds), tensors)
    return digest


def read_kind(path: Path) -> Literal["base", "snapshot", "factors"]:
    """Which sort of policy file it is. Raises PolicyFileError."""
    head = _head(path, read_header(path))
    return "base" if isinstance(head, _Base) else "snapshot" if isinstance(head, _Snapshot) else "factors"


def read_base(path: Path) -> Base:
    """Raises PolicyFileError for any other file."""
    header = read_header(path)
    head = _head(path, header)
    if not isinstance(head, _Base) or header.tensors:
        raise PolicyFileError(f"policy file {path}: not a base policy's")
    return Base(head.digest)


def read_snapshot(path: Path, expected_digest: str | None = None) -> Snapshot:
    """All of a policy's weights. Raises PolicyFileError when the file is broken, or is not the policy expected."""
    header = read_header(path)
    head = _head(path, header)
    if not isinstance(head, _Snapshot):
        raise PolicyFileError(f"policy file {path}: not a snapshot")
    tensors = read_tensors(path, header)
    weights = weights_digest(tensors)
    if weights != head.weights:
        raise PolicyFileError(
            f"policy file {path}: its weights are {weights[:16]}…, not {head.weights[:16]}… as it says"
        )
    _expect(path, head.digest, expected_digest)
    return Snapshot(head.digest, weights, head.update, tensors)


def read_update(path: Path, expected_digest: str | None = None) -> Update:
    """What a file of factors says, all of it checked. Raises PolicyFileError when it is broken, or does not lead to the
    policy expected."""
    header = read_header(path)
    head = _head(path, header)
    if not isinstance(head, _Factors):
        raise PolicyFileError(f"policy file {path}: not an update")
    try:
        _check_layout(header.tensors, len(head.steps))
        tensors = read_tensors(path, header)
        _check_values(tensors)
    except ValueError as error:
        raise PolicyFileError(f"policy file {path}: {error}") from error
    digest = _next_digest(head.base_seed, head.parent, head.storage, head.steps, tensors)
    if digest != head.digest:
        raise PolicyFileError(f"policy file {path}: leads to {digest[:16]}…, not to {head.digest[:16]}… as it says")
    _expect(path, digest, expected_digest)
    steps = [Step(seed.update, seed.drawn, {}) for seed in head.steps]
    dense = {}
    for full, tensor in tensors.items():
        group, name, part = _parts(full)
        if group == "dense":
            dense[name] = tensor
        elif part == "q":
            steps[int(group)].factors[name] = Factors(tensor, tensors[f"{group}/{name}/s"])
    last = steps[-1]
    return Update(
        head.base_seed,
        last.update,
        head.parent,
        digest,
        last.factors,
        dense,
        head.storage,
        last.drawn,
        tuple(steps[:-1]),
    )


def _write(path: Path, head: _Head, tensors: Mapping[str, torch.Tensor]) -> None:
    text = msgspec.json.encode(head)
    try:
        msgspec.json.decode(text, type=_Head)  # what cannot be read is not written
    except ValueError as error:
        raise PolicyFileError(f"{path}: cannot be written: {error}") from error
    write_tensors(path, tensors, {POLICY_KEY: text.decode()})


def _head(path: Path, header: FileHeader) -> _Head:
    try:
        return msgspec.json.decode(header.metadata.get(POLICY_KEY, "null"), type=_Head)
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(
            f"policy file {path}: {POLICY_KEY!r} in its metadata is missing or broken: {error}"
        ) from error


def _expect(path: Path, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected:
        raise PolicyFileError(f"policy file {path}: digest {digest[:16]}… is not the announced {expected[:16]}…")


def _step_tensors(steps: tuple[Step, ...]) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{name}/{part}": tensor
        for index, step in enumerate(steps)
        for name, factors in step.factors.items()
        for part, tensor in zip("qs", factors, strict=True)
    }


def _next_digest(
    base_seed: int, parent: str, storage: Storage, seeds: tuple[StepSeed, ...], tensors: Mapping[str, torch.Tensor]
) -> str:
    """The digest of what an update makes of its parent. The content is the JSON array [base seed, storage, [[update,
    drawn], …]] and the tensors."""
    if not tensors:
        return parent
    content = hashlib.sha256(msgspec.json.encode([base_seed, storage, seeds]))
    hash_tensors(content, tensors)
    return chain_digest(parent, content.hexdigest())


def _parts(name: str) -> tuple[str, str, str]:
    """ "<step>/<name>/q" and "…/s"; or "dense/<name>", whose third part is empty."""
    group, _, rest = name.partition("/")
    name, _, part = rest.partition("/")
    return group, name, part


def _check_layout(tensors: Mapping[str, TensorInfo] | Mapping[str, torch.Tensor], steps: int) -> None:
    """Names, dtypes and shapes of an update, before any of its bytes is looked at. Raises ValueError."""
    indices = {str(index) for index in range(steps)}
    for full, info in tensors.items():
        group, name, part = _parts(full)
        if group == "dense" and name and not part and info.dtype in (torch.float32, torch.bfloat16):
            continue
        other = tensors.get(f"{group}/{name}/{'s' if part == 'q' else 'q'}")
        if group not in indices or not name or part not in ("q", "s") or other is None:
            raise ValueError(f"a tensor {full!r}, {info.dtype}, that is no part of an update of {steps} steps")
        if part == "q":
            fits = info.dtype == torch.int16 and other.dtype == torch.float32 and info.shape[:-1] == other.shape
            if not fits or len(info.shape) not in (2, 3) or not 1 <= info.shape[-1] <= MAX_RANK:
                raise ValueError(
                    f"{full}: {info.dtype} {list(info.shape)} with a scale {other.dtype} {list(other.shape)}"
                )


def _check_values(tensors: Mapping[str, torch.Tensor]) -> None:
    """That scales are powers of two, q within range, dense parameters finite. Raises ValueError."""
    for full, tensor in tensors.items():
        part = full.rsplit("/", 1)[-1]
        if full.startswith("dense/"):
            good = tensor.isfinite().all()
        elif part == "s":
            bits = tensor.view(torch.int32)  # a power of two: no sign, no fraction
            exponent = (bits >> 23) - 127
            good = ((bits & 0x7FFFFF) == 0).all() & (
                (exponent >= SMALLEST_EXPONENT) & (exponent <= LARGEST_EXPONENT)
            ).all()
        else:
            good = (tensor != -32768).all()
        if not bool(good):
            raise ValueError(f"{full}: a value that no encoder gives")

"""A safetensors file, written and read without a second copy of what is in it.

A whole model's weights are gigabytes, and safetensors' own functions gather a file's bytes in memory, or leave two
integers of every tensor behind, for ever. The format is short: the length of a JSON header (8 bytes, little-endian),
the header (name -> dtype, shape, offsets; "__metadata__" -> strings), and the tensors' bytes behind one another. What
is written here opens with `safetensors`, and the other way round.

A file is judged by its header before anything is allocated: names, dtypes, shapes and offsets must add up to the size
that it has. Its tensors are views of the mapped file (copy-on-write: changing one does not change the file).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from async_rl.errors import AsyncRLError

MAX_HEADER = 32 << 20  # a thousand layers of a hundred tensors each have some 10 MB
LENGTH_BYTES = 8
METADATA = "__metadata__"
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}([./][A-Za-z0-9_-]{1,128}){0,31}")  # module paths; no "..", no leading slash
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16"}
DTYPES = {code: dtype for dtype, code in CODES.items()}
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class PolicyFileError(AsyncRLError):
    """A policy file that is broken, or is not what it is said to be."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Literal["F32", "BF16", "F16", "I16"]
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]


class TensorInfo(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of its bytes, from the file's beginning
    size: int


class FileHeader(NamedTuple):
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def tensor_bytes(tensor: torch.Tensor) -> memoryview | bytes:
    """A tensor's bytes in row-major order; a view where it lies so on the CPU already."""
    if not tensor.numel():
        return b""
    flat: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def hash_tensors(digest: hashlib._Hash, tensors: Mapping[str, torch.Tensor]) -> None:
    """Feed `digest` each tensor, sorted by name: name, dtype and shape as JSON, then its bytes."""
    for name in sorted(tensors):
        head = [name, str(tensors[name].dtype), list(tensors[name].shape)]
        digest.update(json.dumps(head, separators=(",", ":")).encode())
        digest.update(tensor_bytes(tensors[name]))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole: under a temporary name, then renamed. Raises PolicyFileError for names, dtypes
    or numbers of axes that `read_header` would refuse."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each lies aligned
    entries: dict[str, object] = {METADATA: dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if not NAME.fullmatch(name) or tensor.dtype not in CODES or tensor.dim() > 8:
            raise PolicyFileError(f"{path}: cannot hold {name!r}, {tensor.dtype} {tuple(tensor.shape)}")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    partial = path.with_suffix(path.suffix + ".part")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for name in order:
            file.write(tensor_bytes(tensors[name]))
    partial.replace(path)


def read_header(path: Path) -> FileHeader:
    """What a file says is in it, once that is known to add up. Raises PolicyFileError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(MAX_HEADER, size - LENGTH_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            parts = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(METADATA, b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in parts.items()}
        tensors = dict(_placed(entries, LENGTH_BYTES + length, size))
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise PolicyFileError(f"policy file {path}: cannot be read: {error}") from error
    return FileHeader(metadata, tensors)


def _placed(entries: Mapping[str, _Entry], start: int, size: int) -> Iterator[tuple[str, TensorInfo]]:
    """Where each tensor lies: one behind the other from the header's end to the file's, aligned."""
    place = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = DTYPES[entry.dtype]
        begin, end = entry.data_offsets
        wanted = math.prod(entry.shape) * dtype.itemsize
        if not NAME.fullmatch(name):
            raise ValueError(f"a tensor named {name[:80]!r}")
        if start + begin != place or end - begin != wanted or place % dtype.itemsize:
            raise ValueError(f"{name}: {entry.dtype} {list(entry.shape)} at bytes {begin} … {end}")
        yield name, TensorInfo(dtype, entry.shape, place, wanted)
        place += wanted
    if place != size:
        raise ValueError(f"its tensors end at byte {place} of {size}")


def read_tensors(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """The tensors that `read_header` found, as views of the mapped file: memory is taken when they are looked at."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise PolicyFileError(f"policy file {path}: cannot be read: {error}") from error
    if any(info.begin + info.size > len(mapped) for info in header.tensors.values()):
        raise PolicyFileError(f"policy file {path}: became shorter while it was read")
    return {
        name: torch.frombuffer(
            mapped, dtype=info.dtype, count=info.size // info.dtype.itemsize, offset=info.begin
        ).reshape(info.shape)
        if info.size
        else torch.empty(info.shape, dtype=info.dtype)
        for name, info in header.tensors.items()
    }

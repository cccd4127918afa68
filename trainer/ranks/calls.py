"""The calls of a trainer backend as messages, so that all ranks make the same ones: msgspec structs of plain values and
arrays, one for each method that computes something together. Never pickle: it runs code when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer.backend import Backend, Sample

Tokens = list[npt.NDArray[np.int32]]


class Step(msgspec.Struct, tag=True):
    samples: list[Sample]
    rate: float

    def run(self, backend: Backend) -> Any:
        return backend.step(self.samples, self.rate)


class Reference(msgspec.Struct, tag=True):
    samples: list[Sample]

    def run(self, backend: Backend) -> Any:
        return backend.reference(self.samples)


class Logprobs(msgspec.Struct, tag=True):
    tokens: Tokens
    temperature: float

    def run(self, backend: Backend) -> Any:
        return backend.logprobs(self.tokens, self.temperature)


class Export(msgspec.Struct, tag=True):
    path: Path

    def run(self, backend: Backend) -> Any:
        return backend.export(self.path)


class ExportWhole(msgspec.Struct, tag=True):
    path: Path

    def run(self, backend: Backend) -> Any:
        return backend.export_whole(self.path)


class ExportFinal(msgspec.Struct, tag=True):
    folder: Path

    def run(self, backend: Backend) -> Any:
        return backend.export_final(self.folder)


class MakeCanary(msgspec.Struct, tag=True):
    path: Path
    seed: int
    tokens: Tokens

    def run(self, backend: Backend) -> Any:
        return backend.canary(self.path, self.seed, self.tokens)


class Save(msgspec.Struct, tag=True):
    folder: Path

    def run(self, backend: Backend) -> Any:
        return backend.save(self.folder)


class Load(msgspec.Struct, tag=True):
    folder: Path

    def run(self, backend: Backend) -> Any:
        return backend.load(self.folder)


class End(msgspec.Struct, tag=True):
    """There will be no other call."""


Computed = Step | Reference | Logprobs | Export | ExportWhole | ExportFinal | MakeCanary | Save | Load
Call = Computed | End


def encode(call: Call) -> bytes:
    return _ENCODER.encode(call)


def decode(message: bytes) -> Call:
    """Arrays are views of the message, not to be written to. Raises msgspec.ValidationError."""
    call: Call = _DECODER.decode(message)
    return call


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no plain form of {type(value)}")


def _back(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(Call, dec_hook=_back)

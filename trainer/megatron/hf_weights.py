"""A model's weights from a folder in Hugging Face layout to the ranks, each reading just its part, and back.

Experts may be stored one by one (`….experts.3.gate_proj.weight`) or fused (`….experts.gate_up_proj`
[experts, gate and up rows, width], `….experts.down_proj`), as transformers stores them or holds them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_rl.errors import AsyncRLError
from trainer.megatron.pieces import Piece, pieces, tensor_names
from trainer.ranks import agreement

if TYPE_CHECKING:
    from trainer.megatron.model import ShardedModel

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
FILE_BYTES = 4 << 30  # of a checkpoint that is written; also what rank 0 holds of it at a time
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load(model: ShardedModel, path: str | Path) -> None:
    """Fill this rank's parameters. Raises AsyncRLError for tensors that are missing, too many, or of another shape."""
    with ExitStack() as stack:
        source = _Source(Path(path), stack, getattr(model.config, "num_experts", 0))
        source.check(tensor_names(model.config))
        for piece in pieces(model):
            piece.local.copy_(source.read(piece).reshape(piece.local.shape))


class _Source:
    """The tensors of a folder: which file has which, opened when they are first read. `experts` are those of a layer
    that the model has."""

    def __init__(self, folder: Path, stack: ExitStack, experts: int) -> None:
        self.folder = folder
        self.experts = experts
        self._stack = stack
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX).exists():
                self.files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            else:
                self.files = dict.fromkeys(self._file(ONE_FILE).keys(), ONE_FILE)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise AsyncRLError(
                f"[model] path = {str(folder)!r}: neither {ONE_FILE} nor {INDEX} can be read: {error}"
            ) from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._open[name]

    def stored(self, name: str) -> tuple[str, int | None, str]:
        """The tensor in which `name` lies: its name, the expert in it if it has all of them, and which part."""
        fused = EXPERT.fullmatch(name)
        if name in self.files or fused is None:
            return name, None, ""
        prefix, expert, part = fused.groups()
        whole = f"{prefix}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        return (whole, int(expert), part) if whole in self.files else (name, None, "")

    def check(self, names: list[str]) -> None:
        needed = {self.stored(name)[0] for name in names}
        # Old checkpoints have rotary frequencies, and tied ones may have their head a second time.
        odd = {name for name in self.files if name not in needed and not name.endswith(("inv_freq", "lm_head.weight"))}
        missing = needed - self.files.keys()
        if missing or odd:
            raise AsyncRLError(
                f"[model] path = {str(self.folder)!r}: its tensors are not those of its config.json: "
                f"missing {_some(missing)}, unknown {_some(odd)}"
            )

    def read(self, piece: Piece) -> torch.Tensor:
        """The rectangle of a piece, [rows, columns] or [length]."""
        name, expert, part = self.stored(piece.name)
        try:
            stored = self._file(self.files[name]).get_slice(name)
            shape, start = tuple(stored.get_shape()), piece.start
            expected = piece.shape
            if expert is not None:
                rows = piece.shape[0]
                expected = (self.experts, rows if part == "down" else 2 * rows, piece.shape[1])
                start = (start[0] + (rows if part == "up" else 0), start[1])
            if shape != expected:
                raise AsyncRLError(
                    f"[model] path = {str(self.folder)!r}: {name} has the shape {list(shape)}, its config.json says "
                    f"{list(expected)}"
                )
            where = [slice(first, first + size) for first, size in zip(start, piece.size, strict=True)]
            values: torch.Tensor = stored[tuple(where)] if expert is None else stored[(expert, *where)]
        except (OSError, SafetensorError) as error:
            raise AsyncRLError(f"[model] path = {str(self.folder)!r}: {name} cannot be read: {error}") from error
        return values


def _some(names: set[str]) -> str:
    return (
        f"{', '.join(sorted(names)[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "none"
    )


# --- the way back ----------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle that a rank speaks for."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


def held(piece: Piece) -> torch.Tensor:
    """The values of a piece as they are: what `full_tensors` sends unless told otherwise."""
    return piece.local


def full_tensors(
    model: ShardedModel, value_of: Callable[[Piece], torch.Tensor] = held
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor of the whole model by its Hugging Face name, experts one by one: on rank 0 on the CPU, in the order
    of `tensor_names`, one at a time; None on the others, which have to go through it at the same time. `value_of` gives
    what is sent for a piece, as many elements in the model's dtype."""
    mine = {piece.name: piece for piece in pieces(model) if piece.owned and piece.local.numel()}
    plan = _gather_plan(
        [_Part(name, piece.shape, piece.start, piece.size) for name, piece in mine.items()], model.device
    )
    rank = dist.get_rank()
    for name in tensor_names(model.config):
        piece = mine.get(name)
        value = None if piece is None else value_of(piece).reshape(piece.size).contiguous()
        if rank == 0:
            yield name, _assembled(model, plan[name], value)
        else:
            if value is not None:
                dist.send(value, dst=0)
            yield name, None


def _assembled(model: ShardedModel, parts: list[tuple[int, _Part]], own: torch.Tensor | None) -> torch.Tensor:
    dtype = model.stage.config.params_dtype
    whole = torch.empty(parts[0][1].shape, dtype=dtype)
    for rank, part in parts:
        value = own
        if rank:
            value = torch.empty(part.size, dtype=dtype, device=model.device)
            dist.recv(value, src=rank)
        assert value is not None
        where = tuple(slice(first, first + size) for first, size in zip(part.start, part.size, strict=True))
        whole[where] = value.cpu()
    return whole


def _gather_plan(mine: list[_Part], device: torch.device) -> dict[str, list[tuple[int, _Part]]]:
    """Who speaks for what: by name the ranks and their parts, in the order of the ranks."""
    payload = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    plan: dict[str, list[tuple[int, _Part]]] = {}
    for rank, (size, packed) in enumerate(zip(sizes, everyone, strict=True)):
        for part in msgspec.msgpack.decode(packed[: int(size)].cpu().numpy().tobytes(), type=list[_Part]):
            plan.setdefault(part.name, []).append((rank, part))
    return plan


def write(
    model: ShardedModel,
    folder: Path,
    value_of: Callable[[Piece], torch.Tensor] = held,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the whole model in Hugging Face layout, from rank 0 (every rank calls it): config.json, and files of about
    `file_bytes` with their index. What is not weights (tokenizer) is the caller's. Raises AsyncRLError on every rank
    when it cannot be written."""
    files = _NewFiles(folder, file_bytes)
    rank, error = dist.get_rank(), None
    if rank == 0:
        error = _error_of(partial(files.begin, model), folder)
    for name, value in full_tensors(model, value_of):
        # After an error rank 0 goes on receiving, else the others would wait for it.
        if value is not None and error is None:
            error = _error_of(partial(files.add, name, value), folder)
    if rank == 0 and error is None:
        error = _error_of(files.finish, folder)
    agreement.agree(error, "writing the whole model", model.device)


def _error_of(step: Callable[[], None], folder: Path) -> AsyncRLError | None:
    """What went wrong with the disk."""
    try:
        step()
    except (OSError, SafetensorError) as error:
        return AsyncRLError(f"{folder} cannot be written: {error}: make room, or name another folder")
    return None


class _NewFiles:
    """The files of a whole model, of about `file_bytes` each; one is in memory until it is full."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._weight_map: dict[str, int] = {}
        self._number, self._held, self._total = 1, 0, 0

    def begin(self, model: ShardedModel) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.config)
        config.dtype = model.stage.config.params_dtype  # which may not be that of the checkpoint that was read
        config.save_pretrained(self._folder)

    def add(self, name: str, value: torch.Tensor) -> None:
        if self._held and self._held + value.nbytes > self._file_bytes:
            self._write()
            self._tensors, self._held = {}, 0
            self._number += 1
        self._tensors[name] = value
        self._weight_map[name] = self._number
        self._held += value.nbytes
        self._total += value.nbytes

    def finish(self) -> None:
        self._write()
        _name_files(self._folder, self._number, self._weight_map, self._total)

    def _write(self) -> None:
        save_file(self._tensors, self._folder / f"model-{self._number:05d}.part", metadata={"format": "pt"})


def _name_files(folder: Path, count: int, weight_map: dict[str, int], total: int) -> None:
    """Under the names that others look for, which say how many files there are."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names, start=1):
        (folder / f"model-{number:05d}.part").rename(folder / (ONE_FILE if count == 1 else name))
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[number - 1] for name, number in weight_map.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

"""A checkpoint of an adapter in parts: each rank writes what it owns to a file of its own, and any layout reads it.

shard-00003.safetensors holds, of each tensor that rank 3 owns a part of, "value/NAME" and once it has had a gradient
AdamW's "exp_avg/NAME" and "exp_avg_sq/NAME"; its metadata say, as JSON, where the parts lie in the whole tensors, which
ranks wrote a file, the adapter's config, and of which checkpoint the file is: the policy's digest and the steps taken,
as in backend.json, so that files of two checkpoints are never read as one. The two files of the torch backend are read
as parts, too, which are whole: so a run may change its backend.

No megatron-core here: `async-rl export` reads these files on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import CONFIG_KEY, canonical_config, policy_digest
from trainer.megatron.slices import Piece
from trainer.optimizer_state import ADAPTER_FILE, MOMENTS, OPTIMIZER_FILE, Counters

SHARDS_KEY = "shards"
VALUE, AVERAGE, SQUARE = "value", "exp_avg", "exp_avg_sq"
Pair = tuple[int, int]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a file's part of a tensor lies in it: its first row and column; `step` counts AdamW's steps, if any."""

    shape: Pair
    offset: Pair
    step: float | None


class Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of a file. `policy` is the digest of the whole adapter and `steps` counts the optimiser's, as in
    backend.json; `ranks` are those that wrote one."""

    policy: str
    steps: int
    ranks: list[int]
    config: str
    tensors: dict[str, Part]


class Tile(NamedTuple):
    """A part of a tensor, rows × columns, and where it is stored."""

    path: Path
    key: str
    rows: Pair
    columns: Pair


class Index(NamedTuple):
    """What a checkpoint has: canonical config; whole shapes by name; AdamW's steps by name, of those that have had a
    gradient; the tiles of each ("value" | "exp_avg" | "exp_avg_sq", name)."""

    config: str
    shapes: dict[str, Pair]
    steps: dict[str, float]
    tiles: dict[tuple[str, str], list[Tile]]


class State(NamedTuple):
    """A rank's part: value by name, and the moments of those that have some."""

    values: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]


def shard_file(rank: int) -> str:
    return f"shard-{rank:05}.safetensors"


def has_shards(folder: Path) -> bool:
    return any(folder.glob("shard-*.safetensors"))


def write_shard(
    folder: Path,
    counters: Counters,
    rank: int,
    ranks: Iterable[int],
    pieces: Iterable[Piece],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
) -> None:
    """What `rank` owns: `pieces`, at least one. `ranks` are all that own some; `counters` are the checkpoint's."""
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, Part] = {}
    for piece in pieces:
        parameter = parameters[piece.name]
        state = optimizer.state.get(parameter, {})
        tensors[f"{VALUE}/{piece.name}"] = parameter.detach().cpu().contiguous()
        for moment in (AVERAGE, SQUARE) if state else ():
            tensors[f"{moment}/{piece.name}"] = state[moment].detach().cpu().contiguous()
        step = float(state["step"]) if state else None
        parts[piece.name] = Part(piece.shape, (piece.rows[0], piece.columns[0]), step)
    shards = Shards(counters.digest, counters.optimizer_steps, sorted(ranks), canonical_config(config), parts)
    save_file(tensors, folder / shard_file(rank), metadata={SHARDS_KEY: msgspec.json.encode(shards).decode()})


def read_index(folder: Path, counters: Counters) -> Index:
    """Raises AsyncRLError for files that are missing or broken, of another checkpoint than `counters`, or that do not
    make up whole tensors."""
    index = _index_of_shards(folder, counters) if has_shards(folder) else _index_of_whole_files(folder)
    for (_, name), tiles in index.tiles.items():
        _check_tiles(folder, name, index.shapes[name], tiles)
    for name in index.shapes:
        wanted = (VALUE, AVERAGE, SQUARE) if name in index.steps else (VALUE,)
        if missing := [kind for kind in wanted if (kind, name) not in index.tiles]:
            raise AsyncRLError(f"checkpoint {folder}: {missing[0]} of {name} is missing")
    return index


def read_state(
    folder: Path, counters: Counters, pieces: Iterable[Piece], shapes: Mapping[str, Pair], config: Mapping[str, Any]
) -> State:
    """What a rank that holds `pieces` needs; `shapes` are those of every tensor of the model's adapter. Raises
    AsyncRLError for files that are missing or broken, or of another adapter."""
    index = read_index(folder, counters)
    if index.config != canonical_config(config):
        raise AsyncRLError(
            f"checkpoint {folder}: its adapter is {index.config}, the configuration asks for "
            f"{canonical_config(config)}: resume with the configuration it was made with"
        )
    if index.shapes != shapes:
        odd = sorted(dict(index.shapes.items() ^ shapes.items()))[0]
        raise AsyncRLError(
            f"checkpoint {folder}: {odd} is {index.shapes.get(odd, 'not in it')}, the model needs "
            f"{shapes.get(odd, 'none')}: resume with the model and the expert_adapters it was made with"
        )
    files = _Files()
    values, moments = {}, {}
    for piece in pieces:
        values[piece.name] = _assemble(files, index.tiles[VALUE, piece.name], piece.rows, piece.columns)
        if piece.name in index.steps:
            moments[piece.name] = {
                kind: _assemble(files, index.tiles[kind, piece.name], piece.rows, piece.columns)
                for kind in (AVERAGE, SQUARE)
            } | {"step": torch.tensor(index.steps[piece.name], dtype=torch.float32)}
    return State(values, moments)


@torch.no_grad()
def restore(state: State, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Fill parameters and optimiser, on the parameters' device."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        parameter.copy_(state.values[name])
        if name in state.moments:
            moments = state.moments[name].items()
            optimizer.state[parameter] = {moment: values.to(parameter.device) for moment, values in moments}


def read_for_one_process(
    folder: Path, counters: Counters, parameters: Mapping[str, torch.nn.Parameter], config: Mapping[str, Any]
) -> State:
    """`read_state` for somebody who holds every tensor whole, and so can say whether it is the policy that `counters`
    names. Raises AsyncRLError, also when it is not."""
    shapes = {name: (parameter.shape[0], parameter.shape[1]) for name, parameter in parameters.items()}
    pieces = [Piece(name, shape, (0, shape[0]), (0, shape[1]), True, ()) for name, shape in shapes.items()]
    state = read_state(folder, counters, pieces, shapes, config)
    _check_digest(folder, counters, state.values, config)
    return state


def read_whole(folder: Path, counters: Counters) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor of the adapter, and its config, as `async_rl.policy.adapter.read_adapter` gives them. Raises
    AsyncRLError also when it is not the policy that `counters` names."""
    index = read_index(folder, counters)
    files = _Files()
    tensors = {
        name: _assemble(files, index.tiles[VALUE, name], (0, shape[0]), (0, shape[1]))
        for name, shape in index.shapes.items()
    }
    config = msgspec.json.decode(index.config)
    _check_digest(folder, counters, tensors, config)
    return tensors, config


def _check_digest(
    folder: Path, counters: Counters, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    if policy_digest(tensors, config) != counters.digest:
        raise AsyncRLError(f"checkpoint {folder}: its shards together are not the policy {counters.digest[:16]}…")


def _index_of_shards(folder: Path, counters: Counters) -> Index:
    files = {path: _shards(path) for path in sorted(folder.glob("shard-*.safetensors"))}
    first = next(iter(files.values()))
    expected = {folder / shard_file(rank) for rank in first.ranks}
    if files.keys() != expected:
        odd = sorted(files.keys() ^ expected)[0]
        raise AsyncRLError(f"checkpoint {folder}: {odd.name} is {'missing' if odd in expected else 'not one of it'}")
    index = Index(first.config, {}, {}, {})
    for path, shards in files.items():
        if (shards.config, shards.ranks) != (first.config, first.ranks):
            raise AsyncRLError(f"checkpoint {folder}: {path.name} is of another checkpoint than the files beside it")
        if (shards.policy, shards.steps) != (counters.digest, counters.optimizer_steps):
            raise AsyncRLError(
                f"checkpoint {folder}: {path.name} is of policy {shards.policy[:16]}… after {shards.steps} steps, "
                f"backend.json of {counters.digest[:16]}… after {counters.optimizer_steps}: files of two checkpoints"
            )
        stored = _stored_shapes(path)
        for name, part in shards.tensors.items():
            if index.shapes.setdefault(name, part.shape) != part.shape:
                raise AsyncRLError(f"checkpoint {folder}: its files disagree on the shape of {name}")
            if part.step is not None and index.steps.setdefault(name, part.step) != part.step:
                raise AsyncRLError(f"checkpoint {folder}: its files disagree on the steps of {name}")
            for kind in (VALUE, AVERAGE, SQUARE) if part.step is not None else (VALUE,):
                key = f"{kind}/{name}"
                if key not in stored:
                    raise AsyncRLError(f"checkpoint {folder}: {path.name} lacks {key}")
                index.tiles.setdefault((kind, name), []).append(_tile(path, key, part.offset, stored[key]))
    return index


def _index_of_whole_files(folder: Path) -> Index:
    """Of the torch backend: an adapter file, and the moments beside it."""
    adapter, optimizer = folder / ADAPTER_FILE, folder / OPTIMIZER_FILE
    try:
        with safe_open(adapter, framework="pt") as file:
            config = canonical_config(msgspec.json.decode((file.metadata() or {})[CONFIG_KEY]))
        values, moments = _stored_shapes(adapter), _stored_shapes(optimizer)
        steps: dict[str, float] = {}
        with safe_open(optimizer, framework="pt") as file:
            for key in moments:
                if key.startswith("step/"):
                    steps[key.removeprefix("step/")] = float(file.get_tensor(key))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise AsyncRLError(f"checkpoint {folder}: cannot be read: {error!r}") from error
    expected = {f"{moment}/{name}" for name in steps for moment in MOMENTS}
    if moments.keys() != expected or not steps.keys() <= values.keys():
        raise AsyncRLError(f"checkpoint file {optimizer}: its tensors are not those of AdamW on {adapter.name}")
    tiles = {(VALUE, name): [_tile(adapter, name, (0, 0), shape)] for name, shape in values.items()}
    for name in steps:
        for kind in (AVERAGE, SQUARE):
            tiles[kind, name] = [_tile(optimizer, f"{kind}/{name}", (0, 0), moments[f"{kind}/{name}"])]
    return Index(config, {name: (shape[0], shape[1]) for name, shape in values.items()}, steps, tiles)


def _shards(path: Path) -> Shards:
    try:
        with safe_open(path, framework="pt") as file:
            return msgspec.json.decode((file.metadata() or {})[SHARDS_KEY], type=Shards)
    except (SafetensorError, OSError, KeyError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error!r}") from error


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """From the file's header."""
    with safe_open(path, framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _tile(path: Path, key: str, offset: Pair, shape: tuple[int, ...]) -> Tile:
    if len(shape) != 2:
        raise AsyncRLError(f"checkpoint file {path}: {key} has {len(shape)} dimensions, not two")
    return Tile(path, key, (offset[0], offset[0] + shape[0]), (offset[1], offset[1] + shape[1]))


def _check_tiles(folder: Path, name: str, shape: Pair, tiles: Sequence[Tile]) -> None:
    """They cover the tensor, each element once: none leaves it, no two overlap, and together they have its size."""
    for tile in tiles:
        for (first, last), size in zip((tile.rows, tile.columns), shape, strict=True):
            if not 0 <= first <= last <= size:
                raise AsyncRLError(f"checkpoint {folder}: {tile.key} of {tile.path.name} is not inside of {shape}")
    twice = any(_overlap(a.rows, b.rows) and _overlap(a.columns, b.columns) for a, b in combinations(tiles, 2))
    size = sum((tile.rows[1] - tile.rows[0]) * (tile.columns[1] - tile.columns[0]) for tile in tiles)
    if twice or size != shape[0] * shape[1]:
        raise AsyncRLError(f"checkpoint {folder}: the parts of {name} do not make up the whole tensor {shape}")


class _Files:
    """Files that stay open while parts are read from them."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def part(self, path: Path, key: str, rows: slice, columns: slice) -> torch.Tensor:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        part: torch.Tensor = self._open[path].get_slice(key)[rows, columns]
        return part


def _assemble(files: _Files, tiles: Iterable[Tile], rows: Pair, columns: Pair) -> torch.Tensor:
    """rows × columns of a tensor, out of the tiles that overlap with them. Raises AsyncRLError."""
    out: torch.Tensor | None = None
    for tile in tiles:
        r, c = _overlap(tile.rows, rows), _overlap(tile.columns, columns)
        if r is None or c is None:
            continue
        try:
            part = files.part(tile.path, tile.key, _shift(r, tile.rows), _shift(c, tile.columns))
        except (SafetensorError, OSError) as error:
            raise AsyncRLError(f"checkpoint file {tile.path}: {tile.key} cannot be read: {error}") from error
        if out is None:
            out = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=part.dtype)
        out[_shift(r, rows), _shift(c, columns)] = part
    assert out is not None  # the tiles cover the tensor: _check_tiles
    return out


def _overlap(a: Pair, b: Pair) -> Pair | None:
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first < last else None


def _shift(span: Pair, origin: Pair) -> slice:
    return slice(span[0] - origin[0], span[1] - origin[0])

"""Which part of each adapter tensor a rank holds, who counts and writes it, and over which ranks its gradient is
summed.

Pure: from a layout's sizes, without a process group, for any rank. The names and shapes are those of the adapter file,
which knows nothing of ranks; so a file made under one layout can be cut for another.

For y = W x + scale B A x, with W [out, in] cut by rows over the tensor ranks (q, k, v, gate, up: "column-parallel"), A
is whole on each rank and B is cut as W's rows are; with W cut by columns (o, down: "row-parallel"), A is cut as W's
columns are and B is whole. What is whole on each tensor rank gets the whole gradient on each of them, unless each rank
computed a part of the tokens (`sequence`) or of the sum (experts: nothing is summed over ranks inside of them, only
afterwards); then the gradient is the sum over the tensor ranks.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.policy import adapter
from trainer.targets import Target

Axis = Literal["tensor", "data", "expert_tensor", "expert", "expert_data"]
"""A group of ranks that differ only in this coordinate of their `Place`."""

Part = Literal["A", "B"]
PARTS: tuple[Part, ...] = ("A", "B")

SPLIT_BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
SPLIT_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_NAME = re.compile(
    r"model\.layers\.(\d+)\.(?:self_attn\.(?:q|k|v|o)_proj|mlp\.(?:experts\.(\d+)\.)?(?:gate|up|down)_proj)"
)


class SliceError(AsyncRLError):
    """A module cannot be adapted under this layout; the message names it and says what to change."""


class Place(NamedTuple):
    """A rank's coordinates. The same ranks of a pipeline stage are numbered twice: as tensor + data for what is not an
    expert, and as expert_tensor, expert and expert_data for experts."""

    pipeline: int
    tensor: int
    data: int
    expert_tensor: int
    expert: int
    expert_data: int


class Piece(NamedTuple):
    """The part `rows` × `columns` (first and one after the last, each) of the tensor `name` of the adapter file, whose
    whole shape is `shape`. `owns`: of all ranks that hold this part, this one counts and writes it. Its gradient is
    the sum over the ranks along each axis of `sums`, one after the other."""

    name: str
    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    owns: bool
    sums: tuple[Axis, ...]

    @property
    def local_shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def index(self) -> tuple[slice, slice]:
        """What cuts this part out of the whole tensor."""
        return slice(*self.rows), slice(*self.columns)


class Position(NamedTuple):
    """Where a module is: its layer, and which expert of it, if it is of one."""

    layer: int
    expert: int | None


class Plan(NamedTuple):
    """What is adapted, and how it lies on the ranks: the modules, sorted by name; the adapter's rank; whether experts
    share the factor that faces the hidden states ("shared outer": A of gate and up, B of down); the layout; the layers
    of each pipeline stage; how many experts a layer has."""

    modules: tuple[Target, ...]
    rank: int
    shared_outer: bool
    parallel: ParallelConfig
    stages: tuple[tuple[int, ...], ...]
    experts: int


def place_of(rank: int, parallel: ParallelConfig) -> Place:
    """Of a rank of the whole run: tensor ranks are neighbours, then data, then pipeline; and in a stage expert_tensor
    ranks, then expert, then expert_data (the order of megatron-core's groups)."""
    stage = parallel.tensor * parallel.data
    within = rank % stage
    return Place(
        pipeline=rank // stage,
        tensor=within % parallel.tensor,
        data=within // parallel.tensor,
        expert_tensor=within % parallel.expert_tensor,
        expert=within // parallel.expert_tensor % parallel.expert,
        expert_data=within // (parallel.expert_tensor * parallel.expert),
    )


@cache
def locate(module: str) -> Position:
    """Raises SliceError for a module that has no place in this backend's layers."""
    found = _NAME.fullmatch(module)
    if found is None:
        raise SliceError(
            f"[trainer] targets: {module} cannot be adapted by backend megatron, only q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj and down_proj of the layers and of their experts: remove it, or use backend torch"
        )
    return Position(int(found[1]), None if found[2] is None else int(found[2]))


def tensor_name(module: str, part: Part, shared: bool = False) -> str:
    """In the adapter file. What the experts share bears no expert's number."""
    if shared:
        module = adapter.shared_name(module)
    return adapter.tensor_name(module, part)


def is_shared(plan: Plan, module: Target, part: Part) -> bool:
    """Whether all experts of the layer have this factor in common."""
    outer = "A" if module.last in SPLIT_BY_ROWS else "B"
    return plan.shared_outer and locate(module.name).expert is not None and part == outer


def pieces(plan: Plan, place: Place) -> dict[tuple[str, Part], Piece]:
    """What the rank at `place` holds, by module and factor. What experts share is one piece, under each of their
    modules. Raises SliceError."""
    layers = frozenset(plan.stages[place.pipeline])
    out: dict[tuple[str, Part], Piece] = {}
    for module in plan.modules:
        layer, expert = locate(module.name)
        if layer not in layers:
            continue
        if expert is not None and expert * plan.parallel.expert // plan.experts != place.expert:
            continue
        for part in PARTS:
            out[module.name, part] = _piece(plan, module, part, place)
    return out


def whole(plan: Plan) -> dict[str, tuple[int, int]]:
    """Every tensor of the adapter file: its name, sorted, and its shape."""
    found = {
        tensor_name(module.name, part, is_shared(plan, module, part)): _size(plan, module, part)
        for module in plan.modules
        for part in PARTS
    }
    return dict(sorted(found.items()))


class Owners:
    """Of each rank, what it counts and writes, sorted by name: over all ranks that is every tensor exactly once. Found
    once for a rank, as there may be many tensors and many ranks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._owned: dict[int, list[Piece]] = {}

    def of(self, rank: int) -> list[Piece]:
        if rank not in self._owned:
            held = pieces(self.plan, place_of(rank, self.plan.parallel))
            self._owned[rank] = sorted({piece for piece in held.values() if piece.owns})
        return self._owned[rank]


def check_plan(plan: Plan) -> None:
    """Every pipeline stage has something that learns, and experts are dealt out evenly. Raises SliceError."""
    parallel = plan.parallel
    if plan.experts % parallel.expert:
        raise SliceError(
            f"[trainer.parallel] expert = {parallel.expert} ranks cannot share {plan.experts} experts evenly: change it"
        )
    adapted = {locate(module.name).layer for module in plan.modules}
    for stage, layers in enumerate(plan.stages):
        if adapted.isdisjoint(layers):
            raise SliceError(
                f"[trainer] targets: none of the adapted modules is in layers {min(layers)} to {max(layers)}, pipeline "
                f"stage {stage}, where then nothing learns: adapt more, or lower [trainer.parallel] pipeline"
            )


def _size(plan: Plan, module: Target, part: Part) -> tuple[int, int]:
    return (plan.rank, module.in_features) if part == "A" else (module.out_features, plan.rank)


def _piece(plan: Plan, module: Target, part: Part, place: Place) -> Piece:
    parallel = plan.parallel
    expert = locate(module.name).expert is not None
    is_cut = (part == "B") == (module.last in SPLIT_BY_ROWS)
    size = _size(plan, module, part)
    spans = [(0, size[0]), (0, size[1])]
    if is_cut:
        axis = 0 if part == "B" else 1
        ranks, rank = (parallel.expert_tensor, place.expert_tensor) if expert else (parallel.tensor, place.tensor)
        spans[axis] = _cut(size[axis], ranks, rank, module)
    shared = is_shared(plan, module, part)
    copies, sums = _copies_and_sums(is_cut, expert, shared, parallel.sequence)
    return Piece(
        name=tensor_name(module.name, part, shared),
        shape=size,
        rows=spans[0],
        columns=spans[1],
        owns=all(getattr(place, axis) == 0 for axis in copies),
        sums=sums,
    )


def _copies_and_sums(
    is_cut: bool, expert: bool, shared: bool, sequence: bool
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Along which axes the ranks hold the same part, and along which of these each has a part of its gradient."""
    if expert:
        over: list[Axis] = ["expert"] if shared else []
        over += [] if is_cut else ["expert_tensor"]
        return (*over, "expert_data"), (*over, "expert_data")
    if is_cut:
        return ("data",), ("data",)
    return ("tensor", "data"), ("tensor", "data") if sequence else ("data",)


def _cut(size: int, ranks: int, rank: int, module: Target) -> tuple[int, int]:
    if size % ranks:
        raise SliceError(
            f"{module.name}: {size} features cannot be shared evenly by {ranks} tensor ranks: change "
            "[trainer.parallel] tensor or expert_tensor"
        )
    width = size // ranks
    return rank * width, (rank + 1) * width

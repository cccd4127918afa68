"""Which linear modules of a model learn: by our own list, because peft's `all-linear` also adapts routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from async_rl.errors import AsyncRLError

# Parts of a module path that mark a mixture-of-experts router: adapting it would move the routing.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


class TargetError(AsyncRLError):
    """What was asked to learn is not in this model; the message says what exists instead."""


class Target(NamedTuple):
    """A linear module to adapt: full path, and W's shape."""

    name: str
    out_features: int
    in_features: int

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


class Targets(NamedTuple):
    """What is adapted, by path; `patterns` say the same to peft and to engines (last parts of paths where these are
    unambiguous); `notices` are what a person should know was left out."""

    modules: tuple[Target, ...]
    patterns: tuple[str, ...]
    notices: tuple[str, ...]

    def parameters(self, rank: int) -> int:
        """Trainable parameters: A is rank × in, B is out × rank."""
        return sum(rank * (target.in_features + target.out_features) for target in self.modules)

    def table(self, rank: int) -> str:
        """One line per target name: how many modules, how many trainable parameters."""
        count = Counter(target.last for target in self.modules)
        size: Counter[str] = Counter()
        for target in self.modules:
            size[target.last] += rank * (target.in_features + target.out_features)
        width = max(len(name) for name in (*count, "target", "total"))
        rows = [(name, count[name], size[name]) for name in sorted(count)]
        rows.append(("total", len(self.modules), self.parameters(rank)))
        lines = [f"{'target':<{width}}  modules  parameters"]
        lines += [f"{name:<{width}}  {modules:>7}  {parameters:>10,}" for name, modules, parameters in rows]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])


def resolve_targets(model: nn.Module, names: Sequence[str] = ()) -> Targets:
    """The linear modules that `names` mean (last parts of paths, or more of the path); none means every nn.Linear
    except routers and the output head. Raises TargetError for a name that matches no nn.Linear and for a model without
    any, naming what exists."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_default = {name: module for name, module in linear.items() if not _left_out(model, name, module)}
    fused = fused_experts(model)
    if names:
        for name in names:
            if not any(matches(path, name) for path in linear):
                raise TargetError(_no_such_target(model, name, linear, fused))
        chosen = {path: module for path, module in linear.items() if any(matches(path, name) for name in names)}
    else:
        chosen = by_default
    if not chosen:
        kinds = Counter(type(module).__name__ for module in model.modules() if hasattr(module, "weight"))
        raise TargetError(
            f"model {type(model).__name__}: no nn.Linear to adapt besides routers and head; its weights are in "
            f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}. Only nn.Linear layers can be "
            "adapted (a GPT-2-like Conv1D cannot): use a model with linear layers"
        )
    modules = tuple(Target(path, chosen[path].out_features, chosen[path].in_features) for path in sorted(chosen))
    return Targets(modules, _patterns(model, modules), _notices(fused))


def matches(path: str, name: str) -> bool:
    """Whether a name of a target means the module at `path`: peft's rule, too."""
    return path == name or path.endswith(f".{name}")


def _left_out(model: nn.Module, name: str, module: nn.Module) -> bool:
    return module is model.get_output_embeddings() or not ROUTER_NAMES.isdisjoint(name.split("."))  # type: ignore[operator]


def _patterns(model: nn.Module, modules: Sequence[Target]) -> tuple[str, ...]:
    """Last parts of paths, which every engine understands, unless one also matches a module that is not a target;
    then the full paths instead."""
    chosen = {target.name for target in modules}
    paths = [name for name, _ in model.named_modules()]
    ambiguous = {
        last
        for last in {target.last for target in modules}
        if any(matches(path, last) and path not in chosen for path in paths)
    }
    return tuple(sorted({target.name if target.last in ambiguous else target.last for target in modules}))


def fused_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Expert weights that are one 3-D parameter per layer (transformers 5), by path."""
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and "expert" in name
    }


def _notices(fused: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    if not fused:
        return ()
    name, shape = next(iter(fused.items()))
    return (
        f"{len(fused)} fused expert parameters (3-D, such as {name} {list(shape)}) are not adapted: LoRA on fused "
        "experts is not implemented; attention and other linear layers are",
    )


def _no_such_target(model: nn.Module, name: str, linear: Mapping[str, nn.Linear], fused: Mapping[str, Any]) -> str:
    hits = [path for path in fused if matches(path, name)]
    if hits:
        return (
            f"[trainer] targets: {name!r} is only fused expert parameters here ({hits[0]}, 3-D), and LoRA on those is "
            "not implemented: leave it out"
        )
    others = {type(module).__name__ for path, module in model.named_modules() if matches(path, name)}
    what = f"is a {', '.join(sorted(others))}, not an nn.Linear" if others else "matches no module"
    exist = sorted({path.rpartition(".")[2] for path in linear})
    return (
        f"[trainer] targets: {name!r} {what} of {type(model).__name__}; linear modules here: "
        f"{', '.join(exist) if exist else 'none'}"
    )

"""Which linear modules and experts of a model learn: by our own list, as peft's `all-linear` also adapts routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import means
from async_rl.policy.experts import DOWN, GATE_UP, ExpertTarget, find_experts
from async_rl.trainer_config import ExpertAdapters

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
    """What is adapted, by path; `patterns` say the same to engines (last parts of paths where these are unambiguous);
    `notices` are what a person should know was left out."""

    modules: tuple[Target, ...]
    patterns: tuple[str, ...]
    notices: tuple[str, ...]
    experts: tuple[ExpertTarget, ...] = ()

    def parameters(self, rank: int, layout: ExpertAdapters = "each") -> int:
        """Trainable parameters: A is rank × in, B is out × rank."""
        return sum(size for _, _, size in self._sizes(rank, layout))

    def table(self, rank: int, layout: ExpertAdapters = "each") -> str:
        """One line per target name: how many modules, how many trainable parameters."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for last, modules, parameters in self._sizes(rank, layout):
            count[last] += modules
            size[last] += parameters
        width = max(len(name) for name in (*count, "target", "total"))
        rows = [(name, count[name], size[name]) for name in sorted(count)]
        rows.append(("total", count.total(), size.total()))
        lines = [f"{'target':<{width}}  modules  parameters"]
        lines += [f"{name:<{width}}  {modules:>7}  {parameters:>10,}" for name, modules, parameters in rows]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])

    def _sizes(self, rank: int, layout: ExpertAdapters) -> Iterator[tuple[str, int, int]]:
        """Last name, modules and trainable parameters of each target."""
        for each in self.modules:
            yield each.last, 1, rank * (each.in_features + each.out_features)
        for experts in self.experts:
            yield experts.projection, experts.experts, experts.parameters(rank, layout)


def resolve_targets(model: nn.Module, names: Sequence[str] = ()) -> Targets:
    """The linear modules and projections of experts that `names` mean (last parts of paths, or more of the path); none
    means every nn.Linear and expert except routers and the output head. Raises TargetError for a name that matches
    nothing and for a model without anything to adapt, naming what exists."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_default = {name: module for name, module in linear.items() if not _left_out(model, name, module)}
    experts, unknown = find_experts(model)
    for name in names:
        if not any(means(name, path) for path in linear) and not any(_means(each, name) for each in experts):
            raise TargetError(_no_such_target(model, name, linear, experts, unknown))
    chosen, chosen_experts = by_default, experts
    if names:
        chosen = {path: module for path, module in linear.items() if any(means(name, path) for name in names)}
        chosen_experts = [each for each in experts if any(_means(each, name) for name in names)]
    if not chosen and not chosen_experts:
        kinds = Counter(type(module).__name__ for module in model.modules() if hasattr(module, "weight"))
        raise TargetError(
            f"model {type(model).__name__}: no nn.Linear to adapt besides routers and head; its weights are in "
            f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}. Only nn.Linear layers can be "
            "adapted (a GPT-2-like Conv1D cannot): use a model with linear layers"
        )
    modules = tuple(Target(path, chosen[path].out_features, chosen[path].in_features) for path in sorted(chosen))
    patterns = _patterns(model, modules, experts, chosen_experts)
    return Targets(modules, patterns, _notices(unknown), tuple(chosen_experts))


def _left_out(model: nn.Module, name: str, module: nn.Module) -> bool:
    return module is model.get_output_embeddings() or not ROUTER_NAMES.isdisjoint(name.split("."))  # type: ignore[operator]


def _means(experts: ExpertTarget, name: str) -> bool:
    """Whether the name of a target means this projection of experts: its own, or that of the parameter it is in."""
    fused = experts.projection != DOWN and means(name, f"{experts.path}.{GATE_UP}")
    return fused or means(name, experts.name)


def _patterns(
    model: nn.Module, modules: Sequence[Target], experts: Sequence[ExpertTarget], chosen: Sequence[ExpertTarget]
) -> tuple[str, ...]:
    """Last parts of paths, which every engine understands, unless one also matches a module that is not a target;
    then the full paths instead. Each expert counts as a module of its own."""
    last_of = {target.name: target.last for target in modules}
    last_of |= {path: each.projection for each in chosen for path in each.modules()}
    paths = [name for name, _ in model.named_modules()] + [path for each in experts for path in each.modules()]
    ambiguous = {
        last for last in set(last_of.values()) if any(means(last, path) and path not in last_of for path in paths)
    }
    return tuple(sorted({path if last in ambiguous else last for path, last in last_of.items()}))


def _notices(unknown: Mapping[str, str]) -> tuple[str, ...]:
    if not unknown:
        return ()
    path, why = next(iter(unknown.items()))
    return (
        f"the experts of {len(unknown)} layers (such as {path}, {why}) are not adapted: they are stored in another "
        "layout than gate_up_proj and down_proj, [experts, out, in]; attention and other linear layers are",
    )


def _no_such_target(
    model: nn.Module,
    name: str,
    linear: Mapping[str, nn.Linear],
    experts: Sequence[ExpertTarget],
    unknown: Mapping[str, str],
) -> str:
    for path, why in unknown.items():
        if any(means(name, f"{path}.{parameter}") for parameter, _ in model.get_submodule(path).named_parameters()):
            return (
                f"[trainer] targets: {name!r} is only experts here ({path}, {why}), stored in another layout than "
                "gate_up_proj and down_proj, [experts, out, in]: leave it out"
            )
    others = {type(module).__name__ for path, module in model.named_modules() if means(name, path)}
    what = f"is a {', '.join(sorted(others))}, not an nn.Linear" if others else "matches no module"
    exist = sorted({path.rpartition(".")[2] for path in linear} | {each.projection for each in experts})
    return (
        f"[trainer] targets: {name!r} {what} of {type(model).__name__}; linear modules here: "
        f"{', '.join(exist) if exist else 'none'}"
    )

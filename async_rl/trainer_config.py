"""The section [trainer]: what of the model learns, by which optimiser and how fast, and how it is published."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from async_rl.parallel_config import ParallelConfig, check_parallel
from async_rl.schema import ConfigError, Count, NonNegative, PositiveFloat, PositiveInt, Section, changed

ExpertAdapters = Literal["each", "shared_outer"]

MAX_SKETCH_RANK = 512
"""Beyond it the sums of a factor update's integers no longer fit into a float32, and receivers would disagree."""


class StepControlConfig(Section, frozen=True, kw_only=True):
    """The table [trainer.step_control]: before each step the divergence it would cause is predicted, and the step is
    made longer or shorter to meet a budget (trainer/step_control)."""

    budget: PositiveFloat = 2e-4
    """KL divergence of the policies before and after a step, in nats a token; a cosine leads from it at the first step
    to final_budget at the last."""
    final_budget: PositiveFloat = 2e-5
    max_scale: PositiveFloat = 3.0
    """A step is made at most this many times as long as the optimiser proposed."""
    responses: PositiveInt = 2
    """Sampled segments of the batch on which the divergence is predicted."""
    probe_tokens: PositiveInt = 4096
    """Tokens of them together, at most."""
    method: Literal["auto", "jvp", "difference"] = "auto"
    """jvp: one forward pass with directional derivatives. difference: two passes, for models with operators that have
    none. auto: the first where it works."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    kind: Literal["lora", "sketch", "full"] = "lora"
    """lora: an adapter on the linear layers, by AdamW. sketch: the linear layers' own weights, by gradient sketches.
    full: every parameter, by AdamW. Of the last two a node holds one copy: [inference] in_flight = "continue" or
    "recompute"."""
    backend: Literal["torch", "megatron"] = "torch"
    """torch: any model of transformers, on one process; dense ones over ranks, too ([trainer.parallel] data). megatron:
    Qwen3 and Qwen3-MoE over the ranks of [trainer.parallel], kinds "lora" and, in float32, "sketch"."""
    parallel: ParallelConfig = ParallelConfig()
    rank: PositiveInt = 16
    """Of the adapter, or of the gradient's sketch."""
    ranks: dict[str, PositiveInt] = msgspec.field(default_factory=dict)
    """For kind "sketch": other ranks, by the last part of the module path (q_proj = 64, say)."""
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = ()
    """Names of the linear modules to adapt (last part of the module path); empty is every linear layer except
    routers, head and embeddings, experts included."""
    expert_adapters: ExpertAdapters = "each"
    """Of a mixture's experts, for kind "lora". each: an adapter for every expert. shared_outer: gate and up projections
    of a layer's experts share A, down projections share B, which are what meets the hidden width."""
    learning_rate: PositiveFloat = 2e-4
    update_ratio: PositiveFloat = 6e-5
    """For kind "sketch": how far a step moves the weights, as a part of their norm."""
    warmup_steps: Count = 5
    final_learning_rate: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Fraction of learning_rate (or update_ratio) reached by linear decay at the last step."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    weight_decay: NonNegative = 0.0
    max_grad_norm: PositiveFloat = 1.0
    redraw_every: PositiveInt = 1
    """For kind "sketch": steps after which gradients are projected onto other directions."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """For kind "sketch": of a running mean of the sketches; 0 is none."""
    carry_momentum: bool = True
    """Whether that mean is carried over to the new directions, or begins anew."""
    publish: Literal["factors", "snapshots"] = "factors"
    """For kind "sketch": each version as what was added to the weights, some twenty times smaller than they are, or
    whole."""
    snapshot_every: PositiveInt = 50
    """With publish = "factors": versions between whole copies for nodes that join late."""
    train_embeddings: bool = False
    """For kind "sketch": embeddings and head learn too, by AdamW; needs publish = "snapshots"."""
    step_control: StepControlConfig | None = None
    updates_per_batch: PositiveInt = 1
    """Optimiser steps on each batch, over disjoint parts of whole groups; the version rises once a batch all the same.
    Above 1 a pass of its own gives the proximal log-probabilities first."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens computed at once, padding included where there is any; an attempt that has more is computed alone."""
    packing: Literal["auto", "never"] = "auto"
    """auto: sequences lie behind one another without padding, if the model's log-probabilities are then the same (tried
    when it is loaded). never: rows padded to the longest of a micro-batch."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: less memory, a third more time."""
    checkpoint_every: Count = 20
    """Versions between checkpoints; 0 is only at the end."""


_ADAMW = ("learning_rate", "beta1", "weight_decay", "max_grad_norm")
_SKETCH = (
    "ranks", "update_ratio", "redraw_every", "momentum", "carry_momentum", "publish", "snapshot_every",
    "train_embeddings",
)  # fmt: skip
WITHOUT_MEANING: dict[str, tuple[str, ...]] = {
    "lora": _SKETCH,
    "sketch": ("alpha", "expert_adapters", *_ADAMW),
    "full": ("rank", "alpha", "targets", "expert_adapters", *_SKETCH),
}
"""By kind, the keys that only mean something for another; with train_embeddings, a sketch has AdamW's too."""


FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj"})
"""The last part of the names of a layer's projections behind attention, and of each expert's in a mixture."""


def adapts_feed_forward(trainer: TrainerConfig) -> bool:
    """Whether the trainer may adapt these projections, by what `targets` says: of a model nothing is known here."""
    named = {target.rpartition(".")[2] for target in trainer.targets}
    return trainer.kind == "lora" and (not named or not FEED_FORWARD.isdisjoint(named))


def rate_key(trainer: TrainerConfig) -> Literal["learning_rate", "update_ratio"]:
    """The key that says how far a step goes, which the schedule scales."""
    return "update_ratio" if trainer.kind == "sketch" else "learning_rate"


def peak_rate(trainer: TrainerConfig) -> float:
    """Its value."""
    return trainer.update_ratio if trainer.kind == "sketch" else trainer.learning_rate


def publishes_factors(trainer: TrainerConfig) -> bool:
    """Whether a version's file says only what changed since the version before."""
    return trainer.kind == "sketch" and trainer.publish == "factors"


def describe_trainer(trainer: TrainerConfig) -> str:
    """The section in a line, for people: "sketch on torch, rank 16, update ratio 6e-05"."""
    rank = "" if trainer.kind == "full" else f", rank {trainer.rank}"
    ranks = "".join(f", {name} {each}" for name, each in sorted(trainer.ranks.items()))
    control = f", at most {trainer.step_control.budget:g} nats a step" if trainer.step_control else ""
    rate = f"{rate_key(trainer).replace('_', ' ')} {peak_rate(trainer):g}"
    return f"{trainer.kind} on {_describe_backend(trainer)}{rank}{ranks}, {rate}{control}"


def _describe_backend(trainer: TrainerConfig) -> str:
    """As "megatron over 4 ranks (tensor 2 × pipeline 2, sequence)"."""
    if trainer.backend == "torch" and trainer.parallel.ranks == 1:
        return trainer.backend
    parallel = trainer.parallel
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "data", "expert", "expert_tensor")}
    table = " × ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items() if size > 1)
    where = f" ({table}{', sequence' if parallel.sequence else ''})" if table else ""
    return f"{trainer.backend} over {parallel.ranks} rank{'s' if parallel.ranks > 1 else ''}{where}"


def check_trainer(
    trainer: TrainerConfig, *, in_flight: str, reference_kl: str, dtype: str, deterministic: bool
) -> None:
    """The section by itself, and with [inference] in_flight, [algorithm] reference_kl, [model] dtype and [run]
    deterministic. Raises ConfigError."""
    _check_meaning(trainer)
    if trainer.kind != "lora":
        _check_one_copy(trainer.kind, in_flight, reference_kl, dtype, deterministic)
    if trainer.kind == "sketch":
        _check_sketch(trainer)
    _check_backend(trainer, dtype)
    control = trainer.step_control
    if control is not None and control.final_budget > control.budget:
        raise ConfigError(
            f"[trainer.step_control] final_budget = {control.final_budget:g} is above budget = {control.budget:g}, "
            "from which a cosine leads down to it: lower it, or raise budget"
        )


def _check_backend(trainer: TrainerConfig, dtype: str) -> None:
    check_parallel(trainer.parallel)
    if trainer.backend == "torch":
        _check_sharded(trainer)
        return
    if trainer.kind == "full":
        raise ConfigError(
            '[trainer] backend = "megatron" trains kind = "lora" and "sketch", not "full": change kind, or set '
            'backend = "torch"'
        )
    if trainer.kind == "sketch" and dtype != "float32":
        raise ConfigError(
            f'[model] dtype = "{dtype}": [trainer] kind = "sketch" with backend = "megatron" keeps weights in float32 '
            'alone: set dtype = "float32", or backend = "torch"'
        )
    if trainer.train_embeddings:
        raise ConfigError(
            '[trainer] train_embeddings is not offered with backend = "megatron": remove it, or set backend = "torch"'
        )
    if trainer.step_control is not None:
        raise ConfigError(
            '[trainer.step_control] is not offered with [trainer] backend = "megatron": remove it, or set backend = '
            '"torch"'
        )
    if trainer.packing != "auto":
        raise ConfigError(
            f'[trainer] packing = "{trainer.packing}" has no meaning with backend = "megatron", which always packs: '
            "remove it"
        )


def _check_sharded(trainer: TrainerConfig) -> None:
    """What backend "torch" can do over ranks."""
    parallel = trainer.parallel
    if parallel != ParallelConfig(data=parallel.data):
        raise ConfigError(
            '[trainer.parallel] has only `data` with [trainer] backend = "torch", which cuts weights and batches over '
            'that many ranks (FSDP2): remove the others, or set backend = "megatron"'
        )
    if parallel.data == 1:
        return
    if trainer.step_control is not None:
        raise ConfigError(
            "[trainer.step_control] is not offered over several ranks: remove it, or set [trainer.parallel] data = 1"
        )
    if trainer.train_embeddings:
        raise ConfigError(
            "[trainer] train_embeddings is not offered over several ranks: remove it, or set [trainer.parallel] data = "
            "1"
        )


def _check_meaning(trainer: TrainerConfig) -> None:
    keys = WITHOUT_MEANING[trainer.kind]
    if trainer.kind == "sketch" and trainer.train_embeddings:
        keys = tuple(key for key in keys if key not in _ADAMW)
    if unused := changed(trainer, keys):
        others = [kind for kind, without in WITHOUT_MEANING.items() if unused[0] not in without]
        raise ConfigError(
            f'[trainer] {unused[0]} has no meaning with kind = "{trainer.kind}", only with '
            f"{' and '.join(f'{kind!r}' for kind in others)}: remove it, or change kind"
        )


def _check_one_copy(kind: str, in_flight: str, reference_kl: str, dtype: str, deterministic: bool) -> None:
    """What needs two policies at once, and what needs an adapter that can be switched off."""
    if deterministic:
        raise ConfigError(
            f'[trainer] kind = "{kind}": a node holds one copy of the weights, and run.deterministic = true needs two '
            'policies at once (in_flight = "finish"): set run.deterministic = false, or kind = "lora"'
        )
    if in_flight == "finish":
        raise ConfigError(
            f'[trainer] kind = "{kind}": a node holds one copy of the weights, so no request can finish under the old '
            'ones: set [inference] in_flight = "continue" or "recompute"'
        )
    if reference_kl != "none":
        raise ConfigError(
            f'[algorithm] reference_kl = "{reference_kl}" needs the base model, which [trainer] kind = "{kind}" '
            'changes: remove it, or set kind = "lora", where the adapter can be switched off'
        )
    if dtype == "float16":
        raise ConfigError(
            f'[model] dtype = "float16" cannot hold the steps of [trainer] kind = "{kind}", which moves the weights '
            'themselves: set "float32" or "bfloat16"'
        )


def _check_sketch(trainer: TrainerConfig) -> None:
    for name, rank in {"": trainer.rank, **trainer.ranks}.items():
        if rank > MAX_SKETCH_RANK:
            where = f"[trainer.ranks] {name}" if name else "[trainer] rank"
            raise ConfigError(f"{where} = {rank}: a sketch has at most rank {MAX_SKETCH_RANK}: lower it")
        if "." in name:
            raise ConfigError(
                f"[trainer.ranks] {name!r}: ranks are by the last part of the module path: write "
                f"{name.rpartition('.')[2]!r}"
            )
    if trainer.train_embeddings and trainer.publish != "snapshots":
        raise ConfigError(
            "[trainer] train_embeddings = true: a factor update cannot carry embeddings: set publish = "
            '"snapshots", or remove it'
        )
    if trainer.publish == "snapshots" and changed(trainer, ["snapshot_every"]):
        raise ConfigError(
            '[trainer] snapshot_every has no meaning with publish = "snapshots", where every version is one: remove it'
        )
    if changed(trainer, ["carry_momentum"]) and not trainer.momentum:
        raise ConfigError("[trainer] carry_momentum has no meaning with momentum = 0: set that above 0, or remove it")

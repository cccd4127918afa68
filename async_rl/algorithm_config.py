"""The section [algorithm]: the parts of the loss by name, and which of them go together.

A preset is a file of configs/presets with some of these keys; what a config says itself goes before it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from async_rl.alarm_config import AlarmConfig
from async_rl.credit_config import CreditConfig
from async_rl.schema import ConfigError, Count, NonNegative, PositiveFloat, changed

PRESETS = Path(__file__).resolve().parent.parent / "configs" / "presets"


RatioLevel = Literal["token", "sequence", "geometric", "segment"]


class AlgorithmConfig(CreditConfig, frozen=True, kw_only=True):
    """docs/algorithm.md has the formulas. π is the policy that is trained, μ the one that sampled."""

    preset: str = ""
    """A file of configs/presets, whose keys count where this section does not set its own."""
    loss: str = ""
    """"module:function": a loss of one's own (trainer/algorithm/custom.py) in place of surrogate, gates and weights."""
    ratio_level: RatioLevel = "sequence"
    """What a ratio π/μ is of: the token, its attempt (the product, or their geometric mean), or those tokens of its
    attempt that one policy version sampled."""
    treatment: Literal["truncate", "mask", "clip", "uncorrected"] = "truncate"
    """truncate, clip: the ratio into [ratio_low, ratio_high]; "clip" is also PPO's. mask: zero outside. uncorrected: no
    ratio."""
    ratio_low: NonNegative = 0.0
    ratio_high: PositiveFloat = 2.0
    age_power: float = 0.0
    """Both bounds are raised to (1 + age)^age_power: below 0 the older a token the narrower, above 0 the wider."""
    surrogate: Literal["policy_gradient", "ppo", "topr", "decoupled_ppo"] = "policy_gradient"
    """ppo clips π/μ itself. topr weights failures only. decoupled_ppo clips π/π_prox, weighted by π_prox/μ."""
    dual_clip: NonNegative = 0.0
    """With ppo and decoupled_ppo, above 1: a failure's loss is at most this times its advantage; 0 is off."""
    proximal: Literal["recomputed", "log_linear"] = "recomputed"
    """With decoupled_ppo, where π_prox comes from: a pass before the batch's first step, or between μ and π by the
    token's age."""
    clip_low: NonNegative = 0.0
    clip_high: NonNegative = 0.0
    """With decoupled_ppo, which needs them: the bounds of π/π_prox, as ratio_low and ratio_high are those of π_prox/μ.
    0.8 and 1.2 are usual."""
    gate: Literal["none", "binary_kl", "tv", "k2", "k3"] = "none"
    """A divergence of π from μ; what is beyond gate_bound does not train."""
    gate_level: Literal["token", "sequence"] = "token"
    """sequence: the attempt's mean decides for all its tokens."""
    gate_side: Literal["both", "away"] = "both"
    """away: only what the step would move further from μ is stopped."""
    gate_bound: NonNegative = 0.0
    veto: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """An attempt with a token whose ratio is below this does not train; 0 is off."""
    negative_mask: NonNegative = 0.0
    """An attempt with a negative advantage and a mean log(μ/π) above this does not train; 0 is off."""
    age_decay: NonNegative = 0.0
    """A token's weight is multiplied by (1 + age)^-age_decay."""
    age_decay_of: Literal["all", "failures"] = "all"
    """failures: only where the advantage is negative; what went well stays worth learning however old it is."""
    center_scores: Count = 0
    """Take Σ μ log π over the sampler's k likeliest tokens from each token's log π, instead of a ratio; 0 is off, 32 is
    usual, the vocabulary's size is the most. Each of the k takes 8 bytes a token."""
    router_replay: Literal["none", "rollout", "trainer"] = "none"
    """Of a mixture-of-experts model, whose choice of experts counts when a batch is trained. rollout: the inference
    engine's, which sends it with every token (R3). trainer: the trainer's own in the pass before the updates of a batch
    (R2). Their weights are always the live router's."""
    alarms: AlarmConfig = AlarmConfig()


def check_algorithm(algorithm: AlgorithmConfig, *, updates_per_batch: int = 1) -> None:
    """Refuse parts that do not go together, or not with the rest of the config. Raises ConfigError."""
    _check_ratio(algorithm)
    if algorithm.loss:
        _check_custom_loss(algorithm)
    _check_surrogate(algorithm)
    if algorithm.center_scores:
        _check_centring(algorithm)
    if (algorithm.surrogate, algorithm.proximal) == ("decoupled_ppo", "recomputed") and updates_per_batch == 1:
        raise ConfigError(
            '[algorithm] surrogate = "decoupled_ppo" clips how far the steps on one batch go, and with one of them '
            'there is nothing to clip: set [trainer] updates_per_batch above 1, or proximal = "log_linear"'
        )
    if algorithm.router_replay == "trainer" and updates_per_batch == 1:
        raise ConfigError(
            '[algorithm] router_replay = "trainer" keeps the experts of the pass before a batch\'s updates in all of '
            'them, and with one update there is no such pass: set [trainer] updates_per_batch above 1, or "rollout"'
        )
    _check_gate(algorithm)


REPLACED_BY_LOSS = (
    "surrogate", "dual_clip", "proximal", "clip_low", "clip_high", "gate", "veto", "negative_mask", "age_decay",
    "age_decay_of", "center_scores",
)  # fmt: skip


def _check_custom_loss(algorithm: AlgorithmConfig) -> None:
    module, _, function = algorithm.loss.partition(":")
    if not module or not function.isidentifier():
        raise ConfigError(f'[algorithm] loss = {algorithm.loss!r}: expected "module:function"')
    if unused := changed(algorithm, REPLACED_BY_LOSS):
        raise ConfigError(
            f"[algorithm] loss = {algorithm.loss!r} takes the place of {unused[0]}: remove one of them (ratio_level, "
            "treatment and the bounds remain, for the metrics)"
        )


def _check_ratio(algorithm: AlgorithmConfig) -> None:
    low, high, power = algorithm.ratio_low, algorithm.ratio_high, algorithm.age_power
    if low > high:
        raise ConfigError("[algorithm] ratio_low is above ratio_high")
    if not math.isfinite(power) or (power and not low <= 1 <= high):
        raise ConfigError(
            f"[algorithm] age_power = {power:g} makes bounds around 1 narrower or wider: it must be finite, and 1 "
            f"between ratio_low = {low:g} and ratio_high = {high:g}"
        )
    if power and algorithm.treatment == "uncorrected":
        raise ConfigError(
            '[algorithm] age_power has no meaning with treatment = "uncorrected", which has no bounds: '
            "remove one of them"
        )


def _check_surrogate(algorithm: AlgorithmConfig) -> None:
    surrogate, treatment = algorithm.surrogate, algorithm.treatment
    if surrogate == "ppo" and treatment != "clip":
        raise ConfigError(
            f'[algorithm] surrogate = "ppo" is itself a function of the ratio, so treatment = "{treatment}" would '
            'count it twice or not at all: set treatment = "clip"'
        )
    if surrogate == "topr" and treatment == "uncorrected":
        raise ConfigError(
            '[algorithm] surrogate = "topr" weights failures by the ratio, which treatment = "uncorrected" leaves out: '
            'set treatment = "truncate", or surrogate = "policy_gradient"'
        )
    if algorithm.dual_clip and (algorithm.dual_clip <= 1 or surrogate not in ("ppo", "decoupled_ppo")):
        raise ConfigError(
            f"[algorithm] dual_clip = {algorithm.dual_clip:g} limits a clipped ratio: it must be above 1, and "
            f'surrogate "ppo" or "decoupled_ppo", not "{surrogate}"; or remove it'
        )
    if surrogate != "decoupled_ppo" and (unused := changed(algorithm, ("proximal", "clip_low", "clip_high"))):
        raise ConfigError(
            f'[algorithm] {unused[0]} has a meaning with surrogate = "decoupled_ppo" alone, not with "{surrogate}": '
            "remove it (the bounds of π/μ are ratio_low and ratio_high)"
        )
    if surrogate == "decoupled_ppo" and not algorithm.clip_low <= 1 <= algorithm.clip_high:
        raise ConfigError(
            f"[algorithm] 1, where each step begins, must lie between clip_low = {algorithm.clip_low:g} and "
            f'clip_high = {algorithm.clip_high:g}: surrogate = "decoupled_ppo" needs both, and 0.8 and 1.2 are usual'
        )
    if surrogate == "ppo" and not algorithm.ratio_low <= 1 <= algorithm.ratio_high:
        raise ConfigError(
            f'[algorithm] surrogate = "ppo" clips around 1, the ratio of fresh data: 1 must lie between ratio_low = '
            f"{algorithm.ratio_low:g} and ratio_high = {algorithm.ratio_high:g}"
        )


def _check_centring(algorithm: AlgorithmConfig) -> None:
    k = algorithm.center_scores
    if (algorithm.surrogate, algorithm.treatment) != ("policy_gradient", "uncorrected"):
        raise ConfigError(
            f"[algorithm] center_scores = {k} takes the place of the ratio, so with surrogate = "
            f'"{algorithm.surrogate}" and treatment = "{algorithm.treatment}" the data would be corrected twice: set '
            'surrogate = "policy_gradient" and treatment = "uncorrected"'
        )
    if chosen := changed(algorithm, ("gate", "veto", "negative_mask")):
        raise ConfigError(
            f"[algorithm] {chosen[0]} chooses among tokens by what was sampled, and center_scores = {k} takes away the "
            "mean over all that could have been: remove one of them"
        )


def _check_gate(algorithm: AlgorithmConfig) -> None:
    if algorithm.age_decay == 0 and changed(algorithm, ("age_decay_of",)):
        raise ConfigError("[algorithm] age_decay_of has no meaning with age_decay = 0: set that above 0, or remove it")
    if algorithm.gate == "none":
        if unused := changed(algorithm, ("gate_level", "gate_side", "gate_bound")):
            raise ConfigError(f'[algorithm] {unused[0]} has no meaning with gate = "none": remove it, or name a gate')
        return
    if algorithm.gate_bound == 0:
        raise ConfigError(f'[algorithm] gate = "{algorithm.gate}" needs a gate_bound above 0: 0 stops every token')
    if algorithm.gate_side == "away" and algorithm.gate_level == "sequence":
        raise ConfigError(
            '[algorithm] gate_side = "away" judges single tokens, gate_level = "sequence" whole attempts: set '
            'gate_level = "token" or gate_side = "both"'
        )


def shipped_presets() -> dict[str, Path]:
    """Presets that come with the package, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.toml"))}


def describe(algorithm: AlgorithmConfig) -> str:
    """The composition in a line, for people: "dapo: grpo, ppo, token-level clip 0.8 … 1.28, token_mean"."""
    ratio: str = algorithm.treatment
    if ratio != "uncorrected":
        ratio = f"{algorithm.ratio_level}-level {ratio} {algorithm.ratio_low:g} … {algorithm.ratio_high:g}"
    if algorithm.age_power:
        ratio += f" by age^{algorithm.age_power:g}"
    if algorithm.center_scores:
        ratio += f", scores centred by {algorithm.center_scores} tokens"
    parts = [algorithm.advantage, f"loss {algorithm.loss}" if algorithm.loss else algorithm.surrogate, ratio]
    if algorithm.gate != "none":
        parts.append(f"{algorithm.gate_level}-level {algorithm.gate} at most {algorithm.gate_bound:g}")
    numbers = {name: getattr(algorithm, name) for name in ("veto", "negative_mask", "age_decay", "dual_clip")}
    parts += [f"{name} {value:g}" for name, value in numbers.items() if value]
    if algorithm.age_decay and algorithm.age_decay_of == "failures":
        parts.append("age_decay of failures")
    if algorithm.router_replay != "none":
        parts.append(f"routes of the {algorithm.router_replay}")
    preset = f"{algorithm.preset}: " if algorithm.preset else ""
    return preset + ", ".join([*parts, algorithm.aggregation])


KEPT_KEYS = frozenset((*CreditConfig.__struct_fields__, "alarms"))


def under_preset(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What stays of a file's [algorithm] when a preset is named over it (--set algorithm.preset=NAME): what answers are
    worth, where the preset leaves that open, and the alarms. How ratios are corrected is the preset's alone, as parts
    of two methods seldom go together."""
    path = shipped_presets().get(name)
    named = tomllib.loads(path.read_text()) if path else {}
    return {key: value for key, value in section.items() if key in KEPT_KEYS and key not in named}


def with_preset(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of [algorithm] with those of its preset where it has none of its own. Raises ConfigError for a preset
    that does not exist."""
    name = section.get("preset", "")
    if not isinstance(name, str) or not name:
        return dict(section)
    presets = shipped_presets()
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(presets)}"
        raise ConfigError(f"{where}: [algorithm] preset = {name!r}: no such preset; {hint}")
    return tomllib.loads(presets[name].read_text()) | dict(section)

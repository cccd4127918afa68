"""The keys of [algorithm] that say what an answer is worth and how much it counts: from rewards to advantages, from
token losses to the batch's loss, and the distance to the reference policy."""

from __future__ import annotations

from typing import Literal

from async_rl.schema import ConfigError, Count, NonNegative, PositiveFloat, Section, changed

# These compare an attempt with the others of its group; what is left is compared with the batch.
NEED_GROUPS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl"})
NORMALISED = frozenset({"reinforce_pp", "reinforce_pp_baseline"})


class CreditConfig(Section, frozen=True, kw_only=True):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "batch_mean"] = (
        "grpo"
    )
    """What a reward is compared with (trainer/algorithm/advantages.py): the mean of its group, of the others of its
    group (rloo), or of the batch (batch_mean and reinforce_pp, which a group_size of 1 is enough for)."""
    advantage_normalisation: Literal["none", "batch"] = "none"
    """batch: divide all advantages of a batch by their standard deviation."""
    overlong_buffer: Count = 0
    """Tokens before inference.max_new_tokens within which an answer loses reward, up to overlong_penalty at the limit;
    0 is never. Metrics report rewards as they were earned, and what is left of them as shaped_reward."""
    overlong_penalty: PositiveFloat = 1.0
    truncated: Literal["keep", "mask"] = "keep"
    """mask: an answer that was cut at max_new_tokens does not train; its reward still counts in the mean that others
    are compared with."""
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    """Whose mean the loss is: of all tokens, of the token means of attempts or of prompts (groups), or the sum divided
    by attempts times aggregation_length."""
    aggregation_length: Count = 0
    """For aggregation "constant", in tokens; 0 is inference.max_new_tokens."""
    reference_kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from the base model that is penalised (trainer/algorithm/reference_kl.py)."""
    reference_kl_weight: NonNegative = 1e-3
    """0 only measures it."""
    reference_kl_place: Literal["loss", "reward"] = "loss"
    """reward: the sum over an attempt's tokens is taken from its reward, before advantages."""
    reference_kl_ratio: bool = False
    """In the loss, weight it by π_θ/μ: then its gradient is that of the divergence however old the tokens are."""


def check_credit(credit: CreditConfig, *, group_size: int, max_new_tokens: int) -> None:
    """Raises ConfigError."""
    advantage = credit.advantage
    if advantage in NEED_GROUPS and group_size < 2:
        raise ConfigError(
            f'[algorithm] advantage = "{advantage}" compares within a group: [buffer] group_size must be ≥ 2 (with one '
            'attempt per prompt: advantage = "batch_mean" or "reinforce_pp")'
        )
    if advantage in NORMALISED and credit.advantage_normalisation != "none":
        raise ConfigError(
            f'[algorithm] advantage = "{advantage}" is normalised over the batch already: remove '
            "advantage_normalisation"
        )
    if credit.overlong_buffer > max_new_tokens:
        raise ConfigError(
            f"[algorithm] overlong_buffer = {credit.overlong_buffer} is more than [inference] max_new_tokens = "
            f"{max_new_tokens}: even an empty answer would be too long"
        )
    if changed(credit, ["overlong_penalty"]) and not credit.overlong_buffer:
        raise ConfigError(
            "[algorithm] overlong_penalty has no meaning with overlong_buffer = 0: set that above 0, or remove this one"
        )
    in_reward = credit.reference_kl != "none" and credit.reference_kl_place == "reward"
    if advantage == "maxrl" and (credit.overlong_buffer or in_reward):
        cause = "overlong_buffer" if credit.overlong_buffer else 'reference_kl_place = "reward"'
        raise ConfigError(
            f'[algorithm] advantage = "maxrl" divides by the mean reward of a group, and {cause} may make rewards '
            "negative: remove it or choose another advantage"
        )
    if credit.aggregation_length and credit.aggregation != "constant":
        raise ConfigError(
            f'[algorithm] aggregation_length has no meaning with aggregation = "{credit.aggregation}": remove it or '
            'set aggregation = "constant"'
        )
    _check_reference(credit)


def _check_reference(credit: CreditConfig) -> None:
    form, in_reward = credit.reference_kl, credit.reference_kl_place == "reward"
    if form == "none":
        if unused := changed(credit, ("reference_kl_place", "reference_kl_ratio", "reference_kl_weight")):
            raise ConfigError(
                f"[algorithm] {unused[0]} has no meaning without reference_kl: set that, or remove this one"
            )
        return
    if in_reward and (form != "k1" or credit.reference_kl_ratio):
        what = f'reference_kl = "{form}"' if form != "k1" else "reference_kl_ratio = true"
        raise ConfigError(
            f'[algorithm] {what} with reference_kl_place = "reward" is not the gradient of the divergence: there only '
            'reference_kl = "k1" without the ratio is; or set reference_kl_place = "loss"'
        )
    if form == "k1" and not in_reward and not credit.reference_kl_ratio:
        raise ConfigError(
            '[algorithm] reference_kl = "k1" in the loss has a gradient of mean zero, so it only adds noise: set '
            'reference_kl_ratio = true, or reference_kl_place = "reward", or use "k2" or "k3"'
        )

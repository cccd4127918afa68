"""Proof of delivery: what shows that the policy a node serves is the policy that the trainer trained.

With every policy the trainer sends the buffer a `Proof`: its log-probabilities on a fixed set of tokens (the probe),
and the modules that it adapts. A node makes the same of what it serves, never having seen the trainer's, and the buffer
compares the two. One policy is only for this: the *canary*, whose every tensor is seeded noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

CANARY = "canary"  # the name, and in the store the kind, of the policy that is only for proof
PROBE_SEQUENCES, PROBE_LENGTH = 8, 16
"""128 tokens, in sequences for which any model has the positions. Twice as many cost the quickstart 4 % of its time."""
MAX_PROBE_BYTES = 1 << 16
LARGEST_BOUND = 0.5
"""In nats: an engine that declares a wider bound is held to this one."""
HALF_PRECISION_BOUND = 0.05
"""In nats: the least bound of engines in half precision; float32 has a lower one."""
MIXTURE_SHARE = 0.5
"""Of a half-precision bound, for the mean of a mixture of experts' differences: see `compare`."""
CANARY_SHARE, ROUNDING_SHARE = 0.35, 0.125
"""How far, on average, a mixture may be under the canary: a share of what this changes, or one of the bound where it
changes little. Correct nodes were up to 0.29 of it away, those with an adapter at 1.5 times its scale, or half of it,
0.44 or more (docs/proof-of-delivery.md)."""
WHAT_TO_CHECK = (
    "check that node and trainer have the same weights, with the head tied or untied in both, in dtypes that fit the "
    "bound ([model] dtype, [inference] dtype), and that the engine scales an adapter by alpha / rank; `async-rl doctor "
    "CONFIG` compares base and adapter apart, and [inference] logprob_bound sets the bound"
)
"""By whoever finds two programs further apart than their bound."""
CANARY_FLOOR = 2.0
"""In nats: the canary should move some token's log-probability so far from the base model's, so that a node which
serves the base is beyond every bound."""
MOST_EXPONENT = 20.0  # of the k3 estimate: e^20 says "wrong" as clearly as infinity, and can be averaged


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """What a policy does on the probe. `probe` names the tokens and `modules` the set of adapted modules, both by
    SHA-256; `logprobs` are little-endian float32 at temperature 1, sequence after sequence; so are `base`, the model's
    without any adapter, which only the canary's proof from the trainer has. `mixture`: the model has experts, of which
    routers choose; only the trainer says so, and a node's word on it is not looked at."""

    probe: Annotated[str, Meta(max_length=64)]
    modules: Annotated[str, Meta(max_length=64)]
    module_count: Annotated[int, Meta(ge=0)]
    logprobs: Annotated[bytes, Meta(max_length=MAX_PROBE_BYTES)]
    base: Annotated[bytes, Meta(max_length=MAX_PROBE_BYTES)] = b""
    mixture: bool = False


class Mismatch(NamedTuple):
    """Between the trainer's log-probabilities and a node's: the largest difference in nats, the mean of
    k3 = exp(d) - 1 - d with d = trainer - node (http://joschu.net/blog/kl-approx.html; an estimate of a KL divergence
    only for tokens that were sampled, and those of the probe were not), and the mean of |d| in nats."""

    max_dlogp: float
    k3: float
    mean_dlogp: float


class Verdict(NamedTuple):
    """`cause` is empty when a node passed; `mismatch` is what was measured, if anything could be."""

    cause: str
    mismatch: Mismatch | None


def probe_tokens(seed: int, vocabulary: int) -> list[npt.NDArray[np.int32]]:
    """PROBE_SEQUENCES arrays of PROBE_LENGTH token ids below `vocabulary`, the same on every machine."""
    generator = np.random.Generator(np.random.Philox(seed))
    ids = generator.integers(0, vocabulary, (PROBE_SEQUENCES, PROBE_LENGTH), dtype=np.int32)
    return list(ids)


def make_proof(
    tokens: Sequence[npt.NDArray[np.int32]],
    logprobs: Sequence[npt.NDArray[np.float32]],
    modules: Iterable[str],
    base: Sequence[npt.NDArray[np.float32]] = (),
    mixture: bool = False,
) -> Proof:
    """`logprobs` and `base` as Engine.score and Backend.logprobs return them for `tokens`."""
    names = sorted(modules)
    return Proof(
        probe=hashlib.sha256(np.concatenate(tokens).astype("<i4").tobytes()).hexdigest(),
        modules=hashlib.sha256("\n".join(names).encode()).hexdigest(),
        module_count=len(names),
        logprobs=np.concatenate(logprobs).astype("<f4").tobytes(),
        base=np.concatenate(base).astype("<f4").tobytes() if base else b"",
        mixture=mixture,
    )


def mismatch(trainer: bytes, node: bytes) -> Mismatch | None:
    """Of two lists of log-probabilities, as a Proof has them; None when their lengths differ. What is not a number on
    either side counts as infinitely far."""
    if len(trainer) != len(node) or len(trainer) % 4 or not trainer:
        return None
    difference = np.frombuffer(trainer, "<f4").astype(np.float64) - np.frombuffer(node, "<f4").astype(np.float64)
    if not np.isfinite(difference).all():
        return Mismatch(float("inf"), float("inf"), float("inf"))
    clamped, far = np.clip(difference, -MOST_EXPONENT, MOST_EXPONENT), np.abs(difference)
    return Mismatch(float(far.max()), float(np.mean(np.expm1(clamped) - clamped)), float(far.mean()))


def compare(expected: Proof, shown: Proof, bound: float, base: bytes = b"") -> Verdict:
    """What a node has `shown` of a policy with what the trainer has: whether they are within `bound` nats, and never
    more than LARGEST_BOUND. `base`: what the base model does, to say so where it is that.

    It is the largest difference that counts, except of a mixture of experts in half precision: there rounding sends
    some tokens to other experts, and each of these differs by as much as experts do, though nothing is wrong. What is
    wrong shows at all tokens, so the mean counts: against a share of the bound, and under the canary against a share of
    what that changes."""
    if shown.probe != expected.probe:
        return Verdict("it scored other tokens than the probe's", None)
    if shown.modules != expected.modules:
        return Verdict(
            f"its engine matched another set of modules ({shown.module_count}) than the trainer adapts "
            f"({expected.module_count})",
            None,
        )
    measured = mismatch(expected.logprobs, shown.logprobs)
    if measured is None:
        return Verdict("it scored another number of tokens", None)
    bound = min(bound, LARGEST_BOUND)
    by_mean = expected.mixture and bound >= HALF_PRECISION_BOUND
    limit = _mean_limit(expected, bound) if by_mean else bound

    def is_within(found: Mismatch) -> bool:
        return (found.mean_dlogp if by_mean else found.max_dlogp) <= limit

    if is_within(measured):
        return Verdict("", measured)
    like_base = mismatch(base, shown.logprobs)
    served = ", and as the base model's do" if like_base is not None and is_within(like_base) else ""
    most = f"up to {measured.max_dlogp:.2g} (k3 {measured.k3:.2g})"
    found = f"{measured.mean_dlogp:.2g} on average, {most}" if by_mean else most
    allows = f"{bound:.2g}, of a mixture's average {limit:.2g}" if by_mean else f"{bound:.2g}"
    return Verdict(
        f"its log-probabilities on the probe differ from the trainer's by {found}, its engine's bound is "
        f"{allows}{served}",
        measured,
    )


def _mean_limit(expected: Proof, bound: float) -> float:
    """For the mean difference of a mixture of experts; only of the canary is there a base to measure it by."""
    changed = mismatch(expected.base, expected.logprobs)
    if changed is None:
        return MIXTURE_SHARE * bound
    return max(CANARY_SHARE * changed.mean_dlogp, ROUNDING_SHARE * bound)


def within(max_dlogp: float, bound: float) -> str:
    """For logs, of who passed: beyond the bound by a mixture of experts, of which the mean counts."""
    if max_dlogp > bound:
        return (
            f"log-probabilities differ from the trainer's by {max_dlogp:.2g} nats at most, beyond the bound of "
            f"{bound:g}, but as a mixture of experts does that sends some tokens elsewhere: on average little"
        )
    return f"log-probabilities differ from the trainer's by {max_dlogp:.2g} nats at most, within the bound of {bound:g}"

"""The adaptive bound: how far ahead nodes may work, by how well the trainer can correct for the age of what it gets.

After each step the trainer reports the effective sample size of its token ratios (a fraction of the tokens) and k3, the
divergence between what sampled and what trains. The effective bound e, of K - K_a + 1 <= e <= K, follows:

    trouble     effective sample size below adaptive_ess, or k3 above adaptive_k3, or not a number: e falls by one
    health      HEALTHY_STEPS steps in a row without trouble: e rises by one
    no report   a step that trained nothing says nothing

After a fall the next e + 1 batches are of tickets that were leased under the bound before it, so that their reports say
nothing of the new one: trouble in them is not answered again. With reuse it takes K + 1: what was leased under the old
bound may train again until it is K versions old.

e acts on admission alone: K_a becomes K_a - (K - e), 1 or more: at 0 both pools would take turns, which no ratio is
worth. (Where K_a is 0 already, e stays at K.) It can only fall, so what bounds staleness (buffer.order,
buffer.reuse) holds a fortiori, and K stays the guarantee, enforced by the trainer. Nothing can wait for ever: with any
K_a >= 0 a node of the trainer's version may have every ticket of the next batch, which is all that these proofs ask.

The state is part of the rules' and comes out of the journal, like the reports, which are parts of the confirmations.
"""

from __future__ import annotations

from typing import NamedTuple

from buffer.rules import Rules

HEALTHY_STEPS = 10  # slowly: a step costs one report to take back, and a broken policy cannot be taken back


class Report(NamedTuple):
    """Of one training step: effective sample size over sample size of the token ratios, in [0, 1], and k3 in nats a
    token; None where nothing was trained."""

    ess: float | None
    k3: float | None


class AdaptiveBound(NamedTuple):
    """`bound` is e; `healthy` steps have gone well in a row; reports of the next `settling` steps are of older data."""

    bound: int
    healthy: int = 0
    settling: int = 0


def is_trouble(report: Report, least_ess: float, most_k3: float) -> bool:
    """Whether what was trained was too far from what trains; a number that is none is trouble, too."""
    low = report.ess is not None and not report.ess >= least_ess
    return low or (report.k3 is not None and not report.k3 <= most_k3)


def next_bound(now: AdaptiveBound, report: Report, rules: Rules) -> AdaptiveBound:
    """The bound after a step with this report, at most K and at least what leaves a lead of 1."""
    if report.ess is None and report.k3 is None:
        return now
    settling = max(0, now.settling - 1)
    if is_trouble(report, rules.adaptive_ess, rules.adaptive_k3):
        if now.settling:
            return now._replace(healthy=0, settling=settling)
        lower = max(least_bound(rules), now.bound - 1)
        oldest = rules.max_staleness if rules.reuse > 1 else now.bound
        return AdaptiveBound(lower, settling=oldest + 1 if lower < now.bound else 0)
    if now.healthy + 1 < HEALTHY_STEPS:
        return AdaptiveBound(now.bound, now.healthy + 1, settling)
    return AdaptiveBound(min(rules.max_staleness, now.bound + 1), settling=settling)


def least_bound(rules: Rules) -> int:
    """The bound under which nodes still work one version ahead; K where they never work ahead."""
    return min(rules.max_staleness, rules.max_staleness - rules.lead + 1)


def adaptive_lead(rules: Rules, bound: int) -> int:
    """K_a under the effective bound."""
    return rules.lead - (rules.max_staleness - bound)

"""Which task instance a ticket asks, and what is known of each: how many attempts there were, and how many passed.

In epochs (`rules.sources`) the first try of a ticket asks what async_rl.data.order has for it, and a later try another
instance of the same source. Else the instance is a hash of run seed, ticket and try. Where the history of instances
decides, these only propose, and so do further hashes after them:

    retired     pass rate >= retire_above over at least retire_after attempts: nothing is left to learn; not asked again
    weighted    taken with a chance in proportion to E[p (1 - p)], the spread of rewards that is to be expected
    pools       taken with a chance in proportion to the weight of its pool: hard, normal or easy, by its pass rate

So with a history an epoch may ask an instance in the place of another one, of the same source: the mix stays.

The rate is the mean of the rewards, each cut to [0, 1], over all good attempts, whatever became of their groups. p has
a Beta(1 + passed, 1 + failed) distribution, from a uniform prior: an instance that was never asked weighs 1/6, one of
which half the attempts pass tends to 1/4, one that always or never passes to 0. In pools, it is normal.

Proposals are taken or not (von Neumann's rejection), so choosing costs a few hashes however many instances there are.
After PROPOSALS of them the heaviest is taken: when so many of them are easy or hopeless, weights hardly matter.

The history is a part of the rules' state: it comes out of the journal, and two numbers for each instance are all it
takes. A run that is resumed without its journal begins it anew.
"""

from __future__ import annotations

from array import array

from async_rl.buffer_config import PoolsConfig
from async_rl.data.order import asked, asked_instead
from buffer.leases import derive, train_instance
from buffer.reuse import uniform
from buffer.rules import Rules

PROPOSALS = 64
HEAVIEST = 0.25  # no p (1 - p) is larger


def expected_spread(passed: float, attempts: int) -> float:
    """E[p (1 - p)] = a b / ((a + b) (a + b + 1)) of the Beta distribution with a = 1 + passed, b = 1 + failed."""
    a, b = 1.0 + passed, 1.0 + attempts - passed
    return a * b / ((a + b) * (a + b + 1.0))


def is_retired(passed: float, attempts: int, above: float, after: int) -> bool:
    """Whether so many of so many attempts passed that an instance is not asked again; `above` = 0 is never."""
    return above > 0 and attempts >= after and passed >= above * attempts


def pool_weight(passed: float, attempts: int, pools: PoolsConfig) -> float:
    """The weight of an instance's pool."""
    if not attempts or pools.hard_below * attempts <= passed <= pools.easy_above * attempts:
        return pools.normal
    return pools.hard if passed < pools.hard_below * attempts else pools.easy


class Instances:
    """`count` of them are known, 0 when nothing is asked of their history."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._begin(rules.instances)
        self.adopt(rules)

    def _begin(self, count: int) -> None:
        """Nothing was asked yet."""
        self.count = count
        self._attempts = array("L", [0]) * count
        self._passed = array("d", [0.0]) * count
        self.retired = 0

    def adopt(self, rules: Rules) -> None:
        """Go on by other rules: what is retired is asked anew, and where the history had no use it begins."""
        if rules.instances != self.count:
            self._begin(rules.instances)
        self._rules = rules
        self.retired = sum(map(self.is_retired, range(self.count)))

    def is_retired(self, instance: int) -> bool:
        if not self.count:
            return False
        instance %= self.count
        rules = self._rules
        return is_retired(self._passed[instance], self._attempts[instance], rules.retire_above, rules.retire_after)

    def note(self, instance: int, reward: float) -> None:
        """A good attempt came back. Only where there is a history; an instance that was chosen when there was none is
        any number, which means the one that it leaves (async_rl.tasks.task.instance_of)."""
        instance %= self.count
        before = self.is_retired(instance)
        self._attempts[instance] += 1
        self._passed[instance] += min(1.0, max(0.0, reward))
        self.retired += self.is_retired(instance) - before

    def why_none(self) -> str:
        """Why no instance can be asked any more; empty while one can."""
        if not self.count or self.retired < self.count:
            return ""
        return (
            f"all {self.count} instances of the task are retired: each has a pass rate of "
            f"{self._rules.retire_above:g} or more over at least {self._rules.retire_after} attempts "
            "(buffer.retire_above): the task is learned; train on a harder one, or resume with buffer.retire_above = 0"
        )

    def choose(self, ticket: int, try_: int) -> int:
        """The instance of a try, by the history as it is now."""
        if not self.count:
            return self._propose(ticket, try_, 0)
        best, heaviest = 0, -1.0
        for proposal in range(PROPOSALS):
            instance = self._propose(ticket, try_, proposal)
            weight = self._weight(instance)
            if uniform(f"difficulty/{self._rules.run_seed}/{ticket}/{try_}/{proposal}") * HEAVIEST <= weight:
                return instance
            if weight > heaviest:
                best, heaviest = instance, weight
        while heaviest <= 0 and self.is_retired(best) and self.retired < self.count:
            best = (best + 1) % self.count
        return best

    def _propose(self, ticket: int, try_: int, proposal: int) -> int:
        seed, sources = self._rules.run_seed, self._rules.sources
        if sources and not try_ and not proposal:
            return asked(seed, sources, ticket)
        place = f"instance/{seed}/{ticket}/{try_}/{proposal}"
        word = derive(place) if proposal else train_instance(seed, ticket, try_)
        if sources:
            return asked_instead(seed, sources, ticket, word)
        return word % self.count if self.count else word

    def _weight(self, instance: int) -> float:
        """0 when it is retired; else of HEAVIEST at most."""
        if self.is_retired(instance):
            return 0.0
        passed, attempts, pools = self._passed[instance], self._attempts[instance], self._rules.pools
        if pools is not None:
            return HEAVIEST * pool_weight(passed, attempts, pools) / max(pools.hard, pools.normal, pools.easy)
        return expected_spread(passed, attempts) if self._rules.weighted else HEAVIEST

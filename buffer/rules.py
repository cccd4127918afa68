"""The plain numbers that decide everything in the replay buffer, and where they come from."""

from __future__ import annotations

from typing import Literal, NamedTuple

from async_rl.buffer_config import PoolsConfig, fresh_groups, lead
from async_rl.config import Config, group_bytes
from async_rl.data.order import Source
from async_rl.inference_config import node_count
from async_rl.tasks.registry import instance_sources, known_instances
from async_rl.wire.messages import SamplingParams

OnShortGroup = Literal["retry", "drop", "accept"]
ZeroVariance = Literal["keep", "refill"]
OnStale = Literal["wait", "drop", "mask"]

ENDLESS = 1 << 40  # tickets of a window in which any may overtake any other


class Rules(NamedTuple):
    """One run's numbers: B = groups_per_step, G = group_size, K = max_staleness, K_a = lead, W = window, R = reuse,
    F = fresh_groups.

    There is no separate name for the order. `fifo` is a window of 1; where stale data is not waited for, the window
    is ENDLESS (see buffer.order, whose bound then does not hold: what becomes too old is dropped); `fresh` is
    `newest_first` (buffer.newest), and `replay` is fifo with a reuse above 1 (buffer.reuse). `instances` is how
    many the task has, where their history decides (buffer.instances), else 0; `sources` is what is gone through in
    epochs, empty when instances are drawn independently. `one_copy`: a node has room for the policy that it serves and
    for no other. `nodes`: how many the run begins with, 0 when nobody knows. Times are in seconds.

    With `shards` N the rules of a whole run name it, and `of_shard` makes those of each: B, F, W and the capacity are
    then an N-th, and ticket m of shard i is ticket m N + i of the run. Admission and orders count in their own tickets:
    m < (v + 1 + K_a) F / N for all shards is n < (v + 1 + K_a) F, so what holds in each shard holds for the run. K_a is
    the run's (with a window it might be larger in a shard)."""

    run_seed: int
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    lead: int
    window: int
    on_short_group: OnShortGroup
    zero_variance: ZeroVariance
    max_tries: int
    capacity_bytes: int
    group_bytes: int
    lease_timeout: float
    eval_share: float
    sampling: SamplingParams
    quarantine_limit: float = 30.0
    on_stale: OnStale = "wait"
    deterministic: bool = False
    newest_first: bool = False
    reuse: int = 1
    instances: int = 0
    retire_above: float = 0.0
    retire_after: int = 16
    weighted: bool = False
    adaptive: bool = False
    adaptive_ess: float = 0.3
    adaptive_k3: float = 0.05
    one_copy: bool = False
    nodes: int = 0
    shards: int = 1
    shard: int = 0
    pools: PoolsConfig | None = None
    sources: tuple[Source, ...] = ()

    @property
    def fresh_groups(self) -> int:
        """F: the new groups of a batch; tickets are counted in these."""
        return fresh_groups(self.groups_per_step, self.reuse)

    def ticket(self, local: int) -> int:
        """The run's number of a shard's own ticket: what instance and seeds come from, and what people see."""
        return local * self.shards + self.shard


def of_shard(rules: Rules, shard: int) -> Rules:
    """The rules that one shard of a run goes by; a run's own where there is one shard."""
    parts = rules.shards
    return rules._replace(
        shard=shard,
        groups_per_step=rules.groups_per_step // parts,
        window=rules.window if rules.window in (1, ENDLESS) else rules.window // parts,
        capacity_bytes=rules.capacity_bytes // parts,
    )


def rules_from_config(config: Config, *, together: bool = False) -> Rules:
    """What the buffer needs of a checked configuration; `together`: the nodes that it names are started with the
    buffer, while of nodes that are started by hand nobody knows how many there will be. Raises ConfigError when the
    history of the task's instances is to decide, and the task has no end to them; and what loading it raises."""
    buffer, inference = config.buffer, config.inference
    return Rules(
        run_seed=config.run.seed,
        steps=config.run.steps,
        groups_per_step=buffer.groups_per_step,
        group_size=buffer.group_size,
        max_staleness=buffer.max_staleness,
        lead=lead(buffer),
        window=ENDLESS if buffer.on_stale != "wait" else 1 if buffer.order == "fifo" else buffer.window,
        on_short_group=buffer.on_short_group,
        zero_variance=buffer.zero_variance,
        max_tries=buffer.max_tries,
        capacity_bytes=buffer.capacity_bytes,
        group_bytes=group_bytes(config),
        lease_timeout=buffer.lease_timeout,
        eval_share=inference.eval_share,
        sampling=SamplingParams(inference.temperature, inference.max_new_tokens),
        quarantine_limit=buffer.quarantine_limit,
        on_stale=buffer.on_stale,
        deterministic=config.run.deterministic,
        newest_first=buffer.order == "fresh",
        reuse=buffer.reuse,
        instances=known_instances(config),
        retire_above=buffer.retire_above,
        retire_after=buffer.retire_after,
        weighted=buffer.difficulty == "weighted",
        pools=buffer.pools if buffer.difficulty == "pools" else None,
        sources=instance_sources(config),
        adaptive=buffer.adaptive,
        adaptive_ess=buffer.adaptive_ess,
        adaptive_k3=buffer.adaptive_k3,
        one_copy=config.trainer.kind != "lora",
        shards=buffer.shards,
        nodes=node_count(inference) if together else 0,
    )

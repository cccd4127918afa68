"""The section [buffer]: what does not go together is refused, what just does passes, and what follows from it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.buffer_config import BufferConfig, batches_held, check_buffer, fresh_groups, lead
from async_rl.config import Config, batch_bytes, group_bytes
from async_rl.schema import ConfigError


def made(**keys: Any) -> BufferConfig:
    return msgspec.convert(keys, BufferConfig)


BROKEN = {
    'window has no meaning with order = "fifo"': {"window": 2},
    'reuse has no meaning with order = "fresh"': {"order": "fresh", "reuse": 2},
    'order = "replay" with reuse = 1 is fifo': {"order": "replay"},
    'order = "windowed" has no meaning with on_stale = "drop"': {"order": "windowed", "on_stale": "drop"},
    "may delay a ticket by 5 batches, more than max_staleness = 4: make window smaller": {
        "order": "windowed", "groups_per_step": 2, "window": 10,
    },
    "here they work 1 ahead (max_staleness = 1): make max_staleness larger": {"adaptive": True, "max_staleness": 1},
    "reuse = 3 is more than groups_per_step = 2": {"order": "replay", "reuse": 3, "groups_per_step": 2},
    "adaptive_ess has no meaning without adaptive = true": {"adaptive_ess": 0.2},
    "retire_after has no meaning without retire_above": {"retire_after": 8, "difficulty": "weighted"},
    'pools has no meaning without difficulty = "pools"': {"pools": {"hard": 0.2}, "difficulty": "weighted"},
    "hard_below = 0.9 is above easy_above = 0.8": {"pools": {"hard_below": 0.9}, "difficulty": "pools"},
}  # fmt: skip
BROKEN_AS_WELL = {
    'window has no meaning with order = "replay"': {"order": "replay", "reuse": 2, "window": 2},
    'reuse has no meaning with order = "fifo"': {"reuse": 2},
    "here they work 0 ahead (max_staleness = 4): make reuse smaller, make max_staleness larger": {
        "adaptive": True, "order": "replay", "reuse": 5,
    },
    "here they work 1 ahead (max_staleness = 4): make window smaller, make max_staleness larger": {
        "adaptive": True, "order": "windowed", "window": 80,
    },
    "reuse = 6 trains a group again in the next 5 batches, more than": {
        "adaptive": True, "order": "replay", "reuse": 6,
    },
    "adaptive_k3 has no meaning without adaptive = true": {"adaptive_k3": 0.2},
    'order = "fresh" has no meaning with on_stale = "mask"': {"order": "fresh", "on_stale": "mask"},
    "reuse = 6 trains a group again in the next 5 batches, more than max_staleness = 4: make reuse smaller": {
        "order": "replay", "reuse": 6,
    },
}  # fmt: skip
# Each as near as one can come to a rule without breaking it.
WHOLE: list[dict[str, Any]] = [
    {},
    {"order": "windowed", "groups_per_step": 2, "window": 9},
    {"order": "windowed", "on_stale": "wait"},
    {"order": "fresh", "max_staleness": 0},
    {"adaptive": True, "max_staleness": 2},
    {"adaptive": True, "order": "replay", "reuse": 3},
    {"adaptive": True, "max_staleness": 2, "adaptive_ess": 0.2, "adaptive_k3": 0.2},
    {"retire_above": 0.9, "retire_after": 8},
    {"difficulty": "pools", "pools": {"hard_below": 0.8}},
    {"order": "replay", "reuse": 5},
    {"order": "replay", "reuse": 2, "groups_per_step": 2},
]


@pytest.mark.parametrize("says", [*BROKEN, *BROKEN_AS_WELL])
def test_every_rule_refuses_what_breaks_it(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_buffer(made(**(BROKEN | BROKEN_AS_WELL)[says]))


def test_every_rule_has_its_example_here() -> None:
    assert inspect.getsource(check_buffer).count("raise ConfigError") == len(BROKEN)


@pytest.mark.parametrize("keys", WHOLE, ids=str)
def test_what_just_keeps_the_rules_passes(keys: dict[str, Any]) -> None:
    check_buffer(made(**keys))


@given(st.integers(0, 8), st.integers(1, 8), st.integers(1, 40))
def test_a_window_costs_lead_so_that_its_last_ticket_keeps_the_bound(bound: int, batch: int, window: int) -> None:
    buffer = {"max_staleness": bound, "groups_per_step": batch, "window": window, "order": "windowed"}
    ahead = lead(made(**buffer))
    # Ticket n may be leased to a node at version v if n < (v + 1 + lead)·B; overtaken by the window - 1 tickets behind
    # it, it trains in batch (n + window - 1) // B at the latest.
    for version in range(3):
        newest = (version + 1 + ahead) * batch - 1
        trains_at = (newest + window - 1) // batch
        assert trains_at - version <= bound
    # And no lead is given away: with one more, the newest ticket of version 0 would break the bound.
    assert ((1 + ahead + 1) * batch - 1 + window - 1) // batch > bound


def test_in_order_the_lead_is_the_whole_bound() -> None:
    assert lead(made(max_staleness=3)) == 3


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_batch_has_as_few_new_groups_as_reuse_allows(groups: int, reuse: int) -> None:
    fresh = fresh_groups(groups, reuse)
    assert fresh * reuse >= groups
    assert (fresh - 1) * reuse < groups


def test_reuse_costs_lead_and_room_for_what_may_be_used_again() -> None:
    replay = made(order="replay", reuse=3, max_staleness=4, groups_per_step=8)
    assert (lead(replay), batches_held(replay)) == (2, 6)
    config = msgspec.structs.replace(Config(), buffer=replay)
    assert batch_bytes(config) == 6 * 3 * group_bytes(config)

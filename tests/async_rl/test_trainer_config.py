"""The section [trainer]: kinds have keys of their own, and what does not go together is one error with the remedy."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec
import pytest

from async_rl import trainer_config
from async_rl.config import Config, ConfigError, config_from_table, config_table
from async_rl.trainer_config import (
    WITHOUT_MEANING,
    TrainerConfig,
    describe_trainer,
    peak_rate,
    publishes_factors,
    rate_key,
)


def made(in_flight: str = "continue", sections: dict[str, Any] | None = None, **trainer: Any) -> Config:
    table = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}, "inference": {"in_flight": in_flight}}
    for name, keys in (sections or {}).items():
        table[name] = table.get(name, {}) | keys
    return config_from_table(table | {"trainer": trainer}, "test.toml")


SNAPSHOTS = {"kind": "sketch", "publish": "snapshots"}
BROKEN: dict[str, dict[str, Any]] = {
    "alpha has no meaning with kind = \"sketch\", only with 'lora': remove it": {"kind": "sketch", "alpha": 8.0},
    "no request can finish under the old ones: set [inference] in_flight": {"kind": "full", "in_flight": "finish"},
    'run.deterministic = true needs two policies at once (in_flight = "finish")': {
        "kind": "sketch", "in_flight": "finish", "sections": {"run": {"deterministic": True}},
    },
    'reference_kl = "k3" needs the base model': {"kind": "full", "sections": {"algorithm": {"reference_kl": "k3"}}},
    'dtype = "float16" cannot hold the steps': {"kind": "full", "sections": {"model": {"dtype": "float16"}}},
    "[trainer.ranks] q_proj = 513: a sketch has at most rank 512": {"kind": "sketch", "ranks": {"q_proj": 513}},
    "write 'q_proj'": {"kind": "sketch", "ranks": {"self_attn.q_proj": 8}},
    'a factor update cannot carry embeddings: set publish = "snapshots"': {"kind": "sketch", "train_embeddings": True},
    'snapshot_every has no meaning with publish = "snapshots"': SNAPSHOTS | {"snapshot_every": 7},
    "carry_momentum has no meaning with momentum = 0": {"kind": "sketch", "carry_momentum": False},
    '[trainer.parallel] has only `data` with [trainer] backend = "torch"': {"parallel": {"data": 2, "tensor": 2}},
    "[trainer.step_control] is not offered over several ranks": {"parallel": {"data": 2}, "step_control": {}},
    "[trainer] train_embeddings is not offered over several ranks": SNAPSHOTS | {
        "parallel": {"data": 2}, "train_embeddings": True
    },
    'backend = "megatron" trains kind = "lora" and "sketch", not "full"': {"kind": "full", "backend": "megatron"},
    'dtype = "bfloat16": [trainer] kind = "sketch" with backend = "megatron"': {
        "kind": "sketch", "backend": "megatron", "sections": {"model": {"dtype": "bfloat16"}},
    },
    "train_embeddings is not offered with": SNAPSHOTS | {"backend": "megatron", "train_embeddings": True},
    "[trainer.step_control] is not offered with": {"backend": "megatron", "step_control": {}},
    'packing = "never" has no meaning with backend = "megatron"': {"backend": "megatron", "packing": "never"},
    "final_budget = 0.01 is above budget = 0.0002": {"step_control": {"final_budget": 0.01}},
}  # fmt: skip


@pytest.mark.parametrize("says", BROKEN)
def test_what_does_not_go_together_is_refused_with_the_remedy(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**BROKEN[says])


def test_every_rule_has_its_example_here() -> None:
    assert inspect.getsource(trainer_config).count("raise ConfigError") == len(BROKEN)


OTHER: dict[str, Any] = {
    "ranks": {"q_proj": 2}, "update_ratio": 1e-3, "redraw_every": 2, "momentum": 0.5, "carry_momentum": False,
    "publish": "snapshots", "snapshot_every": 9, "train_embeddings": True, "alpha": 8.0, "learning_rate": 1.0,
    "beta1": 0.5, "weight_decay": 0.1, "max_grad_norm": 2.0, "rank": 3, "targets": ["q_proj"],
    "expert_adapters": "shared_outer",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in WITHOUT_MEANING.items() for key in keys])
def test_a_key_of_another_kind_is_refused_and_the_message_names_both_kinds(kind: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf'{key} has no meaning with kind = "{kind}", only with') as raised:
        made(kind=kind, **{key: OTHER[key]})
    own = [other for other, keys in WITHOUT_MEANING.items() if key not in keys]
    assert own
    assert all(f"'{other}'" in str(raised.value) for other in own)


def test_every_key_means_something_for_some_kind() -> None:
    assert set.intersection(*(set(keys) for keys in WITHOUT_MEANING.values())) == set()
    for key in {key for keys in WITHOUT_MEANING.values() for key in keys}:
        assert msgspec.convert({key: OTHER[key]}, TrainerConfig) != TrainerConfig(), f"{key} is not another value here"


@pytest.mark.parametrize(
    "trainer",
    [
        {"kind": "lora", "rank": 1024, "alpha": 8.0, "learning_rate": 1.0, "targets": ["q_proj"]},
        {"kind": "sketch", "rank": 512, "ranks": {"q_proj": 8}, "update_ratio": 1e-3, "updates_per_batch": 2},
        {"kind": "sketch", "momentum": 0.5, "carry_momentum": False, "snapshot_every": 1},
        SNAPSHOTS | {"train_embeddings": True, "learning_rate": 1e-5, "weight_decay": 0.1},
        {"kind": "full", "learning_rate": 1e-5, "max_grad_norm": 0.5, "step_control": {"max_scale": 2.0}},
    ],
)
@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_what_goes_together_passes_and_reads_back_from_a_run_directory(trainer: dict[str, Any], in_flight: str) -> None:
    config = made(in_flight, **trainer)
    table = config_table(config)
    assert ("step_control" in table["trainer"]) == ("step_control" in trainer)
    assert config_from_table(table, "again") == config


def test_a_sketchs_rate_is_its_update_ratio() -> None:
    sketch = TrainerConfig(kind="sketch", update_ratio=3e-5)
    assert (rate_key(sketch), peak_rate(sketch)) == ("update_ratio", 3e-5)
    assert describe_trainer(sketch) == "sketch on torch, rank 16, update ratio 3e-05"
    full = TrainerConfig(kind="full", learning_rate=1e-5)
    assert (rate_key(full), peak_rate(full)) == ("learning_rate", 1e-5)
    assert describe_trainer(full) == "full on torch, learning rate 1e-05"


def test_only_a_sketch_publishes_what_was_added_to_the_weights() -> None:
    kinds = [TrainerConfig(), TrainerConfig(kind="full"), TrainerConfig(kind="sketch"), TrainerConfig(**SNAPSHOTS)]
    assert [publishes_factors(each) for each in kinds] == [False, False, True, False]


def test_unknown_keys_of_the_step_control_table_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `max_scal` in \[trainer.step_control\]: did you mean"):
        made(step_control={"max_scal": 2.0})


def test_a_layout_is_told_in_a_line() -> None:
    parallel = {"tensor": 2, "pipeline": 2, "sequence": True}
    config = made(backend="megatron", parallel=parallel)
    assert describe_trainer(config.trainer) == (
        "lora on megatron over 4 ranks (tensor 2 × pipeline 2, sequence), rank 16, learning rate 0.0002"
    )
    assert describe_trainer(made(parallel={"data": 2}).trainer).startswith("lora on torch over 2 ranks (data 2), rank")
    assert describe_trainer(made(backend="megatron").trainer).startswith("lora on megatron over 1 rank,")

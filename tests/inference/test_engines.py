"""From a config to an engine: what is handed on, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, ConfigError, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.inference_config import OFFERED
from async_rl.trainer_config import adapts_feed_forward
from inference.engine import Capabilities, EngineError
from inference.engines import ENGINES, make_engine, sglang_arguments, vllm_arguments
from inference.sglang_child import default_flags


def made(trainer: dict[str, Any], **inference: Any) -> Config:
    table = {"model": {"path": "m"}, "task": {"kind": "digit_sort"}, "trainer": trainer, "inference": inference}
    return config_from_table(table, "test.toml")


def test_every_engine_that_a_config_may_name_is_here_with_what_it_offers() -> None:
    assert ENGINES.keys() == OFFERED.keys()


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (16, 16), (17, 32), (300, 320), (4096, 512)])
def test_vllm_has_room_for_the_trainers_adapter_in_the_least_of_its_sizes(rank: int, room: int) -> None:
    assert vllm_arguments(made({"rank": rank}, engine="vllm")) == {"max_lora_rank": room}


def test_what_the_config_says_of_the_rank_counts() -> None:
    given = {"max_lora_rank": 128, "seed": 3}
    assert vllm_arguments(made({"rank": 8}, engine="vllm", vllm={"arguments": given})) == given


def test_sglang_has_room_for_the_trainers_adapter_unless_its_server_is_there_already() -> None:
    assert sglang_arguments(made({"rank": 24}, engine="sglang")) == {"max-lora-rank": 24}
    endpoint = {"endpoint": "http://127.0.0.1:30000"}
    assert sglang_arguments(made({"rank": 24}, engine="sglang", sglang=endpoint)) == {}


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [
        ({}, True),
        ({"targets": ["q_proj"]}, False),
        ({"targets": ["q_proj", "mlp.up_proj"]}, True),
        ({"kind": "full"}, False),
    ],
)
def test_sglang_has_room_on_experts_where_the_trainer_may_adapt_some(trainer: dict[str, Any], wanted: bool) -> None:
    assert adapts_feed_forward(made(trainer, in_flight="recompute").trainer) == wanted
    flags = default_flags(
        slots=1, max_context=9, max_adapters=3, device="cuda", dtype="bfloat16", whole=False, feed_forward=wanted,
        routes=False,
    )  # fmt: skip
    assert ("down_proj" in flags["lora-target-modules"]) == wanted
    assert "q_proj" in flags["lora-target-modules"]


def test_there_is_no_adapter_where_the_weights_change() -> None:
    whole = {"kind": "sketch"}
    assert vllm_arguments(made(whole, engine="vllm", in_flight="continue")) == {}
    assert sglang_arguments(made(whole, engine="sglang", in_flight="continue")) == {}


def test_a_config_with_groups_makes_no_engine_before_one_is_chosen() -> None:
    with pytest.raises(ConfigError, match="choose one with --group NAME, of a, b"):
        make_engine(made({}, group=[{"name": "a"}, {"name": "b"}]), Path("m"))


@pytest.mark.parametrize("replay", ["none", "rollout"])
@pytest.mark.parametrize("engine", ["torch", "sglang"])
def test_an_engine_is_asked_for_routes_where_the_trainer_replays_them(
    engine: str, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def make(*_: Any, **options: Any) -> Any:
        asked.update(options)
        raise EngineError("enough")

    monkeypatch.setattr("inference.torch_engine.TorchEngine", make)
    monkeypatch.setattr("inference.sglang_engine.SglangServer", make)
    table = {"model": {"path": "m"}, "task": {"kind": "digit_sort"}, "inference": {"engine": engine}}
    with pytest.raises(EngineError, match="enough"):
        make_engine(config_from_table(table | {"algorithm": {"router_replay": replay}}, "test.toml"), Path("m"))
    assert asked["routes"] == (replay == "rollout")


def test_an_engine_that_does_not_tell_routes_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        capabilities = Capabilities("torch", frozenset(["finish"]), 3, "span", 0.1)
        closed = False

        def close(self) -> None:
            self.closed = True

    silent = Silent()
    monkeypatch.setitem(ENGINES, "torch", lambda *_: silent)  # type: ignore[arg-type,return-value]
    table = {"model": {"path": "m"}, "task": {"kind": "digit_sort"}, "algorithm": {"router_replay": "rollout"}}
    with pytest.raises(AsyncRLError, match='router_replay = "rollout": engine "torch" does not tell where tokens went'):
        make_engine(config_from_table(table, "test.toml"), Path("m"))
    assert silent.closed

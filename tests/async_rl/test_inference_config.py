from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl import inference_config
from async_rl.config import Config, ConfigError, config_from_table, group_bytes, load_config, with_group
from async_rl.inference_config import (
    ONLY_WITH,
    NodeSettings,
    as_one_kind,
    describe_group,
    interpreter,
    node_count,
    node_groups,
)
from async_rl.schema import changed


def made(**changes: Any) -> Config:
    """The least that passes, with sections changed or added."""
    return config_from_table({"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}} | changes, "test.toml")


def grouped(*groups: dict[str, Any], **inference: Any) -> Config:
    return made(inference={**inference, "group": list(groups)})


# --- groups ----------------------------------------------------------------------------------------------------------


def test_without_groups_all_nodes_are_one_and_are_numbered() -> None:
    config = made(inference={"nodes": 2, "slots": 8})
    (group,) = node_groups(config.inference)
    assert (group.name, group.node_names, group.inference) == ("", ("node-0", "node-1"), config.inference)
    assert node_count(config.inference) == 2
    assert describe_group(group) == "2 × torch, 8 slots each, in flight: finish"


def test_a_group_has_from_the_section_what_it_does_not_set_itself() -> None:
    config = grouped(
        {"name": "a"}, {"name": "b", "engine": "vllm", "slots": 128, "nodes": 3, "vllm": {"arguments": {"seed": 1}}},
        slots=16, nodes=2, temperature=0.7, max_context=300,
    )  # fmt: skip
    a, b = node_groups(config.inference)
    assert (a.inference.engine, a.inference.slots, a.node_names) == ("torch", 16, ("a-0", "a-1"))
    assert (b.inference.engine, b.inference.slots, b.node_names) == ("vllm", 128, ("b-0", "b-1", "b-2"))
    assert b.inference.vllm.arguments == {"seed": 1}
    assert node_count(config.inference) == 5
    for group in (a, b):
        assert (group.inference.temperature, group.inference.max_context, group.inference.group) == (0.7, 300, ())
    assert describe_group(b) == f"b: 3 × vllm, 128 slots each, in flight: finish, with {sys.executable}"
    (at,) = node_groups(made(inference={"engine": "sglang", "sglang": {"endpoint": SERVER}}).inference)
    assert describe_group(at) == f"1 × sglang, 64 slots each, in flight: finish, at {SERVER}"


def test_a_groups_arguments_are_added_to_those_of_the_section() -> None:
    config = grouped(
        {"name": "a", "engine": "vllm", "vllm": {"arguments": {"seed": 2, "x": 3}}}, {"name": "b", "engine": "vllm"},
        {"name": "c", "engine": "sglang", "sglang": {"arguments": {"tp": 2}}},
        {"name": "d", "engine": "sglang", "sglang": {"endpoint": SERVER}},
        vllm={"arguments": {"seed": 1, "y": 4}}, sglang={"arguments": {"dp": 1}},
    )  # fmt: skip
    a, b, c, d = (group.inference for group in node_groups(config.inference))
    assert a.vllm.arguments == {"seed": 2, "x": 3, "y": 4}
    assert b.vllm.arguments == {"seed": 1, "y": 4}
    assert c.sglang.arguments == {"tp": 2, "dp": 1}
    assert (d.sglang.endpoint, d.sglang.arguments) == (SERVER, {})  # they are for servers that a node starts


def test_a_node_has_the_config_of_a_run_whose_nodes_are_all_like_it() -> None:
    config = grouped({"name": "a"}, {"name": "b", "slots": 5})
    assert with_group(config, "b") == made(inference={"slots": 5})
    assert with_group(made(), "") == made()


def test_a_group_that_there_is_not_or_none_chosen_names_those_that_there_are() -> None:
    config = grouped({"name": "a"}, {"name": "b"})
    with pytest.raises(ConfigError, match=r"there is no \[\[inference.group\]\] of the name 'c': .* of a, b$"):
        with_group(config, "c")
    with pytest.raises(ConfigError, match=r"different groups: choose one with --group NAME, of a, b$"):
        with_group(config, "")
    with pytest.raises(ConfigError, match=r"--group a: this config has no \[\[inference.group\]\]: leave it out"):
        with_group(made(), "a")


def test_a_group_may_be_given_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "x"\n[task]\nkind = "digit_sort"\n')
    config = load_config(str(file), ['inference.group=[{name = "a", nodes = 2}, {name = "b"}]'])
    assert [group.node_names for group in node_groups(config.inference)] == [("a-0", "a-1"), ("b-0",)]


def test_what_is_reserved_for_a_group_is_for_the_longest_context_of_any() -> None:
    assert group_bytes(grouped({"name": "a"}, {"name": "b", "max_context": 2048}, max_context=100)) == group_bytes(
        made(inference={"max_context": 2048})
    )


def test_a_forecast_takes_all_groups_for_one_unless_they_differ_in_what_it_rests_on() -> None:
    groups = [{"name": "a", "nodes": 2, "max_context": 900}, {"name": "b", "engine": "vllm", "nodes": 3}]
    one = as_one_kind(grouped(*groups, slots=7).inference)
    assert (one.nodes, one.slots, one.max_context, one.group) == (5, 7, 900, ())
    assert as_one_kind(made().inference) == made().inference
    for key, value in {"slots": 9, "in_flight": "recompute"}.items():
        with pytest.raises(ConfigError, match=rf"{key} = .*, {value}: a forecast knows one kind of node"):
            as_one_kind(grouped(*groups, {"name": "c", key: value}).inference)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"name": "a", "slot": 3}, "test.toml: unknown key `slot` in [[inference.group]]: did you mean `slots`?"),
        ({"name": "a", "slots": 0}, "`inference.group[1].slots`"),
        ({"name": "a", "engine": "tgi"}, "`inference.group[1].engine`"),
        ({"name": "a", "vllm": {"args": {}}}, "unknown key `args` in [inference.group.vllm]: did you mean"),
        ({"slots": 3}, "required field `name` - at `inference.group[1]`"),
        ({"name": ""}, "`inference.group[1].name`"),
        ({"name": "a/b"}, "`inference.group[1].name`"),
        ({"name": "a" * 33}, "`inference.group[1].name`"),
        ({"name": "a", "group": []}, "unknown key `group` in [[inference.group]]"),
        ({"name": "a", "temperature": 1.0}, "[[inference.group]] temperature = 1.0 is refused: it comes with every"),
        ({"name": "a", "max_new_tokens": 9}, "[[inference.group]] max_new_tokens = 9 is refused: it comes with every"),
        ({"name": "a", "eval_share": 0.1}, "eval_share = 0.1 is refused: the buffer shares out evaluation"),
        ({"name": "a", "top_p": 0.9}, "[[inference.group]] top_p = 0.9 is refused: it cuts the distribution"),
    ],
)
def test_a_group_with_a_wrong_key_or_value_is_refused_with_its_place(group: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=r"^test\.toml: ") as caught:
        grouped({"name": "first"}, group)
    assert says in str(caught.value)


def test_a_list_that_holds_no_tables_is_an_error_for_people() -> None:
    with pytest.raises(ConfigError, match=r"`inference\.group\[0\]`"):
        made(inference={"group": [3]})
    with pytest.raises(ConfigError, match=r"`inference\.group`"):
        made(inference={"group": 3})


# --- rules -----------------------------------------------------------------------------------------------------------

CENTRED = {"center_scores": 32, "treatment": "uncorrected"}
SKETCH = {"trainer": {"kind": "sketch"}}
SERVER = "http://127.0.0.1:30000"
BROKEN: dict[str, dict[str, Any]] = {
    "name = 'a' is there 2 times": {"inference": {"group": [{"name": "a"}, {"name": "a"}]}},
    "[[inference.group]]: run.deterministic = true needs nodes that are all alike": {
        "run": {"deterministic": True},
        "inference": {"handover": "discard", "group": [{"name": "a"}]},
    },
    "nothing wider than 0.5 nats": {"inference": {"logprob_bound": 0.6}},
    "is that of 2 groups: one node has a server to itself": {
        "inference": {
            "engine": "sglang",
            "sglang": {"endpoint": SERVER},
            "group": [{"name": "a"}, {"name": "b"}],
        }
    },
    '[inference] compile has no meaning with engine sglang and vllm, only with "torch": remove it': {
        "inference": {
            "compile": "never",
            "group": [{"name": "a", "engine": "vllm"}, {"name": "b", "engine": "sglang"}],
        }
    },
    '[[inference.group]] \'a\': engine_timeout has no meaning with engine torch, only with "vllm" or "sglang"': {
        "inference": {"group": [{"name": "a", "engine_timeout": 3.0}]},
    },
    'in_flight = "continue": engine "sglang" cannot do that with adapters: set "finish" or "recompute"': {
        "inference": {"engine": "sglang", "in_flight": "continue"},
    },
    "max_resident must be at least 3": {"run": {"eval_every": 5}, "inference": {"max_resident": 2}},
    "leaves no room for a prompt": {"inference": {"max_new_tokens": 64, "max_context": 64}},
    '[inference] engine = "vllm": run.deterministic = true needs steps of fixed shapes': {
        "run": {"deterministic": True},
        "inference": {"handover": "discard", "engine": "vllm"},
    },
    'at every token, which engine "vllm" does not give': {
        "algorithm": CENTRED,
        "inference": {"handover": "discard", "engine": "vllm"},
    },
    "which are not handed over with samples that go on elsewhere": {"algorithm": CENTRED},
    "center_scores = 32 needs more of a decode step": {
        "algorithm": CENTRED,
        "inference": {"handover": "discard", "compile": "always"},
    },
    'needs the experts of every token, which engine "vllm" does not tell: set [inference] engine = "torch" or': {
        "algorithm": {"router_replay": "rollout"},
        "inference": {"group": [{"name": "a"}, {"name": "b", "engine": "vllm"}]},
    },
    "endpoint = 'localhost:30000': write it as http://host:port": {
        "inference": {"engine": "sglang", "sglang": {"endpoint": "localhost:30000"}},
    },
    "[inference] vllm.arguments: dtype, model: the node sets it by itself: leave it out": {
        "inference": {"engine": "vllm", "vllm": {"arguments": {"model": "x", "dtype": "float16"}}},
    },
    "set nodes = 1, or make a group for each server": {
        "inference": {"engine": "sglang", "sglang": {"endpoint": SERVER}, "nodes": 2},
    },
    "that server runs already: remove sglang.arguments": {
        "inference": {"engine": "sglang", "sglang": {"endpoint": SERVER, "arguments": {"tp": 2}}},
    },
}
# Each as near as one can come to the rule above it without breaking it.
WHOLE: list[dict[str, Any]] = [
    {"inference": {"group": [{"name": "a"}, {"name": "b"}]}},
    {"run": {"deterministic": True}, "inference": {"handover": "discard"}},
    {"inference": {"engine": "sglang", "group": [{"name": "a", "sglang": {"endpoint": SERVER}}, {"name": "b"}]}},
    {"inference": {"compile": "never", "group": [{"name": "a", "engine": "vllm"}, {"name": "b"}]}},
    {"inference": {"engine_timeout": 3.0, "group": [{"name": "a", "engine": "vllm"}, {"name": "b"}]}},
    {"inference": {"engine": "sglang", "in_flight": "recompute"}},
    {
        "algorithm": {"router_replay": "rollout"},
        "inference": {"group": [{"name": "a"}, {"name": "b", "engine": "sglang"}]},
    },
    {"algorithm": {"router_replay": "trainer"}, "trainer": {"updates_per_batch": 2}, "inference": {"engine": "vllm"}},
    {"inference": {"engine": "sglang", "in_flight": "continue"}, **SKETCH},
    {"inference": {"engine": "vllm", "in_flight": "continue"}},
    {"run": {"eval_every": 5}, "inference": {"max_resident": 3}},
    {"run": {"eval_every": 5}, "inference": {"max_resident": 2, "in_flight": "continue"}},
    {"inference": {"max_resident": 2}},
    {"inference": {"max_new_tokens": 63, "max_context": 64}},
    {"algorithm": CENTRED, "inference": {"handover": "discard"}},
    {"inference": {"engine": "sglang", "sglang": {"endpoint": SERVER}}},
    {"inference": {"engine": "sglang", "sglang": {"endpoint": "https://[::1]/sglang"}}},
    {"inference": {"engine": "sglang", "sglang": {"arguments": {"tp": 2, "mem-fraction-static": 0.5}}}},
    {
        "inference": {
            "sglang": {"endpoint": SERVER},
            "group": [{"name": "a", "engine": "sglang"}, {"name": "b"}, {"name": "c", "engine": "vllm"}],
        }
    },
]


@pytest.mark.parametrize("says", BROKEN)
def test_every_rule_refuses_what_breaks_it(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**BROKEN[says])


def test_no_key_of_a_server_may_stand_in_a_config_wherever_it_is_written() -> None:
    """The resolved config is a file of the run."""
    key = {"--api_key": "secret"}
    served = {"name": "a", "engine": "sglang", "sglang": {"endpoint": SERVER}}
    for inference in (
        {"engine": "sglang", "sglang": {"arguments": key}},
        {"sglang": {"arguments": key}, "group": [served]},
        {"group": [{"name": "b"}, {"name": "a", "engine": "sglang", "sglang": {"arguments": key}}]},
    ):
        with pytest.raises(ConfigError, match=r"sglang\.arguments: api-key: the node sets it by itself") as caught:
            made(inference=inference)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["http://", "http:///x", "http://:30000", "ftp://a:1", "http://[::1", "http://a b"]
)
def test_an_endpoint_names_a_host(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as http://host:port"):
        made(inference={"engine": "sglang", "sglang": {"endpoint": endpoint}})


def test_one_server_is_one_however_its_endpoint_is_written() -> None:
    groups = [{"name": name, "sglang": {"endpoint": end}} for name, end in (("a", SERVER), ("b", f"{SERVER}/"))]
    with pytest.raises(ConfigError, match="is that of 2 groups"):
        made(inference={"engine": "sglang", "group": groups})


def test_every_rule_has_its_example_here() -> None:
    rules = inspect.getsource(inference_config).count("raise ConfigError")
    assert rules - inspect.getsource(as_one_kind).count("raise ConfigError") == len(BROKEN)


@pytest.mark.parametrize("sections", WHOLE, ids=str)
def test_what_just_keeps_the_rules_passes(sections: dict[str, Any]) -> None:
    made(**sections)


def test_whole_weights_can_finish_nothing_with_any_engine() -> None:
    for engine in ("torch", "vllm", "sglang"):
        with pytest.raises(ConfigError, match="no request can finish under the old ones"):
            made(**SKETCH, inference={"engine": engine})


def test_a_deterministic_run_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"add --set buffer.order=fifo --set inference.handover=discard --set infe"):
        made(run={"deterministic": True}, buffer={"order": "windowed"}, inference={"compile": "always"})


@pytest.mark.parametrize("key", ONLY_WITH)
def test_a_key_that_means_nothing_to_the_engine_must_be_at_its_default(key: str) -> None:
    values: dict[str, Any] = {
        "compile": "never", "max_tokens_per_second": 5.0, "engine_python": "python3", "engine_timeout": 9.0,
        "vllm": {"arguments": {"seed": 1}}, "sglang": {"arguments": {"tp": 2}},
    }  # fmt: skip
    for engine in ("torch", "vllm", "sglang"):
        if engine in ONLY_WITH[key]:
            config = made(inference={"engine": engine, key: values[key]})
            assert changed(config.inference, list(ONLY_WITH)) == [key]
        else:
            with pytest.raises(ConfigError, match=rf"^\[inference\] {key} has no meaning with engine {engine}"):
                made(inference={"engine": engine, key: values[key]})


def test_every_key_with_a_meaning_of_its_own_is_one_of_a_nodes() -> None:
    assert set(ONLY_WITH) <= set(NodeSettings.__struct_fields__)


def test_an_interpreter_is_an_absolute_path_whose_links_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """A virtual environment's python is a link to another, and run through that it would have other packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "python").symlink_to(sys.executable)
    assert interpreter(made().inference) == sys.executable
    for given, path in {"python": str(tmp_path / "python"), "~/v/bin/python": "/home/somebody/v/bin/python"}.items():
        assert interpreter(made(inference={"engine": "vllm", "engine_python": given}).inference) == path

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl.config import (
    Config,
    ConfigError,
    apply_override,
    batch_bytes,
    check_config,
    config_from_table,
    config_table,
    load_config,
    shipped_configs,
)

PPO = {"surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8}


def table(**changes: Any) -> dict[str, Any]:
    """The least that passes, with sections changed or added."""
    return {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}} | changes


def made(**changes: Any) -> Config:
    return config_from_table(table(**changes), "test.toml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(table()))
    return path


# --- keys and types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"tranier": {}}, "unknown key `tranier` in the top level: did you mean `trainer`?"),
        ({"trainer": {"learing_rate": 1}}, "unknown key `learing_rate` in [trainer]: did you mean `learning_rate`?"),
        ({"model": {"tiny": {"layer": 2}}}, "unknown key `layer` in [model.tiny]: did you mean `layers`?"),
        (
            {"launch": {"zzz": 1}},
            "unknown key `zzz` in [launch]: known keys: kind, grace, restarts, pin, ray, autoscale",
        ),
    ],
)
def test_an_unknown_key_names_its_place_and_the_nearest_known_one(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**sections)
    assert str(caught.value) == f"test.toml: {says}"


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_truncated_sampling_is_refused_saying_what_it_would_do_to_the_ratios(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"\[inference\] {key} = 0\.9 is refused: .*ratio would be biased.* Remove it"
    ):
        made(inference={"temperature": 0.7, key: 0.9})


def test_the_tasks_own_keys_are_not_judged_here() -> None:
    assert made(task={"kind": "x", "whatever": [1, {"a": 2}]}).task["whatever"] == [1, {"a": 2}]


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"run": {"steps": -1}}, "`run.steps`"),
        ({"run": {"steps": "many"}}, "`run.steps`"),
        ({"run": 3}, "`run`"),
        ({"trainer": {"learning_rate": float("nan")}}, "`trainer.learning_rate`"),
        ({"trainer": {"targets": "q_proj"}}, "`trainer.targets`"),
        ({"inference": {"in_flight": "wait"}}, "`inference.in_flight`"),
        ({"inference": {"eval_share": 1.5}}, "`inference.eval_share`"),
        ({"model": {"tiny": {"accuracy_low": 0}}}, "`model.tiny.accuracy_low`"),
    ],
)
def test_a_wrong_value_names_the_file_and_the_key(sections: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=r"^test\.toml: ") as caught:
        made(**sections)
    assert place in str(caught.value)
    assert "$" not in str(caught.value)


# --- what no single value shows --------------------------------------------------------------------------------------

CENTRED = {"center_scores": 32, "treatment": "uncorrected"}
BROKEN = {
    "[task] needs a key `kind`": {"task": {}},
    "[model] needs `path`": {"model": {}},
    'shape = "qwen3-30b-a3b" has no meaning': {"model": {"path": "m", "shape": "qwen3-30b-a3b"}},
    "updates_per_batch = 5 takes whole groups": {
        "trainer": {"updates_per_batch": 5},
        "buffer": {"groups_per_step": 4},
    },
    "group 'long': [inference] max_new_tokens leaves no room": {
        "inference": {"group": [{"name": "short"}, {"name": "long", "max_context": 64}]},
    },
    "is below one batch of at most 1466368 bytes": {"buffer": {"capacity_bytes": 1466367}},
}
# Each as near as one can come to the rule above it without breaking it.
WHOLE = [
    {"model": {"tiny": {}}},
    {"trainer": {"updates_per_batch": 4}, "buffer": {"groups_per_step": 4}},
    {"inference": {"group": [{"name": "short"}, {"name": "long", "max_context": 65}]}},
    {"buffer": {"capacity_bytes": 1466368}},
]


@pytest.mark.parametrize("says", BROKEN)
def test_every_rule_refuses_what_breaks_it(says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**BROKEN[says])


def test_every_rule_has_its_example_here() -> None:
    assert inspect.getsource(check_config).count("raise ConfigError") == len(BROKEN)


@pytest.mark.parametrize("sections", WHOLE, ids=str)
def test_what_just_keeps_the_rules_passes(sections: dict[str, Any]) -> None:
    made(**sections)


def test_a_batch_of_the_default_settings_takes_what_the_message_says() -> None:
    assert batch_bytes(made()) == 32 * 8 * (512 * 9 + 6 * 80 + 640) == 1466368


def test_the_samplers_likeliest_tokens_count_in_what_a_batch_may_take() -> None:
    config = made(algorithm=CENTRED, inference={"handover": "discard"})
    assert batch_bytes(config) == batch_bytes(made()) + 32 * 8 * 512 * (8 * 32)


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_pass_by_name(name: str) -> None:
    assert load_config(name).run.name == name


def test_nothing_that_the_clock_decides_goes_with_a_deterministic_run() -> None:
    keys = {"adaptive": True, "retire_above": 0.9, "difficulty": "weighted"}
    for key, value in keys.items():
        with pytest.raises(ConfigError, match=rf"other settings: add --set buffer.{key}=(false|0|uniform)$"):
            made(run={"deterministic": True}, inference={"handover": "discard"}, buffer={key: value})
    with pytest.raises(ConfigError, match=r"add --set buffer\.order=fifo$"):
        made(run={"deterministic": True}, inference={"handover": "discard"}, buffer={"order": "replay", "reuse": 2})


# --- files and overrides ---------------------------------------------------------------------------------------------


def override(*settings: str) -> dict[str, Any]:
    changed: dict[str, Any] = {"run": {"steps": 1}, "task": {"kind": "digit_sort"}}
    for setting in settings:
        apply_override(changed, setting)
    return changed


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("run.steps=20", ("run", "steps"), 20),
        ("run.name=quick test", ("run", "name"), "quick test"),
        ("run.name = spaced ", ("run", "name"), "spaced"),
        ('run.name="20"', ("run", "name"), "20"),
        ("run.name=a=b", ("run", "name"), "a=b"),
        ("run.name=", ("run", "name"), ""),
        ("buffer.endpoint=tcp://127.0.0.1:5701", ("buffer", "endpoint"), "tcp://127.0.0.1:5701"),
        ("trainer.learning_rate=2e-3", ("trainer", "learning_rate"), 0.002),
        ('trainer.targets=["q_proj", "v_proj"]', ("trainer", "targets"), ["q_proj", "v_proj"]),
        ("model.tiny.layers=2", ("model", "tiny", "layers"), 2),
        ("task.options={a = 1}", ("task", "options"), {"a": 1}),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(setting: str, path: tuple[str, ...], value: Any) -> None:
    changed: Any = override(setting)
    for part in path:
        changed = changed[part]
    assert changed == value
    assert type(changed) is type(value)


def test_of_two_overrides_of_one_key_the_later_counts() -> None:
    assert override("run.steps=2", "run.steps=3")["run"] == {"steps": 3}


@pytest.mark.parametrize("setting", ["run.steps", "steps=3", "=3", "run.=3", ".steps=3", ""])
def test_what_is_no_override_is_refused_with_an_example(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value, for example"):
        override(setting)


def test_an_override_cannot_go_into_a_value() -> None:
    with pytest.raises(ConfigError, match="'steps' is a value, not a section"):
        override("run.steps.more=1")


def test_a_file_is_read_overridden_and_named_after_itself(file: Path) -> None:
    config = load_config(str(file), ["run.steps=9", 'trainer.targets=["q_proj"]', "inference.in_flight=recompute"])
    assert config.run.name == "mine"
    assert (config.run.steps, config.trainer.targets, config.inference.in_flight) == (9, ("q_proj",), "recompute")
    assert load_config(str(file), ["run.name=other"]).run.name == "other"


def test_an_override_is_checked_like_the_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml: unknown key `step` in \[run\]: did you mean `steps`\?"):
        load_config(str(file), ["run.step=9"])
    with pytest.raises(ConfigError, match="group_size must be ≥ 2"):
        load_config(str(file), ["buffer.group_size=1"])


def test_a_section_that_is_a_value_is_an_error_for_people(file: Path) -> None:
    file.write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: .*`run`"):
        load_config(str(file))


def test_a_file_that_is_not_toml_or_not_there_is_named(file: Path) -> None:
    file.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML: .*line 1"):
        load_config(str(file))
    file.write_bytes(b"[run]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML"):
        load_config(str(file))
    with pytest.raises(ConfigError, match=r"no config file 'quickstrat'.*Did you mean 'quickstart'\?"):
        load_config("quickstrat")


@pytest.mark.parametrize(
    "config",
    [
        *(load_config(name) for name in shipped_configs()),
        made(),
        made(model={"tiny": {"layers": 2}}, trainer={"targets": ["q_proj", "v_proj"]}, algorithm=PPO),
        made(task={"kind": "reasoning_gym", "options": {"a": [1, 2.5], "b": {"c": True}}}),
    ],
)
def test_what_a_run_directory_keeps_is_the_same_config(config: Config) -> None:
    written = tomli_w.dumps(config_table(config))
    assert config_from_table(tomllib.loads(written), "config.toml") == config

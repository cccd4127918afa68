"""`async-rl doctor`: real halves, judged as in a run, and told."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tiny_lm import save_qwen3

from async_rl.config import Config, InferenceConfig, ModelConfig, RunConfig
from async_rl.proof import Proof, make_proof, probe_tokens
from async_rl.run.cli import _dtypes, main
from async_rl.run.doctor import Workshop, in_dtype
from async_rl.run.doctor_report import Report, Row, cells, judged, page, text
from async_rl.run.launch import LaunchError, ProcessSpec
from async_rl.run.parity_files import Served, Trained
from async_rl.schema import ConfigError
from trainer.tiny_model import char_tokenizer

TOKENS = probe_tokens(0, 50)
ROW = Row(group="", engine="torch", trainer_dtype="float32", engine_dtype="float32")
BASE, CANARY = -3.0, -5.5


def proof(level: float, *, base: bool = False, modules: tuple[str, ...] = ("a", "b")) -> Proof:
    scores = [np.full(len(tokens) - 1, level, np.float32) for tokens in TOKENS]
    of_base = [np.full(len(tokens) - 1, BASE, np.float32) for tokens in TOKENS]
    return make_proof(TOKENS, scores, modules, of_base if base else ())


TRAINED = Trained(proof(BASE), proof(CANARY, base=True), {"peft": "1"})


def row(base: Proof | str, canary: Proof | str | None, bound: float = 1e-3, problem: str = "") -> Row:
    return judged(ROW, TRAINED, Served("torch", bound, base, canary, 9, problem, {"torch": "2"}))


def test_an_engine_that_agrees_has_its_differences_and_no_problem() -> None:
    found = row(proof(BASE + 2e-4), proof(CANARY))
    assert cells(found) == (
        "torch", "float32", "float32", "2.0e-04", "2.0e-04", "0.0e+00", "0.0e+00", "0.001", "agrees"
    )  # fmt: skip
    assert found.problems == ()
    assert found.versions == {"torch": "2"}


@pytest.mark.parametrize(
    ("base", "canary", "words", "advice"),
    [
        (proof(BASE + 0.1), proof(CANARY + 0.1), "base: its log-probabilities on the probe differ", "tied"),
        (proof(BASE), proof(CANARY - 1.0), "canary: its log-probabilities on the probe differ", "alpha / rank"),
        (proof(BASE), proof(BASE), "and as the base model's do", "applies it to all modules"),
        (proof(BASE), proof(CANARY, modules=("a",)), "another set of modules (1)", "largest rank"),
        (proof(BASE), "the engine refuses it: no", "canary: the engine refuses it: no", "largest rank"),
        (proof(BASE), None, "canary: it was not shown", "largest rank"),
    ],
)
def test_what_differs_says_which_policy_and_where_to_look(
    base: Proof, canary: Proof | str | None, words: str, advice: str
) -> None:
    found = row(base, canary)
    assert cells(found)[-1] == "WRONG"
    assert words in "\n".join(found.problems)
    assert found.problems[-1].startswith("check, as ")
    assert advice in found.problems[-1]


def test_a_bound_wider_than_any_is_held_to_the_largest_and_a_tokenizer_counts() -> None:
    assert row(proof(BASE + 0.6), proof(CANARY), bound=9.0).bound == 0.5
    assert row(proof(BASE + 0.6), proof(CANARY), bound=9.0).problems
    assert row(proof(BASE), proof(CANARY), problem="another model's").problems == ("another model's",)


def test_the_page_and_the_text_have_a_line_for_each_engine_and_problem() -> None:
    failed = msgspec.structs.replace(ROW, group="big", engine="vllm", problems=("it did not start",))
    rows = (row(proof(BASE), proof(CANARY)), failed)
    report = Report(name="mine", model="m", task="kind = t", kind="lora", seed=0, versions={"peft": "1"}, rows=rows)
    assert not report.is_well
    shown = text(report)
    assert shown.splitlines()[1].startswith("torch       float32")
    assert "big (vllm)  float32     float32           –" in shown
    assert "FAILED\nbig (vllm), float32: it did not start\nthe first instance of the task is a prompt of 9 tok" in shown
    assert "| big (vllm) | float32 | float32 | – | – | – | – | – | FAILED |" in page(report)
    assert "- trainer: peft 1\n- torch: torch 2\n- vllm: could not be asked\n" in page(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_in_another_dtype_everything_is_in_it_or_the_config_is_refused() -> None:
    groups = [{"name": "a", "dtype": "float16"}, {"name": "b"}]
    config = Config(
        model=ModelConfig(path="m"), task={"kind": "digit_sort"},
        inference=msgspec.convert({"dtype": "float32", "group": groups}, InferenceConfig),
    )  # fmt: skip
    changed = in_dtype(config, "bfloat16")
    assert changed.model.dtype == "bfloat16"
    assert [group.dtype for group in changed.inference.group] == [msgspec.UNSET, msgspec.UNSET]
    assert changed.inference.dtype == "auto"
    sketch = msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, kind="sketch"))
    with pytest.raises(ConfigError):
        in_dtype(sketch, "float16")


def test_a_dtype_that_is_named_twice_is_one() -> None:
    assert _dtypes("float32,bfloat16,float32") == ["float32", "bfloat16"]


@pytest.mark.timeout(60)
def test_the_log_of_a_half_that_did_not_end_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = Config(run=RunConfig(work_timeout=0.5), model=ModelConfig(path="m"), task={"kind": "digit_sort"})
    endless = ProcessSpec("half", "http.server", ("--bind", "127.0.0.1", "0"), ends_run=True)
    with (
        pytest.raises(LaunchError, match=r"half has not ended within .* = 0\.5 s; log: ") as caught,
        Workshop() as shop,
    ):
        shop.run(endless, config)
    assert Path(str(caught.value).rpartition("log: ")[2]).is_file()


@pytest.mark.timeout(240)
@pytest.mark.long
def test_every_engine_of_a_config_is_asked_and_one_that_fails_keeps_no_other_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = char_tokenizer()
    model = save_qwen3(
        tmp_path / "model", std=0.25,
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    tokenizer.save_pretrained(model)
    (tmp_path / "three.toml").write_text(f"""
[model]
path = "{model}"
[task]
kind = "digit_sort"
[inference]
max_context = 40
max_new_tokens = 12
slots = 2
[[inference.group]]
name = "good"
[[inference.group]]
name = "coarse"
dtype = "bfloat16"
logprob_bound = 1e-3
[[inference.group]]
name = "absent"
engine = "vllm"
engine_python = "/nowhere/python"
""")
    assert main(["doctor", "three.toml", "--json", "a.json", "--markdown", "a.md"]) == 1
    out = capsys.readouterr().out
    report = json.loads(Path("a.json").read_text())
    good, coarse, absent = report["rows"]
    assert good["problems"] == []
    assert 0 < good["canary"]["max_dlogp"] < 1e-4
    assert 0 < good["base"]["mean_dlogp"] < good["base"]["max_dlogp"] < 1e-4
    assert (coarse["trainer_dtype"], coarse["engine_dtype"]) == ("float32", "bfloat16")
    assert [problem.partition(":")[0] for problem in coarse["problems"]][:2] == ["base", "canary"]
    assert coarse["problems"][2].startswith("check, as the base model itself differs")
    assert coarse["base"]["max_dlogp"] > 1e-3
    assert "/nowhere/python" in absent["problems"][0]
    assert absent["bound"] is None
    for words in ("good (torch)", "coarse (torch), bfloat16: base:", "absent (vllm), float32:", "a prompt of"):
        assert words in out
    assert Path("a.md").read_text() == page(msgspec.json.decode(Path("a.json").read_bytes(), type=Report))


def test_a_dtype_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "quickstart", "--dtypes", "float32,fp8"])
    assert "fp8: choose from float32, bfloat16, float16" in capsys.readouterr().err

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import BOUND, make_directory, make_run, sample_record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from async_rl.run.report.plot import age_colour
from async_rl.run.report.run_data import RunData, read_run
from async_rl.run.report.trajectories import chosen, make_decoder, trajectories_html


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    directory = make_directory(tmp_path / "run")
    make_run(directory)
    return read_run(directory)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Of bytes, as the tokenizers of large models are at their base."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return made


def shown(run: RunData, model: str = "", **segment: object) -> str:
    """The page's part for one trajectory, without its tags where `segment` replaces what it holds."""
    record = sample_record(9, 0)
    record["segments"][0].update(segment)
    return trajectories_html(replace(run, samples=[record]), make_decoder(model))


def words(page: str) -> str:
    (tokens,) = re.findall(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", tokens))


def test_the_tokens_of_a_trajectory_read_as_its_text(run: RunData, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "a <b> & naïve\nanswer"
    ids = tokenizer.encode(text).ids
    page = shown(run, str(tmp_path), tokens=ids, versions=[9] * len(ids), logprobs=[-0.5] * len(ids))
    # The two bytes of ï are two tokens: the first of them shows as a mark of its own.
    assert words(page) == text.replace("ï", "▫ï").replace("\n", "⏎\n")
    assert page.count('class="t"') == len(ids)


def test_a_token_has_the_colour_and_the_facts_of_its_age(run: RunData) -> None:
    page = shown(run, versions=[None, None, 5, 5, 6])
    colours = re.findall(r'class="t" style="background:(#\w+)" data-facts="([^"]+)"', page)
    assert [colour for colour, _ in colours] == [age_colour(age, BOUND) for age in (4, 4, 3)]
    assert colours[1][1] == "version 5, age 4 at step 9, log-probability -1.250"
    assert "age 3 to 4" in page


def test_what_was_given_is_one_piece_without_a_version(run: RunData) -> None:
    page = shown(run, versions=[None, 5, None, None, 5])
    pieces = re.findall(r'<span class="given">(.*?)</span>', page)
    assert pieces == ["given, not sampled", "5 ", "7 8 "]


def test_without_a_tokenizer_there_are_ids_and_the_page_says_why(run: RunData, tmp_path: Path) -> None:
    page = shown(run, str(tmp_path / "gone"))
    assert words(page) == "5 6 7 8 9 "
    assert "there is no" in page
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in shown(run, str(tmp_path))


def test_some_steps_from_the_first_to_the_last_are_chosen_and_of_a_repeated_one_the_later(run: RunData) -> None:
    again = sample_record(19, 0, reward=0.5)
    found = chosen([*run.samples, again])
    assert [record["step"] for record in found] == [0, 0, 5, 5, 10, 10, 14, 14, 19, 19]
    assert found[8]["reward"] == 0.5


def test_a_long_answer_is_cut_and_the_page_says_by_how_much(run: RunData) -> None:
    page = shown(run, tokens=[1] * 1000, versions=[9] * 1000, logprobs=[0.0] * 1000, omitted=24)
    assert page.count('class="t"') == 600
    assert "… 424 more tokens" in page


def test_before_any_was_kept_the_page_says_so(run: RunData) -> None:
    assert "None was kept yet" in trajectories_html(replace(run, samples=[]), make_decoder(""))

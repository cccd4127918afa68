"""The report as a browser shows it, at the width of a desk and of a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from made_runs import (
    control_record,
    eval_record,
    finish_run,
    make_directory,
    make_run,
    pools_record,
    sample_record,
    step_record,
)
from tokenizers import Tokenizer, models

from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import MetricsWriter
from async_rl.run.report import write_report

WIDTHS = (1280, 390)
PLOTS = 14
HOSTILE = """</title></script><script>document.title='owned'</script><img src=x onerror="document.title='owned'">'"`&"""
LONG = "a" * 300

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on this machine: the page was not looked at")
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = make_directory(tmp_path / "run")
    make_run(made)
    finish_run(made)
    return made


def looked_at(browser: Browser, directory: RunDirectory, width: int = 1280) -> int:
    """Open the report, and hold what must hold of every one; returns the number of plots drawn."""
    browser.open(write_report(directory), width)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert browser.evaluate("document.documentElement.dataset.plots") == "drawn"
    assert browser.evaluate("document.getElementById('trouble').hidden") is True
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    places = "document.querySelectorAll('.plot div[id]')"
    marks = "svg .trace path, svg .hm image"
    empty = f"[...{places}].filter((place) => !place.querySelector('{marks}')).map((place) => place.id)"
    assert browser.evaluate(empty) == []
    beyond = f"[...{places}].filter((p) => p.querySelector('svg').getBoundingClientRect().right > {width}).length"
    assert browser.evaluate(beyond) == 0
    return int(browser.evaluate(f"{places}.length"))


def record(directory: RunDirectory, *records: dict[str, Any]) -> None:
    with MetricsWriter(directory.metrics_path) as metrics:
        for item in records:
            metrics.write(item)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_finished_run_is_drawn_whole_and_fits(browser: Browser, directory: RunDirectory, width: int) -> None:
    assert looked_at(browser, directory, width) == PLOTS
    text = browser.evaluate("document.body.innerText")
    for words in ("finished", "Neither pool was the slower one", "768 issued", "task.digits", "20 of 20 steps in 0:20"):
        assert words in text, words


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_words_from_files_are_only_words(browser: Browser, tmp_path: Path, width: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({HOSTILE: 5, LONG: 6, "a": 7, "b": 8, "c": 9}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    directory = make_directory(tmp_path / "run", name=HOSTILE + LONG, model=tmp_path)
    make_run(directory)
    view = pools_record(21, waiting=HOSTILE + LONG)
    view["pools"]["nodes"][0]["name"] = HOSTILE
    view["pools"]["ledger"][f"dropped.{HOSTILE}"] = 3
    record(directory, view, {"eval": {**eval_record(20)["eval"], "n": 7}})
    sample = sample_record(30, 0, node=HOSTILE, components={HOSTILE: 1.0})
    sample["segments"][0]["finish"] = HOSTILE
    with MetricsWriter(directory.samples_path) as samples:
        samples.write(sample)
    looked_at(browser, directory, width)
    assert browser.evaluate("document.querySelectorAll('img[src=x], img[onerror]').length") == 0
    assert browser.evaluate("document.title").startswith(HOSTILE)
    for place in ("h1", ".given", "header .sub:last-child", "article:last-child header", "#work"):
        assert "onerror" in browser.evaluate(f"document.querySelector('{place}:not(.legend *)').textContent"), place


def test_a_run_that_has_only_begun_says_that_nothing_is_there(browser: Browser, tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    assert looked_at(browser, directory) == 0
    assert browser.evaluate("document.querySelectorAll('figure .empty').length") == PLOTS


@pytest.mark.parametrize("width", WIDTHS)
def test_one_step_is_drawn_while_the_run_goes_on(browser: Browser, tmp_path: Path, width: int) -> None:
    directory = make_directory(tmp_path / "run")
    record(directory, pools_record(0), step_record(0), pools_record(1))
    with directory.hold():
        assert looked_at(browser, directory, width) == PLOTS
    text = browser.evaluate("document.querySelector('header').innerText")
    assert "running" in text
    assert "When last seen, the trainer waits for ticket 1." in text


def test_a_run_of_before_the_buffers_view_was_recorded_is_drawn(browser: Browser, tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    keys = ("step", "version", "reward", "staleness_max", "staleness_mean", "tokens", "step_s", "draw_wait_s", "time_s")
    record(directory, *({key: step_record(step)[key] for key in keys} for step in range(5)))
    assert 0 < looked_at(browser, directory) < PLOTS
    assert "stopped before its end" in browser.evaluate("document.querySelector('h1').innerText")


@pytest.mark.parametrize("width", WIDTHS)
def test_controlled_steps_are_drawn_and_fit(browser: Browser, tmp_path: Path, width: int) -> None:
    directory = make_directory(tmp_path / "run")
    record(directory, *(control_record(step) for step in range(20)))
    assert looked_at(browser, directory, width) > 2
    for key in ("calibration", "step_scale"):
        assert browser.evaluate(f"document.querySelectorAll('#{key} svg .trace path').length") > 1
    assert browser.evaluate("document.querySelectorAll('#calibration .points path').length") == 20


def test_a_token_that_is_pointed_at_tells_its_version(browser: Browser, directory: RunDirectory) -> None:
    looked_at(browser, directory)
    browser.evaluate("document.querySelector('article:last-child .t').click()")
    assert "version 15, age 4 at step 19" in browser.evaluate("document.getElementById('token').innerText")
    browser.evaluate("document.querySelector('h1').click()")
    assert browser.evaluate("document.getElementById('token').hidden") is True


def test_the_page_may_load_nothing_and_run_nothing_but_its_own(browser: Browser, directory: RunDirectory) -> None:
    looked_at(browser, directory)
    blocked = "fetch('http://127.0.0.1:9/').then(() => 'loaded', () => 'refused')"
    assert browser.evaluate(blocked) == "refused"
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.head.append(s)"
    browser.evaluate(f"{script}; 0")
    assert browser.evaluate("window.ran === undefined") is True
    assert len([words for words in browser.complaints() if "Content Security Policy" in words]) >= 2


def test_the_page_is_written_whole_or_not_at_all(directory: RunDirectory) -> None:
    path = write_report(directory)
    first = path.read_text()
    assert write_report(directory).read_text()[-100:] == first[-100:]
    directory.summary_path.write_text("{")
    with pytest.raises(AsyncRLError, match=r"summary\.json"):
        write_report(directory)
    assert path.read_text()[-100:] == first[-100:]
    assert not list(directory.path.glob("*.part"))


def test_the_page_holds_its_library_once_and_compressed(directory: RunDirectory) -> None:
    page = write_report(directory).read_text()
    assert len(page) < 2_500_000
    (figures,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL)
    assert len(json.loads(figures)) == PLOTS
    assert "<" not in figures  # so nothing in it can end its element

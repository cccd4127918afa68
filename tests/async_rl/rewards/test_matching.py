r"""Where an answer stands in a text, and whether it is the right one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.rewards import load_rewards
from async_rl.rewards.extraction import extract, number_of
from async_rl.tasks.task import Instance


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 4", "4"), ("#### 4\nQuestion:", "4"), ("####\n4", "4"), ("#### 4 #### 5", "5"), ("4", None),
        (r"\boxed{4}", "4"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed 7$.", "7$."[:1]), (r"\fbox{x}", "x"), (r"\boxed{1} and \boxed{2", "1"), (r"\boxed{\}}", r"\}"),
        (r"\boxed{3} #### 4", "4"), (r"#### 4, that is \boxed{3}", "3"), ("####", None), (r"\boxed{}", None),
    ],
)  # fmt: skip
def test_the_answer_is_behind_the_last_mark_or_in_the_last_box(text: str, answer: str | None) -> None:
    assert extract(text, "auto") == answer


def test_extract_may_be_told_where_to_look() -> None:
    text = r"#### 4 \boxed{5}"
    assert [extract(text, how) for how in ("mark", "boxed", "whole")] == [r"4 \boxed{5}", "5", text]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,200", 1200), ("$1,200.50", Fraction(2401, 2)), ("-$5", -5), ("−3", -3), ("3/4", Fraction(3, 4)), ("007", 7),
        (".5", Fraction(1, 2)), ("5.", 5), ("12%", 12), (r"12\%", 12), ("**18**", 18), ("+5", 5), (r"\$5", 5),
        ("1,20", None), ("x", None), ("5 apples", None), ("", None), ("1e5", None), ("3/0", None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_a_number_is_read_exactly_or_not_at_all(text: str, number: Fraction | None) -> None:
    assert number_of(text) == number


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_every_spelling_of_a_number_is_that_number(whole: int, zeros: int) -> None:
    padded = f"{whole}" + ("." + "0" * zeros if zeros else "")
    assert number_of(padded) == number_of(f" {whole:,} ") == number_of(f"${whole}") == whole


@settings(deadline=None)
@given(st.text(alphabet="#\\boxed{}12 \n", max_size=40))
def test_no_text_breaks_what_looks_for_answers(text: str) -> None:
    for how in ("auto", "mark", "boxed", "whole"):
        answer = extract(text, how)  # type: ignore[arg-type]
        assert answer is None or (answer and answer in text)


def score(table: dict[str, object], answer: str, completion: str) -> float:
    return load_rewards([table]).score(Instance("", None, answer), completion).reward


def test_exact_takes_white_space_and_where_told_case_as_equal() -> None:
    assert score({"kind": "exact"}, "New  York", " New York\n") == 1
    assert score({"kind": "exact"}, "New York", "new york") == 0
    assert score({"kind": "exact", "case": False}, "New York", "new york") == 1
    assert score({"kind": "exact", "extract": "boxed"}, "b", r"It is \boxed{b}") == 1
    assert score({"kind": "exact", "extract": "boxed"}, "b", "b") == 0
    tagged = {"kind": "exact", "pattern": "<answer>(.*?)</answer>"}
    assert score(tagged, "yes", "<answer>no</answer><answer> yes\n</answer>") == 1
    assert score(tagged, "yes", "yes") == 0


def test_numeric_compares_within_the_wider_tolerance() -> None:
    assert score({"kind": "numeric"}, "so it is\n#### 1,200", "#### $1200.00") == 1
    assert score({"kind": "numeric"}, "1200", "1200") == 0, "an answer that is not marked"
    assert score({"kind": "numeric", "relative": 0.01}, "1000", "#### 1010") == 1
    assert score({"kind": "numeric", "relative": 0.01}, "1000", "#### 1010.1") == 0
    assert score({"kind": "numeric", "relative": 0.01, "absolute": 20}, "1000", "#### 981") == 1
    assert score({"kind": "numeric"}, "4", "#### four") == 0
    with pytest.raises(Exception, match="the instance's answer is no number"):
        score({"kind": "numeric"}, "four", "#### 4")


def test_format_is_found_somewhere_or_matches_all() -> None:
    assert score({"kind": "format", "pattern": "#### *-?[0-9]+"}, "", "a\n#### -4 apples") == 1
    assert score({"kind": "format", "pattern": "#### *-?[0-9]+", "whole": True}, "", "a\n#### -4") == 0
    assert score({"kind": "format", "pattern": "<think>.*</think>.+", "whole": True}, "", "<think>\n</think>4") == 1

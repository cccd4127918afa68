"""Rewards that others give: services and judges over HTTP, and functions of the user's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_service import Answer, RewardService, chat

from async_rl.config import ConfigError
from async_rl.rewards import RewardError, calls, load_rewards
from async_rl.tasks.task import Instance, Score

SUM = Instance(None, ({"role": "user", "content": "2+2?"},), "4", {"source": "sums"})
PLAIN = Instance("2+2=", None, "4")
GOOD: Answer = (200, {"reward": 0.5, "components": {"style": 1}}, {})


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.01)


def http(service: RewardService, **keys: Any) -> Any:
    return load_rewards([{"kind": "http", "url": f"{service.url}/score", "timeout": 60, **keys}])


def scripted(*answers: Answer) -> RewardService:
    """One answer after the other."""
    left: Iterator[Answer] = iter(answers)
    return RewardService(lambda _: next(left))


def test_a_service_gets_all_that_there_is_to_judge_and_its_number_is_the_reward() -> None:
    with RewardService(lambda _: GOOD) as service:
        assert http(service).score(SUM, "4") == Score(0.5, {"http": 0.5, "http.style": 1.0})
        assert http(service).score(PLAIN, "5").reward == 0.5
    assert service.asked[0] == {
        "completion": "4", "answer": "4", "data": {"source": "sums"}, "messages": [{"role": "user", "content": "2+2?"}],
    }  # fmt: skip
    assert service.asked[1]["prompt"] == "2+2="
    assert set(service.paths) == {"/score"}


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with scripted((status, "later", {}), (status, "later", {"Retry-After": "0"}), GOOD) as service:
        assert http(service, retries=2).score(SUM, "4").reward == 0.5
    assert len(service.asked) == 3


def test_no_connection_no_answer_in_time_and_half_an_answer_are_tried_again() -> None:
    with RewardService(lambda _: (200, b"{", {"Content-Length": "100"}), seconds=0.0) as cut:
        with pytest.raises(RewardError, match=r"2 times: the answer was cut short"):
            http(cut, retries=1).score(SUM, "4")
        gone = cut.url
    assert len(cut.asked) == 2
    over = threading.Event()
    with RewardService(lambda _: GOOD if over.wait(60) else (500, "", {})) as slow:
        with pytest.raises(RewardError, match=r"2 times: timed out"):
            http(slow, retries=1, timeout=0.1).score(SUM, "4")
        over.set()
    with pytest.raises(RewardError, match=r"reward 'http': .* 3 times: .*refused"):
        load_rewards([{"kind": "http", "url": gone, "retries": 2}]).score(SUM, "4")


def test_what_will_not_pass_is_not_tried_again_and_a_redirect_is_not_followed() -> None:
    for answer in [(400, "bad", {}), (401, "who?", {}), (404, "", {}), (307, "", {"Location": "/elsewhere"})]:
        with scripted(answer, GOOD) as service, pytest.raises(RewardError, match=f"status {answer[0]}"):
            http(service).score(SUM, "4")
        assert len(service.asked) == 1, answer


@pytest.mark.parametrize("body", [b"no json", {"rewards": 1}, {"reward": "1"}, {"reward": 1, "components": [1]}, []])
def test_an_answer_that_is_no_reward_is_a_failure_that_shows_it(body: Any) -> None:
    with scripted((200, body, {})) as service, pytest.raises(RewardError, match="the service answered"):
        http(service).score(SUM, "4")


def test_the_key_comes_from_the_environment_and_stands_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(GOOD, (401, "no such key: s3cret", {}), (500, "s3cret", {})) as service:
        rewards = http(service, key_env="TEST_REWARD_KEY", retries=0)
        monkeypatch.delenv("TEST_REWARD_KEY", raising=False)
        with pytest.raises(RewardError, match=r"variable TEST_REWARD_KEY .* is not set"):
            rewards.score(SUM, "4")
        monkeypatch.setenv("TEST_REWARD_KEY", "s3cret\nand more")
        with pytest.raises(RewardError, match=r"TEST_REWARD_KEY .* holds no key") as no_key:
            rewards.score(SUM, "4")
        assert "s3cret" not in str(no_key.value)
        monkeypatch.setenv("TEST_REWARD_KEY", "s3cret\n")
        assert rewards.score(SUM, "4").reward == 0.5
        for _ in range(2):
            with pytest.raises(RewardError, match=r"\[key\]") as error:
                rewards.score(SUM, "4")
            assert "s3cret" not in str(error.value)
            assert error.value.__cause__ is None or "s3cret" not in str(error.value.__cause__)
    assert service.headers[0]["Authorization"] == "Bearer s3cret"


def judge(service: RewardService, **keys: Any) -> Any:
    return load_rewards([{"kind": "judge", "url": f"{service.url}/v1", "model": "big", **keys}])


def test_a_judge_is_asked_by_chat_and_its_last_score_counts() -> None:
    with scripted(chat("Score: 3? No.\n**Score:** 7.5"), chat("4")) as service:
        assert judge(service).score(SUM, "It is {answer}.") == Score(0.75, {"judge": 0.75})
        keys = {"prompt": "{completion}|{question}", "pattern": "([0-9]+)", "lowest": 1, "highest": 5}
        rewards = judge(service, **keys, request={"max_tokens": 9})
        assert rewards.score(PLAIN, "{question}").reward == 0.75
    first, second = service.asked
    assert (first["model"], first["temperature"]) == ("big", 0)
    (message,) = first["messages"]
    assert "<question>\n2+2?\n</question>" in message["content"]
    assert "<response>\nIt is {answer}.\n</response>" in message["content"], "what a completion says is not filled in"
    assert "from 0 (wrong" in message["content"]
    assert second["messages"][0]["content"] == "{question}|2+2="
    assert second["max_tokens"] == 9
    assert "temperature" not in second
    assert service.paths == ["/v1/chat/completions"] * 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (chat("Fine."), "no score: 'Fine.'"), (chat(None), "no score"),
        (chat("Score: 11"), r"gave 11, outside \[0, 10\]"),
        ((200, {"choices": []}, {}), "no chat completion"), ((200, b"<html>", {}), "no chat completion: '<html>'"),
    ],
)  # fmt: skip
def test_a_judge_without_a_score_in_range_is_a_failure_and_no_0(answer: Answer, says: str) -> None:
    with scripted(answer) as service, pytest.raises(RewardError, match=says):
        judge(service).score(SUM, "4")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kind": "http", "url": "localhost:80"}, "write it as http://"),
        ({"kind": "http", "url": "https://me:pass@host/x"}, "use key_env"),
        ({"kind": "judge", "url": "http://h/v1", "model": "m", "prompt": "Grade it."}, "no {completion}"),
        ({"kind": "judge", "url": "http://h/v1", "model": "m", "pattern": "[0-9]+"}, "has no group"),
        ({"kind": "judge", "url": "http://h/v1", "model": "m", "lowest": 10.0}, "must be below"),
        ({"kind": "judge", "url": "http://h/v1"}, "required field `model`"),
        ({"kind": "python", "function": "json:nothing"}, "cannot be loaded"),
        ({"kind": "python", "function": "no_such_module:f"}, "PYTHONPATH"),
        ({"kind": "python", "function": "json"}, "cannot be loaded"),
        ({"kind": "python", "function": "json:encoder"}, "is no function"),
    ],
)
def test_a_service_or_function_that_cannot_be_is_refused_before_anything_runs(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_rewards([table])
    assert says in str(error.value)


def test_what_one_completion_may_take_allows_for_every_try() -> None:
    table = {"kind": "http", "url": "http://h", "timeout": 2.0, "retries": 3, "concurrency": 4}
    rewards = load_rewards([table])
    assert rewards.seconds == 2.0 * 4 + calls.MAX_PAUSE_S * 3
    assert rewards.concurrency == 4


FUNCTIONS = """
from async_rl.tasks.task import Score

def right(instance, completion, points=1):
    return points * (completion == instance.answer)

async def later(instance, completion):
    return Score(0.5, {"length": len(completion)})

def pair(instance, completion):
    return 0.25, {"a": 1}

def broken(instance, completion):
    raise KeyError("gone")
"""


def test_a_function_may_give_a_number_or_a_score_now_or_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"reward_functions_{random.randrange(10**9)}"
    (tmp_path / f"{module}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)

    def score(function: str, completion: str, **keys: Any) -> Any:
        return load_rewards([{"kind": "python", "function": f"{module}:{function}", **keys}]).score(PLAIN, completion)

    assert score("right", "4", options={"points": 3}) == Score(3.0, {"python": 3.0})
    assert score("right", "5") == Score(0.0, {"python": 0.0})
    assert score("later", "abc", name="mine") == Score(0.5, {"mine": 0.5, "mine.length": 3.0})
    assert score("pair", "") == Score(0.25, {"python": 0.25, "python.a": 1.0})
    with pytest.raises(RewardError, match="reward 'python': KeyError: 'gone'"):
        score("broken", "")

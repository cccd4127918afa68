"""OpenAI's own client at a node's endpoint: what it gets is what is recorded, token by token, and nobody else's."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from agent_house import LARGE, AgentHouse, Room, SaysWhatItIsTold, chat_tokenizer

from async_rl.trajectory import MaskReason, Trajectory, segment_arrays
from inference import agent_endpoint
from inference.episodes import Limits

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def house() -> Iterator[Callable[..., AgentHouse]]:
    made: list[AgentHouse] = []

    def make(engine: Any, tokenizer: Any, *limits: Any, **more: Any) -> AgentHouse:
        made.append(AgentHouse(engine, tokenizer, *limits, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def told(house: Callable[..., AgentHouse]) -> Callable[..., AgentHouse]:
    """A house whose engine says, as text, what a function makes of the prompt's text."""

    def make(answer: Callable[[str], str], **more: Any) -> AgentHouse:
        tokenizer = more.pop("tokenizer", None) or chat_tokenizer(LARGE)

        def tokens(prompt: list[int]) -> Sequence[int]:
            ids: Sequence[int] = tokenizer.encode(answer(tokenizer.decode(prompt)), add_special_tokens=False)
            return ids

        return house(SaysWhatItIsTold(tokens, tokenizer.eos_token_id), tokenizer, **more)

    return make


def client(room: Room) -> Any:
    return openai.OpenAI(base_url=room.url, api_key=room.key, max_retries=0, timeout=30)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def text_of(tokenizer: Any, trajectory: Trajectory, segment: int = 0) -> str:
    return str(tokenizer.decode(segment_arrays(trajectory)[segment].tokens))


def words(tokenizer: Any, trajectory: Trajectory, reason: MaskReason, segment: int = 0) -> str:
    arrays = segment_arrays(trajectory)[segment]
    return str(tokenizer.decode(arrays.tokens[arrays.mask == reason]))


def raw(room: Room, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(room.url.removesuffix("/v1") + path, body or None, method=method)
    for name, value in ({"Authorization": f"Bearer {room.key}"} | headers).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# --- the tokens ------------------------------------------------------------------------------------------------------


def test_an_agents_turns_are_one_segment_whose_tokens_and_log_probabilities_a_plain_model_gives_too(
    qwen: Any, house: Callable[..., AgentHouse]
) -> None:
    tokenizer = chat_tokenizer()
    here = house(qwen.engine(max_context=64), tokenizer, Limits(64, 256))
    (room,) = here.enter(1, 0, new=6)
    messages: list[Any] = [{"role": "system", "content": "ab"}, user("1+2=?")]
    answers = []
    for turn in range(3):
        answer = client(room).chat.completions.create(model="any", messages=messages, logprobs=True, temperature=0.3)
        answers.append(answer)
        messages += [answer.choices[0].message, user(f"{turn}?")]
    (trajectory,) = here.leave(room)
    (arrays,) = segment_arrays(trajectory)
    sampled = arrays.mask == MaskReason.SAMPLED
    assert sampled.sum() == 18 == sum(answer.usage.completion_tokens for answer in answers)
    assert tokenizer.decode(arrays.tokens[: answers[0].usage.prompt_tokens]) == "SabU1+2=?A"
    assert words(tokenizer, trajectory, MaskReason.ENVIRONMENT) == "0?1?"
    told = [each.logprob for answer in answers for each in answer.choices[0].logprobs.content]
    np.testing.assert_array_equal(np.float32(told), arrays.logprobs[sampled])
    full = qwen.logprobs(0, arrays.tokens[:1], arrays.tokens[1:], 1.0)
    np.testing.assert_allclose(arrays.logprobs[sampled], full[np.flatnonzero(sampled) - 1], atol=1e-4)
    # And the prompt of each turn is what the template makes of the messages: a character is a token here.
    text = tokenizer.apply_chat_template(
        [m if isinstance(m, dict) else {"role": "assistant", "content": m.content} for m in messages[:-1]],
        tokenize=False,
    )
    # But for what has no text, and was sampled all the same.
    assert text.removesuffix("</s>") == tokenizer.decode(arrays.tokens).replace("<pad>", "")


def test_sessions_side_by_side_never_mix(told: Callable[..., AgentHouse]) -> None:
    """32 at a time, each with turns of its own and other calls beside them, answered in any order."""

    def echo(prompt: str) -> str:
        return prompt.split("U")[-1].removesuffix("A") + "!"

    here = told(echo)
    n, turns = 32, 4
    rooms = here.enter(1, *range(n), new=64)
    assert len({room.key for room in rooms}) == n

    def ask(room: Room, messages: list[Any]) -> str:
        status, answer = raw(room, "POST", "/v1/chat/completions", json.dumps({"messages": messages}).encode())
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    def play(room: Room) -> None:
        sample = room.play.attempt.key[1]
        mark = f"<{random.Random(sample).getrandbits(48):x}-{sample}>"
        messages: list[Any] = []
        with ThreadPoolExecutor(2) as both:
            for turn in range(turns):
                messages.append(user(f"{mark}{turn}"))
                asked = [both.submit(ask, room, each) for each in (list(messages), [user(f"{mark}beside{turn}")])]
                answer, aside = (each.result(60) for each in asked)
                assert (answer, aside) == (f"{mark}{turn}!", f"{mark}beside{turn}!")
                messages.append({"role": "assistant", "content": answer})

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(play, rooms))
    for room, trajectory in zip(rooms, here.leave(*rooms), strict=True):
        sample = room.play.attempt.key[1]
        assert (trajectory.status, trajectory.sample, len(trajectory.segments)) == ("ok", sample, 1 + turns)
        marks = set()
        for segment in range(1 + turns):
            text = text_of(here.tokenizer, trajectory, segment)
            marks |= {part.split(">")[0] for part in text.split("<")[1:] if not part.startswith("/s>")}
        assert marks == {f"{random.Random(sample).getrandbits(48):x}-{sample}"}
        longest = max(range(1 + turns), key=lambda at: trajectory.segments[at].n_tokens)
        assert words(here.tokenizer, trajectory, MaskReason.SAMPLED, longest).count("!") == turns


def test_an_answer_that_was_changed_or_dropped_begins_a_segment_of_its_own(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: "four")
    (room,) = here.enter(1, 0)
    ask = client(room).chat.completions.create
    ask(model="m", messages=[user("2+2")])
    ask(model="m", messages=[user("2+2"), {"role": "assistant", "content": " four\n"}, user("so?")])  # trimmed: known
    ask(model="m", messages=[user("2+2"), {"role": "assistant", "content": "five"}, user("so?")])
    ask(model="m", messages=[user("so?")])
    (trajectory,) = here.leave(room)
    assert [text_of(here.tokenizer, trajectory, at) for at in range(3)] == [
        "U2+2Afour</s>Uso?Afour</s>",
        "U2+2Afive</s>Uso?Afour</s>",
        "Uso?Afour</s>",
    ]
    assert words(here.tokenizer, trajectory, MaskReason.SAMPLED, 1) == "four</s>", "the agent's own words do not train"


# --- what else clients ask for ---------------------------------------------------------------------------------------


def test_calls_of_tools_come_as_such_and_their_results_go_on_after_the_sampled_tokens(
    told: Callable[..., AgentHouse],
) -> None:
    said = 'look <tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
    here = told(lambda prompt: "3" if "T" in prompt else said)
    (room,) = here.enter(1, 0, new=128)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages: list[Any] = [user("1+2")]
    choice = client(room).chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "look")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    answer = client(room).chat.completions.create(model="m", messages=messages, tools=tools)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("3", "stop")
    (trajectory,) = here.leave(room)
    assert text_of(here.tokenizer, trajectory) == f"S1;U1+2A{said}</s>T3A3</s>"
    assert words(here.tokenizer, trajectory, MaskReason.SAMPLED) == f"{said}</s>3</s>"


def test_a_stop_text_ends_what_is_recorded_too(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: "act: look. result: nothing" if "result" not in prompt else "done")
    (room,) = here.enter(1, 0, new=64)
    ask = client(room).completions.create
    answer = ask(model="m", prompt="go ", stop=["never", "result:"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("act: look. ", "stop")
    assert ask(model="m", prompt="go act: look. result: 42 ").choices[0].text == "done"
    (trajectory,) = here.leave(room)
    assert text_of(here.tokenizer, trajectory) == "go act: look. result: 42 done</s>"
    assert words(here.tokenizer, trajectory, MaskReason.SAMPLED) == "act: look. result:done</s>"
    assert [run.count for run in trajectory.segments[0].versions] == [len("act: look. result:done") + 1]


def test_streams_say_the_same_as_one_answer(told: Callable[..., AgentHouse], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_endpoint, "ALIVE_S", 0.01)  # so that signs of life come in between
    here = told(lambda prompt: (time.sleep(0.1), "some words")[1])
    (room,) = here.enter(1, 0)
    chat = client(room).chat.completions.create(
        model="m", messages=[user("a")], stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    pieces = list(chat)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "some words"
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices] == [None, "stop"]
    assert pieces[-1].usage.completion_tokens == 11
    text = list(client(room).completions.create(model="m", prompt="b", stream=True))
    assert "".join(piece.choices[0].text for piece in text) == "some words"
    here.leave(room)


def test_several_answers_at_once_are_segments_and_all_of_them_count(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: "ok")
    (room,) = here.enter(1, 0)
    answer = client(room).chat.completions.create(model="m", messages=[user("a")], n=3, max_completion_tokens=2)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage.completion_tokens == 6
    (trajectory,) = here.leave(room)
    assert [text_of(here.tokenizer, trajectory, at) for at in range(3)] == ["UaAok"] * 3


def test_prompts_may_be_token_ids_and_other_names_of_the_model_are_as_good(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: prompt)
    (room,) = here.enter(1, 0)
    speaks = client(room)
    ids = here.tokenizer.encode("abc", add_special_tokens=False)
    answer = speaks.completions.create(model="gpt", prompt=ids, logprobs=0)
    assert (answer.choices[0].text, answer.model) == ("abc", "gpt")
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c", "</s>"]
    assert answer.system_fingerprint == "3-abababab"
    assert [each.id for each in speaks.models.list()] == ["async-rl"]
    assert speaks.models.retrieve("gpt").id == "gpt"
    here.leave(room)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_strangers_and_sessions_without_a_lease_are_refused(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: "x")
    first, second = here.enter(1, 0, 1)
    with pytest.raises(openai.AuthenticationError, match="no session has this key"):
        client(first._replace(key="guess")).models.list()
    assert raw(first, "POST", "/v1/chat/completions", b"{}", Authorization="")[0] == 401
    assert raw(first, "POST", "/v1/chat/completions", b"{}", Authorization=f"Basic {first.key}")[0] == 401
    assert here.rooms.endpoint._server is not None
    assert {each.getsockname()[0] for each in here.rooms.endpoint._server.sockets} == {"127.0.0.1"}
    client(first).chat.completions.create(model="m", messages=[user("a")])
    here.leave(first)
    with pytest.raises(openai.PermissionDeniedError, match="its lease has ended"):
        client(first).chat.completions.create(model="m", messages=[user("a")])
    client(second).chat.completions.create(model="m", messages=[user("a")])
    (trajectory,) = here.leave(second)
    assert len(trajectory.segments) == 1, "nothing of a stranger's was recorded"


def test_a_cancelled_lease_ends_its_session_and_what_it_waits_for(told: Callable[..., AgentHouse]) -> None:
    here = told(lambda prompt: "x")
    here.node.engine.step = lambda: []  # it never answers
    (room,) = here.enter(1, 0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client(room).chat.completions.create, model="m", messages=[user("a")])
        while not here.node.engine.active:
            time.sleep(0.01)
        here.node.cancel(1)
        with pytest.raises((openai.PermissionDeniedError, openai.APIConnectionError)):
            asked.result(30)
    while here.node.engine.active:
        time.sleep(0.01)
    assert here.node.withdrawn


def test_a_client_that_goes_away_leaves_nothing_in_the_engine_or_the_record(
    told: Callable[..., AgentHouse],
) -> None:
    """So that one which gave up waiting, and asks again, is not recorded twice."""
    here = told(lambda prompt: "x")
    whole = here.node.engine.step
    here.node.engine.step = lambda: []
    (room,) = here.enter(1, 0)
    body = b'{"model": "m", "prompt": "a"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {room.key}\r\n"
    with socket.create_connection(("127.0.0.1", int(room.url.split(":")[2].split("/")[0]))) as goes:
        goes.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not here.node.engine.active:
            time.sleep(0.01)
    while here.node.engine.active:
        time.sleep(0.01)
    here.node.engine.step = whole
    client(room).completions.create(model="m", prompt="a")
    (trajectory,) = here.leave(room)
    assert len(here.node.withdrawn) == 1
    assert [text_of(here.tokenizer, trajectory)] == ["ax</s>"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "leaves no room"),
    ],
)
def test_what_cannot_be_done_is_said_in_openais_form(
    told: Callable[..., AgentHouse], asked: dict[str, Any], message: str
) -> None:
    here = told(lambda prompt: "x")
    (room,) = here.enter(1, 0)
    with pytest.raises(openai.BadRequestError, match=message):
        client(room).chat.completions.create(**({"model": "m", "messages": [user("a")]} | asked))
    assert room.session.cut == ("room" in message)
    here.leave(room)


def test_a_model_without_a_template_and_an_attempt_without_room_say_what_to_do(
    told: Callable[..., AgentHouse],
) -> None:
    here = told(lambda prompt: "x", tokenizer=chat_tokenizer(LARGE, None), max_calls=2)
    (room,) = here.enter(1, 0)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client(room).chat.completions.create(model="m", messages=[user("a")])
    for _ in range(2):
        client(room).completions.create(model="m", prompt="a")
    with pytest.raises(openai.BadRequestError, match="all the calls"):
        client(room).completions.create(model="m", prompt="a")
    (trajectory,) = here.leave(room)
    assert trajectory.segments[-1].finish == "length", "it was cut"


def test_hostile_requests_cost_one_answer_each(
    told: Callable[..., AgentHouse], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_endpoint, "MAX_BODY_BYTES", 1 << 16)
    here = told(lambda prompt: "x")
    (room,) = here.enter(1, 0)
    chat = "/v1/chat/completions"
    assert raw(room, "POST", chat, b"[" * 60000)[0] == 400
    assert raw(room, "POST", chat, b'{"messages": ' + b"[" * 60000)[0] == 400
    assert raw(room, "POST", chat, b"\xff\xfe")[0] == 400
    assert raw(room, "POST", chat, b" " * (1 << 17))[0] == 413
    assert raw(room, "POST", chat, b"{}", **{"Content-Encoding": "gzip"})[0] == 415
    assert raw(room, "DELETE", "/v1/models")[0] == 404
    assert raw(room, "GET", "/etc/passwd")[0] == 404
    assert raw(room, "POST", "/v1/reward", b'{"reward": 1e999}')[0] == 400
    assert raw(room, "POST", "/v1/completions", b'{"prompt": [99999]}')[0] == 200  # this engine takes any
    assert raw(room, "POST", "/v1/reward", b'{"reward": 0.5, "components": {"a": 1}}')[0] == 200
    assert room.session.reward is not None
    assert room.session.reward.reward == 0.5
    here.leave(room)


def test_connections_that_show_no_key_are_closed_and_slow_ones_hold_up_nobody(
    told: Callable[..., AgentHouse], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("READ_S", 3.0), ("MAX_STRANGERS", 8)):
        monkeypatch.setattr(agent_endpoint, name, value)
    here = told(lambda prompt: "x")
    (room,) = here.enter(1, 0)
    where = ("127.0.0.1", int(room.url.split(":")[2].split("/")[0]))
    strangers = [socket.create_connection(where, timeout=20) for _ in range(20)]
    for each in strangers[:10]:
        each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    slow = socket.create_connection(where, timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {room.key}\r\nContent-Length: 99\r\n\r\n"
    slow.sendall(head.encode() + b"{")
    assert client(room).completions.create(model="m", prompt="a").choices[0].text == "x"
    assert b" 408 " in slow.recv(1000)
    monkeypatch.setattr(agent_endpoint, "STRANGER_S", 0.5)  # not before: an honest one may be slow to come to its key
    for each in strangers:
        with contextlib.suppress(ConnectionError):  # an end of the stream, or a reset: either is an end
            assert each.recv(1000) == b""
        each.close()
    here.leave(room)


def test_a_call_that_the_engine_gives_up_ends_the_attempt_as_the_engines_failure(
    told: Callable[..., AgentHouse],
) -> None:
    here = told(lambda prompt: "x")
    whole = here.node.engine.step
    here.node.engine.step = lambda: [each._replace(finish="abort") for each in whole()]
    (room,) = here.enter(1, 0)
    with pytest.raises(openai.InternalServerError, match="the engine has no answer"):
        client(room).completions.create(model="m", prompt="a")
    assert room.session.trouble.done()
    (trajectory,) = here.leave(room)
    assert trajectory.status == "aborted"

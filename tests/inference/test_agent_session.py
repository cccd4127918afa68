"""How an agent's requests are read, and its answers cut and known again: the rules without a socket."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.top_tokens import TopTokens
from async_rl.version import VersionRun, tokens_of
from inference.agent_forms import (
    IGNORED,
    NEUTRAL,
    BadRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    read_request,
    template_message,
)
from inference.agent_session import chain, link, parse_calls, shortened, tokens_until
from inference.engine import Completion

MESSAGE: dict[str, Any] = {"role": "user", "content": "a"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted({"messages", "prompt", "n", "stop", "stream", "tools", "tool_choice", *NEUTRAL}))


def body(**values: Any) -> bytes:
    return msgspec.json.encode(values)


@settings(deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=5) | JSON, st.sampled_from([ChatRequest, CompletionRequest]))
def test_whatever_is_sent_is_a_request_or_refused(value: Any, kind: type[Any]) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(read_request(msgspec.json.encode(value), kind), kind)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_and_so_is_what_is_no_json(value: bytes) -> None:
    with pytest.raises(BadRequest):
        read_request(value, ChatRequest)


def test_what_only_says_how_to_sample_is_left_aside_and_what_is_not_known_refused_by_name() -> None:
    everything = dict.fromkeys(IGNORED, "x") | {name: values[0] for name, values in NEUTRAL.items()}
    assert read_request(body(messages=[MESSAGE], **everything), ChatRequest) == read_request(
        body(messages=[MESSAGE]), ChatRequest
    )
    with pytest.raises(BadRequest, match="grammar"):
        read_request(body(messages=[MESSAGE], grammar="x"), ChatRequest)
    with pytest.raises(BadRequest, match="presence_penalty"):
        read_request(body(messages=[MESSAGE], presence_penalty=1), ChatRequest)
    tools = [{"type": "function"}]
    assert read_request(body(messages=[MESSAGE], tools=tools, tool_choice="none"), ChatRequest).tools is None


def test_a_prompt_is_one_text_or_ids() -> None:
    assert read_request(body(prompt="a"), CompletionRequest).text == "a"
    assert read_request(body(prompt=["a"]), CompletionRequest).text == "a"
    asked = read_request(body(prompt=[3, 4]), CompletionRequest)
    assert (asked.text, asked.ids) == (None, [3, 4])
    with pytest.raises(BadRequest, match="several prompts"):
        assert read_request(body(prompt=["a", "b"]), CompletionRequest).text


def test_messages_are_what_a_template_reads() -> None:
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "x": 1}
    assert template_message(msgspec.convert(parts, ChatMessage)) == {"role": "system", "content": "ab"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    message = template_message(msgspec.convert({"role": "assistant", "tool_calls": [call]}, ChatMessage))
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}


@settings(deadline=None)
@given(st.text("abX", max_size=30), st.lists(st.text("abX", min_size=1, max_size=3), max_size=3))
def test_an_answer_ends_with_the_token_that_completes_a_stop_text(text: str, stops: list[str]) -> None:
    tokens = np.asarray([ord(letter) for letter in text], np.int32)
    length = tokens_until(tokens, stops, lambda ids: "".join(map(chr, ids)))
    naive = next((n for n in range(1, len(text) + 1) if any(stop in text[:n] for stop in stops)), None)
    assert length == naive


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_what_is_left_of_an_answer_keeps_what_belongs_to_its_tokens(counts: list[int], data: st.DataObject) -> None:
    total, n_prompt = sum(counts), 3
    length = data.draw(st.integers(1, total))
    runs = tuple(VersionRun(version, "ab" * 32, count) for version, count in enumerate(counts))
    ids = np.arange(total, dtype=np.int32)
    top = TopTokens(np.stack([ids, ids], 1), np.zeros((total, 2), np.float32))
    routes = np.zeros((n_prompt + total - 1, 2, 2), np.uint8)
    whole = Completion((1, -1), ids, -ids.astype(np.float32), runs, "length", 0.0, 0.0, 0, top, routes)
    left = shortened(whole, length, n_prompt)
    assert left.finish == "stop"
    assert tokens_of(left.versions) == len(left.tokens) == len(left.logprobs) == length
    stamps = np.repeat(range(len(counts)), counts)[:length].tolist()
    assert [run.version for run in left.versions for _ in range(run.count)] == stamps
    assert left.top is not None
    assert len(left.top.ids) == len(left.top.logprobs) == length
    assert left.routes is not None
    assert len(left.routes) == n_prompt + length - 1


def test_calls_of_tools_are_read_and_what_is_none_stays_text() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'
    content, calls = parse_calls(f"so {call} and {call}")
    assert content == "so  and"
    assert [(each.function.name, each.function.arguments) for each in calls] == [("f", '{"b":1}')] * 2
    assert len({each.id for each in calls}) == 2
    for text in (
        "<tool_call>{'name': 1}</tool_call>",
        '<tool_call>{"name": "f"',
        "no call ",
        "<tool_call></tool_call>",
    ):
        assert parse_calls(text) == (text, ())


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text("ab ", max_size=3)}
        ),
        max_size=4,
    ),
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text("ab ", max_size=3)}
        ),
        max_size=4,
    ),
)
def test_conversations_have_one_name_where_they_are_the_same_but_for_trimmed_answers(
    a: list[Any], b: list[Any]
) -> None:
    def plain(messages: list[Any]) -> list[Any]:
        return [(m["role"], m["content"].strip() if m["role"] == "assistant" else m["content"]) for m in messages]

    assert (chain(a, ())[-1] == chain(b, ())[-1]) == (plain(a) == plain(b))
    assert chain(a, ())[-1] != chain(a, [{"name": "tool"}])[-1]


def test_a_call_of_a_tool_is_known_by_what_it_calls_and_not_by_its_id() -> None:
    def said(identity: str, **arguments: Any) -> dict[str, Any]:
        calls = [{"id": identity, "function": {"name": "f", "arguments": arguments}}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    assert link(b"", said("1", a=1, b=2)) == link(b"", said("2", b=2, a=1))
    assert link(b"", said("1", a=1)) != link(b"", said("1", a=2))
    assert link(b"", said("1")) != link(b"", {"role": "assistant", "content": ""})

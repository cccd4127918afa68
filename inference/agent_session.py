"""One attempt of an agent, as its endpoint sees it: prompts from what it sends, answers from the engine.

An agent sends the whole conversation with every call, as text. What it sends back of this session's own answers is
known, and stands for the tokens that were sampled then: a conversation is looked up by its messages, never tokenised
again. What comes after goes on in the same segment of the attempt (inference.transcript). A conversation that is not
known so far, as one with an answer that was changed, or another beside it, begins a segment of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.tasks.rendering import Conversation, decode, following, opening
from async_rl.tasks.tools import TAGGED, ToolError, calls_in
from async_rl.top_tokens import TopTokens
from async_rl.version import VersionRun
from inference.agent_forms import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Function,
    RewardGiven,
    Said,
    ToolCall,
    template_message,
)
from inference.engine import Completion
from inference.episodes import NoRoom, Play, SampleFailed

log = logging.getLogger("agents")

KEPT_CONVERSATIONS = 32  # of a session, those that were used last: each holds its tokens and messages
MAX_UNDER_WAY = 64  # calls of a session at a time


class Known(NamedTuple):
    """A conversation up to an answer of ours: its prompt, and what was sampled after it. `ended` is whether the last of
    that is a stop token of the model."""

    prompt: npt.NDArray[np.int32]
    reasons: npt.NDArray[np.uint8]
    messages: tuple[Mapping[str, Any], ...] | None
    text: str | None
    sampled: npt.NDArray[np.int32]
    ended: bool

    def then(self, added: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """The prompt that goes on from it."""
        before = Conversation(self.prompt.tolist(), self.reasons.tolist(), self.messages, self.text)
        finish = "stop" if self.ended else "length"
        return following(before, self.sampled.tolist(), finish, added, tokenizer, tools)


class Session:
    """Made and used in the event loop of the attempts. `trouble` is done when the engine failed it (`failure`)."""

    def __init__(self, play: Play, tokenizer: Any, max_calls: int) -> None:
        self._play = play
        self._tokenizer = tokenizer
        self._calls_left = max_calls
        self._known: OrderedDict[bytes | str, Known] = OrderedDict()
        self._under_way: set[asyncio.Task[list[Said]]] = set()
        self.said = ""
        """The last answer of the model, as the agent got it."""
        self.reward: RewardGiven | None = None
        self.cut = False
        """Whether a call was refused because the attempt had no more room."""
        self.failure: SampleFailed | None = None
        self.trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, asked: ChatRequest | CompletionRequest) -> asyncio.Task[list[Said]]:
        """Answer it, until the session ends. The task raises BadRequest."""
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise BadRequest(f"{MAX_UNDER_WAY} calls of this session are under way: wait for one of them", 429)
        task = asyncio.create_task(self._answer(asked))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def end(self) -> None:
        """Nobody waits for what is under way."""
        for task in list(self._under_way):
            task.cancel()

    async def _answer(self, asked: ChatRequest | CompletionRequest) -> list[Said]:
        try:
            return await (self._chat(asked) if isinstance(asked, ChatRequest) else self._complete(asked))
        except BadRequest:
            raise
        except AsyncRLError as refused:  # by the model's template, or by the engine for a token that there is not
            raise BadRequest(str(refused)) from refused
        except Exception as fault:
            log.exception("a call of attempt %d/%d failed", *self._play.attempt.key)
            raise BadRequest(f"{type(fault).__name__}: {fault}", status=500, code="internal") from fault

    # --- chat --------------------------------------------------------------------------------------------------------

    async def _chat(self, asked: ChatRequest) -> list[Said]:
        messages = tuple(template_message(message) for message in asked.messages)
        tools = asked.tools or []
        names = chain(messages, tools)
        conversation = self._of_messages(messages, names, tools)
        out = []
        for completion, stopped in await self._sample(conversation, asked):
            text, finish = self._words(completion, stopped, asked.stops)
            content, calls = parse_calls(text) if tools else (text, ())
            said = self._said(content, finish, calls, conversation, completion, bool(asked.logprobs))
            reply: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                reply["tool_calls"] = [_template_call(call) for call in calls]
            self._remember(link(names[-1], reply), conversation, completion, stopped)
            out.append(said)
        self.said = out[-1].text
        return out

    def _of_messages(
        self, messages: Sequence[Mapping[str, Any]], names: Sequence[bytes], tools: Sequence[Mapping[str, Any]]
    ) -> Conversation:
        """The longest known beginning that ends with an answer of ours, and what was added; or all of it anew."""
        for n in range(len(messages) - 1, 0, -1):
            known = self._known.get(names[n]) if messages[n - 1]["role"] == "assistant" else None
            if known is not None:
                self._known.move_to_end(names[n])
                return known.then(messages[n:], self._tokenizer, tools)
        return opening(messages, self._tokenizer, tools)

    # --- text --------------------------------------------------------------------------------------------------------

    async def _complete(self, asked: CompletionRequest) -> list[Said]:
        prompt = asked.text
        conversation = opening(asked.ids, self._tokenizer) if prompt is None else self._of_text(prompt)
        out = []
        for completion, stopped in await self._sample(conversation, asked):
            text, finish = self._words(completion, stopped, asked.stops)
            said = self._said(text, finish, (), conversation, completion, asked.logprobs is not None)
            if prompt is not None:
                self._remember(prompt + self._decode(completion.tokens.tolist()), conversation, completion, stopped)
            out.append(said)
        self.said = out[-1].text
        return out

    def _of_text(self, prompt: str) -> Conversation:
        """The longest text that is known, with its tokens, and what was added; or all of it anew."""
        texts = [text for text in self._known if isinstance(text, str) and prompt.startswith(text)]
        if not texts:
            return opening(prompt, self._tokenizer)
        longest = max(texts, key=len)
        self._known.move_to_end(longest)
        return self._known[longest].then(prompt[len(longest) :], self._tokenizer)

    # --- both --------------------------------------------------------------------------------------------------------

    async def _sample(
        self, conversation: Conversation, asked: ChatRequest | CompletionRequest
    ) -> list[tuple[Completion, bool]]:
        """As many answers as were asked for, and of each whether a stop text ended it. Raises BadRequest."""
        n = asked.n or 1
        if n > self._calls_left:
            self.cut = True
            raise BadRequest("this session has made all the calls that an attempt may make", code="max_calls")
        self._calls_left -= n
        tasks = [asyncio.create_task(self._sample_one(conversation, asked)) for _ in range(n)]
        try:
            return await asyncio.gather(*tasks)
        except NoRoom as none:
            self.cut = True
            raise BadRequest(
                f"a prompt of {len(conversation.prompt)} tokens leaves no room for an answer, in the context or in "
                "what is left of the attempt",
                code="context_length_exceeded",
            ) from none
        except SampleFailed as failed:
            self.failure = failed
            if not self.trouble.done():
                self.trouble.set_result(None)
            raise BadRequest(f"the engine has no answer: {failed}", status=503, code="engine") from failed
        finally:
            for task in tasks:
                task.cancel()

    async def _sample_one(
        self, conversation: Conversation, asked: ChatRequest | CompletionRequest
    ) -> tuple[Completion, bool]:
        stopped = False

        def until(completion: Completion) -> Completion:
            nonlocal stopped
            length = tokens_until(completion.tokens, asked.stops, self._decode)
            if length is None:
                return completion
            stopped = True
            return shortened(completion, length, len(conversation.prompt))

        completion, _ = await self._play.sample(conversation.prompt, conversation.reasons, asked.most_tokens, until)
        return completion, stopped

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(tokens, self._tokenizer)

    def _words(
        self, completion: Completion, stopped: bool, stops: Sequence[str]
    ) -> tuple[str, Literal["stop", "length"]]:
        """The text up to the first stop text, and how it ended."""
        text = self._decode(completion.tokens.tolist())
        if stopped:
            return text[: min(place for stop in stops if (place := text.find(stop)) >= 0)], "stop"
        return text, "length" if completion.finish == "length" else "stop"

    def _said(
        self,
        text: str,
        finish: Literal["stop", "length"],
        calls: tuple[ToolCall, ...],
        conversation: Conversation,
        completion: Completion,
        with_logprobs: bool,
    ) -> Said:
        last, tokens = completion.versions[-1], completion.tokens.tolist()
        said = Said(text, finish, calls, len(conversation.prompt), len(tokens), f"{last.version}-{last.digest[:8]}")
        if not with_logprobs:
            return said
        pieces = tuple(str(self._tokenizer.decode([token])) for token in tokens)
        return said._replace(pieces=pieces, logprobs=tuple(completion.logprobs.tolist()))

    def _remember(self, name: bytes | str, conversation: Conversation, completion: Completion, stopped: bool) -> None:
        prompt, reasons = np.asarray(conversation.prompt, np.int32), np.asarray(conversation.reasons, np.uint8)
        ended = completion.finish == "stop" and not stopped
        self._known[name] = Known(prompt, reasons, conversation.messages, conversation.text, completion.tokens, ended)
        self._known.move_to_end(name)
        if len(self._known) > KEPT_CONVERSATIONS:
            self._known.popitem(last=False)


# --- names of conversations ------------------------------------------------------------------------------------------


def chain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A name for the conversation before the first message, and after each: equal for equal ones alone."""
    names = [hashlib.blake2b(msgspec.json.encode(list(tools), order="sorted"), digest_size=16).digest()]
    for message in messages:
        names.append(link(names[-1], message))
    return names


def link(name: bytes, message: Mapping[str, Any]) -> bytes:
    """Of a conversation that goes on with this message. Clients may trim what the model said, and give its calls of
    tools other ids."""
    plain = dict(message)
    if plain["role"] == "assistant":
        plain["content"] = plain["content"].strip()
        plain["tool_calls"] = [call["function"] for call in plain.get("tool_calls", ())]
        plain.pop("name", None)
    return hashlib.blake2b(name + msgspec.json.encode(plain, order="sorted"), digest_size=16).digest()


# --- stop texts ------------------------------------------------------------------------------------------------------


def tokens_until(
    tokens: npt.NDArray[np.int32], stops: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> int | None:
    """How many of the tokens it takes until their text has a stop text in it; None when it has none. An answer that
    ends there is as likely as it is under the policy: whether to go on was decided by what stands before alone."""
    ids = tokens.tolist()

    def stopped(n: int) -> bool:
        text = text_of(ids[:n])
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(ids)):
        return None
    low, high = 1, len(ids)  # the first length at which it is there lies between them
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    return low


def shortened(completion: Completion, length: int, n_prompt: int) -> Completion:
    """Its first `length` tokens, as if it had ended there."""
    left, versions = length, []
    for run in completion.versions:
        if left > 0:
            versions.append(VersionRun(run.version, run.digest, min(left, run.count)))
            left -= run.count
    top = completion.top
    return completion._replace(
        tokens=completion.tokens[:length],
        logprobs=completion.logprobs[:length],
        versions=tuple(versions),
        finish="stop",
        top=None if top is None else TopTokens(top.ids[:length], top.logprobs[:length]),
        routes=None if completion.routes is None else completion.routes[: n_prompt + length - 1],
    )


# --- calls of tools --------------------------------------------------------------------------------------------------

def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls of tools, and these. What is no whole call stays text."""
    calls: list[ToolCall] = []

    def taken(found: re.Match[str]) -> str:
        for call in calls_in(found[0], "chat"):
            if isinstance(call, ToolError):
                return found[0]
            arguments = msgspec.json.encode(call.arguments).decode()
            calls.append(ToolCall(Function(call.name, arguments), f"call_{secrets.token_hex(12)}"))
        return ""

    rest = TAGGED.sub(taken, text)
    return (rest.strip() if calls else text), tuple(calls)


def _template_call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.function.name, "arguments": msgspec.json.decode(call.function.arguments)}}

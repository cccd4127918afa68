"""What OpenAI's clients send and expect, as far as an agent's endpoint has it: JSON in, JSON out, no socket.

A request is read strictly. What only says how to sample (temperature, top_p, seed) is left aside: the run decides that,
as every log-probability must be of the distribution that it samples from. What would change the distribution in another
way (a penalty, a bias, a grammar), or is not known here, is refused by name: a program that relies on it would not get
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from async_rl.errors import AsyncRLError

MODEL = "async-rl"  # as the endpoint calls what it serves; it answers to any name
MAX_STOPS = 16
MAX_CHOICES = 8
IGNORED = frozenset((
    "temperature", "top_p", "seed", "user", "store", "metadata", "service_tier", "parallel_tool_calls",
    "reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key",
))  # fmt: skip
"""Taken, and without effect."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tool_choice": ("auto", "none", None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
}
"""Taken only with a value that changes nothing."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
Stops = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None


class BadRequest(AsyncRLError):
    """What was asked cannot be done; the message goes to the client, with `status` and OpenAI's `code`."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    function: Function
    id: str = ""
    type: str = "function"


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """What a template reads of a message; clients send more with those that they were given."""

    role: Role
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    max_tokens: Tokens | None = None
    n: Choices | None = 1
    stop: Stops = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


class ChatRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = False

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | Annotated[list[int | str], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0)] | None = None

    @property
    def text(self) -> str | None:
        """The prompt as text; None where it came as ids. Raises BadRequest."""
        if isinstance(self.prompt, str):
            return self.prompt
        if all(isinstance(each, int) for each in self.prompt):
            return None
        if len(self.prompt) == 1:
            return str(self.prompt[0])
        raise BadRequest("several prompts in one request: send each in one of its own")

    @property
    def ids(self) -> list[int]:
        return [each for each in self.prompt if isinstance(each, int)]


class Said(NamedTuple):
    """One answer: its text, as the client gets it; whether it ended by itself or was cut; which tools it calls; of how
    many tokens prompt and answer are; the policy that sampled its last token. Where log-probabilities were asked for,
    `pieces` and `logprobs` (natural log) of every token, its stop token included."""

    text: str
    finish: Literal["stop", "length"]
    tool_calls: tuple[ToolCall, ...]
    n_prompt: int
    n_tokens: int
    policy: str
    pieces: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()


# --- in --------------------------------------------------------------------------------------------------------------


def read_request(body: bytes, kind: type[Any]) -> Any:
    """A ChatRequest or CompletionRequest. Raises BadRequest."""
    asked = read_object(body)
    for key, value in asked.items():
        if key in NEUTRAL and value not in NEUTRAL[key]:
            raise BadRequest(
                f"{key} = {value!r}: not offered here, as it changes the distribution that tokens are sampled from, or "
                "asks for what the engine does not give: leave it out"
            )
    # A request without tools is what "none" means: nothing is told of them, and no call is looked for.
    left_out = IGNORED | NEUTRAL.keys() | ({"tools"} if asked.get("tool_choice") == "none" else set())
    try:
        return msgspec.convert({key: value for key, value in asked.items() if key not in left_out}, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}".replace("`$.", "`").replace("Object", "The request")) from error


def read_object(body: bytes) -> dict[str, Any]:
    """Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"The request is no JSON object: {error}") from error


class RewardGiven(msgspec.Struct, frozen=True):
    """What an agent that says the reward itself sends, or writes."""

    reward: float
    components: dict[str, float] = {}


def read_reward(body: bytes) -> RewardGiven:
    """JSON has no numbers that are not finite. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=RewardGiven)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f'A reward is {{"reward": NUMBER, "components": {{NAME: NUMBER}}}}: {error}') from error


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates want it: content as text, arguments as values. Raises BadRequest."""
    content = message.content
    if isinstance(content, list):
        if other := next((part.type for part in content if part.type not in ("text", "refusal")), None):
            raise BadRequest(f"a part of type {other!r} in a message: the model reads text alone")
        content = "".join(part.text for part in content)
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _values(call)}}
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            out[key] = value
    return out


def _values(call: ToolCall) -> Any:
    try:
        return msgspec.json.decode(call.function.arguments.encode() or b"{}")
    except (msgspec.MsgspecError, RecursionError):
        return call.function.arguments


# --- out -------------------------------------------------------------------------------------------------------------


def error_body(message: str, code: str, status: int) -> bytes:
    kind = {401: "authentication_error", 403: "permission_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def models_body(name: str | None = None) -> bytes:
    """The list, or one of it, by whatever name it was asked for."""
    model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": MODEL}
    return msgspec.json.encode(model if name else {"object": "list", "data": [model]})


def usage(answers: Sequence[Said]) -> dict[str, int]:
    prompt, completion = answers[0].n_prompt, sum(said.n_tokens for said in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def assistant_message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.tool_calls:
        message["content"] = said.text or None
        message["tool_calls"] = list(said.tool_calls)
    return message


def finish_reason(said: Said) -> str:
    return "tool_calls" if said.tool_calls else said.finish


def chat_body(asked: ChatRequest, answers: Sequence[Said], number: str) -> bytes:
    choices = [
        {
            "index": index,
            "message": assistant_message(said),
            "logprobs": _chat_logprobs(said) if asked.logprobs else None,
            "finish_reason": finish_reason(said),
        }
        for index, said in enumerate(answers)
    ]
    return msgspec.json.encode(_head(asked, answers, number, "chat.completion") | {"choices": choices})


def completion_body(asked: CompletionRequest, answers: Sequence[Said], number: str) -> bytes:
    choices = [_text_choice(asked, index, said) for index, said in enumerate(answers)]
    return msgspec.json.encode(_head(asked, answers, number, "text_completion") | {"choices": choices})


def _text_choice(asked: CompletionRequest, index: int, said: Said) -> dict[str, Any]:
    return {
        "index": index,
        "text": said.text,
        "logprobs": _text_logprobs(said) if asked.logprobs is not None else None,
        "finish_reason": said.finish,
    }


def _head(asked: Common, answers: Sequence[Said], number: str, kind: str) -> dict[str, Any]:
    return {
        "id": number,
        "object": kind,
        "created": int(time.time()),
        "model": asked.model or MODEL,
        "system_fingerprint": answers[0].policy,
        "usage": usage(answers),
    }


def chunks(asked: ChatRequest | CompletionRequest, answers: Sequence[Said], number: str) -> Iterable[bytes]:
    """The same as events of a stream, an answer in a piece: it is all there before the first of them."""
    chat = isinstance(asked, ChatRequest)
    head = _head(asked, answers, number, "chat.completion.chunk" if chat else "text_completion")
    totals = head.pop("usage")
    for index, said in enumerate(answers):
        if isinstance(asked, ChatRequest):
            deltas = _chat_deltas(asked, index, said)
        else:
            deltas = [_text_choice(asked, index, said)]
        for delta in deltas:
            yield event(head | {"choices": [delta]})
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(head | {"choices": [], "usage": totals})
    yield b"data: [DONE]\n\n"


def _chat_deltas(asked: ChatRequest, index: int, said: Said) -> list[dict[str, Any]]:
    message = assistant_message(said)
    calls = [
        {"index": place, "id": call.id, "type": call.type, "function": call.function}
        for place, call in enumerate(said.tool_calls)
    ]
    content = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
    logprobs = _chat_logprobs(said) if asked.logprobs else None
    return [
        {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": None},
        {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason(said)},
    ]


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _chat_logprobs(said: Said) -> dict[str, Any]:
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(said.pieces, said.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(said: Said) -> dict[str, Any]:
    offsets, place = [], 0
    for piece in said.pieces:
        offsets.append(place)
        place += len(piece)
    return {
        "tokens": list(said.pieces), "token_logprobs": list(said.logprobs), "top_logprobs": None,
        "text_offset": offsets,
    }  # fmt: skip

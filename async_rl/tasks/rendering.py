"""From an instance to token ids and from sampled ids back to text: the only place where text is tokenised.

`tokenizer` is a Hugging Face tokenizer, taken as it comes: nothing here imports one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from async_rl.tasks.environment import Message, Observation
from async_rl.tasks.task import Instance, TaskError
from async_rl.trajectory import MaskReason

NO_TEMPLATE = (
    "the task asks in chat messages, but the model's tokenizer has no chat template: use a chat model, or a plain "
    'prompt where the task offers one (reasoning_gym: style = "plain")'
)


def render(instance: Instance, tokenizer: Any) -> list[int]:
    """Prompt token ids: the chat template up to where the answer starts, or the plain prompt without special tokens.
    Raises TaskError when the tokenizer has no chat template, or the prompt comes out empty."""
    if (instance.prompt is None) == (instance.messages is None):
        raise TaskError("an instance must have a prompt or messages, and not both: the task is at fault")
    if instance.prompt is not None:
        ids = tokenizer.encode(instance.prompt, add_special_tokens=False)
    else:
        if not tokenizer.chat_template:
            raise TaskError(NO_TEMPLATE)
        ids = tokenizer.apply_chat_template(
            list(instance.messages or ()), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if not ids:
        raise TaskError("a prompt came out as no tokens at all: there is nothing to continue")
    return [int(token) for token in ids]


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """The text of sampled tokens, without the stop token at their end and without special tokens."""
    ids = [int(token) for token in tokens]
    if ids and ids[-1] == tokenizer.eos_token_id:  # some models' stop token is not marked as special
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


# --- conversations ---------------------------------------------------------------------------------------------------

SENTINEL = "\u2063said\u2063"  # stands for what the model said, to find what a template adds behind it


class Conversation(NamedTuple):
    """The prompt of one call: token ids, and why each does not train (MaskReason). `text` is what the template gives
    for `messages`, both None where there is no template in it."""

    prompt: list[int]
    reasons: list[int]
    messages: tuple[Message, ...] | None = None
    text: str | None = None


def opening(observation: Observation, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
    """The first prompt. Raises TaskError as `render` does."""
    messages = _messages(observation)
    text = None if messages is None else _chat_text(messages, tokenizer, tools)
    ids = _ids(observation, tokenizer) if text is None else tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise TaskError("a prompt came out as no tokens at all: there is nothing to continue")
    return Conversation([int(each) for each in ids], [MaskReason.PROMPT] * len(ids), messages, text)


def following(
    before: Conversation,
    sampled: Sequence[int],
    finish: str,
    observation: Observation,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Conversation:
    """The prompt after `sampled` was said and `observation` came. It begins with the last prompt and the sampled tokens
    themselves, and goes on with what the template adds: only that is tokenised. Where the template would not render the
    conversation so (it rewrites what was said before, or drops it), the whole is rendered anew. `finish`: "stop" where
    the last of `sampled` is a stop token. Raises TaskError."""
    sampled = [int(token) for token in sampled]
    new = _messages(observation)
    if (new is None) != (before.messages is None):
        raise TaskError("an environment must keep to one kind of observation: messages, or text (or tokens)")
    if new is None:
        added = [int(each) for each in _ids(observation, tokenizer)]
        return _after(before, sampled, added, [int(MaskReason.ENVIRONMENT)] * len(added), None, None)
    assert before.messages is not None
    said = said_text(sampled, finish, tokenizer)
    messages = (*before.messages, {"role": "assistant", "content": said}, *new)
    text = _chat_text(messages, tokenizer, tools)
    tail = _tail(before, new, tokenizer, tools)
    if tail is None or text not in (f"{before.text}{said}{tail}", f"{before.text}{said.strip()}{tail}"):
        ids = [int(each) for each in tokenizer.encode(text, add_special_tokens=False)]
        return Conversation(ids, [MaskReason.PROMPT] * len(ids), messages, text)
    added, reasons = _template_ids(tail, new, tokenizer)
    if finish == "stop" and sampled and added[:1] == sampled[-1:]:  # the model wrote the end of its turn by itself
        added, reasons = added[1:], reasons[1:]
    return _after(before, sampled, added, reasons, messages, text)


def said_text(sampled: Sequence[int], finish: str, tokenizer: Any) -> str:
    """What a template is given as the model's words: with special tokens, but without the stop token."""
    ids = [int(token) for token in sampled]
    ids = ids[:-1] if finish == "stop" else ids
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _after(
    before: Conversation,
    sampled: list[int],
    added: list[int],
    reasons: Sequence[int],
    messages: tuple[Message, ...] | None,
    text: str | None,
) -> Conversation:
    # The reasons of tokens that were sampled are the record's to know; here they only hold the place.
    before_and_said = [*before.reasons, *[MaskReason.TEMPLATE] * len(sampled)]
    return Conversation([*before.prompt, *sampled, *added], [*before_and_said, *reasons], messages, text)


def _messages(observation: Observation) -> tuple[Message, ...] | None:
    """None for text and for token ids."""
    if isinstance(observation, str) or not observation or isinstance(observation[0], int):
        return None
    return tuple(cast(Sequence[Message], observation))


def _ids(observation: Observation, tokenizer: Any) -> Sequence[int]:
    if isinstance(observation, str):
        return cast(Sequence[int], tokenizer.encode(observation, add_special_tokens=False))
    return cast(Sequence[int], observation)


def _chat_text(messages: Sequence[Message], tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    if not tokenizer.chat_template:
        raise TaskError(NO_TEMPLATE)
    plain = [dict(message) for message in messages]
    given = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **given))
    except Exception as error:  # a template is a program of its own, and says in any way what it will not have
        roles = ", ".join(str(message.get("role")) for message in plain)
        raise TaskError(f"the model's chat template refuses a conversation of {roles}: {error}") from error


def _tail(
    before: Conversation, new: Sequence[Message], tokenizer: Any, tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """What the template adds behind the model's words up to its next turn. None when it puts anything between the last
    prompt and those words, or renders the messages before otherwise by now."""
    assert before.messages is not None
    said = {"role": "assistant", "content": SENTINEL}
    text = _chat_text((*before.messages, said, *new), tokenizer, tools)
    head, found, tail = text.partition(SENTINEL)
    return tail if found and head == before.text else None


def _template_ids(text: str, new: Sequence[Message], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of what the template adds, and the reason of each: the messages' own words are the environment's."""
    if not tokenizer.is_fast:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [int(each) for each in ids], [MaskReason.ENVIRONMENT] * len(ids)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, start = [], 0
    for message in new:
        words = message.get("content")
        found = text.find(words, start) if isinstance(words, str) and words else -1
        if found >= 0:
            start = found + len(cast(str, words))
            spans.append((found, start))
    of_world = [any(low < end and begin < high for begin, end in spans) for low, high in encoded["offset_mapping"]]
    reasons = [int(MaskReason.ENVIRONMENT if words else MaskReason.TEMPLATE) for words in of_world]
    return [int(each) for each in encoded["input_ids"]], reasons

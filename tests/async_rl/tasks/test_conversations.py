"""A prompt begins with the tokens of the last one and of what was said; only what a template adds is tokenised."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.tasks.rendering import Conversation, following, opening
from async_rl.tasks.task import TaskError
from async_rl.trajectory import MaskReason

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TURNS = "<|{{ m.role }}|>{{ m.content }}</s>\n"
GO_ON = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}" + TURNS + "{% endfor %}" + GO_ON
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
WITH_TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}</s>\n{% endif %}" + PLAIN
# Drops what earlier turns thought, once somebody has answered them.
FORGETFUL = (
    "{% for m in messages %}{% set words = m.content.split('</think>')[-1] if not loop.last else m.content %}"
    "<|{{ m.role }}|>{{ words }}</s>\n{% endfor %}" + GO_ON
)
MERGES = ["h e", "l l", "he ll", "hell o", "o w", "Ġ w"]
USER = ({"role": "user", "content": "hello?"},)
TOOL = ({"role": "tool", "content": "42"},)


def tokenizer(template: str | None = None) -> Any:
    """Over bytes with merges, so that a text has several tokenisations."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split()) for merge in MERGES]
    vocabulary = {token: n for n, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = template
    return made


def ids(text: str, of: Any) -> list[int]:
    return [int(each) for each in of.encode(text, add_special_tokens=False)]


def letters(text: str, of: Any) -> list[int]:
    """The tokenisation that an encoder would never give, but a sampler may."""
    return [token for letter in text for token in ids(letter, of)]


def test_the_next_prompt_begins_with_the_sampled_tokens_however_their_text_would_be_tokenised() -> None:
    of = tokenizer(PLAIN)
    first = opening(USER, of)
    said = [*letters("hello", of), of.eos_token_id]
    assert said[:-1] != ids("hello", of)
    after = following(first, said, "stop", TOOL, of)
    assert after.prompt[: len(first.prompt) + len(said)] == [*first.prompt, *said]
    assert of.decode(after.prompt) == "<|user|>hello?</s>\n<|assistant|>hello</s>\n<|tool|>42</s>\n<|assistant|>"
    assert of.decode(after.prompt) == after.text


def test_the_worlds_words_and_the_templates_are_told_apart() -> None:
    of = tokenizer(PLAIN)
    first = opening(USER, of)
    said = ids("hello</s>", of)
    after = following(first, said, "stop", TOOL, of)
    start = len(first.prompt) + len(said)
    by_world = [token for token, why in zip(after.prompt, after.reasons, strict=True) if why == MaskReason.ENVIRONMENT]
    assert of.decode(by_world) == "42"
    assert set(after.reasons[start:]) == {MaskReason.ENVIRONMENT, MaskReason.TEMPLATE}
    assert set(first.reasons) == {MaskReason.PROMPT}


def test_a_turn_that_was_cut_is_ended_by_the_template() -> None:
    of = tokenizer(PLAIN)
    after = following(opening(USER, of), ids("hel", of), "length", TOOL, of)
    assert of.decode(after.prompt) == "<|user|>hello?</s>\n<|assistant|>hel</s>\n<|tool|>42</s>\n<|assistant|>"


def test_a_template_that_trims_words_does_not_change_the_tokens_that_were_sampled() -> None:
    of = tokenizer(TRIMMED)
    first = opening(USER, of)
    said = ids(" hello \n</s>", of)
    after = following(first, said, "stop", TOOL, of)
    assert after.prompt[: len(first.prompt) + len(said)] == [*first.prompt, *said]
    again = following(after, said, "stop", TOOL, of)
    assert again.prompt[: len(after.prompt) + len(said)] == [*after.prompt, *said]


def test_a_template_that_drops_what_was_thought_has_the_whole_rendered_anew() -> None:
    of = tokenizer(FORGETFUL)
    first = opening(USER, of)
    after = following(first, ids("hm</think>hello</s>", of), "stop", TOOL, of)
    assert of.decode(after.prompt) == "<|user|>hello?</s>\n<|assistant|>hello</s>\n<|tool|>42</s>\n<|assistant|>"
    assert set(after.reasons) == {MaskReason.PROMPT}
    thoughtless = following(first, ids("hello</s>", of), "stop", TOOL, of)
    assert MaskReason.ENVIRONMENT in thoughtless.reasons, "nothing was dropped: it goes on"


def test_tools_are_told_to_the_template_in_every_turn() -> None:
    of = tokenizer(WITH_TOOLS)
    tools = ({"type": "function", "function": {"name": "add"}},)
    first = opening(USER, of, tools)
    after = following(first, ids("hello</s>", of), "stop", TOOL, of, tools)
    assert of.decode(after.prompt).startswith('<|tools|>[{"type": "function"')
    assert after.prompt[: len(first.prompt)] == first.prompt


def test_text_and_tokens_are_appended_as_they_come() -> None:
    of = tokenizer()
    first = opening("hello?", of)
    said = ids("ow</s>", of)
    after = following(first, said, "stop", "hello", of)
    assert after.prompt == [*ids("hello?", of), *said, *ids("hello", of)]
    assert after.reasons[-1] == MaskReason.ENVIRONMENT
    assert following(Conversation([1, 2], [1, 1]), [3], "stop", [4, 5], of).prompt == [1, 2, 3, 4, 5]


def test_kinds_of_observations_do_not_mix_and_a_template_may_refuse() -> None:
    with pytest.raises(TaskError, match="one kind"):
        following(opening("hello", tokenizer(PLAIN)), [1], "stop", TOOL, tokenizer(PLAIN))
    with pytest.raises(TaskError, match="no chat template"):
        opening(USER, tokenizer())
    strict = tokenizer("{% if messages | length > 1 %}{{ raise_exception('no tools here') }}{% endif %}" + PLAIN)
    with pytest.raises(TaskError, match="refuses a conversation of user, assistant, tool: no tools here"):
        following(opening(USER, strict), [1], "stop", TOOL, strict)
    with pytest.raises(TaskError, match="no tokens"):
        opening("", tokenizer())

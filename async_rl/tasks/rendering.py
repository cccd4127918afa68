"""From an instance to token ids and from sampled ids back to text: the only place where text is tokenised.

`tokenizer` is a Hugging Face tokenizer, taken as it comes: nothing here imports one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rl.tasks.task import Instance, TaskError


def render(instance: Instance, tokenizer: Any) -> list[int]:
    """Prompt token ids: the chat template up to where the answer starts, or the plain prompt without special tokens.
    Raises TaskError when the tokenizer has no chat template, or the prompt comes out empty."""
    if (instance.prompt is None) == (instance.messages is None):
        raise TaskError("an instance must have a prompt or messages, and not both: the task is at fault")
    if instance.prompt is not None:
        ids = tokenizer.encode(instance.prompt, add_special_tokens=False)
    else:
        if not tokenizer.chat_template:
            raise TaskError(
                "the task asks in chat messages, but the model's tokenizer has no chat template: use a chat model, "
                'or a plain prompt where the task offers one (reasoning_gym: style = "plain")'
            )
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

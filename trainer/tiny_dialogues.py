"""The tiny model's warm start on tasks of several turns: what is shown, and what sampling gets.

Such a task's right answer is a list: what to say, what the world answers, what to say then, and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.tasks.environment import Environment, EnvironmentTask, Said
from async_rl.tasks.rendering import Conversation, decode, following, opening, render
from async_rl.tasks.task import Instance

IGNORED = -100  # transformers' label for "no loss here"
Ids = list[int]


def labelled_ids(instance: Instance, tokenizer: Any) -> tuple[Ids, Ids]:
    """Token ids of a prompt and all that follows it, and the label of each: its own id where the model is to say it,
    each turn with the stop token, else IGNORED. Raises AsyncRLError for an answer that is no text, or no list of texts
    that ends with what to say, or a character without a token."""
    turns = instance.answer if isinstance(instance.answer, list) else [instance.answer]
    if not all(isinstance(turn, str) for turn in turns) or len(turns) % 2 == 0:
        raise AsyncRLError(
            f"[model.tiny] cannot learn this task: the answer to {instance.prompt!r} is no text but "
            f"{type(instance.answer).__name__}; use a model of your own ([model] path)"
        )
    ids = render(instance, tokenizer)
    labels = [IGNORED] * len(ids)
    for number, turn in enumerate(turns):
        added = tokenizer.encode(turn, add_special_tokens=False)
        if number % 2 == 0:
            added = [*added, tokenizer.eos_token_id]
        ids += added
        labels += added if number % 2 == 0 else [IGNORED] * len(added)
    if tokenizer.unk_token_id in ids:
        raise AsyncRLError(
            f"[model.tiny] knows printable ASCII only, and the task has other characters: "
            f"{instance.prompt!r} -> {instance.answer!r}; use a model of your own ([model] path)"
        )
    return ids, labels


def longest_turn(instance: Instance, tokenizer: Any) -> int:
    """Tokens of the longest right turn, its stop token included."""
    turns = instance.answer[::2] if isinstance(instance.answer, list) else [instance.answer]
    return 1 + max(len(tokenizer.encode(turn, add_special_tokens=False)) for turn in turns)


def rewards_of_play(
    task: EnvironmentTask, tokenizer: Any, instances: Sequence[Instance], say: Callable[[Sequence[Ids]], list[Ids]]
) -> list[float]:
    """The reward of one attempt at each instance; `say` samples what the model says after each prompt."""
    return asyncio.run(_play(task, tokenizer, instances, say))


async def _play(
    task: EnvironmentTask, tokenizer: Any, instances: Sequence[Instance], say: Callable[[Sequence[Ids]], list[Ids]]
) -> list[float]:
    rewards = [0.0] * len(instances)
    worlds = [task.environment() for _ in instances]
    goes_on: dict[int, Conversation] = {}
    for number, (world, instance) in enumerate(zip(worlds, instances, strict=True)):
        goes_on[number] = opening(await world.reset(instance, number), tokenizer, task.tools)
    for _ in range(task.limits.max_turns):
        numbers = list(goes_on)
        if not numbers:
            break
        sampled = say([goes_on[number].prompt for number in numbers])
        for number, tokens in zip(numbers, sampled, strict=True):
            before, instance = goes_on.pop(number), instances[number]
            reward, after = await _step(task, worlds[number], instance, before, tokens, tokenizer)
            rewards[number] += reward
            if after is not None:
                goes_on[number] = after
    for world in worlds:
        await world.close()
    return rewards


async def _step(
    task: Any, world: Environment, instance: Instance, before: Conversation, tokens: Ids, tokenizer: Any
) -> tuple[float, Conversation | None]:
    stops = tokens[-1:] == [tokenizer.eos_token_id]
    finish = "stop" if stops else "length"
    result = await world.step(Said(decode(tokens, tokenizer), tuple(tokens), "stop" if stops else "length"))
    if not result.done:
        return result.reward, following(before, tokens, finish, result.observation, tokenizer, task.tools)
    judged = 0.0 if result.answer is None else task.score(instance, result.answer).reward
    return result.reward + judged, None

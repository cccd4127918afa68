"""The tiny model's tasks of several turns: what it is shown, and what sampling gets from who says it by heart."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.errors import AsyncRLError
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance
from trainer.tiny_dialogues import IGNORED, labelled_ids, longest_turn, rewards_of_play
from trainer.tiny_model import char_tokenizer

TOKENIZER = char_tokenizer()
TASK: Any = load_task({"kind": "calculator", "digits": 2, "shown_calls": 1.0})


def test_what_the_model_is_to_say_is_learned_with_its_stop_tokens_and_what_the_world_says_is_not() -> None:
    instance = Instance("1=", None, ["[a]", "7\n", "7"])
    ids, labels = labelled_ids(instance, TOKENIZER)
    assert TOKENIZER.decode(ids) == "1=[a]<eos>7\n7<eos>"
    assert TOKENIZER.decode([label for label in labels if label != IGNORED]) == "[a]<eos>7<eos>"
    assert [label for label in labels[:2] if label != IGNORED] == []
    assert longest_turn(instance, TOKENIZER) == 4


@pytest.mark.parametrize("answer", [["a", "b"], [], ["a", 1, "b"], 7])
def test_an_answer_that_is_no_dialogue_is_refused(answer: Any) -> None:
    with pytest.raises(AsyncRLError, match="no text"):
        labelled_ids(Instance("1=", None, answer), TOKENIZER)


def test_who_says_what_is_shown_earns_the_reward_and_who_does_not_earns_none() -> None:
    instances = [TASK.instance("train", number) for number in range(6)]
    turns = {instance.prompt: instance.answer for instance in instances}

    def say(prompts: Any) -> list[list[int]]:
        """By heart, but for the sums that end with 5 or more."""
        said = []
        for prompt in map(TOKENIZER.decode, prompts):
            call, _, answer = turns[prompt.partition("=")[0] + "="]
            words = call if "[" not in prompt else answer if answer[-1] < "5" else "0"
            said.append([*TOKENIZER.encode(words, add_special_tokens=False), TOKENIZER.eos_token_id])
        return said

    rewards = rewards_of_play(TASK, TOKENIZER, instances, say)
    assert rewards == [float(instance.data[-1] < "5") for instance in instances]
    assert 0 < sum(rewards) < len(rewards)

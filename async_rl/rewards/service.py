"""A reward that a service of yours gives: kind "http".

It gets a POST of {"prompt" or "messages", "completion", "answer", "data"} and answers {"reward": number} with
"components": {name: number} if it likes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from async_rl.rewards.calls import SHOWN, CallConfig, Caller
from async_rl.rewards.reward import RewardConfig, RewardError
from async_rl.tasks.task import Instance, Score


class Reply(msgspec.Struct, frozen=True):
    reward: float
    components: dict[str, float] = {}


class Service:
    Config: ClassVar[type[RewardConfig]] = CallConfig

    def __init__(self, config: CallConfig) -> None:
        self._caller = Caller(config, '[[task.reward]] of kind "http"')
        self.concurrency = config.concurrency
        self.seconds = self._caller.seconds

    def score(self, instance: Instance, completion: str) -> Score:
        question: dict[str, Any] = {"completion": completion, "answer": instance.answer, "data": instance.data}
        if instance.messages is None:
            question["prompt"] = instance.prompt
        else:
            question["messages"] = instance.messages
        answer = self._caller.call(question)
        try:
            reply = msgspec.json.decode(answer, type=Reply)
        except msgspec.DecodeError as error:
            shown = answer[:SHOWN].decode(errors="replace")
            raise RewardError(f'expected {{"reward": number}}, and the service answered {shown!r}: {error}') from None
        return Score(reply.reward, reply.components)

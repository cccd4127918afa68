"""Sessions of an agents' endpoint for tests to speak to, over a real engine or one that says what it is told to."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from play_house import PlayHouse, lease
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.version import VersionRun
from inference.agent_endpoint import AgentEndpoint
from inference.agent_session import Session
from inference.engine import Completion, Request
from inference.episodes import Limits, Play
from inference.rollout import Key, Outcome

SMALL = "UATS0123456789 +=?.abcdefgh"  # with the two special ones, as many as the tests' models know
LARGE = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}S{{ tools | length }};{% endif %}"
    "{% for m in messages %}{{ {'system': 'S', 'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
TASK = DigitSort(DigitSortConfig(digits=5))
ROOM = Limits(context=1 << 12, attempt=1 << 14)


def chat_tokenizer(characters: str = SMALL, template: str | None = TEMPLATE) -> Any:
    """A token a character, and a chat template that writes a role as a letter."""
    vocabulary = {token: n for n, token in enumerate(["<pad>", "</s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")
    made.chat_template = template
    return made


class SaysWhatItIsTold:
    """The part of an engine that attempts need. `answer` makes the tokens of an answer from those of its prompt; which
    request is answered next is up to chance. The log-probability of a token is made of its prompt's length and id."""

    def __init__(self, answer: Callable[[list[int]], Sequence[int]], stop: int, seed: int = 0) -> None:
        self._answer = answer
        self._stop = stop
        self._random = random.Random(seed)
        self._waiting: dict[Key, Request] = {}

    @property
    def active(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting[request.key] = request

    def abort(self, key: Key) -> None:
        self._waiting.pop(key, None)

    def step(self) -> list[Completion]:
        if not self._waiting or self._random.random() < 0.2:
            return []
        request = self._waiting.pop(self._random.choice(list(self._waiting)))
        tokens = np.asarray([*self._answer(request.prompt.tolist()), self._stop], np.int32)
        tokens = tokens[: request.sampling.max_new_tokens]
        logprobs = -(len(request.prompt) + tokens / 1024).astype(np.float32)
        finish = "stop" if tokens[-1] == self._stop else "length"
        versions = (VersionRun(3, "ab" * 32, len(tokens)),)
        return [Completion(request.key, tokens, logprobs, versions, finish, 0.0, 0.0)]


class Room(NamedTuple):
    """An attempt that a test plays: `leave` ends it."""

    url: str
    key: str
    session: Session
    play: Play
    leave: Callable[[], None]


class Rooms:
    """A driver that leaves what an agent's program would do to the test."""

    def __init__(self, tokenizer: Any, max_calls: int = 64) -> None:
        self.endpoint = AgentEndpoint()
        self.open: queue.SimpleQueue[Room] = queue.SimpleQueue()
        self._tokenizer = tokenizer
        self._max_calls = max_calls
        self._url: asyncio.Future[str] | None = None

    async def play(self, play: Play) -> Outcome:
        if self._url is None:
            self._url = asyncio.ensure_future(self.endpoint.start())
        url = await self._url
        session = Session(play, self._tokenizer, self._max_calls)
        key, done, loop = self.endpoint.admit(session), asyncio.Event(), asyncio.get_running_loop()
        self.open.put(Room(url, key, session, play, lambda: loop.call_soon_threadsafe(done.set)))
        try:
            await done.wait()
        finally:
            self.endpoint.dismiss(key)
        if session.failure is not None:
            raise session.failure
        return Outcome(reward=1.0, cut=session.cut)

    async def close(self) -> None:
        await self.endpoint.close()


class AgentHouse:
    """A node's work in a thread of its own, and rooms to speak to it in."""

    def __init__(self, engine: Any, tokenizer: Any, limits: Limits = ROOM, max_calls: int = 64) -> None:
        self.rooms = Rooms(tokenizer, max_calls)
        self.tokenizer = tokenizer
        self.node = PlayHouse(engine, TASK, tokenizer, self.rooms, limits)
        self._over = threading.Event()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                self.node.run(until=self._pauses(time.monotonic() + 1.0))
        except BaseException as error:
            self.errors.append(error)

    def _pauses(self, at: float) -> Callable[[], bool]:
        """A run has a limit of time, and what takes too long is for `leave` to say."""
        return lambda: self._over.is_set() or time.monotonic() > at

    def enter(self, number: int, *samples: int, new: int = 16) -> list[Room]:
        """Rooms for these samples of a lease, in any order."""
        self.node.start(lease(number, *samples, new=new))
        return [self.rooms.open.get(timeout=60) for _ in samples]

    def leave(self, *rooms: Room) -> list[Any]:
        """What was recorded in them, as the buffer would read it."""
        for room in rooms:
            room.leave()
        keys = [room.play.attempt.key for room in rooms]
        ends = 0
        while not all(key in self.node.done for key in keys):
            ends += 1
            assert ends < 1200, self.errors or "it takes too long"
            threading.Event().wait(0.05)
        return [self.node.done[key] for key in keys]

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)
        self.node.close()
        assert not self.errors, self.errors

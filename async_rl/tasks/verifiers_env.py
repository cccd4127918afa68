"""Environments of the `verifiers` library (0.4 and later) as tasks: its tasksets, harnesses and scores, our sampling.

    [task]
    kind = "verifiers"
    size = 1000                                   # tasks to train on; those after them are held out

    [task.env]                                    # verifiers' own [env] block
    taskset = {id = "my_taskset"}
    agent = {harness = {id = "my_harness"}}

An episode runs in a worker for environments as it would anywhere: a harness plays a task against a model's endpoint.
That endpoint is a small server in the worker, on loopback, and a turn that it is asked for is a turn that the node
samples (async_rl.tasks.verifiers_endpoint). Its reward is the sum of what its traces were given.
"""

from __future__ import annotations

import asyncio
import itertools
from importlib.util import find_spec
from typing import Any, ClassVar

from async_rl.errors import AsyncRLError
from async_rl.schema import ConfigError, PositiveInt, Section
from async_rl.tasks.environment import EpisodeConfig, Observation, Said, StepResult
from async_rl.tasks.task import Instance, Score, Split, TaskError
from async_rl.tasks.verifiers_endpoint import Endpoint, ModelCall, completion_of, messages_since

WHERE = '[task] of kind "verifiers"'


class VerifiersConfig(EpisodeConfig, frozen=True, kw_only=True):
    env: dict[str, Any]
    """verifiers' EnvConfig: `taskset` with its id, and the seats of agents with their harness."""
    size: PositiveInt = 1000
    """Tasks of the taskset to train on, from its first on."""
    eval_size: PositiveInt = 100
    """Tasks after those, for evaluation. A taskset that ends before leaves fewer: at least one of each is needed."""


class VerifiersTask:
    """The library is imported when first needed: that takes seconds, and only workers need it."""

    Config: ClassVar[type[Section]] = VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        if find_spec("verifiers") is None:
            raise AsyncRLError(
                f"{WHERE} needs a package that is not installed here (verifiers): pip install '.[verifiers]' in the "
                "checkout"
            )
        if not isinstance(config.env.get("taskset"), dict) or not config.env["taskset"].get("id"):
            raise ConfigError(f'{WHERE}: which taskset? Give its id: [task.env] taskset = {{id = "…"}}')
        self.limits: EpisodeConfig = config
        self.tools = ()
        self._config = config
        self._library: Library | None = None

    @property
    def library(self) -> Library:
        if self._library is None:
            self._library = Library(self._config)
        return self._library

    def size(self, split: Split) -> int | None:
        train, held_out = self.library.sizes
        return train if split == "train" else held_out

    def instance(self, split: Split, instance: int) -> Instance:
        index = instance if split == "train" else self.library.sizes[0] + instance
        return Instance(None, ({"role": "user", "content": self.library.words(index)},), None, index)

    def environment(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self.library)

    def score(self, instance: Instance, completion: str) -> Score:
        raise TaskError(f"{WHERE}: its environments judge whole episodes, and no completion alone")


class Library:
    """The environment, its tasks, and what serves them in this process: made once, for all attempts."""

    def __init__(self, config: VerifiersConfig) -> None:
        import verifiers.v1 as vf

        self.vf: Any = vf
        try:
            taskset = config.env["taskset"]
            kind = vf.env_config_type(taskset["id"], config.env.get("id", ""))
            self.env: Any = vf.load_environment(kind.model_validate(config.env))
            most = config.size + config.eval_size
            self._tasks = list(itertools.islice(self.env.taskset, most))
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"{WHERE}: [task.env] cannot be loaded: {error}") from error
        if len(self._tasks) < 2:
            raise ConfigError(f"{WHERE}: the taskset has {len(self._tasks)} tasks: at least 2 are needed, one held out")
        held_out = min(config.eval_size, max(1, len(self._tasks) - config.size))
        self.sizes = (len(self._tasks) - held_out, held_out)
        self.endpoint = Endpoint()
        self._serves: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def task(self, index: int) -> Any:
        return self._tasks[index]

    def words(self, index: int) -> str:
        """What a task asks, for people: what the model sees is its harness's."""
        return str(self._tasks[index].data.prompt or "")

    async def serve(self) -> None:
        """Start what all episodes share, once, and keep it up as long as the worker's loop runs."""
        if self._serves is None:
            self._serves = asyncio.create_task(self._serve())
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait([ready, self._serves], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serves.done():
            self._serves.result()  # raises what kept it from starting

    async def _serve(self) -> None:
        await self.endpoint.start()
        async with self.env.serving():
            self._ready.set()
            await asyncio.Event().wait()


class VerifiersEnvironment:
    """One episode: it runs until it asks the model for a turn, which is an observation, or is over."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._key = ""
        self._episode: asyncio.Task[Any] | None = None
        self._asked: ModelCall | None = None
        self.tools: list[dict[str, Any]] = []

    async def reset(self, instance: Instance, seed: int) -> Observation:
        library, vf = self._library, self._library.vf
        await library.serve()
        self._key = library.endpoint.admit(self._calls)
        client = vf.EvalClientConfig(base_url=library.endpoint.url(self._key), api_key_var="ASYNC_RL_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        task = library.task(instance.data)
        self._episode = asyncio.create_task(library.env.run_episode(task, context))
        self._asked = await self._next()
        if self._asked is None:
            raise TaskError(f"the episode asked the model nothing: {self._errors() or 'it ended at once'}")
        self.tools = list(self._asked.tools)
        return self._asked.messages

    async def step(self, said: Said) -> StepResult:
        before = self._asked
        assert before is not None
        before.answer.set_result(completion_of(said, bool(before.tools)))
        self._asked = await self._next()
        if self._asked is not None:
            return StepResult(messages_since(before, self._asked))
        assert self._episode is not None
        episode = self._episode.result()
        if not episode.ok:
            raise TaskError(f"the episode failed: {self._errors() or 'no trace of it is whole'}")
        numbers = {name: float(value) for trace in episode.traces for name, value in trace.metrics.items() if value}
        return StepResult("", float(sum(trace.reward for trace in episode.traces)), True, numbers)

    async def close(self) -> None:
        self._library.endpoint.dismiss(self._key)
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.wait([self._episode])

    async def _next(self) -> ModelCall | None:
        """The next turn that is asked for; None when the episode is over."""
        assert self._episode is not None
        asked = asyncio.ensure_future(self._calls.get())
        await asyncio.wait([asked, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    def _errors(self) -> str:
        """What the episode says went wrong, without its tracebacks."""
        assert self._episode is not None
        episode = self._episode.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in getattr(trace, "errors", ()))]
        return "; ".join(f"{error.type}: {error.message}" for error in errors)

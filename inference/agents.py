"""Attempts played by agents that speak HTTP (async_rl.tasks.agent): the driver.

    attempt ─> session with a key ─> the program, with OPENAI_BASE_URL and OPENAI_API_KEY
                  │ its calls: inference.agent_endpoint ─> inference.agent_session ─> the engine
                  └ the program ends ─> the answer that is scored, or the reward that it says

A program that fails, that never asks the model, or that was to say a reward and does not, is a failed environment: the
attempt is tried again. One that runs into a limit (time, calls, tokens) is cut: what it has then is scored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.scratch import Scratch
from async_rl.tasks.agent import Agent, AgentConfig
from async_rl.tasks.task import instance_of
from inference.agent_endpoint import AgentEndpoint
from inference.agent_forms import BadRequest, RewardGiven, read_reward
from inference.agent_process import AgentFailed, Ran, remove, run_program
from inference.agent_session import Session
from inference.episodes import Play
from inference.rollout import Outcome

log = logging.getLogger("agents")

REWARD_FILE = "reward.json"
MAX_REWARD_BYTES = 1 << 20
TOLD_CHARACTERS = 2000  # of what a program that failed wrote last


class AgentDriver:
    """Plays attempts of `task`. The tokenizer is used in the event loop alone: no other thread may use it meanwhile."""

    def __init__(self, task: Agent, tokenizer: Any) -> None:
        check_agent(task.options)
        self._task = task
        self._options = task.options
        self._tokenizer = tokenizer
        self._endpoint = AgentEndpoint()
        self._url = ""
        self._starting = asyncio.Lock()
        self._scratch: Scratch | None = None

    async def play(self, play: Play) -> Outcome:
        session = Session(play, self._tokenizer, self._options.max_calls)
        folder = await self._folder(play)
        key = self._endpoint.admit(session)
        try:
            ran = await run_program(
                self._options.command, folder, self._given(play), agent_environment(self._url, key, folder),
                self._options.time_limit, session.trouble,
            )  # fmt: skip
            reward = _written_reward(folder) if self._options.scored == "agent" else None
        finally:
            self._endpoint.dismiss(key)
            await remove(folder)
        _tell(play, ran)
        return self._outcome(play, session, ran, reward or session.reward)

    async def close(self) -> None:
        await self._endpoint.close()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    async def _folder(self, play: Play) -> Path:
        """A new one for this attempt; with the first of them the endpoint begins to listen."""
        async with self._starting:
            if self._scratch is None:
                self._url = await self._endpoint.start()
                self._scratch = Scratch()
                log.info("agents reach the model at %s", self._url)
        folder = self._scratch.path / "{}-{}".format(*play.attempt.key)
        folder.mkdir(mode=0o700)
        return folder

    def _given(self, play: Play) -> bytes:
        """The instance, for the program. The right answer is for one alone that has to say its reward."""
        attempt = play.attempt
        instance = instance_of(self._task, attempt.split, attempt.instance)
        given: dict[str, Any] = {
            "split": attempt.split, "instance": attempt.instance, "seed": attempt.seed, "prompt": instance.prompt,
            "messages": instance.messages,
        }  # fmt: skip
        if self._options.scored == "agent":
            given |= {"answer": instance.answer, "data": instance.data}
        return msgspec.json.encode(given)

    def _outcome(self, play: Play, session: Session, ran: Ran, reward: RewardGiven | None) -> Outcome:
        """Raises AgentFailed, and SampleFailed where the engine has failed it."""
        if session.failure is not None:
            raise session.failure
        cut = session.cut or ran.code is None
        if ran.code and not cut:
            raise AgentFailed(f"the agent ended with exit code {ran.code}: {_last_line(ran.stderr)}")
        if not play.transcript.calls:
            why = "the agent ended without a call of the model"
            raise AgentFailed("the agent's first prompt leaves no room for an answer" if session.cut else why)
        if self._options.scored == "agent":
            if reward is None and not cut:
                raise AgentFailed(
                    f"the agent said no reward: it posts one to OPENAI_BASE_URL/reward, or writes {REWARD_FILE}"
                )
            given = reward or RewardGiven(0.0)
            return Outcome(given.reward, given.components, cut)
        answer = session.said if self._options.scored == "message" else ran.stdout
        return Outcome(cut=cut, answer=answer)


def check_agent(options: AgentConfig) -> None:
    """That what is needed is on this machine. Raises AsyncRLError."""
    if find_spec("aiohttp") is None:
        raise AsyncRLError(
            "[task] kind = \"agent\" needs aiohttp on the machines of nodes: in the checkout, pip install '.[agents]'"
        )
    program = options.command[0]
    if shutil.which(program, path=program_path(os.environ)) is None:
        raise AsyncRLError(
            f"[task] command: there is no program {program!r} on this machine, by its path or in PATH: give its "
            "absolute path, the same on every machine of a node"
        )


def program_path(environment: Mapping[str, str]) -> str:
    """As in an activated environment: `python` is the interpreter that the node runs with."""
    return os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])


def agent_environment(url: str, key: str, folder: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the program finds: the node's own environment, where the model is, and where its files are."""
    found = dict(os.environ if base is None else base)
    for name in [name for name in found if name.startswith("OPENAI_")]:  # a key of the user's is not for it
        del found[name]
    found.pop("PYTHONSAFEPATH", None)  # a script may import what lies beside it
    own = {
        "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key,
        "ASYNC_RL_INSTANCE": str(folder / "instance.json"), "ASYNC_RL_REWARD": str(folder / REWARD_FILE),
        "TMPDIR": str(folder),
        "PATH": program_path(found),
    }  # fmt: skip
    for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
        own[name] = ",".join(each for each in (found.get(name, ""), "127.0.0.1") if each)
    return found | own


def _written_reward(folder: Path) -> RewardGiven | None:
    """Raises AgentFailed for a file that holds none."""
    try:
        # Not to wait: what lies there is the program's, and may be a pipe to which nobody writes.
        with os.fdopen(os.open(folder / REWARD_FILE, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AgentFailed(f"{REWARD_FILE}: it is no file")
            return read_reward(file.read(MAX_REWARD_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, BadRequest) as error:
        raise AgentFailed(f"{REWARD_FILE}: {error}") from error


def _tell(play: Play, ran: Ran) -> None:
    lease, sample = play.attempt.key
    how = "was ended at a limit" if ran.code is None else f"ended with exit code {ran.code}"
    level = logging.WARNING if ran.code else logging.DEBUG
    log.log(level, "the agent of attempt %d/%d %s: %s", lease, sample, how, ran.stderr[-TOLD_CHARACTERS:].strip())


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it wrote nothing to stderr")

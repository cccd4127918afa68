"""An agent's program: started with a session of its own, scored by what it leaves, gone with all that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_house import LARGE, ROOM, TASK, SaysWhatItIsTold, chat_tokenizer
from gone import gone
from play_house import PlayHouse, lease

from async_rl.errors import AsyncRLError
from async_rl.tasks.agent import Agent, AgentConfig
from async_rl.trajectory import Trajectory
from inference.agent_process import KEPT_BYTES, run_program
from inference.agents import AgentDriver, agent_environment
from inference.episodes import Limits

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.timeout(90)

# What every program of these tests begins with: a client of a few lines, so that none has to import a large one.
CLIENT = """
import json, os, sys, urllib.request
def ask(content, path="/completions", **more):
    body = json.dumps({"prompt": content, **more} if path == "/completions" else content).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    answer = json.loads(urllib.request.urlopen(request).read())
    return answer["choices"][0]["text"] if "choices" in answer else answer
instance = json.load(sys.stdin)
"""


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., tuple[Trajectory, PlayHouse]]]:
    """Plays one attempt with a program, and gives what the buffer would read."""
    made: list[PlayHouse] = []

    def run(program: str, limits: Limits = ROOM, **options: Any) -> tuple[Trajectory, PlayHouse]:
        file = tmp_path / "program.py"
        file.write_text(CLIENT + program)
        task = Agent(AgentConfig(command=("python", str(file)), of={"kind": "digit_sort", "digits": 5}, **options))
        tokenizer = chat_tokenizer(LARGE)
        engine = SaysWhatItIsTold(lambda prompt: prompt[-3:], tokenizer.eos_token_id)
        made.append(PlayHouse(engine, task, tokenizer, AgentDriver(task, tokenizer), limits))
        made[-1].start(lease(1, 0))
        made[-1].run()
        return made[-1].done[1, 0], made[-1]

    yield run
    for each in made:
        each.close()


# --- what comes of an attempt ----------------------------------------------------------------------------------------


def test_the_last_message_is_scored_by_the_task(play: Callable[..., tuple[Trajectory, PlayHouse]]) -> None:
    trajectory, house = play('ask("first"); ask(instance["prompt"]); print("not this")')
    assert trajectory.status == "ok"
    (scored,) = house.scored
    assert scored.completion == TASK.instance("train", 1).prompt[-3:]
    assert (trajectory.reward, trajectory.components, len(trajectory.segments)) == (1.0, {"right": 1.0}, 2)


def test_or_what_the_program_prints(play: Callable[..., tuple[Trajectory, PlayHouse]]) -> None:
    _, house = play('print("x" * 10**6); ask("a"); print("the answer")', scored="stdout")
    assert house.scored[0].completion.endswith("x\nthe answer\n")
    assert len(house.scored[0].completion) == KEPT_BYTES


@pytest.mark.parametrize("how", ["posts", "writes"])
def test_or_the_program_says_the_reward_and_then_it_is_told_the_answer(
    play: Callable[..., tuple[Trajectory, PlayHouse]], how: str
) -> None:
    reward = '{"reward": 0.25, "components": {"length": len(instance["answer"])}}'
    if how == "posts":
        says = f'ask({reward}, "/reward")'
    else:
        says = f'json.dump({reward}, open(os.environ["ASYNC_RL_REWARD"], "w"))'
    trajectory, house = play(f'ask("a"); {says}', scored="agent")
    assert (trajectory.reward, trajectory.components, house.scored) == (0.25, {"length": 5.0}, [])


def test_only_a_program_that_has_to_score_is_told_the_answer(
    play: Callable[..., tuple[Trajectory, PlayHouse]],
) -> None:
    told = 'ask("a"); print(sorted(instance), open("instance.json").read() == json.dumps(instance))'
    _, house = play(
        told.replace("json.dumps(instance)", "json.dumps(instance, separators=(',', ':'))"), scored="stdout"
    )
    assert house.scored[0].completion == "['instance', 'messages', 'prompt', 'seed', 'split'] True\n"


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ('ask("a"); raise ValueError("no luck")', "exit code 1: ValueError: no luck"),
        ('ask("a"); os.kill(os.getpid(), 9)', "exit code 137"),
        ("print('done')", "without a call of the model"),
        ('ask("a" * 5000)', "first prompt leaves no room"),
        ('ask("a"); open("reward.json", "w").write("[]")', "reward.json: A reward is"),
        ('ask("a"); os.mkfifo("reward.json")', "reward.json: it is no file"),
        ('ask("a")', "said no reward"),
    ],
)
def test_a_program_that_fails_is_no_reward(
    play: Callable[..., tuple[Trajectory, PlayHouse]], program: str, note: str
) -> None:
    scored = "agent" if "reward" in note else "message"
    trajectory, _ = play(program, scored=scored)
    assert (trajectory.status, trajectory.reward) == ("env_failed", 0.0)
    assert note in trajectory.note


@pytest.mark.parametrize("limit", ["time", "calls", "tokens"])
def test_a_program_that_runs_into_a_limit_is_cut_and_what_it_has_is_scored(
    play: Callable[..., tuple[Trajectory, PlayHouse]], limit: str
) -> None:
    # A busy machine may not come to the first call within the shortest.
    tries: list[dict[str, Any]] = {
        "time": [{"time_limit": 2.0}, {"time_limit": 10.0}, {"time_limit": 40.0}],
        "calls": [{"max_calls": 3}],
        "tokens": [{}],
    }[limit]
    room = Limits(64, 40) if limit == "tokens" else ROOM
    program = "import time\nfor _ in range(10**6): ask('abc')\n"
    for options in tries:
        trajectory, house = play(program.replace("ask('abc')", "ask('abc'); time.sleep(0.1)"), room, **options)
        if trajectory.status == "ok":
            break
    assert (trajectory.status, trajectory.segments[-1].finish) == ("ok", "length")
    assert house.scored[0].completion in ("a", "ab", "abc")


# --- the program -----------------------------------------------------------------------------------------------------


def run(folder: Path, *command: str, limit_s: float = 30.0) -> Any:
    async def body() -> Any:
        environment = agent_environment("http://127.0.0.1:1/v1", "key", folder)
        trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return await run_program(command, folder, b"{}", environment, limit_s, trouble)

    return asyncio.run(body())


LEAVES_ONE = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


LEAVES_A_SESSION = LEAVES_ONE.replace("'600']", "'600'], start_new_session=True")


@pytest.mark.parametrize("program", [LEAVES_ONE, LEAVES_A_SESSION])
@pytest.mark.parametrize("ends", ["by itself", "at its limit"])
def test_what_it_started_ends_with_it(tmp_path: Path, ends: str, program: str) -> None:
    wait = "" if ends == "by itself" else "; import time; time.sleep(600)"
    for limit_s in (60.0,) if ends == "by itself" else (1.0, 10.0, 50.0):  # as long as it takes to start the two
        ran = run(tmp_path, sys.executable, "-c", program + wait, limit_s=limit_s)
        if ran.stdout:
            break
    assert ran.code == (0 if ends == "by itself" else None)
    assert gone(int(ran.stdout))


@pytest.mark.parametrize("leaves", [LEAVES_ONE, LEAVES_A_SESSION])
def test_it_ends_with_the_node_even_when_that_is_killed(tmp_path: Path, leaves: str) -> None:
    """A node of a few lines runs a program that leaves another, and is killed by kill -9."""
    program = leaves.replace("print(", "open('pids', 'w').write('%d %d' % (__import__('os').getpid(), ")
    program = program.replace(".pid, flush=True)", ".pid))") + "; import time; time.sleep(600)"
    node = (
        "import asyncio, os, sys; from pathlib import Path; from inference.agent_process import run_program\n"
        "async def body():\n"
        "    trouble = asyncio.get_running_loop().create_future()\n"
        f"    command = [sys.executable, '-c', {program!r}]\n"
        "    await run_program(command, Path(sys.argv[1]), b'', os.environ, 600, trouble)\n"
        "asyncio.run(body())\n"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", node, str(tmp_path)])
    try:
        ends = time.monotonic() + 60
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
            assert time.monotonic() < ends
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "/nowhere/agent", "--fast")
    assert ran.code == 127
    assert "/nowhere/agent: cannot be started: No such file" in ran.stderr


def test_it_finds_its_session_and_nobody_elses_keys(tmp_path: Path) -> None:
    base = {"OPENAI_API_KEY": "the user's", "OPENAI_ORG_ID": "x", "PYTHONSAFEPATH": "1", "NO_PROXY": "a", "KEPT": "1"}
    found = agent_environment("http://127.0.0.1:1/v1", "own", tmp_path, base)
    assert {name: value for name, value in found.items() if name.startswith("OPENAI")} == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_BASE": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "own",
    }
    assert (found["NO_PROXY"], found["no_proxy"], found["KEPT"]) == ("a,127.0.0.1", "127.0.0.1", "1")
    assert "PYTHONSAFEPATH" not in found
    assert found["PATH"].startswith(str(Path(sys.executable).parent))


def test_a_driver_says_at_once_what_this_machine_lacks() -> None:
    task = Agent(AgentConfig(command=("no-such-agent",), of={"kind": "digit_sort"}))
    with pytest.raises(AsyncRLError, match="there is no program 'no-such-agent'"):
        AgentDriver(task, None)


def test_a_cancelled_lease_ends_its_program(play: Callable[..., tuple[Trajectory, PlayHouse]], tmp_path: Path) -> None:
    _, house = play('ask("a")')
    told = tmp_path / "told"
    (tmp_path / "program.py").write_text(
        f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}} {{os.getcwd()}}\\n'); time.sleep(600)"
    )
    house.start(lease(2, 0))
    house.run(until=lambda: told.exists() and told.read_text().endswith("\n"))
    pid, folder = told.read_text().split()
    house.cancel(2)
    assert gone(int(pid))
    house.run(until=lambda: not Path(folder).exists())
    assert (2, 0) not in house.done


def test_folders_are_private_and_taken_away(play: Callable[..., tuple[Trajectory, PlayHouse]]) -> None:
    program = 'ask("a"); open("left", "w"); print(os.getcwd(), oct(os.stat(".").st_mode & 0o777), os.environ["TMPDIR"])'
    _, house = play(program, scored="stdout")
    folder, mode, temporary = house.scored[0].completion.split()
    assert (mode, temporary) == ("0o700", folder)
    assert not Path(folder).exists()
    house.close()
    assert not Path(folder).parent.exists()

import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from inference.scoring import BATCH, Scorer

TASK = '''
import os, subprocess, sys, time
from async_rl.config import Section
from async_rl.tasks.task import Instance, Score

class Config(Section, frozen=True, kw_only=True):
    pids: str = ""

class Scripted:
    """Does what the completion says."""
    Config = Config
    def __init__(self, config):
        if config.pids:
            with open(config.pids, "a") as file:
                print(os.getpid(), file=file)
    def size(self, split):
        return 10
    def instance(self, split, instance):
        return Instance(f"{split} {instance}", None, str(instance))
    def score(self, instance, completion):
        command, _, rest = completion.partition(" ")
        if command == "hang":
            time.sleep(600)
        if command == "fork":
            child = subprocess.Popen(["sleep", "600"])
            with open(rest, "w") as file:
                print(child.pid, file=file)
            time.sleep(600)
        if command == "raise":
            raise ValueError(rest)
        if command == "sys.exit":
            sys.exit(rest)
        if command == "die":
            os._exit(7)
        if command == "abort":
            os.abort()
        if command == "print":
            print("x" * 100_000, flush=True)
            os.write(1, b"raw " * 1000)
        if command == "read":
            return Score(float(len(sys.stdin.read())), {})
        if command == "nan":
            return Score(float("nan"), {})
        if command == "none":
            return None
        return Score(float(completion == instance.answer), {"length": len(completion)})
'''


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A [task] table of a user's own task, importable by workers through PYTHONPATH."""
    (tmp_path / "scripted_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return {"kind": "scripted_task:Scripted", "pids": str(tmp_path / "pids")}


@pytest.fixture
def scorers():
    """Makes scorers with a queue each, and closes them."""
    made = []

    def make(table, timeout_s=60.0, workers=1):
        results = queue.SimpleQueue()
        made.append(Scorer(table, timeout_s, results, workers))
        return made[-1], results

    yield make
    for scorer in made:
        scorer.close()


def take(results, count):
    return [results.get(timeout=60) for _ in range(count)]


def alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid, seconds=20.0):
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def pids(table):
    with open(table["pids"]) as file:
        return [int(line) for line in file]


def test_one_worker_answers_in_order_under_the_keys_given(table, scorers):
    scorer, results = scorers(table)
    keys = [(n, "sample", n % 3) for n in range(5 * BATCH)]
    for n, key in enumerate(keys):
        scorer.submit(key, "train", n, str(n % 10) if n % 2 else "wrong")
    scored = take(results, len(keys))
    assert [s.key for s in scored] == keys
    assert [s.reward for s in scored] == [n % 2 for n in range(len(keys))]  # instance ids wrap at the size of 10
    assert scored[0].components == {"length": 5.0}
    assert all(s.error == "" and 0 <= s.seconds < 60 for s in scored)
    assert scorer.pending == 0
    assert len(pids(table)) == 1


def test_several_workers_share_the_jobs_and_lose_none(table, scorers):
    scorer, results = scorers(table, workers=2)
    for n in range(6 * BATCH):
        scorer.submit(n, "eval", 3, "3")
    scored = take(results, 6 * BATCH)
    assert sorted(s.key for s in scored) == list(range(6 * BATCH))
    assert all(s.reward == 1 for s in scored)


def test_a_hanging_completion_costs_only_itself(table, scorers):
    scorer, results = scorers(table, timeout_s=0.5)
    scorer.submit("warm", "train", 1, "1")
    take(results, 1)
    for n, completion in enumerate(["1", "hang", "1", "1"]):
        scorer.submit(n, "train", 1, completion)
    scored = take(results, 4)
    assert [(s.key, s.reward) for s in scored] == [(0, 1), (1, 0), (2, 1), (3, 1)]
    assert "longer than 0.5 s" in scored[1].error
    assert scored[1].seconds == 0.5
    assert [bool(s.error) for s in scored] == [False, True, False, False]
    first, second = pids(table)
    assert not alive(first)
    assert alive(second)


def test_a_killed_worker_takes_along_what_its_verifier_started(table, scorers, tmp_path):
    scorer, results = scorers(table, timeout_s=5.0)
    scorer.submit(0, "train", 1, f"fork {tmp_path / 'child'}")
    assert take(results, 1)[0].error
    wait_until_dead(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(("completion", "says"), [("die", "exit code 7"), ("abort", "SIGABRT")])
def test_a_crash_is_an_error_with_its_cause_and_the_rest_goes_on(table, scorers, completion, says):
    scorer, results = scorers(table)
    for n, text in enumerate(["1", completion, "1"]):
        scorer.submit(n, "train", 1, text)
    scored = take(results, 3)
    assert [(s.key, s.reward) for s in scored] == [(0, 1), (1, 0), (2, 1)]
    assert says in scored[1].error
    assert len(pids(table)) == 2


def test_what_a_verifier_raises_or_returns_amiss_is_an_error_and_the_worker_stays(table, scorers):
    scorer, results = scorers(table)
    wrong = {"raise too bad": "ValueError: too bad", "sys.exit 3": "SystemExit: 3", "nan": "nan", "none": "TypeError"}
    for completion in [*wrong, "1"]:
        scorer.submit(completion, "train", 1, completion)
    scored = take(results, len(wrong) + 1)
    for result in scored[:-1]:
        assert wrong[result.key] in result.error
        assert result.reward == 0
    assert scored[-1].reward == 1
    assert len(pids(table)) == 1


def test_a_verifier_that_prints_or_reads_does_not_touch_the_protocol(table, scorers):
    scorer, results = scorers(table)
    for n, completion in enumerate(["print", "read", "1"]):
        scorer.submit(n, "train", 1, completion)
    assert [(s.reward, s.error) for s in take(results, 3)] == [(0, ""), (0, ""), (1, "")]


def test_large_completions_behind_a_hanging_one_do_not_block(table, scorers):
    scorer, results = scorers(table, timeout_s=2.0)
    scorer.submit("hang", "train", 1, "hang")
    for n in range(4):
        scorer.submit(n, "train", 1, "y" * 500_000)  # far more than a pipe holds
    scored = take(results, 5)
    assert scored[0].error
    assert [(s.key, s.components["length"]) for s in scored[1:]] == [(n, 500_000.0) for n in range(4)]


def test_a_task_that_cannot_be_loaded_fails_every_completion_with_the_reason(scorers):
    scorer, results = scorers({"kind": "digit_sort", "digit": 3})
    scorer.submit(0, "train", 1, "x")
    assert "did you mean `digits`" in take(results, 1)[0].error


@pytest.mark.parametrize("completion", ["1", "hang"])
def test_close_leaves_no_process(table, scorers, completion):
    scorer, results = scorers(table, workers=2)
    for n in range(2 * BATCH + 1):
        scorer.submit(n, "train", 1, "1" if n == 0 else completion)
    take(results, 1)
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < 10
    assert pids(table)
    assert not any(alive(pid) for pid in pids(table))
    scorer.close()  # again is harmless


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_worker_that_hangs_dies_with_its_node(table):
    code = (
        "import queue, sys, time\n"
        "from inference.scoring import Scorer\n"
        f"scorer = Scorer({table!r}, 600, results := queue.SimpleQueue())\n"
        "scorer.submit(0, 'train', 1, '1')\n"
        "results.get()\n"
        "scorer.submit(1, 'train', 1, 'hang')\n"
        "print('hanging', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as node:
        assert node.stdout.readline() == b"hanging\n"
        (worker,) = pids(table)
        assert alive(worker)
        os.kill(node.pid, signal.SIGKILL)
    wait_until_dead(worker)


def test_the_worker_imports_no_torch_and_no_other_pool():
    code = (
        "import sys, inference.scoring\n"
        "from async_rl.tasks.registry import load_task\n"
        "load_task({'kind': 'digit_sort'})\n"
        "assert not {'torch', 'transformers', 'zmq', 'buffer', 'trainer'} & set(sys.modules)\n"
        "assert {m for m in sys.modules if m.startswith('inference.')} == {'inference.scoring'}"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)

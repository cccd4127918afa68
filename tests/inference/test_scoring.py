import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
from reward_service import RewardService

from async_rl.scoring_config import ScoringSettings
from async_rl.tasks.registry import load_task
from inference.scoring import Scorer
from inference.scoring_queue import BATCH

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
        if command == "slow":
            time.sleep(float(rest))
            return Score(1.0, {})
        if command == "flaky":
            path, _, fails = rest.partition(" ")
            with open(path, "a") as file:
                file.write("x")
            if os.path.getsize(path) <= int(fails):
                os._exit(3) if os.path.getsize(path) == 1 else 1 / 0
            return Score(1.0, {})
        if command == "crowd":  # waits until four workers are here
            while len(open(rest).readlines()) < 4:
                time.sleep(0.01)
            return Score(1.0, {})
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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return {"kind": "scripted_task:Scripted", "pids": str(tmp_path / "pids")}


@pytest.fixture
def scorers(monkeypatch):
    """Makes scorers with a queue each, and closes them. That a worker ends may take a busy machine a while."""
    monkeypatch.setattr("inference.scoring.REAP_S", 30.0)
    made = []

    def make(table, timeout_s=60.0, workers=1, tries=1):
        results = queue.SimpleQueue()
        settings = ScoringSettings(score_timeout=timeout_s, reward_workers=workers, score_tries=tries)
        made.append(Scorer(table, settings, results))
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


def wait_until_dead(pid, seconds=60.0):
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
    scorer, results = scorers(table, timeout_s=5.0)
    scorer.submit("warm", "train", 1, "1")
    take(results, 1)
    for n, completion in enumerate(["1", "hang", "1", "1"]):
        scorer.submit(n, "train", 1, completion)
    scored = take(results, 4)
    assert [(s.key, s.reward) for s in scored] == [(0, 1), (1, 0), (2, 1), (3, 1)]
    assert "longer than 5 s" in scored[1].error
    assert scored[1].seconds == 5.0
    assert [bool(s.error) for s in scored] == [False, True, False, False]
    first, second = pids(table)
    wait_until_dead(first)
    assert alive(second)


def test_a_killed_worker_takes_along_what_its_verifier_started(table, scorers, tmp_path):
    scorer, results = scorers(table, timeout_s=15.0)
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
    scorer, results = scorers(table, timeout_s=8.0)
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


def test_slow_completions_overlap_in_as_many_workers_as_there_may_be(table, scorers):
    scorer, results = scorers(table, workers=4)
    for n in range(24):
        scorer.submit(n, "train", 1, f"crowd {table['pids']}")
    assert all(s.reward == 1 and not s.error for s in take(results, 24))
    assert len(pids(table)) == 4
    for n in range(24):
        scorer.submit(n, "train", 1, "1")
    assert [s.reward for s in take(results, 24)] == [1] * 24
    assert len(pids(table)) == 4, "no worker is started while one has nothing to do"


def test_a_reward_that_crashes_by_chance_costs_no_sample_and_one_that_always_does_is_given_up(table, scorers, tmp_path):
    scorer, results = scorers(table, tries=3)
    for n in range(3):
        scorer.submit(n, "train", 1, f"flaky {tmp_path / f'flaky-{n}'} {n}")  # fails as often as its last word says
    scorer.submit(3, "train", 1, "raise always")
    scorer.submit(4, "train", 1, "die")
    scored = {s.key: s for s in take(results, 5)}
    assert [(scored[n].reward, scored[n].error) for n in range(3)] == [(1, "")] * 3
    assert scored[3].error == "scoring failed: ValueError: always (3 times in a row)"
    assert scored[4].error == "the scoring worker died (exit code 7) (3 times in a row)"


def reward_table(service, folder, **keys):
    rows = [json.dumps({"question": "2+2?", "answer": "#### 4"})]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    reward = {"kind": "http", "url": service.url, "timeout": 30, **keys}
    return {"kind": "gsm8k", "path": str(folder), "reward": [reward]}


def test_rewards_that_wait_for_a_service_overlap_in_one_worker_up_to_their_limit(scorers, tmp_path):
    together = threading.Barrier(8)

    def number(question):
        together.wait(25)
        return 200, {"reward": float(question["completion"])}, {}

    with RewardService(number, seconds=0.2) as service:
        scorer, results = scorers(reward_table(service, tmp_path, concurrency=8))
        for n in range(32):
            scorer.submit(n, "train", 0, str(n))
        assert {s.key: s.reward for s in take(results, 32)} == {n: float(n) for n in range(32)}
    assert service.most == 8


def test_of_several_at_once_only_the_one_that_crashes_its_worker_is_given_up(scorers, table, tmp_path):
    (tmp_path / "crashing.py").write_text(
        "import os, time\n"
        "def reward(instance, completion):\n"
        "    time.sleep(0.05)\n"
        "    if completion == 'die': os._exit(7)\n"
        "    return float(completion)\n"
    )
    with RewardService(lambda _: (200, {"reward": 0}, {})) as service:
        made = reward_table(service, tmp_path)
        made["reward"] = [{"kind": "python", "function": "crashing:reward", "concurrency": 4}]
        scorer, results = scorers(made, tries=2)
        for n in range(10):
            scorer.submit(n, "train", 0, "die" if n == 5 else str(n))
        scored = {s.key: s for s in take(results, 10)}
    assert {n: s.reward for n, s in scored.items() if not s.error} == {n: float(n) for n in range(10) if n != 5}
    assert scored[5].error == "the scoring worker died (exit code 7) (2 times in a row)"


@pytest.mark.parametrize("completion", ["1", "hang"])
def test_close_leaves_no_process(table, scorers, completion):
    scorer, results = scorers(table, workers=2)
    for n in range(2 * BATCH + 1):
        scorer.submit(n, "train", 1, "1" if n == 0 else completion)
    take(results, 1)
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < 60
    assert pids(table)
    for pid in pids(table):
        wait_until_dead(pid)
    scorer.close()  # again is harmless


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_worker_that_hangs_dies_with_its_node(table):
    code = (
        "import queue, sys, time\n"
        "from inference.scoring import Scorer\n"
        "from async_rl.scoring_config import ScoringSettings\n"
        f"scorer = Scorer({table!r}, ScoringSettings(score_timeout=600), results := queue.SimpleQueue())\n"
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
        "import sys, inference.scoring_worker\n"
        "from async_rl.tasks.registry import load_task\n"
        "load_task({'kind': 'digit_sort'})\n"
        "assert not {'torch', 'transformers', 'zmq', 'buffer', 'trainer'} & set(sys.modules)\n"
        "assert {m for m in sys.modules if m.startswith('inference.')} == {'inference.scoring_worker'}"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_a_set_of_evaluation_with_a_task_of_its_own_is_scored_by_that():
    results = queue.SimpleQueue()
    ours, theirs = {"kind": "digit_sort", "digits": 5}, {"kind": "digit_sort", "digits": 3}
    settings = ScoringSettings(score_timeout=60.0, reward_workers=1)
    scorer = Scorer(ours, settings, results, eval_tasks={"short": theirs})
    try:
        answers = {name: load_task(table).instance("eval", 4).answer for name, table in (("", ours), ("short", theirs))}
        for asked in ("", "short"):
            for answered in ("", "short"):
                scorer.submit((asked, answered), "eval", 4, answers[answered], asked)
        rewards = {each.key: each.reward for each in take(results, 4)}
    finally:
        scorer.close()
    assert {key: reward == 1.0 for key, reward in rewards.items()} == {
        ("", ""): True, ("", "short"): False, ("short", ""): False, ("short", "short"): True
    }


def test_a_stream_that_has_to_be_read_far_is_no_late_score(scorers, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": "q", "a": str(n)}) + "\n" for n in range(40)))
    (tmp_path / "slow_filters.py").write_text("import time\n\ndef keep(row):\n    time.sleep(0.05)\n    return True\n")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    source = {"path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a", "streaming": True, "size": 40}
    source |= {"block": 10, "filter": [{"function": "slow_filters:keep"}]}
    scorer, results = scorers({"kind": "dataset", "source": [source]}, timeout_s=1.5, tries=10)
    scorer.submit("far", "train", 39, "39")
    scored = results.get(timeout=60)
    assert (scored.error, scored.reward) == ("", 1.0)


def test_a_set_of_evaluation_that_scores_fewer_at_once_than_the_run_has_nobody_late_for_waiting(tmp_path, monkeypatch):
    (tmp_path / "slow_tasks.py").write_text(
        "import time\n"
        "from async_rl.config import Section\n"
        "from async_rl.tasks.task import Instance, Score\n"
        "class Nothing(Section, frozen=True): pass\n"
        "class Rewards: concurrency, seconds = 14, 0.0\n"
        "class Run:\n"
        "    Config, rewards = Nothing, Rewards()\n"
        "    def __init__(self, config): pass\n"
        "    def size(self, split): return 20\n"
        "    def instance(self, split, number): return Instance('p', None, 'a')\n"
        "    def score(self, instance, completion): time.sleep(0.5); return Score(1.0, {})\n"
        "class HeldOut(Run): rewards = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    settings, results = ScoringSettings(score_timeout=6.0, reward_workers=1, score_tries=1), queue.SimpleQueue()
    scorer = Scorer({"kind": "slow_tasks:Run"}, settings, results, {"held-out": {"kind": "slow_tasks:HeldOut"}})
    try:
        for number in range(14):
            scorer.submit(number, "eval", number, "", "held-out")
        assert [scored.error for scored in (results.get(timeout=60) for _ in range(14))] == [""] * 14
    finally:
        scorer.close()

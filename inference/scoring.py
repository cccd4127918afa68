"""Scoring in worker processes: a verifier may hang, crash, print or leak, and the node goes on.

    node thread --submit--> jobs --> one thread per worker --pipe--> worker process: task.score
    node thread <---------- results (the caller's queue) <--pipe----

Each worker process is `python -P -m inference.scoring`, spoken to over its standard input and output in frames: the
length as 4 bytes, little-endian, then one msgpack value. It builds the task from the same [task] table, answers
`Ready`, then gets jobs, a few at a time so that the pipe's round trip is shared, and answers each as it is done. A
worker that does not answer in time is killed with whatever it started; the completion it was on gets an error, the
ones sent after it are sent again to the next worker.

This module is the worker's main program too, so it imports nothing that is slow or optional.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.pipes import die_with, frame, take_over_pipes
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Score, Split, instance_of

START_TIMEOUT_S = 120.0  # importing a task's package takes seconds, on a busy machine many
BATCH = 16  # jobs in a worker's pipe at once: more saves little, and all wait behind one that hangs
MAX_FRAME_BYTES = 64 << 20
READ_BYTES = 1 << 16
IDLE_S = 60.0  # how long a thread without a job sleeps
END_S = 5.0  # for the threads to end their workers
REAP_S = 1.0  # between a dying process's closed pipes and its exit code lie microseconds
CACHED_INSTANCES = 256  # the samples of a group ask for the same one


class Scored(NamedTuple):
    """What became of one completion. `seconds` is the worker's time for it. With `error` not empty there is no
    reward: the verifier raised, crashed or took too long."""

    key: Any
    reward: float
    components: dict[str, float]
    seconds: float
    error: str


# --- what crosses the pipe -------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, array_like=True):
    task: dict[str, Any]
    eval_tasks: dict[str, dict[str, Any]]


class Ready(msgspec.Struct, array_like=True):
    error: str


class Job(msgspec.Struct, array_like=True):
    number: int
    split: Split
    instance: int
    completion: str
    eval_set: str


class Verdict(msgspec.Struct, array_like=True):
    number: int
    reward: float
    components: dict[str, float]
    seconds: float
    error: str


# --- the node's side -------------------------------------------------------------------------------------------------


class Scorer:
    """Scores completions in `workers` processes and puts a `Scored` for each into `results`, in any order, and the
    error that ended a thread of this class, should there be one.

    `task_table` is the [task] section, `eval_tasks` are the tables of the sets of evaluation that have one of their
    own; `timeout_s` bounds the scoring of one completion. `submit` and `close` may be called from any one thread. After
    `close` there is no process left, and what was not scored yet never will be."""

    def __init__(
        self,
        task_table: Mapping[str, Any],
        timeout_s: float,
        results: queue.SimpleQueue[Any],
        workers: int = 1,
        eval_tasks: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        setup = Setup(dict(task_table), {name: dict(table) for name, table in (eval_tasks or {}).items()})
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._keys: dict[int, Any] = {}
        self._numbers = 0
        self._results = results
        self._closing_read, self._closing_write = os.pipe()
        self._threads = [
            threading.Thread(target=self._serve, args=(setup, timeout_s), name=f"scorer-{n}", daemon=True)
            for n in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Any, split: Split, instance_id: int, completion: str, eval_set: str = "") -> None:
        """Queue one completion; `key` comes back with its result and means nothing here."""
        self._numbers += 1
        self._keys[self._numbers] = key
        self._jobs.put(Job(self._numbers, split, instance_id, completion, eval_set))

    @property
    def pending(self) -> int:
        """Completions submitted and not yet in `results`."""
        return len(self._keys)

    def close(self) -> None:
        if not self._threads:
            return
        os.write(self._closing_write, b"x")  # never read: it wakes every thread, and keeps doing so
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self._threads = []
        os.close(self._closing_read)
        os.close(self._closing_write)

    def _serve(self, setup: Setup, timeout_s: float) -> None:
        """One worker's thread: take a few jobs, have them scored, until closed. It alone owns its process; a worker
        dies with this thread (PR_SET_PDEATHSIG is about the thread that started it)."""
        waiting: deque[Job] = deque()
        worker: Worker | None = None
        try:
            while self._fill(waiting):
                if not waiting:
                    continue
                try:
                    if worker is None:
                        worker = Worker(self._closing_read)
                        worker.start(setup)
                    self._score(worker, waiting, timeout_s)
                except WorkerFailed as failure:
                    if worker is not None:
                        worker.kill()
                    worker = None
                    # The worker was on the first job without an answer; those behind it are innocent.
                    culprit = waiting.popleft()
                    self._deliver(Verdict(culprit.number, 0.0, {}, failure.seconds, str(failure)))
        except Closed:
            pass
        except Exception as error:  # whatever it is, nobody may be left waiting for this thread
            self._results.put(error)
        finally:
            if worker is not None:
                worker.kill()

    def _fill(self, waiting: deque[Job]) -> bool:
        """Wait a while for a job if there is none, then take what is there, up to BATCH. False when closed."""
        try:
            while len(waiting) < BATCH:
                job = self._jobs.get(timeout=IDLE_S) if not waiting else self._jobs.get_nowait()
                if job is None:
                    return False
                waiting.append(job)
        except queue.Empty:
            pass
        return True

    def _score(self, worker: Worker, waiting: deque[Job], timeout_s: float) -> None:
        """Send all waiting jobs and deliver their verdicts; each is taken off `waiting` as it is answered."""
        worker.send(b"".join(map(frame, waiting)))
        while waiting:
            verdict = worker.receive(Verdict, timeout_s, "scoring one completion")
            if verdict.number != waiting[0].number:
                raise WorkerFailed("the scoring worker answered out of turn", 0.0)
            waiting.popleft()
            self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> None:
        key = self._keys.pop(verdict.number)
        self._results.put(Scored(key, verdict.reward, verdict.components, verdict.seconds, verdict.error))


class WorkerFailed(AsyncRLError):
    """The worker is of no use any more; `seconds` it had been given."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class Closed(Exception):
    """The scorer is being closed."""


class Worker:
    """One worker process and the parent's end of its pipes. No method blocks past its time-out or the closing."""

    def __init__(self, closing: int) -> None:
        self._closing = closing
        # -P: a user's scoring.py or inference.py in the current directory must not be taken for ours. A session of
        # its own: Ctrl-C is the node's business, and a kill reaches what the verifier started.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inference.scoring", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise WorkerFailed(f"a scoring worker cannot be started: {error}", 0.0) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def start(self, setup: Setup) -> None:
        self.send(frame(setup))
        ready = self.receive(Ready, START_TIMEOUT_S, "the scoring worker's start")
        if ready.error:
            raise WorkerFailed(f"the scoring worker cannot load the task: {ready.error}", 0.0)

    def send(self, data: bytes) -> None:
        """Hand over bytes; they leave while `receive` waits, so that a worker that does not read cannot block us."""
        self._unsent = memoryview(bytes(self._unsent) + data)

    def receive(self, kind: type[Any], timeout_s: float, awaited: str) -> Any:
        """The next message. Raises WorkerFailed when it does not come in time or the worker ends, Closed."""
        start = time.monotonic()
        while (body := self._take_frame()) is None:
            left = start + timeout_s - time.monotonic()
            if left <= 0 or not self._advance(left):
                raise WorkerFailed(f"{awaited} took longer than {timeout_s:g} s: worker killed", timeout_s)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise WorkerFailed(f"the scoring worker sent what is no {kind.__name__}: {error}", 0.0) from error

    def _advance(self, timeout_s: float) -> bool:
        """Wait for the pipes and move what can be moved; False when the time is up."""
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        poll.register(self._stdout, select.POLLIN)
        if self._unsent:
            poll.register(self._stdin, select.POLLOUT)
        events = dict(poll.poll(timeout_s * 1000))
        if self._closing in events:
            raise Closed
        if self._stdin in events:
            try:
                self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
            except BrokenPipeError:
                raise WorkerFailed(self._ending(), 0.0) from None
        if self._stdout in events:
            data = os.read(self._stdout, READ_BYTES)
            if not data:
                raise WorkerFailed(self._ending(), 0.0)
            self._received += data
        return bool(events)

    def _take_frame(self) -> bytes | None:
        size = int.from_bytes(self._received[:4], "little") if len(self._received) >= 4 else 0
        if size > MAX_FRAME_BYTES:
            raise WorkerFailed(f"the scoring worker sent a frame of {size} bytes", 0.0)
        if len(self._received) < 4 + size or len(self._received) < 4:
            return None
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return body

    def _ending(self) -> str:
        """How a worker that closed its pipes came to its end."""
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return "the scoring worker closed its pipes"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the scoring worker died ({how})"

    def kill(self) -> None:
        """End the worker and all in its session, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# --- the worker's side -----------------------------------------------------------------------------------------------


def judge(task: Any, instances: Any, job: Job) -> Verdict:
    """Score one completion; whatever the verifier raises, or returns that is no score, becomes the verdict's error."""
    start = time.perf_counter()
    try:
        reward, components = task.score(instances(job.split, job.instance), job.completion)
        score = Score(float(reward), {str(name): float(value) for name, value in components.items()})
        if not math.isfinite(score.reward):
            raise ValueError(f"the reward is {score.reward}")
    except (Exception, SystemExit) as error:
        detail = f"{type(error).__name__}: {error}"
        return Verdict(job.number, 0.0, {}, time.perf_counter() - start, f"scoring failed: {detail}")
    return Verdict(job.number, score.reward, score.components, time.perf_counter() - start, "")


def main(parent: int) -> None:
    """The worker: read `Setup`, answer `Ready`, then a `Verdict` for every `Job`, until the input ends."""
    die_with(parent)
    jobs, answer = take_over_pipes()
    setup = msgspec.msgpack.decode(next(jobs), type=Setup)
    try:
        task = load_task(setup.task)
        held_out = {name: load_task(table) for name, table in setup.eval_tasks.items()}
    except Exception as error:
        answer(Ready(f"{type(error).__name__}: {error}"))
        return
    answer(Ready(""))
    ours = _with_instances(task)
    theirs = {name: _with_instances(each) for name, each in held_out.items()}
    decoder = msgspec.msgpack.Decoder(Job)
    for body in jobs:
        job = decoder.decode(body)
        answer(judge(*theirs.get(job.eval_set, ours), job))


def _with_instances(task: Any) -> tuple[Any, Any]:
    return task, functools.lru_cache(CACHED_INSTANCES)(functools.partial(instance_of, task))


if __name__ == "__main__":
    main(int(sys.argv[1]))

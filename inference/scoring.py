"""Scoring in worker processes: a verifier may hang, crash, print or leak, and the node goes on.

    node thread --submit--> one thread (ScoringQueue) --pipe--> worker processes: task.score
    node thread <-- results (the caller's queue) <----pipe----

Each worker process is `python -P -m inference.scoring_worker`. One is started when there is something to score and
nobody free to do so. A fast verifier gets a few completions at a time, so that the pipe's round trip is shared; a slow
one gets one, and further workers the others; rewards that wait for a service get many at once. A worker that does not
answer in time is killed with whatever it started. What then becomes of the completions that it had, the rules in
`inference/scoring_queue.py` say.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.pipes import frame
from async_rl.scoring_config import ScoringSettings
from async_rl.tasks.task import Split
from inference.scoring_queue import ScoringQueue
from inference.scoring_worker import Job, Reading, Ready, Setup, Verdict

log = logging.getLogger("scoring")

START_TIMEOUT_S = 120.0  # importing a task's package takes seconds, on a busy machine many
MAX_FRAME_BYTES = 64 << 20
READ_BYTES = 1 << 16
ANSWER = Verdict | Reading
IDLE_S = 60.0  # how long the thread sleeps when it waits for nothing
END_S = 5.0  # for the thread to end its workers
REAP_S = 1.0  # between a dying process's closed pipes and its exit code lie microseconds


class Scored(NamedTuple):
    """What became of one completion. `seconds` is the worker's time for it. With `error` not empty there is no
    reward: the verifier raised, crashed or took too long, as often as it was tried."""

    key: Any
    reward: float
    components: dict[str, float]
    seconds: float
    error: str


class Scorer:
    """Scores completions in processes and puts a `Scored` for each into `results`, in any order, and the error that
    ended its thread, should there be one.

    `task_table` is the [task] section, `eval_tasks` are the tables of the sets of evaluation that have one of their
    own. `submit` and `close` may be called from any one thread. After `close` there is no process left, and what was
    not scored yet never will be."""

    def __init__(
        self,
        task_table: Mapping[str, Any],
        settings: ScoringSettings,
        results: queue.SimpleQueue[Any],
        eval_tasks: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._keys: dict[int, Any] = {}
        self._numbers = 0
        self._results = results
        self._timeout_s = settings.score_timeout
        eval_tables = {name: dict(table) for name, table in (eval_tasks or {}).items()}
        self._setup = frame(Setup(dict(task_table), eval_tables))
        self._queue = ScoringQueue(settings.reward_workers, settings.score_tries)
        self._workers: dict[int, Worker] = {}
        self._closing = False
        self._awake = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    def submit(self, key: Any, split: Split, instance_id: int, completion: str, eval_set: str = "") -> None:
        """Queue one completion; `key` comes back with its result and means nothing here."""
        self._numbers += 1
        self._keys[self._numbers] = key
        self._jobs.put(Job(self._numbers, split, instance_id, completion, eval_set))
        self._wake()

    @property
    def pending(self) -> int:
        """Completions submitted and not yet in `results`."""
        return len(self._keys)

    def close(self) -> None:
        if self._thread is None:
            return
        self._closing = True
        self._awake = False
        self._wake()
        self._thread.join(END_S)
        self._thread = None
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        if not self._awake:  # else it will look anyway
            self._awake = True
            os.write(self._wake_write, b"x")

    # --- the thread, which alone has processes: a worker dies with the thread that started it -------------------------

    def _work(self) -> None:
        numbers = itertools.count()
        try:
            while not self._closing:
                self._take_in()
                for number, worker in self._workers.items():
                    if jobs := self._queue.take(number, time.monotonic()) if worker.ready else []:
                        worker.send(b"".join(map(frame, jobs)))
                for _ in range(self._queue.to_start):
                    self._start(next(numbers))
                self._wait()
        except Exception as error:  # whatever it is, nobody may be left waiting for this thread
            self._results.put(error)
        finally:
            for worker in self._workers.values():
                worker.kill()

    def _take_in(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.submit(self._jobs.get_nowait())

    def _start(self, number: int) -> None:
        self._queue.start(number)
        try:
            self._workers[number] = Worker()
            self._workers[number].send(self._setup)
        except WorkerFailed as failure:
            self._deliver(self._queue.not_started(number, str(failure)))

    def _wait(self) -> None:
        """For workers to answer or to be late, and for completions to come."""
        poll, owners = select.poll(), {}
        poll.register(self._wake_read, select.POLLIN)
        for number, worker in self._workers.items():
            owners |= worker.register(poll, number)
        now = time.monotonic()
        limits = [limit - now for limit in map(self._deadline, self._workers) if limit is not None]
        patience = 0.0 if self._queue.to_start else max(0.0, min([IDLE_S, *limits]))
        moved = [descriptor for descriptor, _ in poll.poll(patience * 1000)]
        if self._wake_read in moved:
            # In this order: what is submitted before the second line is taken in after it, and later it wakes us again.
            os.read(self._wake_read, READ_BYTES)
            self._awake = False
        for number in dict.fromkeys(owners[each] for each in moved if each in owners):
            self._hear(number)
        now = time.monotonic()
        for number in list(self._workers):
            deadline = self._deadline(number)
            if deadline is not None and deadline <= now:
                self._end_late(number, now)

    def _deadline(self, number: int) -> float | None:
        worker = self._workers[number]
        return self._queue.deadline(number, self._timeout_s) if worker.ready else worker.since + START_TIMEOUT_S

    def _hear(self, number: int) -> None:
        """Move what this worker's pipes can move, and take in what it said."""
        worker = self._workers[number]
        try:
            ended = worker.advance()
            while (body := worker.take_frame()) is not None:
                if worker.ready:
                    self._answered(number, _read(body, ANSWER))
                else:
                    self._started(number, worker, _read(body, Ready))
            if ended:
                raise WorkerFailed(worker.ending())
        except WorkerFailed as failure:
            self._end(number)
            fails = self._queue.lost if worker.ready else self._queue.not_started
            self._deliver(fails(number, str(failure)))

    def _started(self, number: int, worker: Worker, ready: Ready) -> None:
        if ready.error:
            raise WorkerFailed(f"the scoring worker cannot load the task: {ready.error}")
        worker.ready = True
        self._queue.started(number, ready.concurrency, ready.seconds)

    def _answered(self, number: int, answer: Verdict | Reading) -> None:
        try:
            if isinstance(answer, Reading):
                self._queue.reads(number, answer, time.monotonic())
                return
            final = self._queue.answered(number, answer, time.monotonic())
        except KeyError:
            raise WorkerFailed("the scoring worker answered what it was not asked") from None
        self._deliver([final] if final is not None else [])

    def _end_late(self, number: int, now: float) -> None:
        ready = self._workers[number].ready
        self._end(number)
        if ready:
            self._deliver(self._queue.late(number, self._timeout_s, now))
        else:
            why = f"the scoring worker's start took longer than {START_TIMEOUT_S:g} s: worker killed"
            self._deliver(self._queue.not_started(number, why))

    def _end(self, number: int) -> None:
        self._workers.pop(number).kill()

    def _deliver(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            key = self._keys.pop(verdict.number)
            if verdict.error:
                log.warning("attempt %s has no score: %s", key, verdict.error)
            self._results.put(Scored(key, verdict.reward, verdict.components, verdict.seconds, verdict.error))


def _read(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise WorkerFailed(f"the scoring worker sent what is no {getattr(kind, '__name__', kind)}: {error}") from error


class WorkerFailed(AsyncRLError):
    """The worker is of no use any more."""


class Worker:
    """One worker process and this end of its pipes. Nothing here blocks."""

    def __init__(self) -> None:
        # -P: a user's scoring.py or inference.py in the current directory must not be taken for ours. A session of
        # its own: Ctrl-C is the node's business, and a kill reaches what the verifier started.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inference.scoring_worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise WorkerFailed(f"a scoring worker cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self.since = time.monotonic()
        self.ready = False

    def register(self, poll: select.poll, number: int) -> dict[int, int]:
        """With whom to wait for this worker; descriptors under its number."""
        poll.register(self._stdout, select.POLLIN)
        if not self._unsent:
            return {self._stdout: number}
        poll.register(self._stdin, select.POLLOUT)
        return {self._stdout: number, self._stdin: number}

    def send(self, data: bytes) -> None:
        """Hand over bytes; they leave as the worker reads, so that one that does not cannot block us."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        self._push()

    def advance(self) -> bool:
        """Move what can be moved now; whether the worker's output has ended."""
        self._push()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._stdout, READ_BYTES):
                self._received += data
            return True
        return False

    def take_frame(self) -> bytes | None:
        size = int.from_bytes(self._received[:4], "little") if len(self._received) >= 4 else 0
        if size > MAX_FRAME_BYTES:
            raise WorkerFailed(f"the scoring worker sent a frame of {size} bytes")
        if len(self._received) < 4 + size or len(self._received) < 4:
            return None
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return body

    def _push(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has ended, or will be late: its output tells
            self._unsent = memoryview(b"")

    def ending(self) -> str:
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

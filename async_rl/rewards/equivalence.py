"""Whether two mathematical expressions are equal, by math-verify in a process of its own.

math-verify's own time-outs are signals to the main thread, which a long multiplication does not hear. Here the kernel
ends the process when a comparison has used up its processor time, or memory: that is an answer ("no"), as it depends
on the expressions alone. A process that dies or stays silent for another reason is a failure, and no answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import sys
import threading

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.rewards.reward import RewardError
from async_rl.run.pipes import Child, die_with, take_over_pipes

MEMORY_BYTES = 4 << 30  # of address space: sympy needs a tenth, a tower of powers asks for all there is
WALL_FACTOR = 12  # seconds that a second of processor time may take, on a machine that is busy
START_S = 120.0


class Question(msgspec.Struct, array_like=True):
    """Empty texts only ask whether the process is there."""

    right: str
    said: str


class Answer(msgspec.Struct, array_like=True):
    equal: bool


class Comparer:
    """Compares in one process, started when first needed, and again after it was ended. May be called by several
    threads, one of which waits for the other."""

    def __init__(self, cpu_seconds: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._child: Child | None = None
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """The longest that one comparison can take."""
        return float(self._cpu_seconds * WALL_FACTOR)

    def equal(self, right: str, said: str) -> bool | None:
        """None when it took more than its processor time. Raises RewardError."""
        with self._lock:
            child = self._child = self._child or self._start()
            try:
                return child.ask(Question(right, said), Answer, self.seconds).equal
            except AsyncRLError as error:
                code = child.exit_code
                self._end()
                if code == -signal.SIGXCPU:
                    return None
                raise RewardError(f"comparing {said[:80]!r} with {right[:80]!r}: {error}") from error

    def _start(self) -> Child:
        child = Child("async_rl.rewards.equivalence", [str(os.getpid()), str(self._cpu_seconds)], os.environ)
        try:
            child.ask(Question("", ""), Answer, START_S)
        except AsyncRLError as error:
            child.close()
            raise RewardError(f"the process that compares expressions does not start: {error}") from error
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


# --- the process -----------------------------------------------------------------------------------------------------


def compare(right: str, said: str) -> bool:
    """Whether they are equal as math-verify sees it; False for what it cannot read."""
    from math_verify import parse, verify  # half a second, and not everywhere

    # Behind dollars, since it reads as mathematics only what is marked so.
    left, other = (parse(f"${text.strip().strip('$')}$", parsing_timeout=None) for text in (right, said))
    return bool(left and other and verify(left, other, timeout_seconds=None))


def main(parent: int, cpu_seconds: int) -> None:
    die_with(parent)
    questions, answer = take_over_pipes()
    logging.disable()  # it warns that it has no time-outs
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(Question)
    compare("1", "2")  # what it imports is not counted with the first comparison
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for body in questions:
        question = decoder.decode(body)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds, most))
        equal = False
        with contextlib.suppress(Exception):  # all that it cannot read, and what takes too much memory
            equal = compare(question.right, question.said)
        answer(Answer(equal))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

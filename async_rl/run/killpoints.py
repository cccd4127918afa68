"""Named points at which a test lets a process die by `kill -9`: ASYNC_RL_KILL_AT="point[:n][@process]".

A crash that matters falls between two particular lines, and waiting for one to fall there by chance proves nothing. So
each process calls `reached("its.point")` there. Without the variable that is one look at a global; with it the process
(the named one, else any) kills itself when it passes the point for the n-th time (the first, without n). A launcher
that starts a killed process again has to take the variable out of its environment.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from async_rl.errors import AsyncRLError

VARIABLE = "ASYNC_RL_KILL_AT"

POINTS = {
    "buffer.before-append": "the rules know of an event, the journal does not",
    "buffer.after-append": "the journal has an event, nobody has heard what follows from it",
    "buffer.after-effects": "what follows was sent, the event is not acknowledged",
    "buffer.segment-begun": "the journal has a new segment, beside the old one",
    "buffer.segment-deleted": "one of the segments that nobody needs is gone",
    "store.before-index": "the policy's file is whole and durable, the index does not name it yet",
    "store.after-index": "the index names the policy, nobody has heard of it",
    "store.after-announce": "the nodes were told, the trainer was not",
    "node.after-lease": "leases have come and their requests are with the engine",
    "node.mid-route": "a file of several that lead to a policy is here, the next is not",
    "node.before-flip": "the new policy is installed, the old one serves",
    "node.after-flip": "the new policy serves, the buffer does not know",
    "node.before-results": "trajectories are complete and not sent",
    "trainer.after-draw": "a batch is lent, nothing was computed",
    "trainer.after-step": "the weights have moved, the batch is not confirmed",
    "trainer.between-confirms": "one shard of the buffer has closed its part of a batch, the others have not",
    "trainer.after-confirm": "the batch is confirmed, its policy is nowhere but here",
    "trainer.after-upload": "the policy is sent to the store, whose word is still out",
    "trainer.in-checkpoint": "the files of a checkpoint are there under their temporary name",
}  # each is reached at exactly one place (tests/house)


class KillPointError(AsyncRLError):
    """ASYNC_RL_KILL_AT or a call of `reached` names a point that does not exist."""


@dataclass
class Plan:
    """Die at the `passes`-th passing of `point`; only in the process called `process`, if that is not None."""

    point: str
    passes: int
    process: str | None
    armed: bool

    def passed(self, point: str) -> None:
        if point not in POINTS:
            raise KillPointError(f"{point!r} is no point of {__name__}.POINTS")
        if point == self.point and self.armed:
            self.passes -= 1
            if self.passes == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def parse(text: str) -> Plan:
    """Raises KillPointError."""
    match = re.fullmatch(r"([a-z.-]+)(?::([1-9]\d*))?(?:@(\S+))?", text)
    if match is None or match[1] not in POINTS:
        raise KillPointError(f"{VARIABLE}={text!r}: it takes point[:n][@process]; points: {', '.join(POINTS)}")
    return Plan(match[1], int(match[2] or 1), match[3], armed=match[3] is None)


_plan = parse(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def this_process_is(name: str) -> None:
    """Tell which process this is; until then a plan for a named one does nothing."""
    if _plan is not None:
        _plan.armed = _plan.process in (None, name)


def reached(point: str) -> None:
    """The process is at a point of POINTS; it may not return."""
    if _plan is not None:
        _plan.passed(point)

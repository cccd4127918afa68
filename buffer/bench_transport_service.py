"""The buffer's process as the transport benchmark starts it to measure the link alone: the real service, but what it
accepts is not written to a journal."""

from __future__ import annotations

from functools import partial

from async_rl.run.process import pool_main
from buffer.events import AnyEvent, Effect
from buffer.recorder import Recorder
from buffer.service import body


class Forgetful(Recorder):
    """Applies events and writes none of them down."""

    def apply(self, event: AnyEvent, now: float) -> list[Effect]:
        return self.apply_unrecorded(event, now)


if __name__ == "__main__":
    pool_main(__file__, partial(body, kind=Forgetful))

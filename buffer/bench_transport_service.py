"""The buffer's process as the transport benchmark starts it to measure the link alone: the real service, but what it
accepts is not written to a journal."""

from __future__ import annotations

from async_rl.run.dial import listen
from async_rl.run.process import PoolContext, pool_main
from buffer.collector import collect_young_only
from buffer.events import AnyEvent, Effect
from buffer.recorder import Recorder
from buffer.rules import rules_from_config
from buffer.service import Service


class Forgetful(Recorder):
    """Applies events and writes none of them down."""

    def apply(self, event: AnyEvent, now: float) -> list[Effect]:
        return self.apply_unrecorded(event, now)


def body(context: PoolContext) -> None:
    collect_young_only()
    server = listen(context, context.directory.endpoint)
    directory, config = context.directory, context.config
    recorder = Forgetful(directory.journal, directory.run_id, rules_from_config(config), config.buffer.fsync)
    try:
        Service(context, server, recorder).serve()
    finally:
        recorder.close()
        server.close()


if __name__ == "__main__":
    pool_main(__file__, body)

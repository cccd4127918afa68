"""Every rank of a trainer but the first: it does what rank 0 does, at the same time.

    python -P -m trainer.ranks.follower --config FILE --model DIR --name NAME --rank N --world N --meeting FILE

is started by rank 0 (`trainer.ranks.leader`); torchrun starts `trainer.learner` on every rank, which comes here for all
but the first. It has nothing to lose: where rank 0 is gone, or another rank, it ends at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.process import check_house, last_words, prepare_logging
from async_rl.run.watchdog import Watchdog
from trainer.backend import Backend
from trainer.backends import build_rank
from trainer.ranks.calls import Computed, End, decode
from trainer.ranks.channel import Channel, Lost, idle_limit_s
from trainer.ranks.leader import Build
from trainer.ranks.place import Place

log = logging.getLogger("trainer")


def follow(config: Config, place: Place, build: Build, watchdog: Watchdog) -> None:
    """Until rank 0 says that it is over. Raises AsyncRLError."""
    try:
        with watchdog.working("waits for the other ranks"):
            channel = Channel(place, config)
        with watchdog.working("loads the model"):
            backend = _begin(channel, lambda: build(place))
        while True:
            with watchdog.expect("waits for rank 0's next call", idle_limit_s(config)):
                call = decode(channel.hear())
            if isinstance(call, End):
                channel.close()
                return
            with watchdog.working(f"{type(call).__name__}, with the other ranks"):
                _do(channel, call, backend)
    except Lost as lost:
        raise AsyncRLError(f"rank {place.rank} ends, as another is gone: {lost}") from lost


def _begin(channel: Channel, build: Callable[[], Backend]) -> Backend:
    """Where it fails on any rank, rank 0 says why and hangs up: to end before would look like the cause. Raises Lost
    then."""
    try:
        return channel.together(build)
    except Lost:
        raise
    except Exception as error:
        log.error("no backend: %s: %s", type(error).__name__, error, exc_info=not isinstance(error, AsyncRLError))
        channel.hear()
        raise


def _do(channel: Channel, call: Computed, backend: Backend) -> None:
    """An error is rank 0's to raise, which has been told of it: it ends the trainer, or says what comes next. A rank
    that ended by itself would look like one that was lost, which another start may mend."""
    try:
        channel.together(lambda: call.run(backend))
    except Lost:
        raise
    except (AsyncRLError, FloatingPointError) as error:
        log.warning("%s: %s", type(call).__name__, error)
    except Exception:
        log.exception("%s failed; rank 0 knows", type(call).__name__)


def main(build_of: Callable[[Config, Path], Build]) -> NoReturn:
    """The process that rank 0 starts. `build_of` a config and a model's path makes a rank's backend."""
    parser = argparse.ArgumentParser(prog="python -P -m trainer.ranks.follower", description="See trainer/ranks.")
    parser.add_argument("--config", required=True, help="the trainer's config (TOML)")
    parser.add_argument("--model", required=True, type=Path, help="the base model's directory")
    parser.add_argument("--name", required=True, help="what it is called in messages")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--world", required=True, type=int)
    parser.add_argument("--meeting", required=True, type=Path, help="the file by which the ranks find each other")
    options = parser.parse_args()
    # Rank 0 ends this process, or its death does, by SIGTERM, for which nobody looks within a collective.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_logging(logging.INFO)
    code = 0
    try:
        check_house(["trainer"])
        config = load_config(str(options.config))
        watchdog = Watchdog(options.name, config.run.watchdog_s, config.run.work_timeout)
        watchdog.start()
        place = Place(options.rank, options.world, options.rank, options.meeting)
        follow(config, place, build_of(config, options.model), watchdog)
    except AsyncRLError as error:
        code = last_words(str(error))
    except Exception as error:
        log.exception("unexpected error in %s", options.name)
        code = last_words(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without taking torch apart, which takes seconds


if __name__ == "__main__":
    main(build_rank)

"""What every pool's process does first, and how it ends: `pool_main` around the pool's own `body`.

    if __name__ == "__main__":
        pool_main("buffer.service", serve)

Exit code 0 is done; anything else failed, with one line as the last of stderr that says what, where and what to do.
EXIT_AGAIN is a failure that starting the process again may well mend.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

import async_rl
from async_rl.config import Config, load_config, with_group
from async_rl.errors import AsyncRLError, NeedsRestart
from async_rl.run import killpoints
from async_rl.run.calm_log import CalmFilter
from async_rl.run.directory import RunDirectory
from async_rl.run.exporter import Exporter
from async_rl.run.pages import keep_pages
from async_rl.run.watchdog import Watchdog

HOUSE = ("buffer", "inference", "trainer")
HOUSE_PLACE = Path(async_rl.__file__).resolve().parent.parent  # a checkout, or where it is installed
PARENT_VARIABLE = "ASYNC_RL_PARENT_DEATH"  # the launcher's process id: end when it is gone
TERMINATED_EXIT = 128 + signal.SIGTERM
EXIT_AGAIN = 75  # sysexits.h: EX_TEMPFAIL
ORPHAN_GRACE = 10.0  # seconds that a process whose launcher died has to end in good order
ORPHAN_POLL = 0.5
EXIT_GRACE = 5.0  # seconds that a process which is done has for what is registered to be done at exit
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Opened now: between fork and exec another thread's lock on the loader would be held for ever.
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

log = logging.getLogger("async_rl.process")


class Terminated(BaseException):
    """SIGTERM, in the main thread of a body that does not watch `stopping` yet. Not an Exception: no handler of errors
    should swallow it."""


class HouseError(AsyncRLError):
    """Another package hides one of ours; the message names both paths."""


class StopEvent(threading.Event):
    """Set by SIGTERM. A body that looks at it has taken over when to end (between two steps, after a checkpoint);
    until its first look, SIGTERM raises `Terminated`, so a process that still loads a model ends at once."""

    watched = False

    def is_set(self) -> bool:
        self.watched = True
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.watched = True
        return super().wait(timeout)


@dataclass(frozen=True)
class PoolContext:
    """What a pool gets: the resolved config, the run's directory, its own name, `stopping` (see StopEvent), whether it
    is to go on from a checkpoint, whether the whole run was started together with it, which of the buffer's shards it
    is, where its numbers go while it runs, and who ends it when it does not move."""

    config: Config
    directory: RunDirectory
    name: str
    stopping: StopEvent = field(default_factory=StopEvent)
    resume: bool = False
    together: bool = False
    shard: int = 0
    exporter: Exporter = field(default_factory=Exporter)
    watchdog: Watchdog = field(default_factory=Watchdog)


def pool_main(module: str, body: Callable[[PoolContext], int | None]) -> NoReturn:
    """Parse the command line of a pool's process, prepare the process, run `body` and exit with its code (None is
    0). A `Terminated` leaves with 143; every error ends as one last line on stderr. `module` is what --help and the
    log call it: a module's name, or its file."""
    arguments = _parse_arguments(module)
    prepare_logging(logging.DEBUG if arguments.debug else logging.INFO)
    killpoints.this_process_is(arguments.name)
    keep_pages()
    directory = None
    try:
        check_house(name for name in HOUSE if name in sys.modules)
        directory = RunDirectory.open(arguments.dir)
        config = load_config(arguments.config)
        if arguments.group:
            config = with_group(config, arguments.group)
        watchdog = Watchdog(arguments.name, config.run.watchdog_s, config.run.work_timeout)
        context = PoolContext(
            config, directory, arguments.name,
            resume=arguments.resume, together=arguments.together, shard=arguments.shard, watchdog=watchdog,
        )  # fmt: skip
        _follow_parent()
        watchdog.start()
        _handle_termination(context)
        with _exporting(context, module):
            code = body(context) or 0
            watchdog.beat("ends")
    except Terminated:
        log.info("terminated")
        code = TERMINATED_EXIT
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except AsyncRLError as error:
        if arguments.debug:
            traceback.print_exc()
        code = last_words(str(error), EXIT_AGAIN if isinstance(error, NeedsRestart) else 1)
    except Exception as error:
        log.exception("unexpected error in %s", module)
        code = last_words(f"{type(error).__name__}: {error}")
    _leave(code, directory)


def check_house(names: Iterable[str]) -> None:
    """The named packages lie beside `async_rl`. Raises HouseError: PyPI has packages called inference, trainer and
    buffer, and a folder of the user's may hold a trainer.py."""
    house = HOUSE_PLACE
    for name in names:
        place = package_place(name)
        if place is None:
            raise HouseError(f"package {name!r} is not installed beside {house / 'async_rl'}: reinstall async-rl")
        if place.parent != house:
            raise HouseError(
                f"package {name!r} is {place}, not {house / name}: another package of that name hides async-rl's; "
                "uninstall it, or take its folder out of PYTHONPATH"
            )


def package_place(name: str) -> Path | None:
    """The folder of a package (the file of a plain module), found without importing it unless it already was."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def die_with_parent(expected_parent: int) -> None:
    """Ask Linux for SIGTERM when the parent dies; does nothing elsewhere. Survives exec, so it may run between fork
    and exec; a parent that died before the request is noticed too."""
    if _LIBC is None:
        return
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGTERM)


def follow_parent() -> None:
    """For a process that works for the one that started it: end when that does, cleaning up, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with_parent(int(os.environ[PARENT_VARIABLE]))


def _exporting(context: PoolContext, module: str) -> AbstractContextManager[None]:
    """Metrics for Prometheus, if the config wants them; the pool is the package that the module lies in. Of a trainer's
    ranks that torchrun started the first alone has some, and all have one name."""
    pool = Path(module).parent.name or module.partition(".")[0]
    if not context.config.run.prometheus or (pool == "trainer" and int(os.environ.get("RANK", "0")) > 0):
        return nullcontext()
    labels = {"run": context.directory.path.name, "pool": pool}
    return context.exporter.serve(context.directory.path / "prometheus", context.name, labels)


def _parse_arguments(module: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -P -m {module}", description="One pool of a run; see `async-rl`.")
    parser.add_argument("--config", required=True, help="the resolved config (TOML)")
    parser.add_argument("--dir", required=True, type=Path, help="the run directory")
    parser.add_argument("--name", required=True, help="this process's name in the run")
    parser.add_argument("--group", default="", help="of a node: the [[inference.group]] that it belongs to")
    parser.add_argument("--shard", type=int, default=0, help="of a buffer: which of its shards, from 0")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--together", action="store_true", help="all pools of the config are started with this one")
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    return parser.parse_args()


def prepare_logging(level: int) -> None:
    """To stderr, our own from `level` on; and stacks, should the process crash."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(CalmFilter())
    for name in (*HOUSE, "async_rl", "__main__"):
        logging.getLogger(name).setLevel(level)
    faulthandler.enable()


def _handle_termination(context: PoolContext) -> None:
    def terminate(_signal: int, _frame: FrameType | None) -> None:
        watched = context.stopping.watched
        context.stopping.set()
        if not watched:
            raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    # The terminal sends Ctrl-C to every process in the foreground; ending them is the launcher's job.
    if PARENT_VARIABLE in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _follow_parent() -> None:
    """End with the launcher, even when it is killed: SIGTERM from the kernel at once; and for a process that does
    not heed it a thread that ends the whole process group (workers of this process included) after a grace."""
    if PARENT_VARIABLE not in os.environ:
        return
    parent = int(os.environ[PARENT_VARIABLE])
    die_with_parent(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL)
        time.sleep(ORPHAN_GRACE)
        print("error: the launcher is gone and this process did not end: killed", file=sys.stderr, flush=True)
        end_group(signal.SIGKILL)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def end_group(number: int) -> None:
    """Signal this process's group if it leads one, else only itself: a group that others lead is not ours."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)


def last_words(message: str, code: int = 1) -> int:
    """Why a process ends, as the last line that it says; returns the exit code."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


def _leave(code: int, directory: RunDirectory | None) -> NoReturn:
    """End the process, without taking its modules apart: with torch that takes up to two seconds on a busy machine, of
    a grace that is perhaps two, and a SIGTERM in the middle of it would make another exit code of a good one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.environ.get(PARENT_VARIABLE)
    if directory is not None and parent is not None and os.getppid() != int(parent):
        # The launcher was killed, so the last of its processes takes away what it would have.
        directory.remove_sockets(only_empty=True)
    # What a library does at exit must not keep a process that is done.
    timer = threading.Timer(EXIT_GRACE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

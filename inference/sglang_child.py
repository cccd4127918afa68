"""An SGLang server as a child of this process: its flags, how one knows that it lives, and that it ends with us.

A server is three processes or more. They are one process group. Its first process is killed by the kernel when the
thread that started it is gone (so also at a kill -9 of ours), and that takes its own children with it. Its temporary
files lie in a folder of ours (async_rl.run.scratch), which the next one takes away if we could not, and with it those
in shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.inference_config import NOT_FOR_SGLANG, flag_name
from async_rl.run.scratch import Scratch
from async_rl.trainer_config import FEED_FORWARD
from inference.engine import EngineError

LAUNCH = (  # asks to be killed when its parent's thread ends (PR_SET_PDEATHSIG, kept by exec), then becomes the server
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the node has gone before its server began')\n"
    "os.umask(0o077)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MAX_LORA_RANK = 64
SPARE_CONTEXT = 8
"""SGLang keeps a few tokens of its context length for itself, and cuts a request short without a word."""
ORPHANS_S = 5.0  # how long the others may take to notice that the first process is gone
SHARED = ("/dev/shm/sglang_", "/dev/shm/sem.mp-")  # the latter are Python's, whose own tracker it kills when it dies
TAIL_BYTES = 1 << 15
ERROR = re.compile(r"(\S+ )?[\w.]*(Error|Exception|error)\b: ")  # how a traceback, or an argument parser, ends


def default_flags(
    *,
    slots: int,
    max_context: int,
    max_adapters: int,
    device: str,
    dtype: str,
    whole: bool,
    feed_forward: bool,
    routes: bool,
) -> dict[str, Any]:
    """The server's flags by name, without dashes: True is a flag without a value. `device` is cpu or cuda;
    `feed_forward`: adapters may be on more than attention."""
    flags: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "context-length": max_context + SPARE_CONTEXT,
        "max-running-requests": slots,
        "skip-tokenizer-init": True,  # token ids in, token ids out
        "skip-server-warmup": True,
        "incremental-streaming-output": True,  # else what is sent grows with the square of what is sampled
        "stream-interval": 8,
        "log-level": "warning",  # what it tells at the next level holds the key
    }
    if whole:
        # Else it says of a token that was being sampled when the weights changed that the new ones made it.
        flags["disable-overlap-schedule"] = True
    else:
        # A batch with requests of the bare model takes one of these places for it.
        flags |= {"enable-lora": True, "max-loras-per-batch": max_adapters + 1, "max-lora-rank": MAX_LORA_RANK}
        # It keeps room for adapters on all that is named here, and computes experts that are by other kernels.
        flags["lora-target-modules"] = ATTENTION + (sorted(FEED_FORWARD) if feed_forward else [])
    if routes:
        flags["enable-return-routed-experts"] = True
    if device == "cpu":
        flags |= {"attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags |= {"max-total-tokens": (slots + 1) * (max_context + SPARE_CONTEXT)}
        if not whole:
            flags["lora-backend"] = "torch_native"
    return flags


def merge_flags(flags: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With those of the config instead, where it names any. Raises EngineError for one that is not the user's."""
    given = {flag_name(name): value for name, value in arguments.items()}
    if taken := sorted(NOT_FOR_SGLANG & given.keys()):
        raise EngineError(f"[inference.sglang] arguments: {', '.join(taken)}: the node sets it by itself; leave it out")
    return {**flags, **given}


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """["--name", value, …]; a list is several values, a table is JSON, False leaves a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [str(one) for one in value]
        elif value is not True:
            words.append(str(value))
    return words


class Child:
    """Starts a server on a free port of this machine's loopback interface; who wants to speak to it needs `key`. Its
    output is added to `log` (mode 0600), or to a file that goes with it."""

    def __init__(self, python: str, model_path: Path, flags: Mapping[str, Any], key: str, log: Path | None) -> None:
        self._scratch = Scratch()
        self.log = log or self._scratch.path / "server.log"
        self._log_start = 0  # what is before it is of another server
        self.port = _free_port()
        try:
            self._process = self._launch(python, model_path, flags, key)
        except OSError as error:
            self._scratch.remove()
            raise EngineError(
                f"[inference] engine_python: {python} cannot be started ({error.strerror}): name the interpreter whose "
                f"environment has SGLang"
            ) from error
        self._started = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str | None:
        """None while it runs, else how it ended."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the SGLang server (pid {self.pid}) {how} after {time.monotonic() - self._started:.0f} s"

    def log_tail(self) -> str:
        """Where the log is, and of its end the last error, or else the last line."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            if errors := [line for line in lines if ERROR.match(line)]:
                return f"{self.log} has: {errors[-1]}"
            if lines:
                return f"{self.log} ends with: {lines[-1]}"
        return f"{self.log} is empty"

    def note_files(self) -> None:
        """To be called when it is ready: of a server that is dead nobody knows which they were. From then on they go
        with our folder, whoever takes that away."""
        self._scratch.take_along(_shared_files(self.pid))

    async def close(self) -> None:
        """Asks nothing of the server: a polite end takes it seven seconds and leaves more behind."""
        self.note_files()
        self._process.kill()
        deadline = time.monotonic() + ORPHANS_S
        while _group_lives(self.pid) and time.monotonic() < deadline:
            self._process.poll()
            await asyncio.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a disk holds it
            self._process.wait(ORPHANS_S)
        self._scratch.remove()

    def _launch(self, python: str, model_path: Path, flags: Mapping[str, Any], key: str) -> subprocess.Popen[bytes]:
        secret = self._scratch.path / "flags.yaml"  # a command line can be read by every user
        secret.write_text(json.dumps({"api-key": key}))
        own = {"config": secret, "model-path": model_path, "host": "127.0.0.1", "port": self.port}
        words = ["-m", "sglang.launch_server", *command_line({**own, **flags})]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_start = os.fstat(log).st_size
        try:
            return subprocess.Popen(
                [python, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(python, str(flags.get("device"))),
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _environment(self, python: str, device: str) -> dict[str, str]:
        """Ours, without what names our own packages."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # as it would be without TMPDIR
        kept.setdefault("HF_HUB_OFFLINE", "1")  # what it does not find here, it would look for there
        kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        kept["PATH"] = f"{Path(python).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
        kept |= {"TMPDIR": str(self._scratch.path), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for SPARE_CONTEXT
        if device == "cpu":
            kept["SGLANG_USE_CPU_ENGINE"] = "1"
        return kept


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port: int = place.getsockname()[1]
        return port


def _shared_files(group: int) -> set[str]:
    """Of the processes of a group: their files in shared memory, which SGLang does not take away when it ends."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                found |= {name for line in lines if (name := line.split()[-1]).startswith(SHARED)}
    return found


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True

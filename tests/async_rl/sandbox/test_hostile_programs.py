"""Programs that attack what they run in, or lie about what they are worth: each is contained, has a name for what
became of it, scores 0, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cells import children, left_behind, named_processes

from async_rl.rewards.code import score_of
from async_rl.sandbox import Limits, Sandbox, SandboxError

NAME = f"left-{os.getpid()}"  # of the processes of this file's programs, and of all that they make
SETUP = 'def add(a, b):\n    """The sum."""\n'
TESTS = "def check(candidate):\n" + "".join(f"    assert candidate({n}, 3) == {n + 3}\n" for n in range(5))
LIMITS = Limits(wall_s=3, cpu_s=1, memory_mb=192, disk_mb=4, processes=6, files=32, output_bytes=1 << 16)
PATIENT = LIMITS._replace(wall_s=30, cpu_s=10)  # where it is not time that ends the program: the machine may be busy
HEAD = f"""
import builtins, ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, b"{NAME}")
NAME, PORT, SECRET = "{NAME}", %d, %r
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def add(a, b):
    return hostile(a, b)
"""
SLOW = {"cpu", "timeout"}  # which comes first, a busy machine decides
ALWAYS = "class Yes:\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n"

PROGRAMS: dict[str, tuple[str, set[str]]] = {
    "fork bomb": ("while True: os.fork()", {"processes"}),
    "patient fork bomb": (
        "while True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
        SLOW,
    ),
    "thread bomb": (
        "import threading\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        {"processes"},
    ),
    "memory at once": ("x = bytearray(1 << 34)", {"memory"}),
    "memory by and by": ("x = []\nwhile True: x.append(bytes(1 << 20))", {"memory"}),
    "memory of many processes": (
        "for _ in range(5):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (100 << 20)\n"
        "        time.sleep(99)\ntime.sleep(99)",
        {"timeout"},
    ),
    "endless loop": ("def hostile(a, b):\n    while True: pass", SLOW),
    "endless loop that hears no signal": (
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        SLOW,
    ),
    "endless sleep": ("time.sleep(1e6)", {"timeout"}),
    "endless regular expression": ("import re\nre.match('(a+)+$', 'a' * 50 + 'b')", SLOW),
    "deleting everything": (
        "import shutil\nshutil.rmtree('/', ignore_errors=True)\ndef hostile(a, b): pass",
        {"wrong", *SLOW},
    ),
    "deleting a module": ("os.remove(os.__file__)", {"forbidden"}),
    "deleting a file outside": ("os.remove(SECRET)", {"error"}),
    "changing a module": ("open(os.__file__, 'a').write('x')", {"forbidden"}),
    "reading a file outside": ("raise ValueError(open(SECRET).read())", {"error"}),
    "reading passwords": ("open('/etc/shadow').read()", {"error"}),
    "leaving the directory": ("os.chdir('../../..')\nprint(os.listdir('etc'))", {"error"}),
    "leaving by a symbolic link": ("os.symlink(SECRET, 'link')\nopen('link').read()", {"error"}),
    "leaving by chroot": ("os.mkdir('x')\nos.chroot('x')", {"forbidden"}),
    "leaving by mount": ("call('mount', b'proc', b'/tmp', b'proc', 0, None)", {"forbidden"}),
    "leaving by a namespace": ("call('unshare', 0x10000000)", {"forbidden"}),
    "leaving by clone": (
        "call('syscall', 56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
        {"forbidden"},
    ),
    "becoming root": ("os.setuid(0)", {"error"}),
    "another's memory by /proc": ("open('/proc/1/mem')", {"error"}),
    "another's memory by ptrace": ("call('ptrace', 16, 1, 0, 0)", {"forbidden"}),
    "another's memory by a call": ("call('process_vm_readv', 1, 0, 0, 0, 0, 0)", {"forbidden"}),
    "killing everything": ("os.kill(-1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGKILL)", {"error"}),
    "stopping itself": (
        "os.kill(os.getpid(), signal.SIGSTOP)\nif os.fork() == 0: os.kill(1, 19)\ntime.sleep(99)",
        {"timeout"},
    ),
    "a server on this machine": ("socket.create_connection(('127.0.0.1', PORT))", {"forbidden"}),
    "a name on the network": (
        "import urllib.request\nurllib.request.urlopen('http://example.com')",
        {"forbidden"},
    ),
    "a socket by name": ("socket.socket(socket.AF_UNIX).connect('\\0' + NAME)", {"error"}),
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(99)\n    os._exit(0)\n"
        "os.wait()\nos._exit(0)",
        {"exit"},
    ),
    "outliving whoever runs it": ("libc.prctl(1, 0)", {"forbidden"}),
    "output without end": ("while True: print('x' * 1000)", {"output"}),
    "errors without end": ("while True: sys.stderr.write('x' * 1000)", {"output"}),
    "a file without end": ("with open('f', 'wb') as f:\n    while True: f.write(bytes(1 << 20))", {"disk"}),
    "files without end": ("for n in range(10**6): open(f'{NAME}-{n}', 'w').close()", {"disk"}),
    "open files without end": ("f = [open('/dev/null') for _ in range(10**6)]", {"files"}),
    "a shell": ("os.execv('/bin/sh', ['sh', '-c', 'true'])", {"error", "forbidden"}),
    "a subprocess": ("import subprocess\nsubprocess.run([sys.executable, '-c', '1'])", {"error", "forbidden"}),
    "shared memory": ("call('shmget', 4711, 1 << 20, 0o1600)", {"forbidden"}),
    "shared memory by a file": ("open('/dev/shm/' + NAME, 'w').write('x')", {"error"}),
    "memory as a file": ("os.memfd_create('x')", {"forbidden"}),
    "a crash": ("ctypes.string_at(0)", {"signal"}),
    "an end that looks good": ("os._exit(0)", {"exit"}),
    "an exit that looks good": ("sys.exit(0)", {"exit"}),
    "an exit in the tests": ("def hostile(a, b): raise SystemExit(0)", {"exit"}),
    "garbage for the judge": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'passed' * 10)\n    except OSError: pass",
        {"result"},
    ),
    "a verdict for the judge": (
        "import json\nbody = json.dumps({'passed': 9, 'failed': 0, 'why': '', 'note': '', 'broken': ''}).encode()\n"
        "for fd in range(3, 64):\n    for _ in range(20):\n"
        "        try: os.write(fd, len(body).to_bytes(4, 'little') + body)\n        except OSError: pass",
        {"result"},
    ),
    "answers before they are asked for": (
        "import json\n"
        "for message in ({'ready': True}, *[{'value': True, 'args': None}] * 5):\n"
        "    body = json.dumps(message).encode()\n    os.write(3, len(body).to_bytes(4, 'little') + body)",
        {"wrong"},
    ),
    "no answer at all": ("os.closerange(3, 64)\ntime.sleep(99)", {"result"}),
    "an answer without end": ("import itertools\ndef hostile(a, b): return itertools.count()", {"memory", *SLOW}),
    "a huge answer": ("def hostile(a, b): return 'x' * (9 << 20)", {"result"}),
    "a deep answer": (
        "def hostile(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        {"result"},
    ),
    "a deep answer by hand": (
        "body = b'[' * 10**6\nos.write(3, len(body).to_bytes(4, 'little') + body)",
        {"result"},
    ),
    "equal to everything": (ALWAYS + "def hostile(a, b): return Yes()", {"result"}),
    "equal to every number": (
        ALWAYS + "class Is(int):\n    __eq__ = lambda self, other: True\ndef hostile(a, b): return Is(0)",
        {"wrong"},
    ),
    "other builtins": (
        "builtins.AssertionError = builtins.Exception = type('E', (BaseException,), {})\n"
        "builtins.all = builtins.bool = lambda *_: True\n"
        "import json\njson.dumps = lambda *_: '{\"value\": true, \"args\": null}'\ndef hostile(a, b): return 0",
        {"result"},
    ),
    "looking for the tests": (
        "import gc\nfound = [x for x in gc.get_objects() if isinstance(x, dict) and 'tests' in x and 'setup' in x]\n"
        "frame = sys._getframe()\n"
        "while frame:\n    found += [x for x in frame.f_locals.values() if isinstance(x, str) and 'candidate' in x]\n"
        "    frame = frame.f_back\n"
        "text = b''\n"
        "try: text = os.pread(0, 100, 0)\nexcept OSError: pass\n"
        "def hostile(a, b): return a + b if found or text else None",
        {"wrong"},
    ),
    "an end like that of a cell without walls": ("def hostile(a, b): os._exit(80)", {"exit"}),
    "an end like that of a machine out of memory": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        {"error"},
    ),
    "the same by a child's hand": (
        "if os.fork() == 0:\n    libc.prlimit64(1, 0, (ctypes.c_ulong * 2)(0, 0), None)\n    os._exit(0)\n"
        "def hostile(a, b): return os.wait()",
        {"wrong"},
    ),
    "an exception of its own": ("class Own(BaseException): pass\ndef hostile(a, b): raise Own", {"error"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[socket.socket, Path]:
    """What programs must not reach: a server, and a file."""
    server = socket.create_server(("127.0.0.1", 0))
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    return server, secret


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_is_contained_named_and_worth_nothing(
    name: str, sandbox: Sandbox, world: tuple[socket.socket, Path]
) -> None:
    source, reasons = PROGRAMS[name]
    server, secret = world
    head = HEAD % (server.getsockname()[1], str(secret))
    limits = LIMITS if "timeout" in reasons else PATIENT
    verdict = sandbox.judge(SETUP + head + source, SETUP, TESTS, "add", limits)
    assert verdict.broken == ""
    assert verdict.reason in reasons, verdict
    score = score_of(verdict, "all")
    assert score.reward == 0
    assert score.components[verdict.reason] == 1
    assert "secret" not in verdict.note.replace(str(secret), "")
    assert secret.read_text() == "secret"
    server.settimeout(0)
    with pytest.raises(BlockingIOError):
        server.accept()
    assert left_behind(NAME) == []
    assert children(sandbox) == []
    assert sandbox.judge(SETUP + "    return a + b\n", SETUP, TESTS, "add", PATIENT).reason == "passed"


def test_what_is_looked_for_afterwards_is_seen_while_it_is_there(sandbox: Sandbox) -> None:
    daemon = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\ntime.sleep(999)"
    source = HEAD % (0, "") + daemon

    def run() -> None:
        with suppress(SandboxError):  # it is killed from outside, once it was seen
            sandbox.run(source, Limits(wall_s=600))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 60
    while len(seen := named_processes(NAME)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if seen:
        os.kill(min(seen), signal.SIGKILL)
    thread.join(60)
    assert len(seen) >= 2
    assert left_behind(NAME) == []

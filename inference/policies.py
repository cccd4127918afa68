"""How policies reach a node: pulled in chunks (inference.pulls), verified, and handed over as files.

A thread of its own does this, so that sampling goes on while 160 MB come in, and while the engine's `read` looks at
them. It always fetches the newest announced policy, skipping what was overtaken, and on request older ones that
evaluation has pinned. A half-received file is never handed over. The newest is asked for again when it did not come, or
when the engine has gone another way while it came: a few times, but for as long as it is this node's disk that fails.

Where policies change the weights in place (`routed`), what is pulled is the way to a policy: the store says which files
have to be applied to what the engine serves, in the fewest bytes.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.proof import CANARY
from async_rl.run.killpoints import reached
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkError
from async_rl.wire.messages import Announce, RelayKeys, Route, Routed, RouteFile, Stop
from inference import pulls
from inference.engine import PolicyContent
from inference.pulls import FilePuller, Relaying

log = logging.getLogger("policies")

IDLE_S = 0.2
END_S = 2.5  # for the thread, at the end
RETRY_S = 1.0  # before what did not come is asked for again
LONGEST_RETRY_S = 30.0  # the pause doubles with every fault of the disk, up to this
TRIES = 5  # of the newest policy: what is damaged stays so; faults of this disk do not count, it may be emptied


class PolicyFetched(NamedTuple):
    """A verified file, or a folder of such, to be applied in the order of their names; the node calls `discard` after
    use. `order` is the announcement's, 0 for one asked for and for the canary; `tries` says how often it was asked
    for. `content` is what the engine read of the path, or why it refuses it; None where nobody read it yet."""

    policy: PolicyId
    path: Path
    order: int
    fetch_ms: float
    tries: int = 1
    content: PolicyContent | AsyncRLError | None = None

    def discard(self) -> None:
        discard(self.path)


class PolicyFetchFailed(NamedTuple):
    """`again`: it is asked for once more, unless a newer one comes first and nobody waits for this one."""

    policy: PolicyId
    error: str
    again: bool


class Attempt(NamedTuple):
    """To fetch a policy: the newest, or, with order 0, one asked for or the canary. `due` is a time of the monotonic
    clock, `waited_s` the pause before it if the disk was at fault. `asked`: somebody waits for this one in particular,
    and needs it even if a newer one comes meanwhile."""

    policy: PolicyId
    order: int = 0
    tries: int = 1
    due: float = 0.0
    waited_s: float = 0.0
    asked: bool = False


class PolicyPuller:
    """`inbox` receives PolicyFetched and PolicyFetchFailed, and the error that ended the thread, if one did. `read` is
    the engine's; `relaying` is what it takes to pull from other nodes."""

    def __init__(
        self, link: Client, folder: Path, inbox: queue.SimpleQueue[object], routed: bool = False,
        read: Callable[[PolicyId, Path], PolicyContent] | None = None, relaying: Relaying | None = None,
    ) -> None:  # fmt: skip
        self._link = link
        self._folder = folder
        self._inbox = inbox
        self._routed = routed
        self._read = read
        self._files = FilePuller(link, self._note, self._check_open, relaying)
        self._have: PolicyId | None = None
        self._asked: queue.SimpleQueue[PolicyId] = queue.SimpleQueue()
        self._newest: Announce | None = None
        self._canary: PolicyId | None = None  # announced and not here yet
        self._canary_seen: PolicyId | None = None
        self._fetched_order = 0
        self._again: Attempt | None = None  # of the newest, which did not come
        self._begun = 0  # fetches, for names of their own
        self._left: queue.SimpleQueue[PolicyFetched] = queue.SimpleQueue()  # fetched, and of no use any more
        self._order_base = 0
        self._sessions = link.sessions
        self._closing = threading.Event()  # nothing new is begun
        self._closed = threading.Event()  # nobody waits for what was begun either
        self._thread = threading.Thread(target=self._run, name="policy-puller", daemon=True)
        self._thread.start()

    def ask(self, policy: PolicyId) -> None:
        """Fetch a policy that is not the newest."""
        self._asked.put(policy)

    def serves(self, policy: PolicyId) -> None:
        """The engine serves this policy now: ways to others begin there."""
        self._have = policy

    def again(self, fetched: PolicyFetched) -> bool:
        """The engine has left the weights from which this led; ask for the way from those that it serves now. False,
        and nothing, for what is not the newest, or was asked for often enough."""
        wanted = fetched.order > 0 and fetched.tries < TRIES
        if wanted:
            self._left.put(fetched._replace(content=None))
        return wanted

    def close(self, within_s: float = END_S) -> None:
        """Begin nothing more. A thread that has the engine read a whole model is left at it after `within_s`: it ends
        with the process, and the files may be taken away meanwhile."""
        self._closing.set()
        self._closed.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self._files.introduce()
            while not self._closing.is_set():
                self._listen(IDLE_S if self._asked.empty() else 0.0)
                news = self._news()
                if self._canary is not None:
                    self._fetch_canary(self._canary)
                elif news is not None:
                    self._overtaken()
                    self._fetched_order = news.order
                    self._fetch_newest(Attempt(news.policy, self._order_base + news.order))
                elif not self._asked.empty():
                    self._fetch_asked(self._asked.get_nowait())
                else:
                    self._try_again()
        except Exception as error:  # whatever it is, the node must not go on with what it serves for ever
            if not self._closing.is_set():
                self._inbox.put(error)
        finally:
            self._files.close()

    def _fetch_canary(self, canary: PolicyId) -> None:
        """Before any other policy, and again until it is here: the node may not work without it."""
        if self._fetch(Attempt(canary)):
            self._canary, self._canary_seen = None, canary
        else:
            self._closing.wait(RETRY_S)

    def _fetch_asked(self, policy: PolicyId) -> None:
        if self._again is not None and self._again.policy == policy:  # it is on its way, as the newest
            self._again = self._again._replace(asked=True)
        else:
            self._fetch(Attempt(policy))

    def _fetch_newest(self, attempt: Attempt) -> None:
        self._again = None
        self._fetch(attempt)

    def _next(self, attempt: Attempt, error: Exception) -> Attempt | None:
        """What follows on one that failed, if anything does."""
        now = time.monotonic()
        if isinstance(error, OSError):
            pause_s = min(max(RETRY_S, 2 * attempt.waited_s), LONGEST_RETRY_S)
            return attempt._replace(due=now + pause_s, waited_s=pause_s)
        if attempt.tries < TRIES:
            return attempt._replace(tries=attempt.tries + 1, due=now + RETRY_S, waited_s=0.0)
        return None

    def _try_again(self) -> None:
        while not self._left.empty():
            left = self._left.get_nowait()
            if left.order == self._order_base + self._fetched_order:  # else a newer one has come meanwhile
                self._again = Attempt(left.policy, left.order, left.tries + 1, time.monotonic() + RETRY_S)
        if self._again is not None and time.monotonic() >= self._again.due:
            self._fetch_newest(self._again)

    def _overtaken(self) -> None:
        """What is the newest no more is asked for again by none but those who wait for it."""
        if self._again is not None and self._again.asked:
            self._asked.put(self._again.policy)
        self._again = None

    def _notice_a_new_session(self) -> None:
        """The store has forgotten this node, or was started again and counts its announcements from 1: what it
        announces from now on is newer than all before."""
        if self._link.sessions > self._sessions:
            self._sessions = self._link.sessions
            self._files.introduce()
            self._order_base += self._fetched_order
            self._overtaken()
            self._fetched_order, self._newest = 0, None

    def _listen(self, timeout_s: float) -> None:
        """Take announcements until there is nothing more to read."""
        deadline = time.monotonic() + timeout_s
        while not self._closing.is_set():
            received = self._link.poll()
            if received is None:
                if self._canary is not None or self._news() is not None or time.monotonic() >= deadline:
                    return
                time.sleep(0.002)
            else:
                self._note(received.message)

    def _news(self) -> Announce | None:
        """The newest announcement, unless it was fetched already."""
        newest = self._newest
        return newest if newest is not None and newest.order > self._fetched_order else None

    def _note(self, message: object) -> None:
        self._notice_a_new_session()
        if isinstance(message, Announce):
            self._files.relayed = message.relayed
        if isinstance(message, Announce) and message.kind == CANARY:
            self._canary = message.policy if message.policy != self._canary_seen else None
        elif isinstance(message, Announce) and (self._newest is None or message.order > self._newest.order):
            self._newest = message
        elif isinstance(message, RelayKeys):
            self._files.admit(message)
        elif isinstance(message, Stop):
            self._closing.set()

    def _fetch(self, attempt: Attempt) -> bool:
        """Hand it over, or that it failed; returns which."""
        started, policy = time.monotonic(), attempt.policy
        self._begun += 1
        path = self._folder / f"{policy.short()}-{self._begun}.safetensors"
        try:
            if self._routed and policy.name != CANARY:
                path = self._pull_way(policy, path)
            else:
                self._files.pull(policy, path)
            self._check_open(f"policy {policy.short()} was read")
            content = self._content(policy, path)
        except (AsyncRLError, OSError) as error:  # OSError: the disk is full
            discard(path)
            if isinstance(error, LinkError):
                raise
            if attempt.order:
                self._again = self._next(attempt, error)
            again = policy.name == CANARY or (attempt.order > 0 and self._again is not None)
            self._inbox.put(PolicyFetchFailed(policy, str(error), again))
            return False
        ms = (time.monotonic() - started) * 1e3
        self._inbox.put(PolicyFetched(policy, path, attempt.order, ms, attempt.tries, content))
        return True

    def _content(self, policy: PolicyId, path: Path) -> PolicyContent | AsyncRLError | None:
        """A refusal is the engine's, of something that came as the store has it: to be told as such."""
        try:
            return self._read(policy, path) if self._read is not None else None
        except AsyncRLError as refusal:
            return refusal

    def _pull_way(self, policy: PolicyId, path: Path) -> Path:
        """All files of the way to a policy: where it is one, as `path`, else in a folder of that name."""
        files = self._way(policy)
        if len(files) == 1:
            self._files.pull(files[0].policy, path, files[0])
            return path
        path.mkdir(mode=0o700)
        for number, file in enumerate(files):
            self._files.pull(file.policy, path / f"{number:06}.safetensors", file)
            reached("node.mid-route")
        return path

    def _way(self, policy: PolicyId) -> tuple[RouteFile, ...]:
        self._link.send(Route(policy, self._have))
        deadline, awaiting = time.monotonic() + pulls.CHUNK_TIMEOUT_S, f"the way to policy {policy.short()}"
        while True:
            message = self._files.receive(deadline, awaiting).message
            if not isinstance(message, Routed):
                self._note(message)
            elif message.policy == policy:
                if message.error:
                    raise AsyncRLError(f"policy {policy.short()}: {message.error}")
                return message.files

    def _check_open(self, what: str) -> None:
        """Before anything that takes long, or makes a file where the node takes its folder away."""
        if self._closed.is_set():
            raise AsyncRLError(f"the node ends before {what}")


def discard(path: Path) -> None:
    """A policy's file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""A headless Chromium to look at a page with: the DevTools protocol over two pipes, so nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 100.0
START_TIMEOUT_S = 150.0  # to its first answer: 0.5 s from memory, 20 s from a slow disk with nothing beside it
MESSAGE_END = b"\0"


NEEDED = "ASYNC_RL_NEEDS_CHROMIUM"
"""Set where a browser was installed for the tests: then a test without one fails instead of being skipped."""


def find_chromium() -> str | None:
    """Raises RuntimeError where there is none and there should be."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None and NEEDED in os.environ:
        raise RuntimeError(f"{NEEDED} is set, and there is no Chromium on this machine")
    return found


class Browser:
    """One Chromium with one tab. Every wait ends after its limit with an error that names what was awaited."""

    def __init__(self, chromium: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._unread = b""
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # Chromium reads commands at descriptor 3 and answers at 4; bash puts the pipes there.
        start = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
                 "--no-first-run", "--disable-background-networking",
                 f"--user-data-dir={self._profile.name}"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", start, "bash", chromium, *flags, "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._session: str | None = None
        self._limit_s = START_TIMEOUT_S
        try:
            self._attach()
            self._limit_s = TIMEOUT_S
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        (tab,) = (found for found in self.call("Target.getTargets")["targetInfos"] if found["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ask it to end, as it then ends its helpers itself; whatever of its process group is left is killed."""
        self._limit_s = TIMEOUT_S
        with suppress(OSError, RuntimeError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load the page in a window of that many CSS pixels and wait until its plots are drawn, or failed."""
        self.events = []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while not self._has_drawn():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{page}: its plots were not drawn within {TIMEOUT_S:.0f} s")
            time.sleep(0.05)

    def _has_drawn(self) -> bool:
        drawn = "location.protocol === 'file:' && document.documentElement?.dataset.plots"
        try:
            return bool(self.evaluate(drawn))
        except RuntimeError:  # it was asked of the page before, which went away meanwhile
            return False

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError when it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the page since it was opened: console, exceptions, refused loads."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened, itself included."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """As the file's ending says: .png, .webp or .jpeg."""
        options: dict[str, Any] = {"format": path.suffix.removeprefix(".")}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are kept. Raises RuntimeError when it is refused."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + MESSAGE_END)
        deadline = time.monotonic() + self._limit_s
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            if "method" in answer:
                self.events.append(answer)

    def _next(self, deadline: float, awaited: str) -> dict[str, Any]:
        while MESSAGE_END not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"Chromium gave no answer to {awaited} within {self._limit_s:.0f} s")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise RuntimeError(f"Chromium ended while {awaited} was awaited")
            self._unread += data
        message, _, self._unread = self._unread.partition(MESSAGE_END)
        return dict(json.loads(message))

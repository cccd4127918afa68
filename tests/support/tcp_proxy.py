"""A TCP proxy between two of our processes, which can be slow, cut, or dead in the ways a network is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

READ_BYTES = 1 << 16
LOOK_S = 0.05
PATIENCE_S = 10.0


class TcpProxy:
    """Listens on loopback and passes on to `target` ("tcp://127.0.0.1:port"). All may be changed while it runs:
    `delay_s` before each piece of data, `bytes_per_s` (0: no limit), `silent` (half-open: it accepts connections and
    keeps them, and nothing passes), `cut_after` (cuts everything once so many bytes have gone to the dialling side)."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.delay_s = 0.0
        self.bytes_per_s = 0
        self.silent = False
        self.cut_after: int | None = None
        self.passed_back = 0
        self.accepted = 0
        self._connections: list[socket.socket] = []
        self._closing = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LOOK_S)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break every connection; new ones are taken at once."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        self._closing = True
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError, OSError):
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._target, PATIENCE_S)
                self.accepted += 1
                with self._lock:
                    self._connections += [ours, theirs]
                for source, drain, back in ((ours, theirs, False), (theirs, ours, True)):
                    thread = threading.Thread(target=self._pass, args=(source, drain, back), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, drain: socket.socket, back: bool) -> None:
        source.settimeout(LOOK_S)
        with contextlib.suppress(OSError):
            while not self._closing:
                try:
                    data = source.recv(READ_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    break
                while self.silent and not self._closing:
                    time.sleep(LOOK_S)
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                drain.sendall(data)
                if back:
                    self._count(len(data))
        for end in (source, drain):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, size: int) -> None:
        self.passed_back += size
        if self.cut_after is not None and self.passed_back >= self.cut_after:
            self.cut_after = None
            self.cut()

"""A reward service or judge for tests: a real HTTP server on loopback that answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, dict[str, str]]  # status; JSON, or bytes as they are; headers


class RewardService:
    """Answers every POST with what `answers` makes of its JSON; remembers what it was asked, under which path and with
    which headers, and how many calls it ever had at once. A context manager."""

    def __init__(self, answers: Callable[[dict[str, Any]], Answer], seconds: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.asked.append(question)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                time.sleep(seconds)
                status, body, headers = answers(question)
                with outer._lock:
                    outer._now -= 1
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:  # whoever asked has gone
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RewardService:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def chat(content: str | None) -> Answer:
    """A chat completion that says this."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}, {}

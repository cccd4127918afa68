"""How a policy leaves the trainer: tell the buffer, upload once to the store, wait until it is announced.

The buffer hears of a policy before the store has it, so that no trajectory of a policy it does not know can arrive.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import safe_open

from async_rl.policy.update_file import POLICY_KEY
from async_rl.proof import CANARY, Proof
from async_rl.run.killpoints import reached
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkTimeout
from async_rl.wire.messages import FACTORS, PinPolicy, PolicyPublished, Stored, Upload

STORE_TIMEOUT_S = 60.0
PUBLISH_LIMIT_S = 3 * STORE_TIMEOUT_S  # the waits of `publish` together, each of which has a message of its own
SLICE_S = 0.5  # how often a wait looks whether the store was started again


class _PolicyHead(msgspec.Struct):
    """The part of a policy file's metadata (async_rl.policy.update_file) that the store is told."""

    kind: str
    parent: str = ""


class Published(NamedTuple):
    size: int
    upload_ms: float


class Publisher:
    """Raises LinkError when the store does not confirm."""

    def __init__(self, buffer: Client, store: Client) -> None:
        self._buffer = buffer
        self._store = store
        self._sessions = store.sessions
        self._pinned: set[PolicyId] = set()

    def publish(self, policy: PolicyId, path: Path, proof: Proof) -> Published:
        """To the buffer and to the store."""
        started = time.monotonic()
        self._buffer.send(PolicyPublished(policy, proof))
        # Not just sent but handled: a node that serves the policy may speak to the buffer over a faster connection.
        self._buffer.flush(STORE_TIMEOUT_S)
        size = self.store(policy, path)
        return Published(size, (time.monotonic() - started) * 1e3)

    def store(self, policy: PolicyId, path: Path) -> int:
        """To the store alone; its size."""
        data = path.read_bytes()
        kind, parent = (CANARY, None) if policy.name == CANARY else _kind_and_parent(policy, path)
        upload = Upload(policy, kind, len(data), hashlib.sha256(data).hexdigest(), parent)
        self._is_new_store()
        self._store.send(upload, [data])
        reached("trainer.after-upload")
        self._await_stored(upload, data)
        return len(data)

    def pin(self, policy: PolicyId, pinned: bool) -> None:
        self._is_new_store()
        (self._pinned.add if pinned else self._pinned.discard)(policy)
        self._store.send(PinPolicy(policy, pinned))

    def _await_stored(self, upload: Upload, data: bytes) -> None:
        deadline = time.monotonic() + STORE_TIMEOUT_S
        awaiting = f"the store's word that policy {upload.policy.short()} is stored"
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._store.receive(min(SLICE_S, left), awaiting).message
            except LinkTimeout:
                if self._is_new_store():  # it may have stored the policy and not said so
                    self._store.send(upload, [data])
                continue
            if isinstance(message, Stored) and message.policy == upload.policy:
                return
        raise LinkTimeout(f"waited {STORE_TIMEOUT_S:.0f} s for {awaiting}")

    def _is_new_store(self) -> bool:
        """One that was started again has forgotten the pins: it hears them before an upload makes it sweep."""
        if self._store.sessions == self._sessions:
            return False
        self._sessions = self._store.sessions
        for policy in self._pinned:
            self._store.send(PinPolicy(policy, True))
        return True


def _kind_and_parent(policy: PolicyId, path: Path) -> tuple[str, PolicyId | None]:
    """As the file says: an adapter, or one of the files that make or move a model's own weights. Each version has one,
    so what a file of factors changes is the version before."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if POLICY_KEY not in metadata:
        return "lora", None
    head = msgspec.json.decode(metadata[POLICY_KEY], type=_PolicyHead)
    if head.kind != FACTORS:
        return head.kind, None
    return head.kind, PolicyId(policy.name, policy.version - 1, head.parent)

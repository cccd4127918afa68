"""How a policy leaves the trainer: tell the buffer, upload once to the store, wait until it is announced.

The buffer hears of a policy before the store has it, so that no trajectory of a policy it does not know can arrive.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import safe_open

from async_rl.policy.update_file import POLICY_KEY
from async_rl.proof import CANARY, Proof
from async_rl.run.killpoints import reached
from async_rl.run.shard_links import BufferLink
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkTimeout
from async_rl.wire.messages import FACTORS, PinPolicy, PolicyPublished, Stored, Upload
from async_rl.wire.parts import parts_of

STORE_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 10e6  # a tenth of a slow disk: a store that takes less in is not to be waited for
SLICE_S = 0.5  # how often a wait looks whether the store was started again


class _PolicyHead(msgspec.Struct):
    """The part of a policy file's metadata (async_rl.policy.update_file) that the store is told."""

    kind: str
    parent: str = ""


def upload_limit_s(size: int) -> float:
    """For a file of so many bytes to be stored, from its first byte on."""
    return STORE_TIMEOUT_S + size / SLOWEST_BYTES_PER_S


def publish_limit_s(size: int) -> float:
    """The waits of `publish` together, each of which has a message of its own."""
    return 2 * STORE_TIMEOUT_S + upload_limit_s(size)


class Published(NamedTuple):
    size: int
    upload_ms: float


class Publisher:
    """Raises LinkError when the store does not confirm."""

    def __init__(self, buffer: BufferLink, store: Client) -> None:
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
        """To the store alone; its size. The file stays as it is meanwhile."""
        kind, parent = (CANARY, None) if policy.name == CANARY else _kind_and_parent(policy, path)
        upload = Upload(policy, kind, path.stat().st_size, "", parent)
        deadline = time.monotonic() + upload_limit_s(upload.size)
        self._is_new_store()
        self._send(upload, path, deadline)
        reached("trainer.after-upload")
        self._await_stored(upload, path, deadline)
        return upload.size

    def pin(self, policy: PolicyId, pinned: bool) -> None:
        self._is_new_store()
        (self._pinned.add if pinned else self._pinned.discard)(policy)
        self._store.send(PinPolicy(policy, pinned))

    def _send(self, upload: Upload, path: Path, deadline: float) -> None:
        """In parts, of which the link lets a few be under way. All over again when a store that was started again
        answers in the middle: it has what came last, and not what came first."""
        while not self._sent(upload, path, deadline):
            pass

    def _sent(self, upload: Upload, path: Path, deadline: float) -> bool:
        """False when another store answered meanwhile."""
        for message, part in parts_of(path, upload):
            left = max(0.0, deadline - time.monotonic())
            try:
                self._store.send(message, [part], min(STORE_TIMEOUT_S, left))
            except LinkTimeout as error:
                sent = f"{message.offset} of {upload.size} bytes of policy {upload.policy.short()} were sent"
                raise LinkTimeout(f"{error}; {sent}") from None
            if self._is_new_store():
                return False
        return True

    def _await_stored(self, upload: Upload, path: Path, deadline: float) -> None:
        awaiting = f"the store's word that policy {upload.policy.short()} ({upload.size} bytes) is stored"
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._store.receive(min(SLICE_S, left), awaiting).message
            except LinkTimeout:
                if self._is_new_store():  # it may have stored the policy and not said so
                    self._send(upload, path, deadline)
                continue
            if isinstance(message, Stored) and message.policy == upload.policy:
                return
        raise LinkTimeout(f"waited {upload_limit_s(upload.size):.0f} s for {awaiting}")

    def _is_new_store(self) -> bool:
        """One that was started again has forgotten the pins. It hears them now, and lets nothing go before it has had a
        file and, after the pins, another."""
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

"""The policy store's files and their index: opaque here (no torch).

A policy is durable before it is announced: written under a temporary name, fsynced, renamed, and only then entered in
`index.jsonl`. What is kept: every version that a trajectory within the staleness bound may still need, what evaluation
has pinned, and what leads to them (buffer.routes).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from async_rl.proof import CANARY
from async_rl.run.killpoints import reached
from async_rl.version import PolicyId
from async_rl.wire.messages import CHUNK_BYTES, FACTORS, SNAPSHOT, Upload
from buffer.partial import PartialFile
from buffer.routes import Routes, StoredPolicy, expired

log = logging.getLogger("store")

NOT_ANNOUNCED = 0
MAX_PINS = 256


class PolicyFiles:
    """The files and their index. All methods are synchronous; `add` returns when the policy is durable. With
    `keep` what an earlier process of this run has stored is there again; without it, it is deleted."""

    def __init__(self, folder: Path, run: str, max_staleness: int, keep: bool = False) -> None:
        self._folder = folder
        self._run = run
        self._max_staleness = max_staleness
        self._stored: dict[PolicyId, StoredPolicy] = {}
        self._pins: set[PolicyId] = set()
        self._pins_may_be_missing = False
        self._order = 0
        self._partial: PartialFile | None = None
        self._chunks: dict[PolicyId, bytes] = {}  # digests, of what came or was asked for while nodes relay
        self.hash_chunks = False
        """Whether to take the digests of a file's chunks while it comes in: they will be asked for."""
        self._expired = folder / "expired.part"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if keep:
            for entry in self._read_index():
                self._stored.pop(entry.policy, None)
                self._stored[entry.policy] = entry
            self._stored = {policy: entry for policy, entry in self._stored.items() if self._is_whole(entry)}
            self._order = max((entry.order for entry in self._stored.values()), default=0)
        kept = {self._path(policy) for policy in self._stored}
        for leftover in (*folder.glob("*.policy"), *folder.glob("*.part")):
            if leftover not in kept:
                leftover.unlink()

    @property
    def newest(self) -> StoredPolicy | None:
        """What a node should serve. None before the first announcement."""
        announced = [entry for entry in self._stored.values() if entry.order]
        return max(announced, key=lambda entry: entry.order, default=None)

    @property
    def canary(self) -> StoredPolicy | None:
        return next((entry for entry in self._stored.values() if entry.kind == CANARY), None)

    @property
    def newest_order(self) -> int:
        return self._order

    @property
    def sizes(self) -> dict[PolicyId, int]:
        """Bytes of every policy that is kept."""
        return {policy: entry.size for policy, entry in self._stored.items()}

    def get(self, policy: PolicyId) -> StoredPolicy | None:
        return self._stored.get(policy)

    def add(self, upload: Upload, part: memoryview) -> StoredPolicy | None:
        """Take in a part of a policy's file: the policy, once that was the last and all is durable. None: there is more
        to come, or this is part of a file whose begin an earlier process has seen; its sender begins again. Raises
        ValueError when the bytes are not those announced, or factors have no parent of a lower version; nothing is
        left of the file then."""
        if upload.offset == 0:
            self.give_up_partial()
            self._partial = self._begin(upload)
        partial = self._partial
        if partial is None:
            log.info("policy %s: a part at byte %d of no file that was begun", upload.policy.short(), upload.offset)
            return None
        try:
            if not partial.take(upload, part):
                return None
            partial.finish(upload.sha256)
        except Exception:
            self.give_up_partial()
            raise
        self._partial = None
        entry = self._enter(upload, partial.path)
        if partial.chunks:
            self._chunks[entry.policy] = partial.chunks
        return entry

    def give_up_partial(self) -> None:
        """Of a file whose parts will not come any more."""
        if self._partial is not None:
            self._partial.give_up()
            self._partial = None

    def _begin(self, upload: Upload) -> PartialFile:
        """The file of an expired policy is written over, as it has its memory and its blocks already."""
        if upload.kind == FACTORS and (upload.parent is None or upload.parent.version >= upload.policy.version):
            raise ValueError(f"policy {upload.policy.short()}: factors change a policy of a lower version: name it")
        partial = self._path(upload.policy).with_suffix(".part")
        with suppress(FileNotFoundError):
            self._expired.replace(partial)
        return PartialFile(upload, partial, self.hash_chunks)

    def _enter(self, upload: Upload, partial: Path) -> StoredPolicy:
        """A file that has come whole. The same policy again is stored once; in another form (a trainer that goes on
        from a checkpoint has all its weights, and not the last change of them) it takes the place of the first. A
        version at or below the newest (of a trainer that has gone back) is kept, and not announced: its order is 0. So
        what is announced later always has the higher version, and to compare the versions that two policies were served
        under is to compare when they were announced. The canary is announced beside them, with the order 0 too; a
        policy named "snapshot" never is."""
        known = self._stored.get(upload.policy)
        if known is not None and known.sha256 == upload.sha256:
            partial.unlink()
            self._remember(known)
            return known
        newest = self.newest
        is_news = upload.policy.name not in (CANARY, SNAPSHOT) and (
            newest is None or upload.policy.version > newest.policy.version
        )
        self._order += is_news
        order = self._order if is_news else known.order if known is not None else NOT_ANNOUNCED
        entry = StoredPolicy(upload.policy, upload.kind, upload.size, upload.sha256, order, upload.parent)
        partial.replace(self._path(upload.policy))
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)  # the new name
        os.close(descriptor)
        reached("store.before-index")
        self._remember(entry)
        reached("store.after-index")
        self._sweep()
        self._pins_may_be_missing = False
        return entry

    def _remember(self, entry: StoredPolicy) -> None:
        """As the last, with which a past may begin anew; also for the store that is started after this one."""
        with (self._folder / "index.jsonl").open("a") as index:
            index.write(json.dumps([self._run, *msgspec.to_builtins(entry)]) + "\n")
            index.flush()
            os.fsync(index.fileno())
        self._stored.pop(entry.policy, None)
        self._stored[entry.policy] = entry
        self._chunks.pop(entry.policy, None)

    def route(self, policy: PolicyId, have: PolicyId | None) -> tuple[StoredPolicy, ...] | None:
        """See Routes.to."""
        return Routes(self._stored.values()).to(policy, have)

    def read(self, policy: PolicyId, offset: int, count: int) -> bytes | None:
        """Up to `count` bytes of a policy's file, or None when it is not kept (any more)."""
        if policy not in self._stored:
            return None
        try:
            with self._path(policy).open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except OSError as error:
            log.error("policy %s is gone from the disk: %s", policy.short(), error)
            return None

    def chunks(self, policy: PolicyId) -> bytes | None:
        """The SHA-256 (32 bytes each) of a policy's chunks of CHUNK_BYTES; None when it is not kept (any more). The
        file is read for the first who asks: so long as nobody relays, nothing is hashed twice."""
        if policy not in self._chunks and policy in self._stored:
            digests = []
            try:
                with self._path(policy).open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        digests.append(hashlib.sha256(chunk).digest())
            except OSError as error:
                log.error("policy %s is gone from the disk: %s", policy.short(), error)
                return None
            self._chunks[policy] = b"".join(digests)
        return self._chunks.get(policy)

    def pin(self, policy: PolicyId, pinned: bool) -> None:
        """Also one that is not here yet; of MAX_PINS, one more than that is not heeded. A pin lets go of nothing: it
        may be the first of several that are told again."""
        if pinned and len(self._pins) < MAX_PINS:
            self._pins.add(policy)
        elif not pinned:
            self._pins.discard(policy)
            self._sweep()

    def forget_pins(self) -> None:
        """Of a trainer that joins anew. It pins what *it* evaluates and says so before it uploads, but what its link
        had not seen taken by an earlier store comes before that: the rest of an upload, or a pin that ends. So all that
        is stored stays until a first file is, and the next one finds the pins here."""
        self._pins.clear()
        self._pins_may_be_missing = True

    def _read_index(self) -> list[StoredPolicy]:
        """This run's entries, in order; of a policy that was stored again, more than one. The last line may be torn:
        its policy was not announced."""
        entries = []
        with suppress(FileNotFoundError), (self._folder / "index.jsonl").open() as index:
            for line in index:
                with suppress(ValueError, msgspec.MsgspecError):
                    run, *entry = json.loads(line)
                    if run == self._run:
                        entries.append(msgspec.convert(entry, StoredPolicy))
        return entries

    def _is_whole(self, entry: StoredPolicy) -> bool:
        """Its bytes are compared with their SHA-256 by whoever pulls them."""
        path = self._path(entry.policy)
        return path.is_file() and path.stat().st_size == entry.size

    def _sweep(self) -> None:
        """Nobody is served what has expired; the file of one such policy stays for the next to be written over."""
        if self._pins_may_be_missing:
            return
        for entry in expired(list(self._stored.values()), self._pins, self._max_staleness):
            del self._stored[entry.policy]
            self._chunks.pop(entry.policy, None)
            with suppress(FileNotFoundError):
                self._path(entry.policy).replace(self._expired)

    def _path(self, policy: PolicyId) -> Path:
        """Name, version and digest were checked when the message was decoded, so this stays inside the folder."""
        return self._folder / f"{policy.version}-{policy.digest}-{policy.name}.policy"

"""The inference node: leases in, trajectories out, policies swapped in between.

One thread samples and decides; links, the policy puller and the scoring worker have threads or processes of their
own and put what they have into one inbox:

    inbox ─ Leases, Cancel, Stop (from the buffer) · PolicyFetched (from the store) · Scored (from the scoring worker)
      │
      └─> serving.advance ─> engine.step ─> completions ─> scoring ─> trajectories ─> buffer
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from async_rl.errors import AsyncRLError, NeedsRestart
from async_rl.eval_config import eval_tasks
from async_rl.fingerprint import fingerprint
from async_rl.proof import within
from async_rl.run.dial import dial_services
from async_rl.run.exporter import Reading
from async_rl.run.killpoints import reached
from async_rl.run.model_cache import model_path
from async_rl.run.pages import settle
from async_rl.run.process import PoolContext, pool_main
from async_rl.run.scratch import Scratch
from async_rl.run.shard_links import BufferLink, clients_of
from async_rl.tasks.registry import load_task
from async_rl.trajectory import Packed, decode_trajectory
from async_rl.version import PolicyId
from async_rl.wire.link import LinkError, Received
from async_rl.wire.messages import (
    Cancel,
    Compared,
    Drain,
    Introduce,
    Lease,
    Leases,
    NodeReady,
    NodeTrouble,
    NodeWants,
    NothingFree,
    Stop,
    TakeOver,
    words,
)
from async_rl.wire.payloads import unpack_payloads
from inference.buffer_talk import BufferTalk
from inference.departure import SETTLE_S, Departure
from inference.drivers import make_episodes
from inference.engine import Completion, Engine, EngineError, Request
from inference.engines import make_engine
from inference.episodes import Call, Ended, Episodes, SampleFailed, Withdrawn
from inference.gauges import NodeGauges
from inference.policies import END_S, PolicyFetched, PolicyFetchFailed, PolicyPuller
from inference.proof import Prover, logprob_bound
from inference.pulls import relaying_of
from inference.rollout import Attempt, RolloutBook, ToScore, is_call
from inference.scoring import Scored, Scorer
from inference.server import EngineDied
from inference.serving import Serving
from inference.tokenizer import load_tokenizer

log = logging.getLogger("node")

IDLE_S = 0.05  # how long an idle node sleeps on its inbox
REPORT_S = 0.5  # how often an idle node repeats its numbers


class Node:
    """`work()` returns when the run is over. Raises LinkError when the buffer or the store is lost for good, and
    NeedsRestart when its engine died."""

    def __init__(
        self, context: PoolContext, ready: NodeReady, engine: Engine, book: RolloutBook, buffer: BufferLink,
        puller: PolicyPuller, scorer: Scorer, inbox: queue.SimpleQueue[object], gauges: NodeGauges,
        episodes: Episodes | None = None,
    ) -> None:  # fmt: skip
        config = context.config.inference
        self._stopping = context.stopping
        self._engine = engine
        self._book = book
        self._talk = BufferTalk(buffer, context.name, context.config.buffer.group_size, book.leases)
        self._puller = puller
        self._scorer = scorer
        self._episodes = episodes
        self._inbox = inbox
        self._gauges = gauges
        self._prover = Prover(engine, context.config.run.seed, self._talk.send)
        self._exporter = context.exporter
        self._watchdog = context.watchdog
        self._serving = Serving(
            engine, config.in_flight, config.flip_timeout, puller.ask, self._report_trouble, self._cannot_start,
            self._prover.holds, book.pinned, puller.again, context.watchdog.working,
        )  # fmt: skip
        self._departure = Departure(book, self._serving, config.handover, self._talk.send)
        self._grace_s = context.config.launch.grace
        self._group_size = context.config.buffer.group_size
        self._started = time.monotonic()
        self._reported = 0.0
        self._busy_s = 0.0
        self._sampled_tokens = 0
        self._decode_steps = 0
        self._seconds_per_token = 1 / config.max_tokens_per_second if config.max_tokens_per_second else 0.0
        self._next_step = 0.0
        self._outbox: list[Packed] = []
        self._ready = ready
        self._life = secrets.token_hex(8)
        self._over: Stop | None = None
        self._late: PolicyId | None = None  # the last policy of which the buffer heard that it did not come

    # --- the loop ----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        try:
            self._work()
        except EngineDied as died:
            drained = self._departure.began
            self._departure.begin(time.monotonic(), 0.0, "its engine died")
            self._settle()
            try:
                self._read_inbox(0.0)  # leases that were under way go back
            finally:
                self._leave()
            if not drained:
                raise NeedsRestart(str(died)) from died

    def _work(self) -> None:
        self._talk.begin()
        for shard in range(self._talk.shards):
            self._introduce(shard)
        while self._over is None:
            self._watchdog.beat("decodes" if self._can_step else "waits for leases from the buffer")
            self._read_inbox(self._patience)
            for shard in self._talk.new_shards():
                self._introduce(shard, "the buffer was started again, or has forgotten this node")
            flipped = self._serving.advance(time.monotonic())
            if flipped is not None:
                self._gauges.flipped(flipped.load_ms / 1e3)
                self._puller.serves(flipped.installed.policy)
                self._talk.asking.flipped(time.monotonic())
                self._watchdog.note(f"flipped to policy {flipped.installed.policy.short()}")
                self._prover.flipped(flipped.installed, flipped.load_ms)
            for completion in self._step():
                self._on_completion(completion)
            self._send_results()
            self._send_wants()
            self._exporter.offer(time.monotonic(), self._reading)
            if self._stopping.is_set():
                self._departure.begin(time.monotonic(), self._grace_s, "it was told to stop")
            if self._departure.is_due(time.monotonic()):
                self._leave()
                break
        log.info("sampled %d tokens in %d decode steps", self._sampled_tokens, self._decode_steps)
        if self._over is not None and self._over.error:
            log.info("the run ended: %s", self._over.error)

    def _leave(self) -> None:
        """Hand over what is unfinished, and see it arrive: then nobody waits for this node."""
        for completion in self._engine.finished():
            self._on_completion(completion)
        self._send_results()
        self._sampled_tokens += self._departure.leave()
        self._settle()

    def _settle(self) -> None:
        try:
            self._talk.flush(SETTLE_S)
        except LinkError as lost:
            log.warning("what is left of this node's leases may be lost: %s", lost)

    @property
    def _can_step(self) -> bool:
        return self._engine.active > 0 and self._engine.serving is not None

    @property
    def _patience(self) -> float:
        """How long there is nothing to do but wait for the inbox."""
        return min(IDLE_S, max(0.0, self._next_step - time.monotonic())) if self._can_step else IDLE_S

    def _step(self) -> list[Completion]:
        started = time.monotonic()
        if not self._can_step or started < self._next_step:
            return []
        rows = self._engine.active
        if self._decode_steps:
            completions = self._engine.step()
        else:  # the first one may wait for the compiler
            with self._watchdog.working("decodes for the first time"):
                completions = self._engine.step()
        # With a cap on tokens per second the node is busy, as the slower machine that it stands for would be, until
        # its next step may begin.
        self._next_step = max(started - IDLE_S, self._next_step) + rows * self._seconds_per_token
        self._busy_s += max(time.monotonic(), self._next_step) - started
        self._decode_steps += 1
        return completions

    def _read_inbox(self, timeout_s: float) -> None:
        """Everything that has come; sleep at most `timeout_s` for the first."""
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                self._on_item(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _on_item(self, item: object) -> None:
        match item:
            case Received(message=Leases(leases)):
                self._watchdog.note(f"took {len(leases)} leases")
                for lease in leases:
                    self._on_lease(lease)
                reached("node.after-lease")
            case Received(message=TakeOver()):
                self._on_take_over(item)
            case Received(message=Drain(_, grace_s)):
                grace_s = self._grace_s if grace_s is None else grace_s
                self._departure.begin(time.monotonic(), grace_s, "async-rl drain")
            case Received(message=Cancel((), reason)):  # of no lease, but why there will be none
                log.error("%s", reason)
                self._talk.set_aside(self._talk.shard_of(item))
            case Received(message=Cancel(leases, reason)):
                log.info("%d leases cancelled: %s", len(leases), reason)
                for lease_id in leases:
                    self._on_cancel(lease_id)
            case Received(message=Compared(policy, far, bound)):
                log.info("%s %s: %s", policy.name, policy.short(), within(far, bound))
            case Received(message=NothingFree(granted)):
                self._talk.asking.refused(self._talk.shard_of(item), granted)
            case Received(message=Introduce(reason)):
                self._introduce(self._talk.shard_of(item), reason)
            case Received(message=Stop()):
                self._over = item.message
            case Scored():
                self._collect(self._book.scored(item.key, item.reward, item.components, item.seconds, item.error))
            case Call(request):
                self._on_call(request)
            case Withdrawn(key):
                self._drop(key)
            case Ended(key, played, status, error):
                self._on_ended(key, self._book.played(key, played, status, error))
            case PolicyFetched():
                self._serving.fetched(item, time.monotonic())
            case PolicyFetchFailed(policy, error, again):
                log.warning(
                    "policy %s did not come%s: %s", policy.short(), ", and is asked for again" if again else "", error
                )
                if policy != self._late:  # once, however often it is tried
                    self._late = policy
                    self._gauges.failed()
                    self._talk.send(NodeTrouble(policy, words(error)))
                if not again:
                    self._serving.fetch_failed(policy, error)
            case LinkError():
                if self._over is None:  # after the end a closed link is no news
                    raise item
            case Exception():  # the end of a thread that this node cannot do without
                raise item
            case _:
                log.warning("unexpected: %r", item)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _on_lease(self, lease: Lease) -> None:
        if self._book.has(lease.lease):
            return  # sent again, as the buffer could not know that it had come
        self._count(lease)
        if self._departure.began:
            self._departure.refuse(lease)
        else:
            with self._book.reading(self._watchdog.working):
                self._start(lease, lambda: self._book.open(lease))

    def _on_take_over(self, received: Received) -> None:
        """Go on with what another node began; if this one leaves too by now, whoever is next does."""
        message: TakeOver = received.message
        self._count(message.lease)
        if self._departure.began:
            self._departure.pass_on(message.prefixes, received.blobs)
            return
        payloads = unpack_payloads(message.prefixes, received.blobs)
        log.debug("goes on with %d samples of lease %d", len(payloads), message.lease.lease)
        self._start(
            message.lease, lambda: self._book.take_over(message.lease, [decode_trajectory(each) for each in payloads])
        )

    def _count(self, lease: Lease) -> None:
        if lease.split == "train":
            self._talk.granted(lease.lease, len(lease.samples))

    def _start(self, lease: Lease, open_lease: Callable[[], Sequence[Request | ToScore | Attempt]]) -> None:
        try:
            self._check_version(lease)
            for work in open_lease():
                if isinstance(work, ToScore):
                    self._scorer.submit(*work)
                elif isinstance(work, Attempt):
                    assert self._episodes is not None  # else the book would have made requests
                    self._episodes.begin(work)
                else:
                    self._serving.submit(work)
        except EngineDied:
            raise
        except Exception as error:
            # A task may fail in any way, and a prompt may not fit: the buffer counts it and tries again.
            log.error("lease %d (instance %d) cannot be started: %s", lease.lease, lease.instance, error)
            for sample in lease.samples:
                self._drop((lease.lease, sample))
            for trajectory in self._book.refused(lease, str(error)):
                self._collect(trajectory)

    def _check_version(self, lease: Lease) -> None:
        """No lease starts under an older policy than it was admitted for; what serves only ever becomes newer."""
        serving = self._engine.serving
        if lease.policy is None and serving is not None and serving.version < lease.min_version:
            raise EngineError(f"it is for version {lease.min_version} or newer, and {serving.short()} serves")

    def _introduce(self, shard: int, reason: str = "") -> None:
        """Say what this node is, what it works on for this shard of the buffer, and what it serves. The buffer answers
        with what it misses, and cancels what is not its any more."""
        if reason:
            log.warning("introduced again: %s", reason)
        self._send_results()  # first: what is sent is not held
        holds, granted = self._talk.leases_of(shard), self._talk.asking.given(shard)
        with self._talk.only(shard):
            self._talk.send(msgspec.structs.replace(self._ready, life=self._life, holds=holds, granted=granted))
            self._prover.again()
            self._departure.say_again()

    def _on_cancel(self, lease_id: int) -> None:
        for key in self._book.cancel(lease_id):
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._engine.abort(key)
        self._serving.forget(key)
        if self._episodes is not None:
            self._episodes.cancel(key)

    def _on_call(self, request: Request) -> None:
        assert self._episodes is not None
        if not self._episodes.is_wanted(request.key):
            return
        try:
            self._serving.submit(request)
        except EngineDied:
            raise
        except AsyncRLError as error:
            self._episodes.failed(request.key, error)

    def _on_ended(self, key: tuple[int, int], outcome: ToScore | Packed | None) -> None:
        assert self._episodes is not None
        self._episodes.ended(key)
        if isinstance(outcome, ToScore):
            self._scorer.submit(*outcome)
        else:
            self._collect(outcome)

    def _on_completion(self, completion: Completion) -> None:
        self._sampled_tokens += len(completion.tokens) - completion.resumed
        if self._episodes is not None and is_call(completion.key):
            self._episodes.completed(completion)
            return
        outcome = self._book.sampled(completion)
        if isinstance(outcome, ToScore):
            self._scorer.submit(*outcome)
        else:
            self._collect(outcome)

    def _cannot_start(self, request: Request, reason: str) -> None:
        if self._episodes is not None and is_call(request.key):
            self._episodes.failed(request.key, SampleFailed(reason))
            return
        self._collect(self._book.unstarted(request.key, reason))

    def _collect(self, trajectory: Packed | None) -> None:
        if trajectory is not None:
            self._outbox.append(trajectory)

    # --- what the buffer hears ---------------------------------------------------------------------------------------

    def _send_results(self) -> None:
        finished, self._outbox = self._outbox, []
        for shard, results, blobs in self._talk.results(finished):
            reached("node.before-results")
            self._talk.tell(shard, results, blobs)

    def _send_wants(self) -> None:
        """Ask for as many samples as the engine would have in flight, and for a few more, so that who comes next need
        not wait for a lease; repeat the numbers now and then."""
        if self._engine.serving is None:
            return
        now, limit = time.monotonic(), self._engine.limit
        wanted = self._book.sampled_training_samples + limit + max(self._group_size, limit // 4)
        asking = self._talk.asking
        asks = asking.turn(now) + asking.wants(wanted, now)
        if not asks and now - self._reported > REPORT_S:
            asks = [asking.repeat()]
        for shard, total_samples, once in asks:
            self._reported = now
            numbers = (self._busy_s, now - self._started, self._sampled_tokens, self._decode_steps, limit)
            self._talk.tell(shard, NodeWants(total_samples, *numbers, once))

    def _report_trouble(self, policy: PolicyId, error: str) -> None:
        """The engine refused it; the buffer leases this node nothing until it serves a later one."""
        self._gauges.failed()
        serving = self._engine.serving
        goes_on = f"{serving.short()} goes on serving" if serving else "nothing serves yet"
        log.error("policy %s %s: %s; %s", policy.name, policy.short(), error, goes_on)
        self._talk.send(NodeTrouble(policy, words(error), refused=True))

    def _reading(self) -> Reading:
        return self._gauges.reading(
            self._engine, self._sampled_tokens, self._decode_steps, self._busy_s, self._scorer.pending,
            self._serving.recomputed,
        )  # fmt: skip


def body(context: PoolContext) -> None:
    config = context.config
    path = model_path(config)
    with context.watchdog.working("loads the task, the model and the tokenizer"):
        task = load_task(config.task)
        tables = eval_tasks(config)
        held_out = {name: load_task(table) for name, table in tables.items()}
        engine = make_engine(config, path, context.directory.logs / f"{context.name}-engine.log")
        tokenizer = load_tokenizer(path)
    log.info("engine: %s", engine.describe())
    scratch = Scratch()
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    scorer = Scorer(config.task, config.inference, inbox, eval_tasks=tables)
    episodes: Episodes | None = None
    try:
        episodes = make_episodes({"": task, **held_out}, config, tokenizer, inbox)
        buffer, store = dial_services(context, "node", inbox)
        ready = NodeReady(
            engine.capabilities.name, config.inference.slots, fingerprint(config, path), logprob_bound(engine, config)
        )
        relaying = relaying_of(context)
        puller = PolicyPuller(store, scratch.path, inbox, engine.capabilities.in_place, engine.read, relaying)
        plays = frozenset() if episodes is None else episodes.tasks
        book = RolloutBook(task, tokenizer, context.name, engine.capabilities.name, held_out, plays)
        links = {client.peer: client for client in (*clients_of(buffer), store)}
        gauges = NodeGauges(config.inference.slots, links, relaying.relay)
        settle()
        try:
            Node(context, ready, engine, book, buffer, puller, scorer, inbox, gauges, episodes).work()
        finally:
            if relaying.relay is not None:
                relaying.relay.close()
            puller.close(min(END_S, config.launch.grace / 4))  # so that there is time left to take its files away
            store.close()
            buffer.close()
    finally:
        if episodes is not None:
            episodes.close()
        scorer.close()
        engine.close()
        scratch.remove()


if __name__ == "__main__":
    pool_main(__file__, body)

"""The learner: draw, correct, step, publish. Read `Learner.learn` top to bottom; everything else serves it."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from async_rl.config import model_routes
from async_rl.errors import AsyncRLError
from async_rl.eval_config import best_set
from async_rl.fingerprint import fingerprint, pacing
from async_rl.run.curve import draw_learning_curve
from async_rl.run.dial import dial_services
from async_rl.run.killpoints import reached
from async_rl.run.metrics import MetricsWriter, Record, read_metrics
from async_rl.run.model_cache import model_path
from async_rl.run.pages import settle
from async_rl.run.process import PoolContext, pool_main
from async_rl.run.shard_links import BufferLink, clients_of
from async_rl.run.summary import build_summary
from async_rl.shards import split_dispositions, whole_status
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkError, LinkTimeout, Received
from async_rl.wire.messages import (
    Batch,
    Checkpointed,
    Confirm,
    Confirmed,
    Draw,
    EvalResult,
    Final,
    Finish,
    Message,
    Status,
    StatusRequest,
    Stop,
    TrainerReady,
    words,
)
from trainer.backend import Backend, StepResult
from trainer.backends import follow_torchrun, open_backend
from trainer.batches import TrainingBatch, prepare, whole_draw, with_reference_kl
from trainer.best import Best
from trainer.checkpoint import oldest_version, write_checkpoint
from trainer.dialogue import SLICE_S, Dialogue, Interrupted
from trainer.evaluating import Evaluating
from trainer.gauges import TrainerGauges
from trainer.publish import Published, Publisher
from trainer.ranks.place import torchrun_place
from trainer.records import batch_record, health, pools_record, sample_records, samples_due, seen_in
from trainer.releases import Releases
from trainer.schedule import rate_at
from trainer.state import State, progress_of, resume
from trainer.trackers import Records, RecordWriter, open_trackers
from trainer.watch import Watch

log = logging.getLogger("learner")

REPLY_TIMEOUT_S = 30.0  # for answers that the buffer gives at once


class Learner:
    def __init__(
        self,
        context: PoolContext,
        backend: Backend,
        state: State,
        buffer: BufferLink,
        store: Client,
        metrics: RecordWriter,
        samples: MetricsWriter,
        fingerprint: dict[str, str],
    ) -> None:
        self._config = context.config
        self._directory = context.directory
        self._watchdog = context.watchdog
        self._backend = backend
        self._state = state
        self._buffer = buffer
        self._publisher = Publisher(buffer, store)
        self._releases = Releases(context, backend, self._publisher)
        self._store = store
        self._metrics = metrics
        self._samples = samples
        self._started = time.monotonic()
        self._elapsed_before = state.elapsed_s
        best = Best(
            context.directory.adapters, best_set(self._config), backend.export_final,
            [request.policy for request in state.evaluating],
        )  # fmt: skip
        self._evaluating = Evaluating(self._config, best, self._publisher, state.evaluating)
        self._fingerprint = fingerprint
        self._routes = model_routes(self._config) if self._config.algorithm.router_replay == "rollout" else None
        self._life = secrets.token_hex(8)
        self._finishing = False
        self._watch = Watch(context.config, context.directory.checkpoints, context.directory.metrics_path)
        self._talk = Dialogue(
            buffer, self._introduction, self._take_in_passing, lambda: self._state.seen, context.stopping,
            context.watchdog,
        )  # fmt: skip

    # --- the loop ----------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Train to the last step, or until asked to stop. Raises LinkError, AsyncRLError."""
        state, steps = self._state, self._config.run.steps
        self._evaluating.pin()
        self._talk.introduce()
        self._releases.canary()
        self._publish()
        self._evaluate_if_due()
        try:
            began = time.monotonic()
            while state.version < steps:
                asked_at = time.monotonic()
                drawn = self._draw(state.version)
                drawn_at = time.monotonic()
                reached("trainer.after-draw")
                batch = prepare(drawn, self._config, self._backend.vocabulary_size, self._routes)
                rate = rate_at(state.version, steps, self._config.trainer)
                with self._watchdog.working(f"trains batch {drawn.message.batch} from version {state.version}"):
                    batch = with_reference_kl(batch, self._backend, self._config.algorithm)
                    result = self._step(batch, rate)
                trained_at = time.monotonic()
                reached("trainer.after-step")
                self._confirm(drawn.message, batch, result)
                reached("trainer.after-confirm")
                published = self._publish()
                published_at = time.monotonic()
                seconds = {
                    "draw_wait_s": drawn_at - asked_at,
                    "train_s": trained_at - drawn_at,
                    "cycle_s": published_at - drawn_at,
                    "step_s": published_at - began,
                }
                began = published_at
                # Before a checkpoint says that the step is done; and of a policy that is lost there is to be none.
                self._watch.heed(self._record(batch, result, published, seconds))
                self._checkpoint_if_due()
                self._evaluate_if_due()
            self._await_evaluations()
        except Interrupted:
            self._checkpoint()
            raise Interrupted(f"stopped at version {state.version}") from None

    def _introduction(self, shard: int) -> list[Message]:
        """Who this is, where it goes on, and what a shard of the buffer still owes it: the first one evaluates. Raises
        AsyncRLError when the checkpoint is of a run of other shards."""
        progress = progress_of(self._state, shard, self._talk.shards)
        me = TrainerReady(self._fingerprint, pacing(self._config), progress, self._life, self._state.version)
        return [me, *(self._evaluating.pending if shard == 0 else ())]

    def _take_in_passing(self, message: Message) -> None:
        """What the buffer says whatever the trainer waits for. Raises AsyncRLError when it stops the run."""
        if isinstance(message, Stop) and (message.error or not self._finishing):
            raise AsyncRLError(message.error or f"the buffer ended the run: {message.reason}")
        if isinstance(message, EvalResult):
            self._on_eval_result(message)
        if isinstance(message, Status):
            self._on_status(message)

    @property
    def _patience_s(self) -> float:
        """For answers that the buffer gives at once, unless it has to be started again first."""
        return self._config.buffer.trainer_timeout

    def _draw(self, for_version: int) -> Received:
        """Wait in slices; the buffer sends the batch as soon as the rules allow."""
        timeout = self._config.run.draw_timeout
        awaiting = f"a batch for version {for_version}"
        try:
            parts = self._talk.ask(
                Draw(for_version), Batch, timeout, awaiting, interruptible=True,
                wanted=lambda batch: batch.batch == for_version,
            )  # fmt: skip
            return whole_draw(parts)
        except LinkTimeout as error:
            answers = self._talk.ask(StatusRequest(), Status, REPLY_TIMEOUT_S, "the buffer's status")
            waiting = whole_status([answer.message for answer in answers]).waiting
            raise LinkTimeout(f"{error}; the buffer says: {waiting}") from error

    def _step(self, batch: TrainingBatch, rate: float) -> StepResult:
        try:
            return self._backend.step(batch.samples, rate)
        except FloatingPointError as error:
            raise self._watch.not_finite(self._state.version, error) from error

    def _confirm(self, drawn: Batch, batch: TrainingBatch, result: StepResult) -> None:
        """Close the batch for good, and say how its age served; only then does the version rise. A skipped step leaves
        the digest as it is. Not interruptible: weights that have moved belong to the next version, and so does the
        buffer's progress."""
        confirms = [
            Confirm(drawn.batch, part, *health(result))
            for part in split_dispositions(batch.dispositions, self._talk.shards)
        ]
        closed = self._talk.ask(
            confirms, Confirmed, self._patience_s, f"the closing of batch {drawn.batch}",
            wanted=lambda confirmed: confirmed.batch == drawn.batch,
            between=lambda: reached("trainer.between-confirms"),
        )  # fmt: skip
        self._state.progress, *more = [answer.message.progress for answer in closed]
        self._state.more_progress = tuple(more)
        self._state.version += 1

    def _publish(self) -> Published:
        policy, published = self._releases.release(self._state.version)
        self._state.digest = policy.digest
        return published

    @property
    def _policy(self) -> PolicyId:
        return PolicyId("main", self._state.version, self._state.digest)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        with self._watchdog.working(f"keeps version {self._state.version} until it is evaluated"):
            self._evaluating.ask(self._policy, clients_of(self._buffer)[0].send)

    def _on_eval_result(self, result: EvalResult) -> None:
        record = self._evaluating.take(result)
        if record is not None:
            self._metrics.write({"time_s": self._time_s(), "eval": record})

    def _await_evaluations(self) -> None:
        while self._evaluating.pending:
            timeout, awaited = self._evaluating.patience_s(REPLY_TIMEOUT_S), self._evaluating.awaited()
            self._talk.receive(EvalResult, timeout, awaited, interruptible=True)

    # --- what stays --------------------------------------------------------------------------------------------------

    def _checkpoint_if_due(self) -> None:
        every = self._config.trainer.checkpoint_every
        if self._state.version == self._config.run.steps or (every and self._state.version % every == 0):
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._state.elapsed_s = self._time_s()
        self._state.evaluating = self._evaluating.pending
        state = msgspec.to_builtins(self._state, str_keys=True)
        with self._watchdog.working(f"writes the checkpoint of version {self._state.version}"):
            write_checkpoint(self._directory.checkpoints, self._state.version, self._backend.save, state)
        self._buffer.send(Checkpointed(oldest_version(self._directory.checkpoints)))

    def _record(
        self, batch: TrainingBatch, result: StepResult, published: Published, seconds: dict[str, float]
    ) -> Record:
        step = self._state.version - 1
        record = {
            "step": step,
            "version": self._state.version,
            "digest": self._state.digest,
            "time_s": self._time_s(),
            **batch_record(batch),
            "skipped": result.skipped,
            "train_tokens_per_s": batch.tokens / seconds["train_s"],
            "upload_ms": published.upload_ms,
            **seconds,
            **result.metrics,
        }
        self._metrics.write(record)
        if samples_due(step, self._config.run.steps):
            for sample in sample_records(batch, step):
                self._samples.write(sample)
        return record

    def _on_status(self, status: Status) -> None:
        pools = pools_record(status, self._state.seen)
        self._metrics.write({"time_s": self._time_s(), "pools": pools})
        self._state.seen = seen_in(status)
        # When a look at the nodes comes is chance, which must not decide how long a step is where runs are repeated.
        for *_, k3 in () if self._config.run.deterministic else pools["mismatches"]:
            self._backend.observe(k3)

    def _time_s(self) -> float:
        """Seconds of this run, those before a resume included."""
        return round(self._elapsed_before + time.monotonic() - self._started, 3)

    def finish(self, reason: str, error: str = "") -> Final | None:
        """Tell the services that the run is over; the buffer's last word on the ledger. None when it has none to
        give any more: that must not cost a finished run its results."""
        self._tell(self._store, Finish(reason, error), REPLY_TIMEOUT_S)
        self._finishing = True  # a shard says that all is over as soon as it has given its account, before others have
        try:
            finals = self._talk.ask(Finish(reason, error), Final, REPLY_TIMEOUT_S, "the buffer's closing account")
            final = Final(whole_status([answer.message.status for answer in finals]))
        except AsyncRLError as lost:
            log.warning("no closing account from the buffer: %s", lost)
            return None
        self._on_status(final.status)
        return final

    def fail(self, error: Exception) -> None:
        """Best effort: let the others end with the cause instead of waiting for a trainer that is gone."""
        finish = Finish("the trainer failed", words(f"trainer: {error}"))
        self._tell(self._buffer, finish, SLICE_S)
        self._tell(self._store, finish, SLICE_S)

    def _tell(self, service: BufferLink, finish: Finish, timeout_s: float) -> None:
        """A service that cannot be reached any more must not keep the other one from hearing it."""
        try:
            service.send(finish)
            service.flush(timeout_s)
        except LinkError as lost:
            log.warning("a service could not be told of the end: %s", lost)

    def write_results(self, final: Final | None) -> None:
        """adapters/final, summary.json and the learning curve."""
        with self._watchdog.working("writes the results"):
            self._write_results(final)

    def _write_results(self, final: Final | None) -> None:
        self._backend.export_final(self._directory.adapters / "final")
        summary = build_summary(
            read_metrics(self._directory.metrics_path), final.status if final else None, self._config,
            self._time_s(), {**self._releases.sizes(), "best": self._evaluating.best.summary()},
        )  # fmt: skip
        self._directory.summary_path.write_text(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
        draw_learning_curve(self._directory.metrics_path, self._directory.curve_path, self._config)


def run_learner(learner: Learner) -> None:
    """Learn, and whatever happens tell the others why it ended."""
    try:
        learner.learn()
    except Interrupted as interrupted:
        learner.finish(str(interrupted))
        log.info("%s; go on with --resume", interrupted)
    except Exception as error:
        learner.fail(error)
        raise
    else:
        learner.write_results(learner.finish("all steps are done"))


def body(context: PoolContext) -> None:
    config = context.config
    path = model_path(config)
    place = torchrun_place()
    if place is not None and place.rank > 0:
        follow_torchrun(config, path, place, context.watchdog)
        return
    with ExitStack() as stack:
        stack.enter_context(context.directory.alone(context.name))
        with context.watchdog.working("loads the model"):
            backend = stack.enter_context(open_backend(config, path, context.directory.logs, context.name))
            state = resume(context.directory.checkpoints, backend) if context.resume else State()
        _learn(context, path, backend, state)


def _learn(context: PoolContext, path: Path, backend: Backend, state: State) -> None:
    config, directory = context.config, context.directory
    keep = state.version if context.resume else None
    file = MetricsWriter(directory.metrics_path, keep_before_step=keep)
    with Records(file, open_trackers(context, state.version)) as metrics:
        samples = MetricsWriter(directory.samples_path, keep_before_step=keep)
        buffer, store = dial_services(context, "trainer")
        links = {client.peer: client for client in (*clients_of(buffer), store)}
        metrics.listen(TrainerGauges(context.exporter, links))
        settle()
        try:
            run_learner(Learner(context, backend, state, buffer, store, metrics, samples, fingerprint(config, path)))
        finally:
            store.close()
            buffer.close()


if __name__ == "__main__":
    pool_main(__file__, body)

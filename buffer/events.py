"""Everything that may happen to the replay buffer, and everything it may answer.

`Replay.apply(event, now) -> effects` is the whole interface of the rules: the service turns messages into events and
effects into messages, the simulator invents events under a virtual clock, and the journal need only append the events
to reproduce the state. `now` is in seconds on a monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from async_rl.proof import Proof
from async_rl.trajectory import EncodedTrajectory
from async_rl.trajectory import Status as AttemptStatus
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import BatchGroup, Disposition, Lease, NodeMismatch, Progress, SamplingParams
from buffer.rules import Rules

if TYPE_CHECKING:
    Opaque = EncodedTrajectory
else:
    Opaque = memoryview  # how msgspec reads one; none other is ever read, since the journal leaves them empty


NOBODYS = "it came when no lease of its sender's was open for it"  # the problem of a result without a payload


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of what happens. Events and effects are no concern of the garbage collector: they cannot be part of a cycle,
    and there are several for each trajectory."""


class BufferStarted(Event, frozen=True, tag=True, array_like=True):
    """The first event of every life of the service. With other `rules` than before (a resumed run may have more steps,
    or more tries), these hold from now on; what had ended the run then is asked again."""

    rules: Rules


class NodeJoined(Event, frozen=True, tag=True, array_like=True):
    """`life` names the node's process; `granted` is how many samples it has had of this buffer in earlier sessions,
    since it counts what it asks for over its whole life; `logprob_bound` is what its engine declares (see
    buffer.proofs)."""

    node: str
    slots: int
    logprob_bound: float = 0.0
    life: str = ""
    granted: int = 0


class NodeAttested(Event, frozen=True, tag=True, array_like=True):
    """The node's engine serves this policy from now on, and does this on the probe."""

    node: str
    policy: PolicyId
    proof: Proof | None = None


class NodeHeld(Event, frozen=True, tag=True, array_like=True):
    """The node's engine holds this policy without serving it: the canary, or one that evaluation pinned."""

    node: str
    policy: PolicyId
    proof: Proof


class NodeRefused(Event, frozen=True, tag=True, array_like=True):
    """The node's engine could not load a policy whose file had come whole."""

    node: str
    policy: PolicyId
    error: str


class NodeWanted(Event, frozen=True, tag=True, array_like=True):
    """Samples the node has asked for in total since it joined; `once`: what of it cannot be leased now it will look for
    elsewhere (see NodeWants)."""

    node: str
    total_samples: int
    once: bool = False


class NodeLost(Event, frozen=True, tag=True, array_like=True):
    """The node is gone: silent for three heartbeats, left, or was told to."""

    node: str
    reason: str


class NodeDraining(Event, frozen=True, tag=True, array_like=True):
    """The node is about to leave: it gets no lease any more, and still delivers."""

    node: str


class SamplesReturned(Event, frozen=True, tag=True, array_like=True):
    """A node gives back what it has not begun, or does not hand over: leased again as it was."""

    node: str
    lease: int
    samples: tuple[int, ...]


class HandedPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt that was begun: `versions` are the runs over what was sampled so far, `payload` the encoded
    trajectory, opaque here; `problem` as in ResultArrived."""

    sample: int
    versions: tuple[VersionRun, ...]
    payload: Opaque
    problem: str = ""


class PrefixesHandedOver(Event, frozen=True, tag=True, array_like=True):
    """All that a node still owes of a lease and has begun. The attempts stay the same, under another holder."""

    node: str
    lease: int
    prefixes: tuple[HandedPrefix, ...]


class ResultArrived(Event, frozen=True, tag=True, array_like=True):
    """One attempt came back. `payload` is the encoded trajectory, opaque here; `problem` is not empty when the
    service already found it broken (sizes, versions, log-probabilities); `note` is the node's, of why it failed."""

    node: str
    lease: int
    sample: int
    status: AttemptStatus
    reward: float
    versions: tuple[VersionRun, ...]
    n_tokens: int
    payload: Opaque
    problem: str = ""
    note: str = ""


class BundleArrived(Event, frozen=True, tag=True, array_like=True):
    """Good attempts of a lease came back in one payload, a bundle (async_rl.bundle), all of them sampled under version
    and digest. `rewards`, `n_tokens` and `sampled` (of these) have an entry for each of `samples`. Apart from how they
    are kept and lent (bundles of one group in the order of their first samples) it is as if each had come alone."""

    node: str
    lease: int
    samples: tuple[int, ...]
    version: int
    digest: str
    rewards: tuple[float, ...]
    n_tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    payload: Opaque


class ResultsArrived(Event, frozen=True, tag=True, array_like=True):
    """Several results, of any nodes, as if each had come alone, except that what follows from them (lending, leasing)
    is decided once, after the last: what arrives in one burst is one event."""

    results: tuple[ResultArrived | BundleArrived, ...]


class TrainerJoined(Event, frozen=True, tag=True, array_like=True):
    """A trainer, which goes on from `version`: 0, or that of its checkpoint. `life` names its process; every node's
    `fingerprint` must be equal to its own."""

    trainer: str
    life: str
    fingerprint: dict[str, str]
    version: int


class Checkpointed(Event, frozen=True, tag=True, array_like=True):
    """The trainer has a durable checkpoint of `version`, and will never go back beyond it."""

    version: int


class PolicyRegistered(Event, frozen=True, tag=True, array_like=True):
    """`proof` is what a node that serves it has to show; None asks for nothing."""

    policy: PolicyId
    proof: Proof | None = None


class DrawRequested(Event, frozen=True, tag=True, array_like=True):
    for_version: int


class BatchConfirmed(Event, frozen=True, tag=True, array_like=True):
    """`ess` and `k3` are what the step was like, None when nothing trained: see buffer.adaptive."""

    batch: int
    dispositions: tuple[Disposition, ...]
    ess: float | None = None
    k3: float | None = None


class EvalRequested(Event, frozen=True, tag=True, array_like=True):
    policy: PolicyId
    n: int
    sampling: SamplingParams
    timeout_s: float
    eval_set: str = "eval"
    samples: int = 1


class Resumed(Event, frozen=True, tag=True, array_like=True):
    """A checkpoint's progress, before anything was leased."""

    progress: Progress


class Ticked(Event, frozen=True, tag=True, array_like=True):
    """Time passed: lease and evaluation deadlines are looked at."""


class RunFinished(Event, frozen=True, tag=True, array_like=True):
    """Close every open attempt as cancelled, and lease nothing more."""

    reason: str


AnyEvent = (
    BufferStarted | TrainerJoined | Checkpointed | NodeJoined | NodeAttested | NodeHeld | NodeRefused | NodeWanted
    | NodeDraining | NodeLost | ResultArrived | BundleArrived | ResultsArrived | SamplesReturned | PrefixesHandedOver
    | PolicyRegistered | DrawRequested | BatchConfirmed | EvalRequested | Resumed | Ticked | RunFinished
)  # fmt: skip


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Base of what the rules decide."""


class GrantLease(Effect, frozen=True):
    node: str
    lease: Lease


class NothingFree(Effect, frozen=True):
    """Of what the node asked for once there is no more for it now, and it is forgotten; `granted` as NodeWanted."""

    node: str
    granted: int


class MoveLease(Effect, frozen=True):
    """`node` goes on with a lease that another one began; `payloads` as HandedPrefix, in the order of its samples."""

    node: str
    lease: Lease
    payloads: tuple[EncodedTrajectory, ...]


class CancelLease(Effect, frozen=True):
    node: str
    lease: int
    reason: str


class LendBatch(Effect, frozen=True):
    """`payloads` are the encoded trajectories of all groups, alone or bundled, in the order of `groups`."""

    batch: int
    for_version: int
    groups: tuple[BatchGroup, ...]
    payloads: tuple[EncodedTrajectory, ...]


class LendRecorded(Effect, frozen=True):
    """A batch that was confirmed before, to a trainer that has gone back: as it was lent then, from the journal."""

    batch: int


class EvalFinished(Effect, frozen=True):
    """As wire.messages.EvalResult."""

    policy: PolicyId
    n: int
    mean_reward: float
    cancelled: int
    seconds: float
    eval_set: str = "eval"
    rewards: bytes = b""


class ResultRefused(Effect, frozen=True):
    """A result changed nothing, or closed its attempt as refused; to be logged."""

    node: str
    lease: int
    sample: int
    reason: str


class QuarantineNode(Effect, frozen=True):
    """The node gets no more work (its leases were taken back); to be logged, and told to it."""

    node: str
    cause: str


class NodePassed(Effect, frozen=True):
    """The node's canary, or the first policy that it showed after that, was within its `bound`, in nats; to be logged,
    and told to it."""

    policy: PolicyId
    measure: NodeMismatch
    bound: float


class EndRun(Effect, frozen=True):
    """The run cannot go on; the message says why."""

    error: str

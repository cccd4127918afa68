"""Every message that crosses a socket, and the envelope around it.

One msgpack frame carries one envelope; large payloads follow as frames of their own ("blobs"). The
structs are arrays on the wire (no field names), so a field may only be appended, with a default; anything else is a
new SCHEMA. Who sends what:

    node    -> buffer   NodeReady, NodeServing, NodeHolds, NodeTrouble, NodeWants, Results, NodeDraining,
                        GiveBack, HandOver
    buffer  -> node     Leases, Cancel, Compared, Introduce, Drain, TakeOver, Stop
    trainer -> buffer   TrainerReady, PolicyPublished, Draw, Confirm, Checkpointed, EvalRequest, Finish
    buffer  -> trainer  Batch, Confirmed, EvalResult, Final, Stop
    tool    -> buffer   StatusRequest, Drain     buffer -> tool      Status, DrainAnswer
    tool    -> store    StatusRequest            store  -> tool      StoreStatus
    trainer -> store    Upload, PinPolicy        store  -> trainer   Stored
    node    -> store    Route, Pull, NodeRelay, FindSource, Pulled
    store   -> node     Announce, Routed, Chunk, RelayKeys, Source
    node    -> relay    Pull                     relay  -> node      Chunk, NotYet
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from async_rl.proof import Proof
from async_rl.version import PolicyId
from async_rl.wire.seen import NOTHING_SEEN, Seen

MAGIC = "arl"
SCHEMA = 3  # 2: bundles among the payloads; 3: their arrays by columns, dispositions by lease
COALESCE_BYTES = 256 << 10  # small messages are joined up to about this size; twice that gained little (measured)

Role = Literal["node", "trainer", "buffer", "store", "tool"]
Outcome = Literal["trained", "stale", "refused"]

# What a peer declares is checked while it is decoded, the lengths before their contents. So the most that a frame can
# become here is some times its bytes.
MAX_EVALUATED = 1 << 20  # samples of one evaluation, of all its instances together
MAX_ROUTE = 1 << 16  # policy files that are applied one after the other
MAX_WORDS = 4096
Words = Annotated[str, Meta(max_length=MAX_WORDS)]  # for people; `words` shortens
Label = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # not NaN either
Fingerprint = Annotated[dict[Label, Label], Meta(max_length=64)]
Encoded = Annotated[tuple[msgspec.Raw, ...], Meta(max_length=1 << 16)]


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The head of every frame. `seq` counts a sender's messages within one session `epoch` from 1; 0 marks the
    link's own messages. `ack` is the last sequence number received in order; `limit` is the credit: the total number
    of bytes that the receiver of this envelope may have sent in this session. `kind` is the tag of `body`, so a
    receiver can decide without decoding it. `more` holds the bodies of small messages that travel along, numbered from
    seq + 1 on; there are no blobs then."""

    magic: str
    schema: int
    run: str
    sender: str
    epoch: int
    seq: int
    ack: int
    limit: int
    kind: str
    body: msgspec.Raw
    blobs: int = 0
    more: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=1 << 12)] = ()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything a pool says to another. None can be part of a cycle: the garbage collector need not look."""


# --- node and buffer -------------------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """temperature 0 is greedy; log-probabilities are then those of temperature 1."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Lease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The right and duty of one node to produce `samples` of one ticket. Evaluation leases have ticket -1 and a
    pinned `policy`, which those of a deterministic run have too. No node starts a training lease under a version older
    than `min_version`. `seeds` has one entry per sample: the whole random state of an attempt is (seed, position).
    `eval_set` names the set of an evaluation, whose task the node finds in its config."""

    lease: int
    ticket: int
    try_: int
    instance: int
    split: Literal["train", "eval"]
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    min_version: int
    sampling: SamplingParams
    policy: PolicyId | None = None
    eval_set: Label = ""


class NodeReady(Message, frozen=True, array_like=True, tag=True):
    """First message of a node, and of every later session of it: what it runs. `fingerprint` maps a part of the set-up
    to its hash. `life` names the node's process; `holds` are the leases it works on, `granted` the training samples it
    has had so far: the buffer sends what it misses, and cancels what is not its any more. `logprob_bound` is
    how far, in nats, its engine's log-probabilities may be from the trainer's."""

    engine: Label
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]
    fingerprint: Fingerprint
    logprob_bound: float = 0.0
    life: str = ""
    holds: tuple[int, ...] = ()
    granted: Annotated[int, Meta(ge=0)] = 0


class NodeServing(Message, frozen=True, array_like=True, tag=True):
    """The node's engine attests which policy new tokens come from, how many modules the adapter matched, and what it
    does on the probe: scored after the flip and before the first token."""

    policy: PolicyId
    matched_modules: Count
    load_ms: Seconds
    proof: Proof | None = None


class NodeHolds(Message, frozen=True, array_like=True, tag=True):
    """The same proof of a policy that the engine holds without serving it: the canary, or what evaluation pinned."""

    policy: PolicyId
    proof: Proof


class NodeTrouble(Message, frozen=True, array_like=True, tag=True):
    """A policy did not come, or came whole and could not be loaded (`refused`: by the engine); the node goes on
    serving the old one."""

    policy: PolicyId
    error: Words
    refused: bool = False


class NodeWants(Message, frozen=True, array_like=True, tag=True):
    """How many samples this node has asked for since it joined, in total: a cumulative count cannot race with the
    grants under way. The rest are running totals for people, replaced by every later message: seconds in which it had
    work and since it began, tokens sampled, decode steps taken (tokens over steps: how full the batch was). `limit`:
    how many requests its engine would have in flight by now, 0 for a node that does not say. With `once` what cannot be
    granted now is forgotten, and answered by NothingFree (async_rl.asking)."""

    total_samples: Count
    busy_s: Seconds = 0.0
    alive_s: Seconds = 0.0
    sampled_tokens: Count = 0
    decode_steps: Count = 0
    limit: Count = 0
    once: bool = False


class Results(Message, frozen=True, array_like=True, tag=True):
    """Encoded trajectories and bundles of them (async_rl.bundle), in any order, as wire/payloads.py splits them."""

    trajectories: Encoded


class Leases(Message, frozen=True, array_like=True, tag=True):
    leases: tuple[Lease, ...]


class NothingFree(Message, frozen=True, array_like=True, tag=True):
    """This shard has no more for a node that asked once; it has granted it so many samples in all."""

    granted: Count


class Cancel(Message, frozen=True, array_like=True, tag=True):
    leases: tuple[int, ...]
    reason: str


class Compared(Message, frozen=True, array_like=True, tag=True):
    """A node's canary, or its first policy, was within its `bound`; both in nats."""

    policy: PolicyId
    max_dlogp: float
    bound: float


class Introduce(Message, frozen=True, array_like=True, tag=True):
    """The buffer has given this node up meanwhile: begin again with NodeReady."""

    reason: str


class Stop(Message, frozen=True, array_like=True, tag=True):
    """The run is over. `error` is empty after a run that finished."""

    reason: str
    error: str = ""


# --- a node that leaves ----------------------------------------------------------------------------------------------


class Drain(Message, frozen=True, array_like=True, tag=True):
    """Leave: from a tool to the buffer, which tells the node. `grace_s` is how long it may take; None is the node's
    own launch.grace."""

    node: Label
    grace_s: Seconds | None = None


class DrainAnswer(Message, frozen=True, array_like=True, tag=True):
    """The node was told; or `error` says why there is none to tell."""

    node: str
    error: str = ""


class NodeDraining(Message, frozen=True, array_like=True, tag=True):
    """The node leaves, within `grace_s` seconds: no lease for it any more."""

    grace_s: Seconds


class LeaseSamples(msgspec.Struct, frozen=True, array_like=True):
    lease: int
    samples: Annotated[tuple[int, ...], Meta(max_length=1 << 16)]


class GiveBack(Message, frozen=True, array_like=True, tag=True):
    """Samples that the node has not begun, or does not hand over: they are leased again."""

    leases: Annotated[tuple[LeaseSamples, ...], Meta(max_length=1 << 16)]


class HandOver(Message, frozen=True, array_like=True, tag=True):
    """All that the node still owes and has begun: prompt and tokens so far as encoded trajectories of status
    "aborted", in any order. A finish other than "abort" says that only the score is missing."""

    prefixes: Encoded


class TakeOver(Message, frozen=True, array_like=True, tag=True):
    """A lease that another node began: go on from these prefixes, in the order of its samples."""

    lease: Lease
    prefixes: tuple[msgspec.Raw, ...]


# --- trainer and buffer ----------------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of the buffer, for the case that its journal is lost: tickets below `next_ticket` that
    are not in `open_tickets` are spent; `open_tickets` maps the others to their try. Undrawn tickets are leased
    again. `reused` are the counts beside the ledger (buffer.reuse)."""

    next_ticket: Count
    open_tickets: dict[Count, Count]
    confirmed_batches: Count
    next_lease: Count
    ledger: dict[Label, Count]
    eval_ledger: dict[Label, Count]
    reused: dict[Label, Count] = {}


class TrainerReady(Message, frozen=True, array_like=True, tag=True):
    """First message of the trainer, and of every later session of it; its fingerprint is the reference for every node,
    and its `pacing` must be the buffer's. It goes on from `version`; `life` names its process. A buffer without a
    journal takes up `progress`."""

    fingerprint: Fingerprint
    pacing: Fingerprint
    progress: Progress | None = None
    life: str = ""
    version: Annotated[int, Meta(ge=0)] = 0


class PolicyPublished(Message, frozen=True, array_like=True, tag=True):
    """Sent before the policy is uploaded, so that no trajectory of it can arrive first. `proof` is what a node that
    serves it has to show."""

    policy: PolicyId
    proof: Proof | None = None


class Draw(Message, frozen=True, array_like=True, tag=True):
    """Ask for the batch that the training step starting from version `for_version` will use."""

    for_version: int


class BatchGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group of a batch: its ticket, and how many of the trajectories that follow are its own. For each of these, in
    order: how many batches were confirmed when it arrived here (the trainer's version then: what it aged before that
    it aged in flight, the rest in the queue), and for how many seconds it lay here until it was lent. `leased_s` is how
    long ago, at lending, the first lease of the ticket was granted. `uses` is how many batches before this one it was
    trained in: 0 for a fresh group."""

    ticket: int
    try_: int
    instance: int
    size: int
    arrived: tuple[int, ...] = ()
    held_s: tuple[float, ...] = ()
    leased_s: float = 0.0
    uses: int = 0


class Batch(Message, frozen=True, array_like=True, tag=True):
    """The trajectories of all groups, back to back, as the nodes encoded them (see wire/payloads.py): alone, or several
    of a group as a bundle (async_rl.bundle). Lent: the same batch is sent again unchanged until it is confirmed, and
    after that to a trainer that has gone back."""

    batch: int
    for_version: int
    groups: tuple[BatchGroup, ...]
    trajectories: tuple[msgspec.Raw, ...]


class Disposition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of some samples of a lease: of a whole group, most often."""

    lease: int
    samples: tuple[int, ...]
    outcome: Outcome


def dispositions_of(ends: Iterable[tuple[int, int, Outcome]]) -> tuple[Disposition, ...]:
    """Of attempts (lease, sample), with the outcome of each: neighbours of one lease and outcome become one."""
    return tuple(
        [
            Disposition(lease, tuple([sample for _, sample, _ in own]), outcome)
            for (lease, outcome), own in groupby(ends, key=itemgetter(0, 2))
        ]
    )


class Confirm(Message, frozen=True, array_like=True, tag=True):
    """What became of every trajectory of a batch; closes it for good. `ess`, `k3`: its step's (buffer.adaptive)."""

    batch: int
    dispositions: tuple[Disposition, ...]
    ess: float | None = None
    k3: float | None = None


class Confirmed(Message, frozen=True, array_like=True, tag=True):
    batch: int
    progress: Progress


class Checkpointed(Message, frozen=True, array_like=True, tag=True):
    """The trainer's checkpoints are durable, the oldest that it keeps being of `version`: it will never ask for a batch
    below that again."""

    version: Annotated[int, Meta(ge=0)]


class EvalRequest(Message, frozen=True, array_like=True, tag=True):
    """Evaluate `policy` on instances 0..n-1 of the eval split of a set's task, `samples` of each; leased like training
    work, never trained on. What is not done after `timeout_s` is cancelled, counted, and the result reported with its
    n."""

    policy: PolicyId
    n: Annotated[int, Meta(ge=1, le=MAX_EVALUATED)]
    sampling: SamplingParams
    timeout_s: Annotated[float, Meta(gt=0)]
    eval_set: Label = "eval"
    samples: Annotated[int, Meta(ge=1, le=MAX_EVALUATED)] = 1


class EvalResult(Message, frozen=True, array_like=True, tag=True):
    """Over `n` samples. `rewards` are float64, little-endian, [instances, samples]; not a number where a sample was
    cancelled."""

    policy: PolicyId
    n: int
    mean_reward: float
    cancelled: int
    seconds: float
    eval_set: Label = "eval"
    rewards: bytes = b""


class Finish(Message, frozen=True, array_like=True, tag=True):
    """The trainer is done (or failed, with `error`): the buffer cancels what is open and stops the nodes."""

    reason: Words
    error: Words = ""


class Final(Message, frozen=True, array_like=True, tag=True):
    """The buffer's answer to Finish: the status after everything was closed."""

    status: Status


# --- tools -----------------------------------------------------------------------------------------------------------


class NodeMismatch(msgspec.Struct, frozen=True, array_like=True):
    """How far a node's log-probabilities on the probe were from the trainer's under one policy (async_rl.proof)."""

    node: str
    version: int
    max_dlogp: float
    k3: float


class NodeStatus(msgspec.Struct, frozen=True):
    """`max_dlogp`, `k3`: of the last policy that it showed; `canary`, `first`: of its canary, and of the first after
    that; `bound`: what they have to be within. `limit`: how many requests its engine would have in flight by now."""

    name: str
    state: str
    engine: str
    slots: int
    policy: PolicyId | None
    leased_samples: int
    busy_fraction: float
    sampled_tokens: int
    busy_s: float = 0.0
    alive_s: float = 0.0
    decode_steps: int = 0
    limit: int = 0
    reason: str = ""
    max_dlogp: float | None = None
    k3: float | None = None
    bound: float | None = None
    canary: NodeMismatch | None = None
    first: NodeMismatch | None = None


class Status(Message, frozen=True, tag=True):
    """The buffer's view of the run. Times are seconds on the buffer's monotonic clock; push latencies run from the
    trainer's PolicyPublished to the node's NodeServing of that policy: the newest ones, of `pushes` in all, without
    those that who asks has seen. `mismatches` likewise, of `mismatch_count`. `quarantined` and `returned` count how
    often a node was set aside, and came back. `reused` is what was lent again, by outcome, and how many batches were
    smaller for want of it. `life` names the buffer's process: with a new one `pushes` and `sampled_lengths` begin at 0,
    and what the journal makes again, `mismatch_count` among it, goes on. `messages` of this process, each way:
    "control" are those that carry no trajectory, statuses apart; "results" the attempts that nodes sent."""

    uptime_s: float
    nodes: tuple[NodeStatus, ...]
    trainer: str
    newest: PolicyId | None
    confirmed_batches: int
    steps: int
    ledger: dict[str, int]
    eval_ledger: dict[str, int]
    outside: dict[str, int]
    ready_groups: int
    ready_bytes: int
    reserved_bytes: int
    waiting: str
    push_ms: tuple[float, ...]
    bound: int
    pushes: int = 0
    handovers: dict[str, int] = {}
    sampled_lengths: dict[int, int] = {}
    mismatches: tuple[NodeMismatch, ...] = ()
    mismatch_count: int = 0
    quarantined: int = 0
    returned: int = 0
    reused: dict[str, int] = {}
    adaptive_bound: int | None = None
    life: str = ""
    messages: dict[str, int] = {}


class StatusRequest(Message, frozen=True, array_like=True, tag=True):
    seen: Seen = NOTHING_SEEN


# --- policy store ----------------------------------------------------------------------------------------------------

# Kinds of policy files, beside "lora" and the canary's: a change of the parent's weights; all weights (of a policy with
# this *name* they only serve routes, and are not announced); no weights, but the word that they are the checkpoint's.
FACTORS, SNAPSHOT, BASE = "factors", "snapshot", "base"


class Upload(Message, frozen=True, array_like=True, tag=True):
    """A part of one policy file, as a blob: its bytes from `offset` on, of `size` in all. Parts come in order; one with
    offset 0 begins a file, whatever came before. `sha256` is of the whole file's bytes, and counts in the last part
    (who sends the file hashes as it goes); the policy's own digest is over its tensors and is checked by the receivers.
    `parent`, of a file of kind "factors": the policy whose weights it changes; the other kinds stand alone."""

    policy: PolicyId
    kind: Label
    size: Count
    sha256: Label
    parent: PolicyId | None = None
    offset: Count = 0


class Stored(Message, frozen=True, array_like=True, tag=True):
    """The policy is durable and has been announced."""

    policy: PolicyId


class PinPolicy(Message, frozen=True, array_like=True, tag=True):
    """Keep (or let go of) a policy beyond the retention rule, for evaluation."""

    policy: PolicyId
    pinned: bool


class Announce(Message, frozen=True, array_like=True, tag=True):
    """`order` rises with every announcement: newer is what was announced later. It is 0 for the
    canary, which is not to be served. `relayed`: there are nodes that relay, so ask from whom to pull (FindSource)."""

    policy: PolicyId
    kind: str
    size: int
    sha256: str
    order: int
    relayed: bool = False


class Route(Message, frozen=True, array_like=True, tag=True):
    """What has to be pulled and applied, by a node whose weights are those of `have` (None: of no policy that it can
    name), to get to `policy`?"""

    policy: PolicyId
    have: PolicyId | None = None


class RouteFile(msgspec.Struct, frozen=True, array_like=True):
    """`policy` is whose weights these are once the file is applied; size and SHA-256 are the file's."""

    policy: PolicyId
    kind: Label
    size: Count
    sha256: Label


class Routed(Message, frozen=True, array_like=True, tag=True):
    """In the order in which they are applied: updates alone where they lead from what the node has, else one file that
    stands alone and the updates after it; empty when the node has it already. `error`: there is no way."""

    policy: PolicyId
    files: Annotated[tuple[RouteFile, ...], Meta(max_length=MAX_ROUTE)] = ()
    error: Words = ""


class Pull(Message, frozen=True, array_like=True, tag=True):
    policy: PolicyId
    offset: Annotated[int, Meta(ge=0, lt=1 << 48)]
    count: Annotated[int, Meta(ge=1, le=4 << 20)]


class Chunk(Message, frozen=True, array_like=True, tag=True):
    """Bytes [offset, offset+count) of a policy file as a blob; `error` instead when the store has it no longer.
    `size` and `sha256` are the whole file's."""

    policy: PolicyId
    offset: Count
    size: Count
    sha256: Label
    error: Words = ""


# --- relays: nodes that pass on to others what they pull --------------------------------------------------------------

CHUNK_BYTES = 1 << 20  # what is asked for at once, and has a digest of its own
DIGEST_BYTES = 32
MAX_CHUNKS = 1 << 20
RELAY_KEEPS = 4  # files that a relay has pulled last, and passes on
Trouble = Literal["silent", "unreachable", "gone", "damaged"]


class NodeRelay(Message, frozen=True, array_like=True, tag=True):
    """First message of a node to the store, and of every later session of it. `place` is one for all processes that
    reach each other's loopback. `endpoint` is where others may dial this node for what it pulls; empty, it does not
    relay."""

    place: Label
    endpoint: Label = ""


class RelayKeys(Message, frozen=True, array_like=True, tag=True):
    """The public keys (Z85) of all who may come as a node, and so may dial a relay; sent to a node when it joins, where
    there are keys, and whenever the list changes."""

    keys: Annotated[tuple[Annotated[str, Meta(max_length=40)], ...], Meta(max_length=1 << 16)]


class FindSource(Message, frozen=True, array_like=True, tag=True):
    """From whom shall this node pull the file of a policy? `failed` is the relay that it had and has left for
    `trouble`: silent for too long, not to be reached, without the file, or with bytes that were not the file's."""

    policy: PolicyId
    failed: Label = ""
    trouble: Trouble = "silent"


class Source(Message, frozen=True, array_like=True, tag=True):
    """From `relay` at `endpoint`, whose public key is `key` where there are keys; from the store where that is empty.
    `chunks` are the SHA-256 (32 bytes each) of the file's chunks of CHUNK_BYTES. Also unasked, to who pulls the file
    already: go on from there. `error`: the store does not have it."""

    policy: PolicyId
    relay: Label = ""
    endpoint: Label = ""
    key: Annotated[str, Meta(max_length=40)] = ""
    size: Count = 0
    sha256: Label = ""
    chunks: Annotated[bytes, Meta(max_length=DIGEST_BYTES * MAX_CHUNKS)] = b""
    error: Words = ""


class Pulled(Message, frozen=True, array_like=True, tag=True):
    """This node has the whole file, verified; `relayed` of its bytes came from relays."""

    policy: PolicyId
    relayed: Count = 0


class NotYet(Message, frozen=True, array_like=True, tag=True):
    """The relay is alive, and waits for this chunk itself."""

    policy: PolicyId
    offset: Count


class StoreStatus(Message, frozen=True, array_like=True, tag=True):
    """The store's view: the bytes of policies that it has sent, and those that relays have (as the nodes say that had
    them), since it began; the nodes that relay; how often one was bypassed, by reason; who is trusted no more."""

    served_bytes: int = 0
    relayed_bytes: int = 0
    relays: tuple[str, ...] = ()
    bypasses: dict[str, int] = {}
    liars: tuple[str, ...] = ()


AnyMessage = (
    NodeReady | NodeServing | NodeHolds | NodeTrouble | NodeWants | Results | Leases | Cancel | Introduce | Stop
    | TrainerReady | PolicyPublished | Draw | Batch | Confirm | Confirmed | Checkpointed | EvalRequest | EvalResult
    | Finish | Final | StatusRequest | Status | Upload | Stored | PinPolicy | Announce | Pull | Chunk
    | NothingFree | Drain | DrainAnswer | NodeDraining | GiveBack | HandOver | TakeOver | Route | Routed | Compared
    | NodeRelay | RelayKeys | FindSource | Source | Pulled | NotYet | StoreStatus
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_body_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def words(text: str) -> str:
    """As much of a text for people as a message may carry."""
    return text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 1] + "…"


def encode_body(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_body(body: bytes | memoryview | msgspec.Raw) -> Any:
    """The message inside an envelope. Raises msgspec.MsgspecError when it is not one of AnyMessage."""
    return _body_decoder.decode(body)

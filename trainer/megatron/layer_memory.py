"""What a decoder layer of the Megatron backend keeps for its backward pass, and what it needs meanwhile, in bytes.

Counted tensor by tensor from what the layer computes (model.py, attention.py and lora.py here, and megatron-core's MLP,
router and all-to-all dispatcher): what an operation saves counts once, however many save it, and a view as all of the
tensor that it is a view of. Frozen weights save no inputs; an adapter saves its input, as float32 whatever the model's
dtype is. Sequences are taken to be so long that attention computes each by itself (packed_attention.ALONE), and to keep
one number a token and head beside its output.
"""

from __future__ import annotations

from typing import NamedTuple

from async_rl.parallel_config import ParallelConfig
from trainer.megatron.shape import ModelShape

WIDE = 4  # bytes of a float32
INDEX = 8  # of an int64


class Ranks(NamedTuple):
    """The adapter's rank on each of the seven kinds of matrices; 0 where none is adapted."""

    q_proj: int
    k_proj: int
    v_proj: int
    o_proj: int
    gate_proj: int
    up_proj: int
    down_proj: int

    @property
    def qkv(self) -> int:
        return self.q_proj + self.k_proj + self.v_proj

    @property
    def up(self) -> int:
        """Of both that the MLP begins with."""
        return self.gate_proj + self.up_proj


class Work(NamedTuple):
    """A rank's part of a micro-batch: all its `tokens`, and those that lie on the rank between the matrices (`own`;
    fewer under `sequence`); bytes of a number of the model (`dtype`); whether routes are replayed."""

    shape: ModelShape
    parallel: ParallelConfig
    ranks: Ranks
    tokens: int
    own: int
    dtype: int
    replays: bool

    @property
    def stream(self) -> int:
        """Hidden states between two layers."""
        return self.dtype * self.own * self.shape.hidden_size

    @property
    def routed(self) -> int:
        """Rows that a rank's experts compute: what the rank sends away, and as much from each other rank that has the
        same part of the experts' matrices."""
        return self.own * self.shape.num_experts_per_tok * self.parallel.expert_tensor


def micro_batch(
    shape: ModelShape,
    parallel: ParallelConfig,
    ranks: Ranks,
    micro_batch_tokens: int,
    dtype: int,
    *,
    replays: bool = False,
) -> Work:
    """Of a micro-batch of so many tokens, padded to a multiple of the tensor ranks under `sequence`."""
    divisor = parallel.tensor if parallel.sequence else 1
    own = -(-micro_batch_tokens // divisor)
    return Work(shape, parallel, ranks, own * divisor, own, dtype, replays)


def kept(work: Work, layer: int, *, first: bool = False) -> int:
    """What the layer of this number keeps of a micro-batch. `first`: of the model; its input needs no gradient, so the
    norm before its attention keeps nothing."""
    mlp = _experts if work.shape.has_experts(layer) else _dense
    return _norm(work) * (not first) + _attention(work, first) + _norm(work) + mlp(work)


def _norm(work: Work) -> int:
    """Its input as float32, and a factor for each token."""
    return WIDE * work.own * (work.shape.hidden_size + 1)


def _attention(work: Work, first: bool) -> int:
    shape, tensor, tokens = work.shape, work.parallel.tensor, work.tokens
    q, k = shape.query_width // tensor, shape.key_width // tensor
    heads, groups = shape.num_attention_heads // tensor, shape.num_key_value_heads // tensor
    projected = work.dtype * tokens * (q + 2 * k)  # q, k and v of one matrix; v stays a view of it
    # float32 copies; of what is float32 already the queries are copied out of several groups, and the keys are a view.
    normed = WIDE * tokens * (q + k if work.dtype != WIDE else q * (groups > 1))
    factors = WIDE * tokens * (heads + groups)
    angles = 4 * work.dtype * tokens * shape.head_dim  # cosines and sines, of queries and of keys
    attended = work.dtype * tokens * (q + k + q) + WIDE * tokens * heads  # turned q and k, output, log-sums
    return (
        _column_adapter(work, work.ranks.qkv, joined=not first) + projected + normed + factors + angles + attended
        + (WIDE * tokens * q + WIDE * work.own * work.ranks.o_proj if work.ranks.o_proj else 0)
    )  # fmt: skip


def _column_adapter(work: Work, rank: int, *, joined: bool = True) -> int:
    """Of adapters on a matrix split by rows: the input, what A makes of it (gathered from all tensor ranks), and the
    A's side by side."""
    if not rank:
        return 0
    width = work.shape.hidden_size
    return WIDE * (work.own * width + work.tokens * rank + width * rank * joined)


def _dense(work: Work) -> int:
    """The gated MLP keeps gate and up, silu(gate), up once more, and as input of down's adapter their product."""
    inner = work.shape.intermediate_size // work.parallel.tensor
    down = WIDE * work.tokens * inner + WIDE * work.own * work.ranks.down_proj if work.ranks.down_proj else 0
    return _column_adapter(work, work.ranks.up) + 4 * work.dtype * work.tokens * inner + down


def _experts(work: Work) -> int:
    shape, parallel, rows = work.shape, work.parallel, work.routed
    inner = shape.moe_intermediate_size // parallel.expert_tensor
    chosen = shape.num_experts_per_tok
    # The router's input and weights; who goes where, sorted out of a table of all experts. Replay keeps all scores.
    table = shape.experts * (INDEX + WIDE * work.replays)
    routing = work.stream + work.own * ((INDEX + WIDE + INDEX) * chosen + table)
    experts = shape.experts // parallel.expert
    up = WIDE * (rows * shape.hidden_size + rows * work.ranks.up + experts * shape.hidden_size * work.ranks.up)
    down = WIDE * rows * (inner + work.ranks.down_proj)
    weighted = work.dtype * rows * inner + WIDE * rows  # the product before it is weighted, and the weights
    return (
        routing + 4 * work.dtype * rows * inner + weighted
        + up * bool(work.ranks.up) + down * bool(work.ranks.down_proj)
    )  # fmt: skip


def at_work(work: Work, layer: int) -> int:
    """What is there at the fullest moment of computing this layer (again), beside all that it keeps: the gradient that
    came back, hidden states between attention and MLP where those are kept as a copy, and more. Of an MLP that is
    either when what its first matrices' adapters give is added (three tensors as wide as both, of which none is kept,
    while what comes after them is not there yet), or when gradients of the last one's input come together from the
    matrix and from its adapter. Of experts it is when the last of them is done: rows sent, rows received, what each
    expert made of them, and that side by side."""
    shape, parallel, dtype = work.shape, work.parallel, work.dtype
    width, tokens = shape.hidden_size, work.tokens
    half = dtype != WIDE
    beside = work.stream * (1 + half) + dtype * tokens * width * parallel.sequence
    if shape.has_experts(layer):
        copies = 3 + half + (parallel.expert > 1) + (parallel.expert_tensor > 1)
        return dtype * work.routed * width * copies + beside
    inner = shape.intermediate_size // parallel.tensor
    down = WIDE * bool(work.ranks.down_proj)
    adding = tokens * inner * ((6 * WIDE + 2 * dtype * half) * bool(work.ranks.up) - 4 * dtype - down)
    arriving = tokens * inner * (2 * dtype + WIDE - down) + 2 * WIDE * work.own * width * half
    return max(adding, arriving) + beside


class Head(NamedTuple):
    """What the last stage needs after its layers: `kept` until the gradient comes back, and `at_work` meanwhile."""

    kept: int
    at_work: int


def head(work: Work, chunk_bytes: int) -> Head:
    """Final norm, and log-probabilities of all tokens with their derivative, at most `chunk_bytes` of logits at once
    (trainer/megatron/logprobs.py): beside a chunk is another while it is normalised, or a block of the weights made
    float32."""
    width, tokens = work.shape.hidden_size, work.tokens
    rows = -(-work.shape.vocab_size // work.parallel.tensor)
    logits = WIDE * rows * max(1, min(tokens, chunk_bytes // (WIDE * rows)))
    block = min(chunk_bytes, WIDE * rows * width) if work.dtype != WIDE else 0
    hidden = work.stream + work.dtype * tokens * width * (1 + work.parallel.sequence)
    return Head(_norm(work) + INDEX * tokens + WIDE * tokens * width, hidden + logits + max(logits, block))

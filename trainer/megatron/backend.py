"""The Megatron backend: a Qwen3 or Qwen3-MoE model over the ranks of [trainer.parallel], of which an adapter learns, or
the linear layers by gradient sketches.

Every method is called on all ranks at once, with the same arguments (`trainer.ranks.leader` sees to that), and gives
all of them the same. Each copy of the model computes its own part of a batch (`trainer.balance`); the loss has the
denominators of the whole batch, so that gradients only have to be summed, and what a pass found is put together by
adding flat arrays that are zero where another rank computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.routes import UNKNOWN
from async_rl.schema import ConfigError
from trainer.algorithm.custom import load_loss
from trainer.algorithm.tokens import floored
from trainer.backend import Sample, StepResult
from trainer.balance import Dealer, attention_share
from trainer.canary import Canary
from trainer.flat_batch import Batch, flatten, unflatten
from trainer.head import Mixture
from trainer.logprobs import PAD, Rows, packed_rows
from trainer.megatron import groups, passes
from trainer.megatron.learnable import LoraShards, skeleton
from trainer.megatron.model import build
from trainer.megatron.replay import Counts, Trace
from trainer.megatron.settings import head_size, sparse_layers
from trainer.megatron.sketch_learnable import SketchShards
from trainer.push_sizes import push_sizes
from trainer.route_rows import missing_share
from trainer.stepping import Accumulated, Gathered, Stepping, check_centering

LEARNABLES: dict[str, type[LoraShards] | type[SketchShards]] = {"lora": LoraShards, "sketch": SketchShards}


class MicroBatch(NamedTuple):
    """What a rank's copy of the model computes at once: packed rows, the places of their wanted tokens in the flat
    arrays of the whole batch: int64 [n], and the sequences (their places in what was dealt out). Without any it is a
    sequence of which nothing is wanted, as the other copies compute one that counts."""

    rows: Rows
    where: torch.Tensor
    members: Sequence[int]

    @property
    def empty(self) -> bool:
        return not len(self.where)


class MegatronBackend(Stepping):
    """`trainer.backend.Backend`. The arguments are those of `trainer.torch_backend.TorchBackend`, `device` is this
    rank's. torch.distributed has been brought up, with as many ranks as `trainer.parallel` has. Raises AsyncRLError."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        seed: int,
        dtype: str = "float32",
        device: torch.device,
    ) -> None:
        if algorithm.loss:
            load_loss(algorithm.loss)  # what cannot be imported is said before a model is loaded
        self.trainer = trainer
        self.algorithm = algorithm
        self.temperature = temperature
        self.device = device
        self.control = None
        kind = getattr(torch, dtype)
        groups.begin(trainer.parallel, device)
        self.model = build(
            model_path, trainer.parallel, dtype=kind, device=device, recompute=trainer.activation_checkpointing
        )
        self._check_algorithm()
        self.learnable: LoraShards | SketchShards = LEARNABLES[trainer.kind](self.model, trainer, seed, str(model_path))
        self.push_sizes = push_sizes(skeleton(self.model.config).to(kind), trainer)
        self.vocabulary_size = int(self.model.config.vocab_size)
        self.dtype = torch.promote_types(kind, torch.float32)
        self._dealer = Dealer(trainer.parallel.data, trainer.micro_batch_tokens, _attention_share(self.model.config))
        self._counts: list[Counts] = []

    def _check_algorithm(self) -> None:
        algorithm, config = self.algorithm, self.model.config
        check_centering(algorithm, config.vocab_size)
        if self._replays and not any(sparse_layers(config)):
            raise ConfigError(
                f'[algorithm] router_replay = "{algorithm.router_replay}": the model has no experts: set it to "none"'
            )

    @property
    def _replays(self) -> bool:
        return self.algorithm.router_replay != "none"

    @property
    def publishes_canary(self) -> bool:
        return isinstance(self.learnable, LoraShards)

    # --- learning ----------------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        """See `Stepping.step`. One more metric: `rank_imbalance`, what the busiest copy of the model computed in units
        of the mean, in all passes of the step together."""
        self._dealer.begin()
        self._counts = []
        result = super().step(samples, rate)
        result.metrics["rank_imbalance"] = self._dealer.imbalance
        return result

    def _flatten(self, samples: Sequence[Sample]) -> Batch:
        return flatten(samples, self.algorithm, self.vocabulary_size, self.dtype, self.device, divided=False)

    def _accumulate(self, samples: Sequence[Sample], batch: Batch) -> Accumulated:
        gathered = Gathered(samples, batch, self.algorithm)
        share = self._share_of_batch(samples, batch)
        if gathered.asks_reference:
            self._reference_pass(share, gathered.put_reference)

        def loss_of(index: int, logprobs: torch.Tensor, expected: torch.Tensor | None = None) -> torch.Tensor:
            where = share[index].where
            if share[index].empty:
                return logprobs.new_zeros(())
            data = batch.data.at(where)
            if expected is not None:
                data = data._replace(expected=expected)
            return gathered.loss(floored(logprobs), data, where)

        learns = torch.is_grad_enabled()
        trace = self._run(share, loss_of, self.temperature, learns=learns, top=batch.top, replays=self._replays)
        if gathered.routes is not None and trace is not None:
            for each, flat in zip(share, trace.routes(self.model), strict=True):
                if not each.empty:
                    gathered.put_routes([batch.rows[row] for row in each.members], flat, each.rows.spans)
            self._share_routes(samples, batch, gathered.routes)
        found = [gathered.total, gathered.learning, gathered.proximal]
        if gathered.asks_reference and gathered.reference is not None:
            found.append(gathered.reference)
        self._put_together(found)
        return gathered.accumulated()

    def _reference_pass(self, share: Sequence[MicroBatch], put: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Log-probabilities of a share under the base model, to where they belong."""
        with self._adapter.off():
            take = self._take(share, lambda where, logprobs: put(where, floored(logprobs)))
            self._run(share, take, self.temperature, learns=False, replays=self._replays)

    @property
    def _adapter(self) -> LoraShards:
        if not isinstance(self.learnable, LoraShards):
            raise AsyncRLError(
                f'[trainer] kind = "{self.trainer.kind}" changes the base model: it has no reference, and no canary'
            )
        return self.learnable

    def _share_of_batch(self, samples: Sequence[Sample], batch: Batch) -> list[MicroBatch]:
        """The micro-batches of this rank's copy of the model."""
        lengths = [int(places[-1]) for places in batch.wanted]
        dealt = self._dealer.deal(lengths, [samples[row].attempt for row in batch.rows], self.model.groups.dp.rank())
        tokens = [samples[index].tokens for index in batch.rows]
        routes = [samples[index].routes for index in batch.rows] if self._replays else []
        return [self._micro_batch(members, tokens, batch.wanted, batch.start, routes) for members in dealt]

    def _micro_batch(
        self,
        members: Sequence[int],
        tokens: Sequence[npt.NDArray[np.int32]],
        wanted: Sequence[npt.NDArray[np.intp]],
        start: npt.NDArray[np.int64],
        routes: Sequence[npt.NDArray[np.int16] | None] = (),
    ) -> MicroBatch:
        """`start` says where each sequence's wanted tokens begin in the flat arrays; `routes` where each one's tokens
        are to go, if they are replayed."""
        if not members:
            nothing = np.full(2, PAD, np.int32)
            rows = packed_rows([nothing], [np.array([1])], self.device)
            rows = rows._replace(position=rows.position[:0], target=rows.target[:0])
            return MicroBatch(rows, torch.zeros(0, dtype=torch.int64, device=self.device), members)
        theirs = [routes[row] for row in members] if routes else ()
        rows = packed_rows([tokens[row] for row in members], [wanted[row] for row in members], self.device, theirs)
        where = np.concatenate([np.arange(start[row], start[row + 1]) for row in members])
        return MicroBatch(rows, torch.from_numpy(where).to(self.device), members)

    def _take(
        self, share: Sequence[MicroBatch], put: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> Callable[[int, torch.Tensor], None]:
        """For a pass that nothing is learned from: `put` is told of places and their log-probabilities, in the last
        stage."""

        def take(index: int, logprobs: torch.Tensor) -> None:
            if not share[index].empty:
                put(share[index].where, logprobs)

        return take

    def _run(
        self,
        share: Sequence[MicroBatch],
        loss_of: passes.LossOf,
        temperature: float,
        *,
        learns: bool,
        top: Mixture | None = None,
        replays: bool = False,
    ) -> Trace | None:
        """`passes.run`; with `replays` what it tells of routes, which is counted too."""
        trace = Trace() if replays else None
        passes.run(
            self.model,
            [each.rows for each in share],
            loss_of,
            temperature=temperature,
            learns=learns,
            mixtures=None if top is None else [top.at(each.where) for each in share],
            trace=trace,
        )
        if trace is not None:
            self._counts.append(trace.counts(self.model))
        return trace

    def _share_routes(
        self, samples: Sequence[Sample], batch: Batch, routes: list[npt.NDArray[np.int16] | None]
    ) -> None:
        """In place: where the tokens went that other copies of the model computed, from them. Sample by sample: those
        of a whole batch may be many GB."""
        copies, config = self.model.groups.dp, self.model.config
        if copies.size() == 1:
            return
        for index in batch.rows:
            shape = (len(samples[index].tokens), config.num_hidden_layers, config.num_experts_per_tok)
            found = routes[index]
            own = torch.full(shape, UNKNOWN, dtype=torch.int16) if found is None else torch.from_numpy(found)
            whole = own.to(self.device, torch.int32)  # neither gloo nor NCCL knows int16
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=copies)
            routes[index] = whole.to(torch.int16).cpu().numpy()

    def _replay_metrics(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        if not self._replays:
            return {}
        counts = self._counts
        lengths = [int(places[-1]) for places in batch.wanted]
        layers = np.flatnonzero(sparse_layers(self.model.config)).tolist()
        metrics = {"replay_missing": missing_share([samples[row].routes for row in batch.rows], lengths, layers)}
        known, tokens = sum(each.known for each in counts), sum(each.tokens for each in counts)
        if known:
            metrics["replay_changed"] = sum(each.changed for each in counts) / known
            metrics["replay_changed_tokens"] = sum(each.changed_tokens for each in counts) / tokens
        return metrics

    def _put_together(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place: the last stage's, summed over the copies of the model, on every rank."""
        flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
        group = self.model.groups
        dist.all_reduce(flat, group=group.dp)
        dist.broadcast(flat, dist.get_global_rank(group.pp, group.pp.size() - 1), group=group.pp)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def observe(self, divergence: float) -> None:
        """Of use to step control alone, which this backend does not have."""

    # --- reading -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reference(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        batch = self._flatten(samples)
        flat = torch.zeros_like(batch.data.behaviour)
        self._reference_pass(self._share_of_batch(samples, batch), partial(_put, flat))
        self._put_together([flat])
        return unflatten(samples, batch, flat)

    @torch.no_grad()
    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        long = [sequence for sequence in tokens if len(sequence) > 1]
        wanted = [np.arange(1, len(sequence)) for sequence in long]
        lengths = [len(places) for places in wanted]
        start = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        dealt = self._dealer.deal(lengths, range(len(long)), self.model.groups.dp.rank())
        share = [self._micro_batch(members, long, wanted, start) for members in dealt]
        flat = torch.zeros(int(start[-1]), dtype=self.dtype, device=self.device)
        self._run(share, self._take(share, partial(_put, flat)), temperature, learns=False)
        self._put_together([flat])
        ends = np.cumsum([max(len(sequence) - 1, 0) for sequence in tokens])
        return np.split(flat.float().cpu().numpy(), ends[:-1]) if len(tokens) else []

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        return self.learnable.export(path)

    def export_whole(self, path: Path) -> str:
        return self.learnable.export_whole(path)

    def canary(self, path: Path, seed: int, tokens: Sequence[npt.NDArray[np.int32]]) -> Canary:
        return self._adapter.canary(path, seed, partial(self.logprobs, tokens))

    def export_final(self, folder: Path) -> None:
        self.learnable.export_final(folder)

    def save(self, folder: Path) -> None:
        self.learnable.save(folder)

    def load(self, folder: Path) -> None:
        self.learnable.load(folder)


def _put(flat: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
    flat[where] = values.to(flat.dtype)


def _attention_share(hf: Any) -> float:
    """Of the layer that most layers are like: one with experts where there are any."""
    heads, kv_heads, size, width = hf.num_attention_heads, hf.num_key_value_heads, head_size(hf), hf.hidden_size
    attention = 2 * width * size * (heads + kv_heads)
    if getattr(hf, "num_experts", 0):
        mlp = 3 * width * hf.moe_intermediate_size * hf.num_experts_per_tok
    else:
        mlp = 3 * width * hf.intermediate_size
    return attention_share(heads * size, attention + mlp)

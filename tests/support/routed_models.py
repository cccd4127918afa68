"""Mixtures of experts whose tokens go to given experts: on ranks, and in Hugging Face's model on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sharded_models import CPU, TEMPERATURE, _by_expert, _gradients, sequences

from async_rl.parallel_config import ParallelConfig
from trainer.logprobs import packed_rows

Routes = npt.NDArray[np.int16]


def routes_of(path: Path, known: float, seed: int = 3) -> list[list[Routes]]:
    """For the tokens of `sequences`: experts at random [n, layers, k], none twice, in a part `known` of all places; -1
    in the others and in layers without experts."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    random = np.random.default_rng(seed)
    each, experts, layers = config.num_experts_per_tok, config.num_experts, config.num_hidden_layers

    def drawn(tokens: int) -> Routes:
        out = random.random((tokens, layers, experts)).argsort(axis=2)[..., :each].astype(np.int16)
        out[random.random((tokens, layers)) >= known] = -1
        out[:, config.mlp_only_layers] = -1
        return out

    return [[drawn(len(tokens)) for tokens in micro_batch] for micro_batch in sequences()]


def loss_of_logprobs(index: int, logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(index))).sum()


# --- on one process --------------------------------------------------------------------------------------------------


@contextmanager
def forced(model: Any, routes: Routes, seen: list[Routes] | None = None) -> Iterator[None]:
    """Each token of the one sequence that is computed within goes to the experts of `routes` [n, layers, k], weighed by
    softmax over all experts (divided by their sum where the model does that); where they are -1, where the router
    says. `seen` gets where they went, and -1 in layers without experts."""
    went = np.full_like(routes, -1)
    handles = []

    def hook(layer: int, gate: Any) -> Any:
        def force(module: Any, args: Any, out: Any) -> Any:
            logits, _, live = out
            given = torch.from_numpy(routes[:, layer].astype(np.int64))
            chosen = torch.where((given >= 0).all(1, keepdim=True), given, live)
            weights = torch.softmax(logits.float(), dim=-1).gather(1, chosen)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(1, keepdim=True)
            went[:, layer] = chosen.numpy()
            return logits, weights.to(logits.dtype), chosen

        return force

    for layer, module in enumerate(model.model.layers):
        if hasattr(module.mlp, "gate"):
            handles.append(module.mlp.gate.register_forward_hook(hook(layer, module.mlp.gate)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if seen is not None:
        seen.append(went)


class Expected:
    """Of one process: log-probabilities by micro-batch, gradients by tensor, where tokens went by sequence."""

    def __init__(self, path: Path, routes: list[list[Routes]]) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.went: list[list[Routes]] = []
        for index, (micro_batch, of_batch) in enumerate(zip(sequences(), routes, strict=True)):
            parts: list[torch.Tensor] = []
            seen: list[Routes] = []
            for tokens, given in zip(micro_batch, of_batch, strict=True):
                ids = torch.from_numpy(tokens.astype(np.int64))[None]
                with forced(model, given, seen):
                    logits = model(ids).logits[0, :-1]
                logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
                parts.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
            flat = torch.cat(parts)
            loss_of_logprobs(index, flat).backward()
            self.logprobs.append(flat.detach().numpy())
            self.went.append(seen)
        self.gradients = _by_expert({name: each.grad for name, each in model.named_parameters()})


# --- on the ranks ----------------------------------------------------------------------------------------------------


def compute(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (path, parallel, recompute, routes: by sequence or None): this rank's log-probabilities by
    micro-batch of the whole batch, gradients by tensor (on rank 0), where tokens went by micro-batch, and counts."""
    return [_case(**case) for case in payload]


def _case(path: str, parallel: dict[str, Any], recompute: bool, routes: list[list[Routes]] | None) -> dict[str, Any]:
    from trainer.megatron import groups, model, passes
    from trainer.megatron.replay import Trace

    sizes = ParallelConfig(**parallel)
    groups.begin(sizes, CPU)
    try:
        sharded = model.build(path, sizes, dtype=torch.float32, device=CPU, recompute=recompute)
        sharded.stage.requires_grad_(True)
        mine = list(range(len(sequences())))[sharded.groups.dp.rank() :: sharded.groups.dp.size()]
        batches = []
        for index in mine:
            wanted = [np.arange(1, len(tokens)) for tokens in sequences()[index]]
            batches.append(packed_rows(sequences()[index], wanted, CPU, routes[index] if routes else ()))
        out: dict[int, npt.NDArray[np.float32]] = {}

        def loss_of(index: int, logprobs: torch.Tensor) -> torch.Tensor:
            out[mine[index]] = logprobs.detach().numpy().copy()
            return loss_of_logprobs(mine[index], logprobs)

        trace = Trace()
        passes.run(sharded, batches, loss_of, temperature=TEMPERATURE, learns=True, trace=trace)
        went = dict(zip(mine, trace.routes(sharded), strict=True))
        counts = trace.counts(sharded)
        passes.run(sharded, batches, loss_of, temperature=TEMPERATURE, learns=False)
        spans = {index: rows.spans for index, rows in zip(mine, batches, strict=True)}
        return {
            "logprobs": out, "went": went, "spans": spans, "counts": counts._asdict(), "gradients": _gradients(sharded)
        }  # fmt: skip
    finally:
        groups.end()

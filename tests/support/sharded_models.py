"""What the tests of the Megatron model run on their ranks, tiny models, and what one process computes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from async_rl.parallel_config import ParallelConfig
from trainer.head import Mixture
from trainer.logprobs import Rows, packed_rows

TEMPERATURE = 0.7
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 67,  # no multiple of any number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "mixture": MIXTURE | {"norm_topk_prob": True},
    "leading": MIXTURE | {"norm_topk_prob": False, "mlp_only_layers": [0], "num_hidden_layers": 3},
}


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """A model of random weights of one of the kinds of MODELS, large enough that what is wrong shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = SIZES | MODELS[kind]
    mixture = "num_experts" in sizes
    config = (Qwen3MoeConfig if mixture else Qwen3Config)(**sizes)
    model = (Qwen3MoeForCausalLM if mixture else Qwen3ForCausalLM)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() < 3 else 0.25))
    model.save_pretrained(folder)
    return folder


def sequences(seed: int = 0) -> list[list[npt.NDArray[np.int32]]]:
    """Micro-batches of sequences, four of them, of odd lengths."""
    random = np.random.default_rng(seed)
    lengths = ((9, 5, 14), (7,), (3, 3, 12), (11, 2))
    return [[random.integers(0, SIZES["vocab_size"], length).astype(np.int32) for length in row] for row in lengths]


def rows_of(micro_batch: Sequence[npt.NDArray[np.int32]]) -> Rows:
    return packed_rows(micro_batch, [np.arange(1, len(tokens)) for tokens in micro_batch], CPU)


def loss_of_tokens(index: int, logprobs: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """A sum of them, each with a coefficient of its own."""
    of_logprobs, of_means = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(index))
    return (logprobs * of_logprobs).sum() + (means * of_means).sum()


def mixture_of(index: int, n: int) -> Mixture:
    """Three tokens at each of n places, with weights."""
    random = torch.Generator().manual_seed(100 + index)
    ids = torch.randint(0, SIZES["vocab_size"], (n, 3), generator=random)
    return Mixture(ids, torch.rand(n, 3, generator=random))


def of_one_process(
    path: Path, dtype: torch.dtype = torch.float32
) -> tuple[list[npt.NDArray[np.float32]], dict[str, npt.NDArray[np.float32]]]:
    """Log-probabilities of `sequences` by micro-batch, each sequence alone, and the loss's gradient in each tensor but
    the head: nobody trains that here, and so where it is the embedding, too, this has the embedding's own part."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    out = []
    for index, micro_batch in enumerate(sequences()):
        parts, targets = [], []
        for tokens in micro_batch:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            parts.append(torch.log_softmax(model(ids).logits[0, :-1].float() / TEMPERATURE, dim=-1))
            targets.append(ids[0, 1:])
        logprobs = torch.cat(parts)
        flat = logprobs.gather(1, torch.cat(targets)[:, None])[:, 0]
        mixture = mixture_of(index, len(flat))
        means = (mixture.weights * logprobs.gather(1, mixture.ids)).sum(1)
        loss_of_tokens(index, flat, means).backward()
        out.append(flat.detach().numpy())
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return out, _by_expert({name: parameter.grad.float() for name, parameter in learning.items()})


def _by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    out = {}
    for name, gradient in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                for part, value in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = value.numpy()
        elif name.endswith("experts.down_proj"):
            for expert, value in enumerate(gradient):
                out[name.replace("down_proj", f"{expert}.down_proj.weight")] = value.numpy()
        else:
            out[name] = gradient.numpy()
    return out


# --- on the ranks ----------------------------------------------------------------------------------------------------


def compute(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (path, parallel, recompute, learns, and perhaps dtype): this rank's log-probabilities by
    micro-batch of the whole batch, and on rank 0 gradients by tensor."""
    return [_case(**case) for case in payload]


def _case(path: str, parallel: dict[str, Any], recompute: bool, learns: bool, dtype: str = "float32") -> dict[str, Any]:
    from trainer.megatron import groups, model, passes

    sizes = ParallelConfig(**parallel)
    groups.begin(sizes, CPU)
    try:
        sharded = model.build(path, sizes, dtype=getattr(torch, dtype), device=CPU, recompute=recompute)
        sharded.stage.requires_grad_(learns)
        pg = sharded.groups
        mine = list(range(len(sequences())))[pg.dp.rank() :: pg.dp.size()]
        out: dict[int, npt.NDArray[np.float32]] = {}

        def loss_of(index: int, logprobs: torch.Tensor, means: torch.Tensor | None = None) -> torch.Tensor | None:
            out[mine[index]] = logprobs.detach().numpy().copy()
            return None if means is None else loss_of_tokens(mine[index], logprobs, means)

        batches = [rows_of(sequences()[index]) for index in mine]
        mixtures = [mixture_of(index, len(rows.target)) for index, rows in zip(mine, batches, strict=True)]
        passes.run(
            sharded, batches, loss_of, temperature=TEMPERATURE, learns=learns, mixtures=mixtures if learns else None
        )
        return {"logprobs": out, "gradients": _gradients(sharded) if learns else {}}
    finally:
        groups.end()


def _gradients(sharded: Any) -> dict[str, npt.NDArray[np.float32]]:
    """By tensor, whole on rank 0: sums over the ranks that have parts, then the way that weights go."""
    from trainer.megatron import hf_weights

    pg = sharded.groups
    for name, parameter in sharded.stage.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expert = ".local_experts." in name
        dist.all_reduce(gradient, group=pg.expt_dp if expert else pg.dp)
        per_head = ".q_layernorm." in name or ".k_layernorm." in name
        per_token = sharded.parallel.sequence and ("norm." in name or ".router." in name)
        if per_head or per_token:
            dist.all_reduce(gradient, group=pg.tp)
        parameter.data.copy_(gradient)
    return {
        name: value.float().numpy().copy()
        for name, value in hf_weights.full_tensors(sharded)
        if value is not None and name != "lm_head.weight"  # the head is not differentiated
    }


def compute_without(payload: dict[str, Any]) -> None:
    """A case, with everything that the shim puts in place but one."""
    from trainer.megatron import shim

    found = {entry.name: getattr(entry.owner, entry.name) for entry in shim.entries()}
    owners = {entry.name: entry.owner for entry in shim.entries()}
    shim.install()
    if payload["without"]:
        setattr(owners[payload["without"]], payload["without"], found[payload["without"]])
    _case(**payload["case"])


def write_again(payload: list[dict[str, Any]]) -> None:
    """Load each model (path, parallel), and write it to `out`, in several small files."""
    from trainer.megatron import groups, hf_weights, model

    for case in payload:
        sizes = ParallelConfig(**case["parallel"])
        groups.begin(sizes, CPU)
        sharded = model.build(case["path"], sizes, dtype=torch.float32, device=CPU, recompute=False)
        hf_weights.write(sharded, Path(case["out"]), file_bytes=40_000)
        groups.end()

"""A batch and a model for tests that compare gradients, and the process that is one rank of several.

    python -P gradient_batches.py RANK FOLDER

is one of two: for each dtype and case it takes its part of the batch, the first six attempts or the last two, and
writes the gradients summed over both to FOLDER/rank-RANK.npz. FOLDER holds the model and is where the ranks meet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.top_tokens import TopTokens
from trainer.backend import Sample
from trainer.torch_backend import TorchBackend

VOCABULARY = 17
LENGTH = 12  # of every sequence, so that a token budget says exactly how many go into a micro-batch
TRAINED = (9, 9, 9, 9, 9, 5, 6, 4)  # tokens of each attempt: uneven, and 5 : 1 between the first six and the others
GROUPS = (0, 0, 0, 1, 1, 1, 4, 4)

TOP = 5  # likeliest tokens of the sampler's at each place

DTYPES = ("float64", "float32")
SURROGATES = {
    "policy_gradient": {"ratio_level": "sequence", "treatment": "truncate", "ratio_high": 1.02},
    "ppo": {"ratio_level": "token", "treatment": "clip", "ratio_low": 0.98, "ratio_high": 1.02, "surrogate": "ppo"},
    "decoupled_ppo": {
        "surrogate": "decoupled_ppo",
        "ratio_level": "geometric",
        "ratio_high": 1.01,
        "clip_low": 0.8,
        "clip_high": 1.2,
    },
    "gated": {"treatment": "mask", "ratio_level": "token", "ratio_low": 0.97, "ratio_high": 1.03, "veto": 0.93},
    "score_centering": {"treatment": "uncorrected", "center_scores": TOP},
    "reference_kl": {"reference_kl": "k3", "reference_kl_ratio": True, "reference_kl_weight": 0.5},
}
CASES = {
    f"{name}-{aggregation}": AlgorithmConfig(aggregation=aggregation, aggregation_length=10, **parts)
    for name, parts in SURROGATES.items()
    for aggregation in ("token_mean", "sequence_mean", "prompt_mean", "constant")
}


def make_model(folder: Path) -> None:
    """A model that really computes in float64 (Qwen's norms go through float32 whatever its dtype)."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)


def make_backend(folder: Path, algorithm: AlgorithmConfig, dtype: str, budget: int = 4096) -> TorchBackend:
    """With an adapter that is not zero, so that the reference is another policy."""
    backend = TorchBackend(
        folder,
        trainer=TrainerConfig(rank=4, alpha=8.0, micro_batch_tokens=budget),
        algorithm=algorithm,
        temperature=0.7,
        seed=11,
        dtype=dtype,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in backend.learnable.parameters.items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    return backend


def make_batch(folder: Path) -> list[Sample]:
    """Behaviour log-probabilities within a few per cent of the policy's, so that no bound hides an error and some
    tokens are beyond one."""
    generator = np.random.default_rng(3)
    batch = []
    for attempt, (trained, group) in enumerate(zip(TRAINED, GROUPS, strict=True)):
        mask = np.ones(LENGTH, np.uint8)
        mask[LENGTH - trained :] = 0
        batch.append(
            Sample(
                tokens=generator.integers(0, VOCABULARY, LENGTH).astype(np.int32),
                behaviour=np.where(mask == 0, np.float32(-1), np.float32(0)),
                mask=mask,
                ages=generator.integers(0, 5, LENGTH).astype(np.int32),
                advantage=float(generator.normal()),
                attempt=attempt,
                group=group,
            )
        )
    proximal = make_backend(folder, AlgorithmConfig(), "float64").step(batch, 0.0).proximal
    shift = generator.normal(0, 0.03, (len(batch), LENGTH))
    return [
        sample._replace(
            behaviour=np.where(sample.mask == 0, own + moved, 0).astype(np.float32), top=some_top(generator)
        )
        for sample, own, moved in zip(batch, proximal, shift, strict=True)
    ]


def some_top(generator: np.random.Generator) -> TopTokens:
    """Any tokens, which have nine tenths of the probability at their place."""
    ids = np.array([generator.permutation(VOCABULARY)[:TOP] for _ in range(LENGTH)], dtype=np.int32)
    return TopTokens(ids, np.log(0.9 * generator.dirichlet(np.ones(TOP), LENGTH)).astype(np.float32))


def gradient(backend: TorchBackend, batch: list[Sample]) -> npt.NDArray[np.float64]:
    """Of the whole batch's loss, as one vector; summed over ranks where there are several."""
    backend.learnable.optimizer.zero_grad()
    backend._accumulate(batch, backend._flatten(batch))
    whole = torch.cat([parameter.grad.flatten() for parameter in backend.learnable.parameters.values()])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(whole)
    return whole.double().numpy()


def main(rank: int, folder: Path) -> None:
    batch = make_batch(folder)
    backends = {dtype: make_backend(folder, AlgorithmConfig(), dtype) for dtype in DTYPES}
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    with pytest.raises(AsyncRLError, match="group of 2 ranks, and backend torch trains on one"):
        make_backend(folder, AlgorithmConfig(), "float32")  # what is summed below, no trainer sums yet
    out = {}
    for dtype, backend in backends.items():
        for name, algorithm in CASES.items():
            backend.algorithm = algorithm
            out[f"{name}-{dtype}"] = gradient(backend, batch[:6] if rank == 0 else batch[6:])
    np.savez(folder / f"rank-{rank}.npz", **out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

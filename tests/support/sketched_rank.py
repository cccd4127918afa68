"""python -P sketched_rank.py RANK FOLDER CASE

is one of two ranks that train on halves of each batch: three steps of the sketch trainer, whose weights and sketches it
writes to FOLDER/rank-RANK.npz. FOLDER is where the ranks meet. CASE is "uneven", or "empty": one half has no tokens,
and embeddings learn.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from sketched import expert_model, some_loss, some_tokens

from async_rl.config import TrainerConfig
from trainer.sketch.weights import SketchWeights

STEPS = 3
WHOLE = slice(0, 6)
HALVES = {  # denominators are the batch's, not the rank's
    "uneven": (slice(0, 5), slice(5, 6)),
    "empty": (WHOLE, slice(6, 6)),
}
TRAINERS = {
    "uneven": TrainerConfig(kind="sketch", rank=8),
    "empty": TrainerConfig(kind="sketch", rank=8, publish="snapshots", train_embeddings=True),
}


def trained(case: str, part: slice, together: bool) -> dict[str, np.ndarray]:
    """The last sketch and the weights after all steps."""
    weights = SketchWeights(expert_model(), TRAINERS[case], 5, "")
    for number in range(STEPS):
        weights.zero()
        if len(tokens := some_tokens(rows=6, seed=number)[part]):
            some_loss(weights.model, tokens).backward()
        if together:
            weights.reduce()
        last = weights.sketches.flat.clone()
        weights.move(weights.norm(), 1e-2)
    return {name: tensor.numpy() for name, tensor in weights.parameters.items()} | {"sketch": last.numpy()}


def main(rank: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", timeout, rank=rank, world_size=2)
    np.savez(folder / f"rank-{rank}.npz", **trained(case, HALVES[case][rank], together=True))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

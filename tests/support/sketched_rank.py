"""python -P sketched_rank.py RANK FOLDER

is one of two ranks that train on halves of each batch: three steps of the sketch trainer, whose weights and sketches it
writes to FOLDER/rank-RANK.npz. FOLDER is where the ranks meet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from sketched import expert_model, some_loss, some_tokens

from async_rl.config import TrainerConfig
from trainer.sketch.weights import SketchWeights

STEPS = 3
HALVES = (slice(0, 5), slice(5, 6))  # uneven: denominators are the batch's, not the rank's


def trained(part: slice, together: bool) -> dict[str, np.ndarray]:
    """The last sketch and the weights after all steps."""
    weights = SketchWeights(expert_model(), TrainerConfig(kind="sketch", rank=8), 5, "")
    for number in range(STEPS):
        weights.zero()
        some_loss(weights.model, some_tokens(rows=6, seed=number)[part]).backward()
        if together:
            weights.reduce()
        last = weights.sketches.flat.clone()
        weights.move(weights.norm(), 1e-2)
    return {name: tensor.numpy() for name, tensor in weights.parameters.items()} | {"sketch": last.numpy()}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    np.savez(folder / f"rank-{rank}.npz", **trained(HALVES[rank], together=True))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

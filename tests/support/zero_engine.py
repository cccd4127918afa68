"""python -P zero_engine.py MODEL FOLDER STAGE

trains a model of Hugging Face's layout by DeepSpeed's ZeRO on one process, for two steps, and writes it to FOLDER,
with logits.npz: those of the model as it was read, and as it was written, of the tokens in FOLDER/tokens.npy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {
    "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
os.environ.setdefault("MASTER_PORT", "29500")

import deepspeed
import numpy as np
import torch
from transformers import AutoModelForCausalLM

# What it compiles at its start, minutes of C++ for sums within a machine, is quicker, and not needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}


def main(model: str, folder: Path, stage: int) -> None:
    torch.set_num_threads(1)
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    engine = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
        config=CONFIG | {"zero_optimization": {"stage": stage}},
    )[0]
    with torch.no_grad():
        before = engine(input_ids=tokens).logits
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    with torch.no_grad():
        after = engine(input_ids=tokens).logits
    engine.module.save_pretrained(folder)
    np.savez(folder / "logits.npz", before=before.numpy(), after=after.numpy())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

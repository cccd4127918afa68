"""What a run leaves to be looked at: its policies and its journal, copied while it goes on; and every trained token's
log-probability, again."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from async_rl.bundle import trajectories_of
from async_rl.policy.adapter import read_adapter
from async_rl.trajectory import MaskReason, Trajectory, segment_arrays
from async_rl.version import token_versions
from buffer.entries import read_entry
from buffer.events import BatchConfirmed, ResultsArrived
from buffer.journal import Torn, read_segment, segment_numbers

TOLERANCE = 1e-4  # nats


class Kept:
    """What a run takes away again: its policies, and the journal with all that was sampled."""

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self.policies, self.journal = run, folder / "policies", folder / "journal"
        self.policies.mkdir()
        self.journal.mkdir()

    def look(self) -> None:
        for file in (self._run / "adapters" / "store").glob("*-main.policy"):
            if not (self.policies / file.name).exists():
                shutil.copy(file, self.policies)
        for file in (self._run / "journal").glob("*.seg"):
            shutil.copy(file, self.journal)

    def watch(self, process: subprocess.Popen[str], within_s: float) -> None:
        """Until the run ends, which it has to do well."""
        ends = time.monotonic() + within_s
        while process.poll() is None:
            assert time.monotonic() < ends, "the run does not end"
            self.look()
            with_time = time.monotonic()
            while process.poll() is None and time.monotonic() < with_time + 0.2:
                time.sleep(0.02)
        assert process.wait(10) == 0, process.communicate(timeout=10)[0]

    def trained(self) -> list[Trajectory]:
        """Every trajectory that trained."""
        arrived: dict[tuple[int, int], Trajectory] = {}
        trained: list[tuple[int, int]] = []
        for number in segment_numbers(self.journal):
            for record in islice(read_segment(self.journal, number), 1, None):  # the first is what it begins from
                if isinstance(record, Torn):
                    break
                event = read_entry(record).event
                if isinstance(event, ResultsArrived):
                    came = [of for each in event.results if len(each.payload) for of in trajectories_of(each.payload)]
                    arrived |= {(of.lease, of.sample): of for of in came}
                if isinstance(event, BatchConfirmed):
                    ends = [of for of in event.dispositions if of.outcome == "trained"]
                    trained += [(of.lease, sample) for of in ends for sample in of.samples]
        return [arrived[key] for key in trained]


def mu_again(model: Any, file: Path, sequences: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities of every token but the first, by one forward in float32 of the model with an adapter added."""
    tensors, config = read_adapter(file)
    scale = config["lora_alpha"] / config["r"]
    added = {}
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added[f"{module}.weight"] = scale * tensors[name.replace("lora_A", "lora_B")].float() @ a.float()
    weights = {name: value + added.pop(name, 0.0) for name, value in model.state_dict().items()}
    assert not added
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(each.astype(np.int64)) for each in sequences], True)
    with torch.no_grad():
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits
    of_next = torch.log_softmax(logits[:, :-1].double(), -1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    return [row[: len(each) - 1] for row, each in zip(of_next, sequences, strict=True)]


def largest_difference(model_folder: Path, kept: Kept, trained: list[Trajectory]) -> float:
    """Between μ as it was recorded and as each token's own policy gives it on exactly the recorded tokens."""
    of_version: dict[int, list[Any]] = defaultdict(list)
    for trajectory in trained:
        for header, arrays in zip(trajectory.segments, segment_arrays(trajectory), strict=True):
            versions = np.full(len(arrays.tokens), -1)
            versions[arrays.mask == MaskReason.SAMPLED] = token_versions(header.versions)
            for version in set(versions.tolist()) - {-1}:
                of_version[version].append((arrays, versions == version))
    model = AutoModelForCausalLM.from_pretrained(model_folder).float().eval()
    worst = 0.0
    for version, pieces in of_version.items():
        (file,) = kept.policies.glob(f"{version}-*")
        again = mu_again(model, file, [arrays.tokens for arrays, _ in pieces])
        for (arrays, places), logprobs in zip(pieces, again, strict=True):
            worst = max(worst, float(np.abs(arrays.logprobs[1:] - logprobs)[places[1:]].max()))
    return worst

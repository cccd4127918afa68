"""A two-turn task with a tool, on real pools: it is learned, and what trained is what was sampled, token by token."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_runs import Shell, records, summary
from transformers import AutoModelForCausalLM

from async_rl.config import load_config
from async_rl.policy.adapter import read_adapter
from async_rl.run.model_cache import model_path
from async_rl.trajectory import MaskReason, Trajectory, decode_trajectory, segment_arrays
from async_rl.version import token_versions
from buffer.entries import read_entry
from buffer.events import BatchConfirmed, ResultsArrived
from buffer.journal import Torn, read_segment, segment_numbers

STEPS = 24
CONFIG = f"""
[run]
name = "tool"
steps = {STEPS}

[model.tiny]
seed = 0
accuracy_low = 0.2
accuracy_high = 0.3

[task]
kind = "calculator"
digits = 2
max_turns = 3

[buffer]
max_staleness = 2
groups_per_step = 16
group_size = 8
heartbeat = 0.5

[inference]
nodes = 1
slots = 64
max_new_tokens = 24
max_context = 72

[inference.episodes]
max_tokens = 72

[trainer]
learning_rate = 2e-3
warmup_steps = 3
checkpoint_every = 1000

[algorithm]
ratio_level = "token"
treatment = "clip"
ratio_low = 0.8
ratio_high = 1.28
surrogate = "ppo"

[algorithm.alarms]
action = "warn"  # of so few answers a step
"""
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

    def trained(self) -> list[Trajectory]:
        """Every trajectory that trained."""
        arrived: dict[tuple[int, int], memoryview] = {}
        trained: list[tuple[int, int]] = []
        for number in segment_numbers(self.journal):
            for record in read_segment(self.journal, number):
                if isinstance(record, Torn):
                    break
                event = read_entry(record).event
                if isinstance(event, ResultsArrived):
                    arrived |= {(each.lease, each.sample): each.payload for each in event.results}
                if isinstance(event, BatchConfirmed):
                    trained += [(of.lease, of.sample) for of in event.dispositions if of.outcome == "trained"]
        return [decode_trajectory(arrived[key]) for key in trained]


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


@pytest.mark.tasks
def test_a_two_turn_tool_task_is_learned_and_every_trained_token_is_as_it_was_sampled(
    shell: Shell, tmp_path: Path
) -> None:
    config, run = tmp_path / "tool.toml", tmp_path / "run"
    config.write_text(CONFIG)
    kept = Kept(run, tmp_path)
    process = shell.start("run", str(config), "--out", str(run))
    ends = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < ends, "the run does not end"
        kept.look()
        with_time = time.monotonic()
        while process.poll() is None and time.monotonic() < with_time + 0.2:
            time.sleep(0.02)
    assert process.wait(10) == 0, process.communicate(timeout=10)[0]

    rewards = [record["reward"] for record in records(run)]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-6:]) > 1.4 * np.mean(rewards[:4]), str(rewards)
    assert summary(run)["staleness"]["max"] <= 2

    trained = kept.trained()
    assert len(trained) >= (STEPS - 2) * 128  # the last batches may have come after the last look
    turns = [sum(arrays.mask[1:] < arrays.mask[:-1]) for each in trained for arrays in segment_arrays(each)]
    assert np.mean(np.array(turns) == 2) > 0.5, "most have two turns"
    worst = largest_difference(load_config(str(config)), kept, trained)
    print(f"rewards {rewards[:4]} -> {rewards[-6:]}; {len(trained)} attempts; largest |Δμ| {worst:.2e} nats")
    assert worst <= TOLERANCE


def largest_difference(config: Any, kept: Kept, trained: list[Trajectory]) -> float:
    """Between μ as it was recorded and as each token's own policy gives it on exactly the recorded tokens."""
    of_version: dict[int, list[Any]] = defaultdict(list)
    for trajectory in trained:
        for header, arrays in zip(trajectory.segments, segment_arrays(trajectory), strict=True):
            versions = np.full(len(arrays.tokens), -1)
            versions[arrays.mask == MaskReason.SAMPLED] = token_versions(header.versions)
            for version in set(versions.tolist()) - {-1}:
                of_version[version].append((arrays, versions == version))
    model = AutoModelForCausalLM.from_pretrained(model_path(config)).float().eval()
    worst = 0.0
    for version, pieces in of_version.items():
        (file,) = kept.policies.glob(f"{version}-*")
        again = mu_again(model, file, [arrays.tokens for arrays, _ in pieces])
        for (arrays, places), logprobs in zip(pieces, again, strict=True):
            worst = max(worst, float(np.abs(arrays.logprobs[1:] - logprobs)[places[1:]].max()))
    return worst

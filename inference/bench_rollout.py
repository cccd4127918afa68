"""`async-rl bench rollout`: the embedded engine against transformers' `generate` with its KV cache.

Same model, prompts, lengths and attempts at a time; both sample at temperature 1 and record log-probabilities; one
thread. What counts are *useful* tokens: those of the attempts that were asked for. `generate` runs a batch until its
longest attempt ends; what it makes beyond an attempt's own length was not asked for.

The engine is measured as a node uses it: groups of equal prompts are leased without end, somewhat more attempts than
it has slots, and slots are filled again as attempts end. It is credited with an attempt when that ends. The attempts
under way when the clock starts were begun before, those under way when it stops do not count: in a steady state the
two are equal. Its time includes prefill, admission and books, as that of `generate` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import write_adapter
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Task
from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.bench_load import GROUP, Group, Load, groups, made_model
from inference.compiled_step import CompileMode
from inference.engine import Request
from inference.torch_engine import TorchEngine

METRICS = [
    Metric("tokens_per_cpu_s", "useful tokens a CPU-second", "higher"),
    Metric("tokens_per_s", "useful tokens a second", "higher"),
]
WARM_SHARE = 0.5  # of a measurement, before the first one: the engine's attempts must have come out of step
LOADS = (Load(64, 9, 32), Load(64, 32, 32), Load(256, 9, 32))
QUICK_LOADS = (Load(16, 3, 8),)


# --- the arms --------------------------------------------------------------------------------------------------------


class Generate:
    """Batches of `slots` attempts, one after the other, each run to its longest."""

    def __init__(self, path: Path, load: Load, supply: Iterator[Group], pad: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path).eval()
        # Nothing ends an attempt but its length, as in the other arms.
        self._model.generation_config.eos_token_id = None
        self._load, self._supply, self._pad = load, supply, pad

    def work(self) -> int:
        """One batch; returns its useful tokens."""
        return sum(self._batch([next(self._supply) for _ in range(self._load.slots // GROUP)]))

    @torch.no_grad()
    def _batch(self, batch: Sequence[Group]) -> list[int]:
        lengths = [length for group in batch for length in group.lengths]
        prompts = [group.prompt for group in batch for _ in group.lengths]
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # top_k = 0: by default it cuts to the 50 likeliest tokens.
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), pad_token_id=self._pad,
            use_cache=True, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        out = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        logprobs = self._model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        if logprobs.shape != (len(lengths), max(lengths)):
            raise AsyncRLError(f"generate made {tuple(logprobs.shape)} tokens, not {(len(lengths), max(lengths))}")
        return lengths


class Engine:
    """The engine with as many leases as a node takes, under a policy that leaves the model as it is."""

    def __init__(self, path: Path, load: Load, supply: Iterator[Group], context: int, mode: CompileMode) -> None:
        self.engine = TorchEngine(
            path, slots=load.slots, max_context=context, max_resident=2, device="cpu", compile_mode=mode, stop_tokens=()
        )
        self._ahead = load.slots + max(GROUP, load.slots // 4)  # see inference.node
        self._supply = supply
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "policy.safetensors"
            policy = PolicyId("main", 0, write_idle_policy(path, file))
            self.engine.install(policy, file)
        self.engine.flip(policy, "finish")

    def work(self) -> int:
        """One step; returns the tokens of the attempts that ended with it."""
        while self.engine.active + GROUP <= self._ahead:
            self._lease(next(self._supply))
        done = self.engine.step()
        if any(completion.finish != "length" for completion in done):
            raise AsyncRLError(f"attempts ended otherwise than by their length: {done}")
        return sum(len(completion.logprobs) for completion in done)

    def _lease(self, group: Group) -> None:
        prompt = np.array(group.prompt, dtype=np.int32)
        for sample, length in enumerate(group.lengths):
            seed = group.number * GROUP + sample
            self.engine.submit(Request((group.number, sample), prompt, SamplingParams(1.0, length), seed))


def write_idle_policy(path: Path, file: Path) -> str:
    """An adapter on every linear layer but the head, whose B is zero; returns its digest."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tensors, targets, rank = {}, set(), 16
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, module.in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(module.out_features, rank)
            targets.add(name.rpartition(".")[2])
    return write_adapter(file, tensors, {"r": rank, "lora_alpha": rank, "target_modules": sorted(targets)})


def measured(arm: Generate | Engine, seconds: float) -> Measures:
    """Rates over at least so many seconds; CPU time is that of all this process's threads."""
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        tokens += arm.work()
    return {
        "tokens_per_cpu_s": tokens / (time.process_time() - cpu),
        "tokens_per_s": tokens / (time.perf_counter() - wall),
    }


# --- the command -----------------------------------------------------------------------------------------------------


def cell(load: Load, path: Path, task: Task, seconds: float, quick: bool, console: Console) -> Cell:
    """Its arms, warmed up; what compiling took is printed here, and part of no measurement."""
    tokenizer = AutoTokenizer.from_pretrained(path)

    def supply() -> Iterator[Group]:
        return groups(load, task, tokenizer)

    context = len(next(supply()).prompt) + load.longest
    arms: dict[str, Generate | Engine] = {
        "generate": Generate(path, load, supply(), tokenizer.pad_token_id),
        "engine, eager": Engine(path, load, supply(), context, "never"),
    }
    if not quick:
        arms["engine, compiled"] = Engine(path, load, supply(), context, "always")
    for name, arm in arms.items():
        measured(arm, seconds * WARM_SHARE)
        if isinstance(arm, Engine):
            console.print(f"{load.name}: {name}: {arm.engine.describe()['decode']}", style="dim", highlight=False)
    return Cell(
        load.name, [Arm(name, partial(measured, arm, seconds)) for name, arm in arms.items()], baseline="generate"
    )


def bench(options: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    config = load_config(options.config, [])
    path, task = made_model(config, options.config), load_task(config.task)
    loads: Sequence[Load] = LOADS
    rounds, seconds = options.rounds, options.seconds
    if options.quick:
        loads, rounds, seconds = QUICK_LOADS, 1, 0.3
    cells = [cell(load, path, task, seconds, options.quick, console) for load in loads]
    settings = {"config": options.config, "seconds": seconds, "group": GROUP, "threads": 1}
    finish_bench(run_bench("rollout", cells, METRICS, rounds, settings, console), options, console)


def main() -> None:
    parser = bench_parser("rollout", "The embedded engine against transformers' generate with its KV cache.", rounds=5)
    parser.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG", help="whose model and task")
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement (%(default)s)")
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

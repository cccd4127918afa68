"""`async-rl bench replay`: how far a trainer's log-probabilities are from the engine's, with its routes and without.

An engine in bfloat16, in a process of its own, samples from a mixture-of-experts model and tells where each token went.
The trainer, in float32 with the same weights, scores what was sampled: with its own routers ("live"), or with the
engine's choices ("replayed"). Rounding alone makes the two programs send some tokens elsewhere; "differing" are those
tokens whose own position the trainer would have sent elsewhere in some layer. Then the trainer takes four steps of LoRA
on another batch, and scores the first one again, which is four versions old by then.

The models are drawn, not trained: what a wrong expert costs depends on how much experts differ, and in what is drawn
that is known. Every matrix keeps the size of what passes through it (experts' at full, attention's at half), and router
logits have a deviation of about one. Each round draws another model. --model takes a checkpoint instead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.config import Config, load_config, model_routes
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.run.bench_staleness_cells import Sampled, SampleOrder
from async_rl.run.launch import child_environment
from async_rl.run.pipes import Child
from async_rl.trajectory import MaskReason
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, Lease, SamplingParams
from trainer.backend import Sample
from trainer.batches import prepare
from trainer.tiny_model import char_tokenizer
from trainer.torch_backend import TorchBackend

SAMPLER = "inference.bench_staleness_sampler"
SAMPLE_TIMEOUT_S = 600.0
STEPS = 4
RATE = 5e-4  # of the four steps: that of LoRA on small models, as docs/staleness has it
POSITIONS = 160

METRICS = (
    Metric("gap_differing", "mean abs. Δ log p where routes differ, nats", "lower"),
    Metric("gap", "of all tokens", "lower"),
    Metric("largest", "the largest", "lower"),
    Metric("tokens", "tokens that differ", "lower"),
    Metric("choices", "choices that differ", "lower"),
)

Which = Literal["live", "replayed"]


class Shape(NamedTuple):
    """Of a drawn Qwen3-MoE; `width` is an expert's."""

    layers: int
    hidden: int
    experts: int
    each: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {self.each} of {self.experts} experts"


class Scale(NamedTuple):
    """Models, and how many answers of how many tokens at most are sampled from each."""

    shapes: tuple[Shape, ...]
    groups: int
    group_size: int
    new_tokens: int


FULL = Scale((Shape(4, 64, 16, 2, 64), Shape(16, 128, 32, 4, 64), Shape(16, 128, 64, 8, 32)), 8, 4, 64)
QUICK = Scale((Shape(4, 32, 8, 2, 32),), 2, 2, 12)


def draw_model(shape: Shape, seed: int, folder: Path) -> None:
    """A checkpoint with tokenizer in Hugging Face layout."""
    tokenizer = char_tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=shape.hidden // 4, intermediate_size=shape.width,
        num_experts=shape.experts, num_experts_per_tok=shape.each, moe_intermediate_size=shape.width,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, max_position_embeddings=POSITIONS,
        tie_word_embeddings=False, **special,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                gain = 1.0 if "embed" in name else (0.5 if "self_attn" in name else 1.0) / parameter.shape[-1] ** 0.5
                parameter.copy_(gain * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Scored(NamedTuple):
    """Of all sampled tokens: how far the trainer's log-probability is from the engine's, float64 [n], and in how many
    of the routed layers the live router would send the position before it elsewhere, int [n]."""

    gap: npt.NDArray[np.float64]
    elsewhere: npt.NDArray[np.int64]


class Measurement:
    """One model: what it sampled, and how the trainer scores that, at the same version and four steps later."""

    def __init__(self, config: Config, folder: Path, sampler: Child, scale: Scale, seed: int) -> None:
        path = Path(config.model.path)
        self._backend = TorchBackend(
            path, trainer=config.trainer, algorithm=config.algorithm, seed=seed, device=config.model.device,
            temperature=config.inference.temperature,
        )  # fmt: skip
        self._config = config
        self._layers = list(model_routes(config).routed)
        self._judged, others = self._sampled(sampler, folder, scale, seed)
        self.found = {0: self._scored()}
        random = np.random.default_rng(seed)
        others = [sample._replace(advantage=float(random.choice((-1.0, 1.0)))) for sample in others]
        for _ in range(STEPS):
            self._backend.step(others, RATE)
        self.found[STEPS] = self._scored()

    def _sampled(self, sampler: Child, folder: Path, scale: Scale, seed: int) -> tuple[list[Sample], list[Sample]]:
        """Two batches under the base policy."""
        adapter = folder / "policy.safetensors"
        digest = self._backend.export(adapter)
        sampling = SamplingParams(self._config.inference.temperature, self._config.inference.max_new_tokens)
        members = tuple(range(scale.group_size))
        leases = [
            Lease(
                ticket,
                ticket,
                0,
                ticket,
                "train",
                members,
                tuple(seed + 1000 * ticket + i for i in members),
                0,
                sampling,
            )
            for ticket in range(2 * scale.groups)
        ]
        answer = sampler.ask(
            SampleOrder(version=0, digest=digest, adapter=str(adapter), leases=leases), Sampled, SAMPLE_TIMEOUT_S
        )
        half = scale.groups * scale.group_size
        groups = tuple(BatchGroup(lease.ticket, 0, lease.instance, scale.group_size) for lease in leases)
        parts = []
        for which in (slice(0, half), slice(half, None)):
            batch = Batch(0, 0, groups[: scale.groups], tuple(answer.trajectories[which]))
            prepared = prepare(
                Received("bench", batch, []), self._config, self._backend.vocabulary_size, model_routes(self._config)
            )
            parts.append(prepared.samples)
        return parts[0], parts[1]

    def _scored(self) -> dict[Which, Scored]:
        elsewhere = [self._elsewhere(sample) for sample in self._judged]
        return {
            "live": self._gap([sample._replace(routes=None) for sample in self._judged], elsewhere),
            "replayed": self._gap(self._judged, elsewhere),
        }

    def _gap(self, samples: Sequence[Sample], elsewhere: Sequence[npt.NDArray[np.int64]]) -> Scored:
        idle = [sample._replace(advantage=0.0) for sample in samples]  # nothing to learn: the weights stay
        proximal = self._backend.step(idle, 0.0).proximal
        trained = [sample.mask == MaskReason.SAMPLED for sample in samples]
        gaps = [
            np.abs(own.astype(np.float64) - sample.behaviour)[which]
            for own, sample, which in zip(proximal, samples, trained, strict=True)
        ]
        return Scored(np.concatenate(gaps), np.concatenate(elsewhere))

    @torch.no_grad()
    def _elsewhere(self, sample: Sample) -> npt.NDArray[np.int64]:
        """For each sampled token, at the position before it."""
        assert self._backend.replay is not None
        assert sample.routes is not None
        rows = self._backend.scorer.rows([sample.tokens], [np.arange(1, len(sample.tokens))])
        chosen: list[torch.Tensor] = []
        with self._backend.replay.recording(chosen):
            self._backend.scorer.logprobs(rows, 1.0)
        own = np.sort(chosen[0].cpu().numpy()[:, self._layers], axis=2)
        told = np.sort(sample.routes[:-1, self._layers], axis=2)
        differs: npt.NDArray[np.int64] = (own != told).any(axis=2).sum(axis=1)
        return differs[np.flatnonzero(sample.mask == MaskReason.SAMPLED) - 1]

    def measures(self, age: int, which: Which) -> Measures:
        scored = self.found[age][which]
        differ = scored.elsewhere > 0
        return {
            "gap_differing": float(scored.gap[differ].mean()) if differ.any() else 0.0,
            "gap": float(scored.gap.mean()),
            "largest": float(scored.gap.max()),
            "tokens": float(differ.mean()),
            "choices": float(scored.elsewhere.mean() / len(self._layers)),
        }


class Rounds:
    """The measurements of one model, made when first asked for, one for each round."""

    def __init__(
        self, shape: Shape | None, given: str, overrides: Sequence[str], scale: Scale, temporary: Path
    ) -> None:
        self._shape, self._given, self._overrides = shape, given, overrides
        self._scale, self._temporary = scale, temporary
        self._made: list[Measurement] = []
        self._asked: dict[tuple[int, Which], int] = {}

    def measure(self, age: int, which: Which) -> Measures:
        turn = self._asked.get((age, which), 0)
        self._asked[age, which] = turn + 1
        if turn == len(self._made):
            self._made.append(self._make(turn))
        return self._made[turn].measures(age, which)

    def _make(self, seed: int) -> Measurement:
        with tempfile.TemporaryDirectory(dir=self._temporary) as folder:
            path = self._given
            if self._shape is not None:
                path = f"{folder}/model"
                draw_model(self._shape, seed, Path(path))
            settings = [f"model.path={path}", *settings_of(self._scale), *self._overrides]
            with Child(SAMPLER, ["quickstart", *settings], child_environment()) as sampler:
                return Measurement(load_config("quickstart", settings), Path(folder), sampler, self._scale, seed)


def settings_of(scale: Scale) -> list[str]:
    return [
        "algorithm.router_replay=rollout", "algorithm.surrogate=policy_gradient", "algorithm.treatment=uncorrected",
        "inference.dtype=bfloat16", f"inference.slots={scale.groups * scale.group_size}",
        f"inference.max_new_tokens={scale.new_tokens}", f"inference.max_context={POSITIONS - 1}",
    ]  # fmt: skip


def cells(scale: Scale, given: str, overrides: Sequence[str], temporary: Path) -> list[Cell]:
    of = [(shape.name, Rounds(shape, "", overrides, scale, temporary)) for shape in scale.shapes]
    if given:
        of = [(Path(given).name, Rounds(None, given, overrides, scale, temporary))]

    def arms(rounds: Rounds, age: int) -> list[Arm]:
        return [
            Arm("live", lambda: rounds.measure(age, "live")),
            Arm("replayed", lambda: rounds.measure(age, "replayed")),
        ]

    ages = {0: "at the same version", STEPS: f"{STEPS} versions later"}
    return [Cell(f"{name}, {says}", arms(rounds, age), "live") for name, rounds in of for age, says in ages.items()]


def bench(options: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    scale, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    settings = {"model": options.model, "set": options.overrides, "tokens": scale.new_tokens}
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-bench-")))
        measured = cells(scale, options.model, options.overrides, temporary)
        document = run_bench("replay", measured, METRICS, rounds, settings, console)
    finish_bench(document, options, console)


def main() -> None:
    parser = bench_parser(
        "replay", "A trainer's log-probabilities against the engine's, with its routes and without.", 3
    )
    parser.add_argument("--model", default="", metavar="DIR", help="a checkpoint with experts, in place of drawn ones")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
        help="of the config: another engine, for example",
    )  # fmt: skip
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

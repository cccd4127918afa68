"""Tiny random models on disk, adapters whose every tensor is non-zero, and plain transformers with peft as oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from async_rl.policy.adapter import read_adapter, write_adapter
from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.engine import Completion, Request
from inference.torch_engine import TorchEngine

VOCAB = 29
COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
ROPE = COMMON | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3": ROPE,
    "llama": ROPE,
    "qwen2": ROPE,
    # Windows far shorter than the sequences of the tests, on one of two layers and on all of them.
    "gemma3_text": ROPE | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": ROPE | {"sliding_window": 5},
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    # The first layer is dense.
    "qwen3_moe": ROPE | {
        "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Tiny:
    """One tiny model: its folder, adapters made for it, and the oracle."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.vocab = kind, folder, VOCAB
        self.path = folder / "model"
        self.targets = TARGETS.get(kind, ALL_LINEAR)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
        with torch.no_grad():
            # Initial weights give nearly uniform distributions, in which a wrong mask would hardly show.
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.25)
        model.save_pretrained(self.path)
        self.linears = {
            name: (module.nf, module.nx) if isinstance(module, Conv1D) else tuple(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and name.rsplit(".", 1)[-1] in self.targets
        }

    def tensors(self, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (out_features, in_features) in self.linears.items():
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.2
        return tensors

    def config(self, **changes: object) -> dict[str, object]:
        return {"r": 4, "lora_alpha": 8, "target_modules": self.targets, "use_rslora": False} | changes

    def write(self, version: int, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> tuple[PolicyId, Path]:
        path = self.folder / f"adapter-{version}-{len(list(self.folder.iterdir()))}.safetensors"
        return PolicyId("main", version, write_adapter(path, tensors, config)), path

    @cache  # noqa: B019 (the fixture's lifetime is the session)
    def policy(self, version: int) -> tuple[PolicyId, Path]:
        """A random adapter, the same for the same version."""
        return self.write(version, self.tensors(seed=100 + version), self.config(use_rslora=version % 2 == 1))

    @cache  # noqa: B019
    def oracle(self, version: int) -> torch.nn.Module:
        """The plain model with the adapter loaded by peft from the same tensors."""
        tensors, config = read_adapter(self.policy(version)[1])
        folder = self.folder / f"peft-{version}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        extra = {"fan_in_fan_out": self.kind == "gpt2", "inference_mode": True}
        (folder / "adapter_config.json").write_text(json.dumps(config | extra))
        base = AutoModelForCausalLM.from_pretrained(self.path)
        return PeftModel.from_pretrained(base, folder).eval()

    @torch.no_grad()
    def logprobs(self, version: int, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probabilities of `tokens` after `prompt` by one full forward of the oracle."""
        ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        logits = self.oracle(version)(input_ids=ids, use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)[len(prompt) - 1 : -1]
        return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def engine(self, versions: tuple[int, ...] = (0,), **changes: object) -> TorchEngine:
        """An engine with policies installed, serving the first of them."""
        options: dict[str, object] = {"slots": 4, "max_context": 48, "max_resident": 3, "device": "cpu"}
        engine = TorchEngine(self.path, **(options | changes))  # type: ignore[arg-type]
        for version in versions:
            engine.install(*self.policy(version))
        if versions:
            engine.flip(self.policy(versions[0])[0], "finish")
        return engine

    def prompt(self, seed: int, length: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)

    def request(
        self,
        sample: int,
        length: int = 5,
        new: int = 8,
        temperature: float = 1.0,
        policy: PolicyId | None = None,
        prompt_seed: int | None = None,
    ) -> Request:
        """A request of its own prompt (unless `prompt_seed` is given) and seed."""
        prompt = self.prompt(sample if prompt_seed is None else prompt_seed, length)
        return Request((7, sample), prompt, SamplingParams(temperature, new), 1000 + sample, policy)


def run_all(engine: TorchEngine, steps: int = 500) -> dict[int, Completion]:
    """Step until nothing is active; completions by sample."""
    done = {}
    for _ in range(steps):
        for completion in engine.step():
            done[completion.key[1]] = completion
        if not engine.active:
            return done
    raise AssertionError(f"still {engine.active} active after {steps} steps")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Makes (once) the tiny model of a kind."""

    @cache
    def make(kind: str) -> Tiny:
        return Tiny(kind, tmp_path_factory.mktemp(kind))

    return make


@pytest.fixture(scope="session")
def qwen(tiny_model: Callable[[str], Tiny]) -> Tiny:
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def finish_all() -> Callable[..., dict[int, Completion]]:
    return run_all

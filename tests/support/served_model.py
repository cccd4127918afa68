"""A model small enough for every engine to be started on in a test, its adapters, and transformers with peft as oracle.

Its shape is one that vLLM's attention on a CPU can do (head_dim 32), its positions are several of vLLM's cache blocks
(128 tokens each there), and its distributions are far from uniform."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from safetensors.torch import save_file
from tiny_lm import save_qwen3
from transformers import AutoModelForCausalLM, DynamicCache

from async_rl.policy.adapter import read_adapter, write_adapter
from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.engine import Request

VOCABULARY, POSITIONS = 96, 1024
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": POSITIONS,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
Ids = npt.NDArray[np.int32]


class ServedModel:
    """In `folder`: the model at `path`, and what is made for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = save_qwen3(folder / "model", std=0.15, **SHAPE)
        model = self.plain()
        self.linears = {
            name: tuple(module.weight.shape)
            for name, module in model.named_modules()
            if name.rsplit(".", 1)[-1] in TARGETS
        }
        self._written = 0

    def plain(self, weights: Tensors | None = None) -> torch.nn.Module:
        """As transformers loads it; or with these weights, by parameter name."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        if weights is not None:
            model.load_state_dict(weights)
        return model

    # --- adapters ----------------------------------------------------------------------------------------------------

    def tensors(self, seed: int, rank: int = 4, size: float = 0.15) -> Tensors:
        """Of an adapter with no zero in it."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, (out_features, in_features) in self.linears.items():
            prefix = f"base_model.model.{name}"
            made[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * size
            made[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * size
        return made

    def config(self, **changes: object) -> dict[str, object]:
        return {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "use_rslora": False} | changes

    def write(self, version: int, tensors: Tensors, config: dict[str, object]) -> tuple[PolicyId, Path]:
        """An adapter's file, as the policy store has it."""
        self._written += 1
        path = self.folder / f"adapter-{version}-{self._written}.safetensors"
        return PolicyId("main", version, write_adapter(path, tensors, config)), path

    @cache  # noqa: B019 (it lives as long as the session)
    def policy(self, version: int) -> tuple[PolicyId, Path]:
        """A random adapter, the same for the same version; of several scales."""
        return self.write(version, self.tensors(seed=100 + version), self.config(lora_alpha=6 + 2 * (version % 3)))

    def peft_folder(self, version: int, name: str = "") -> Path:
        """Version's adapter as peft writes one, in a folder of that name."""
        folder = self.folder / (name or f"peft-{version}")
        tensors, config = read_adapter(self.policy(version)[1])
        return write_peft(folder, tensors, config)

    # --- the oracle --------------------------------------------------------------------------------------------------

    @cache  # noqa: B019
    def oracle(self, version: int | None) -> torch.nn.Module:
        """The plain model with the adapter loaded by peft from the same tensors; None: without one."""
        if version is None:
            return self.plain()
        return PeftModel.from_pretrained(self.plain(), self.peft_folder(version)).eval()

    def logprobs(
        self, version: int | None, prompt: Ids, tokens: Ids, temperature: float = 1.0, top_p: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Of `tokens` after `prompt`, float32, by one forward of the oracle; -inf outside the likeliest `top_p`."""
        return logprobs_by(self.oracle(version), prompt, tokens, temperature, top_p)

    def logprobs_with(
        self, tensors: Tensors, config: dict[str, object], prompt: Ids, tokens: Ids
    ) -> npt.NDArray[np.float32]:
        """The same, with any adapter."""
        model = PeftModel.from_pretrained(self.plain(), write_peft(self.folder / "peft-any", tensors, config)).eval()
        return logprobs_by(model, prompt, tokens)

    # --- requests ----------------------------------------------------------------------------------------------------

    def prompt(self, seed: int, length: int) -> Ids:
        return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)

    def request(
        self,
        sample: int,
        length: int = 6,
        new: int = 12,
        temperature: float = 1.0,
        top_p: float = 1.0,
        policy: PolicyId | None = None,
    ) -> Request:
        """A request with a prompt and a seed of its own."""
        sampling = SamplingParams(temperature, new, top_p)
        return Request((7, sample), self.prompt(sample, length), sampling, 1000 + sample, policy)


def write_peft(folder: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    """`folder`, with an adapter in peft's layout in place of what was there."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    extra = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(extra | config))
    return folder


@torch.no_grad()
def logprobs_by(
    model: torch.nn.Module, prompt: Ids, tokens: Ids, temperature: float = 1.0, top_p: float = 1.0
) -> npt.NDArray[np.float32]:
    """See ServedModel.logprobs; temperature 0 counts as 1."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].float()[len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if top_p < 1:
        logprobs = nucleus(logprobs, top_p)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@torch.no_grad()
def logprobs_across(
    old: torch.nn.Module, new: torch.nn.Module, prompt: Ids, tokens: Ids, flip: int
) -> npt.NDArray[np.float32]:
    """Of `tokens[flip:]` by `new`, on a KV cache that `old` filled with prompt and `tokens[: flip - 1]`: the token
    before the flip is the first that `new` reads."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    at = len(prompt) + flip - 1
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(type(new).forward).parameters else "past_key_values"
    old(input_ids=ids[:, :at], use_cache=True, **{name: cache})
    logits = new(input_ids=ids[:, at:-1], use_cache=True, **{name: cache}).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, at + 1 :, None])[:, 0].numpy()


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """[places, vocabulary], of the smallest set of likeliest tokens that has at least `top_p`, and of it alone."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    kept = torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered.masked_fill(outside, -torch.inf))
    return torch.log_softmax(kept, dim=-1)


def broken_adapters(model: ServedModel) -> Sequence[tuple[str, Tensors, dict[str, object], str]]:
    """(what is wrong, tensors, config, what the message must say)."""
    tensors, config = model.tensors(seed=5), model.config()
    a = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    b = a.replace("lora_A", "lora_B")
    without = {name: tensor for name, tensor in tensors.items() if name != b}
    neither = {name: tensor for name, tensor in without.items() if name != a}
    others = [target for target in TARGETS if target != "up_proj"]
    elsewhere = {name.replace("layers.", "layers.7"): tensor for name, tensor in tensors.items()}
    return (
        ("half of a pair", without, config, "up_proj has no lora_B"),
        ("a module without its pair", neither, config, "up_proj has no lora_A"),
        ("misnamed", neither | {a.replace("up_p", "upp_p"): tensors[a], b.replace("up_p", "upp_p"): tensors[b]}, config,
         "upp_proj"),
        ("a module more than there is", tensors | {a.replace(".1.", ".9."): tensors[a].clone(),
                                                   b.replace(".1.", ".9."): tensors[b].clone()}, config, "layers.9"),
        ("names that match nothing", elsewhere, config, "layers.7"),
        ("without the prefix", neither | {a.removeprefix("base_model."): tensors[a], b: tensors[b]}, config, "named"),
        ("transposed", tensors | {a: tensors[a].T.contiguous()}, config, "shape"),
        ("of another rank", tensors, model.config(r=8), "shape"),
        ("not finite", tensors | {a: tensors[a] * torch.nan}, config, "finite"),
        ("of a module that is no target", tensors, model.config(target_modules=others), "not among"),
        ("a target that is not there", tensors, model.config(target_modules=[*TARGETS, "router"]), "router"),
    )  # fmt: skip

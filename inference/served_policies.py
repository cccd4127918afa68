"""Policies for servers, as files in this machine's memory: folders of adapters, and checkpoints of whole models.

A server loads by path, and may load again from there whenever it likes; so each policy has a folder of its own, which
stays as it is while the policy is resident, and no path is ever used twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.pytorch_utils import Conv1D

from async_rl.policy.adapter import canonical_config
from async_rl.policy.experts import ExpertTarget, find_experts
from async_rl.policy.update_file import STORAGE, Storage
from async_rl.run.scratch import Scratch
from async_rl.version import PolicyId
from inference.adapter_match import match_adapter, matched_modules, module_and_part
from inference.adapter_slots import Adapter, read_content
from inference.engine import EngineError
from inference.model_loading import end_tokens, load_model

MEMORY = Path("/dev/shm")  # a disk that is memory, on Linux


def memory_scratch() -> Scratch:
    """A folder in memory where the system has a place for that, else where other temporary files are."""
    return Scratch(MEMORY if MEMORY.is_dir() else None)


Shapes = dict[str, tuple[int, int]]  # [out, in] of linear modules, by name


def linear_shapes(path: Path) -> Shapes:
    """Of every linear module of the model at `path`, without loading a weight. Raises EngineError."""
    return _linear_shapes(_empty_model(path))


def modules_of(path: Path, experts: bool) -> tuple[Shapes, list[ExpertTarget]]:
    """What an adapter of the model at `path` may adapt: its linear modules and, with `experts`, the projections of its
    experts. Raises EngineError."""
    model = _empty_model(path)
    return _linear_shapes(model), find_experts(model)[0] if experts else []


def _empty_model(path: Path) -> nn.Module:
    try:
        with torch.device("meta"):
            made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"model at {path}: cannot be read: {error}") from error
    return made


def _linear_shapes(model: nn.Module) -> Shapes:
    shapes: Shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            shapes[name] = (module.nf, module.nx)
    return shapes


def end_tokens_of(path: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of the generation config at `path`, else of the model's; empty if neither names one."""
    sources: list[Any] = [AutoConfig.from_pretrained(path).get_text_config(decoder=True)]
    if (path / "generation_config.json").is_file():
        sources.insert(0, GenerationConfig.from_pretrained(path))
    return end_tokens(sources)


class AdapterFolders:
    """Adapters that are, or may become, resident: each a folder with the tensors of its file, below `root`. Every
    tensor has to find its module in `shapes`, or among `experts`, and every target its tensors, as servers pass over in
    silence what they do not know. Without `experts` policies that adapt some are refused."""

    def __init__(self, root: Path, shapes: Shapes, experts: Sequence[ExpertTarget] = ()) -> None:
        self._root, self._shapes, self._experts = root, shapes, experts
        self._folders: dict[PolicyId, Path] = {}
        self._made = 0

    def read(self, policy: PolicyId, path: Path) -> Adapter:
        return read_content(policy, path)

    def write(self, policy: PolicyId, content: Adapter) -> tuple[str, ...]:
        """Check it and make its folder; the names of the modules that it matched. Raises EngineError."""
        if not self._experts:
            self._refuse_experts(policy, content)
        adapters = match_adapter(content.tensors, content.config, self._shapes, self._experts)
        matched = matched_modules(content.tensors, adapters, self._experts)
        del adapters  # of experts they are copies
        self._made += 1
        folder = self._root / f"{policy.name}-{policy.short()}-{self._made}"
        try:
            folder.mkdir(mode=0o700)
            save_file(content.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            config = json.loads(canonical_config(content.config)) | {"inference_mode": True, "lora_dropout": 0.0}
            (folder / "adapter_config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(f"policy {policy.short()}: no room for it in {self._root} ({error})") from error
        self._folders[policy] = folder
        return matched

    def _refuse_experts(self, policy: PolicyId, content: Adapter) -> None:
        """With a message of its own: the tensors are right, the engine is not."""
        modules = {module_and_part(name)[0] for name in content.tensors}
        of_experts = sorted(name for name in modules if name not in self._shapes and ".experts." in name)
        if not of_experts:
            return
        # A dense layer may bear the same names as experts, and a target of that name means both.
        adapted, borne = ({name.rpartition(".")[2] for name in some} for some in (modules, of_experts))
        others = json.dumps(sorted(adapted - borne)) if adapted - borne else "what is not in experts, as q_proj"
        raise EngineError(
            f"policy {policy.short()} adapts experts ({of_experts[0]}), which this engine does not serve: set "
            f'[trainer] targets = {others}, or [inference] engine = "torch" or "sglang"'
        )

    def folder(self, policy: PolicyId) -> Path:
        return self._folders[policy]

    def remove(self, policy: PolicyId) -> None:
        shutil.rmtree(self._folders.pop(policy), ignore_errors=True)


class MasterModel:
    """The weights that policies change, in host memory and in the trainer's own dtype; `hand_over` is given each
    changed state as a checkpoint, which is gone when it returns. Implements inference.whole_weights.WeightHolder."""

    def __init__(self, path: Path, storage: Storage, root: Path, hand_over: Callable[[Path], None]) -> None:
        self.model = load_model(path, torch.device("cpu"), storage)
        self.dtype = STORAGE[storage]
        self._path, self._root, self._hand_over = path, root, hand_over
        self._made = 0

    def changed(self) -> None:
        """Raises EngineError."""
        self._made += 1
        folder = self._root / f"weights-{self._made}"
        try:
            folder.mkdir(mode=0o700)
            self.model.save_pretrained(folder, max_shard_size="1TB")
            for extra in self._path.glob("*.json"):  # the tokenizer's, and whatever a server looks for in a checkpoint
                if not (folder / extra.name).exists() and "index" not in extra.name:
                    shutil.copy(extra, folder)
            self._hand_over(folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"no room for a checkpoint of the model in {self._root} ({error})") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

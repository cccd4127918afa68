"""What of the node runs in vLLM's worker."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """vLLM mixes this into its worker's class; the methods are called through its collective_rpc."""

    model_runner: Any

    def leave_head_out(self) -> int:
        """Take LoRA off the output head; returns how many were found. With it vLLM expects one row a request there, and
        a request for the log-probabilities of a prompt, which has more, kills the worker on a CPU, whatever adapter it
        names. Adapters that have tensors for the head are refused from then on."""
        adapters = self.model_runner.lora_manager._adapter_manager
        wrapped = {
            name: module
            for name, module in adapters.model.named_modules()
            if type(module).__name__ == "LogitsProcessorWithLoRA"
        }
        for name, module in wrapped.items():
            parent, _, leaf = name.rpartition(".")
            setattr(adapters.model.get_submodule(parent), leaf, module.base_layer)
        heads = [name for name, module in adapters.modules.items() if any(module is one for one in wrapped.values())]
        for name in heads:
            del adapters.modules[name]
            suffix = name.rpartition(".")[2]
            if suffix in adapters.supported_lora_modules:
                adapters.supported_lora_modules.remove(suffix)
        return len(wrapped)

"""The engines by name; a new one is a file and an entry here. Only the chosen engine's dependencies are imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from inference.engine import Engine


def _torch(config: Config, model_path: Path) -> Engine:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from async_rl.policy.update_file import Storage
    from inference.torch_engine import TorchEngine

    disable_progress_bar()  # a node writes to a log
    inference = config.inference
    if config.run.deterministic:
        torch.set_num_threads(1)  # more would share out the work by their number, which may differ between machines
    storage: Storage | None = None
    if config.trainer.kind != "lora":
        storage = "bfloat16" if config.model.dtype == "bfloat16" else "float32"
    return TorchEngine(
        model_path,
        slots=inference.slots,
        max_context=inference.max_context,
        max_resident=inference.max_resident,
        device=config.model.device,
        dtype=config.model.dtype if inference.dtype == "auto" else inference.dtype,
        compile_mode=inference.compile,
        exact=config.run.deterministic,
        top_tokens=config.algorithm.center_scores,
        storage=storage,
    )


ENGINES: dict[str, Callable[[Config, Path], Engine]] = {"torch": _torch}


def make_engine(config: Config, model_path: Path) -> Engine:
    """Build the configured engine. Raises AsyncRLError when it cannot do what the config asks for."""
    engine = ENGINES[config.inference.engine](config, model_path)
    offered = engine.capabilities.in_flight
    if config.inference.in_flight not in offered:
        raise AsyncRLError(
            f'[inference] in_flight = "{config.inference.in_flight}": engine "{config.inference.engine}" offers only '
            f"{', '.join(sorted(offered))}"
        )
    return engine

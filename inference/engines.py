"""The engines by name; a new one is a file and an entry here. Only the chosen engine's dependencies are imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.config import Config, with_group
from async_rl.errors import AsyncRLError
from async_rl.inference_config import interpreter
from async_rl.policy.update_file import Storage
from async_rl.trainer_config import adapts_feed_forward
from inference.engine import Engine
from inference.server import Server

Make = Callable[[Config, Path, Path | None], Engine]

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, for which it has room in its kernels


def _torch(config: Config, model_path: Path, _log: Path | None) -> Engine:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from inference.torch_engine import TorchEngine

    disable_progress_bar()  # a node writes to a log
    inference = config.inference
    if config.run.deterministic:
        torch.set_num_threads(1)  # more would share out the work by their number, which may differ between machines
    return TorchEngine(
        model_path,
        slots=inference.slots,
        max_context=inference.max_context,
        max_resident=inference.max_resident,
        device=config.model.device,
        dtype=_dtype(config),
        compile_mode=inference.compile,
        exact=config.run.deterministic,
        top_tokens=config.algorithm.center_scores,
        routes=_routes(config),
        storage=_storage(config),
    )


def _vllm(config: Config, model_path: Path, _log: Path | None) -> Engine:
    from inference.vllm_engine import VllmServer

    server = VllmServer(
        model_path, **_of_any_server(config), in_flight=config.inference.in_flight, arguments=vllm_arguments(config)
    )
    return _served(server, config, model_path)


def _sglang(config: Config, model_path: Path, log: Path | None) -> Engine:
    from inference.sglang_engine import SglangServer

    inference = config.inference
    server = SglangServer(
        model_path,
        **_of_any_server(config),
        python=interpreter(inference),
        endpoint=inference.sglang.endpoint,
        arguments=sglang_arguments(config),
        log=log,
        routes=_routes(config),
        feed_forward=adapts_feed_forward(config.trainer),
    )
    return _served(server, config, model_path)


def _of_any_server(config: Config) -> dict[str, Any]:
    inference = config.inference
    return {
        "slots": inference.slots,
        "max_context": inference.max_context,
        "max_adapters": inference.max_resident,
        "device": config.model.device,
        "dtype": _dtype(config),
        "whole": _storage(config) is not None,
    }


def vllm_arguments(config: Config) -> dict[str, Any]:
    """Those of the config; and room for the trainer's adapter and no larger one, since it is computed with in full."""
    arguments = config.inference.vllm.arguments
    if config.trainer.kind != "lora":
        return arguments
    room = next((rank for rank in VLLM_RANKS if rank >= config.trainer.rank), VLLM_RANKS[-1])
    return {"max_lora_rank": room} | arguments


def sglang_arguments(config: Config) -> dict[str, Any]:
    """The same of a server that the node starts; one that is there already has its own."""
    sglang = config.inference.sglang
    if config.trainer.kind != "lora" or sglang.endpoint:
        return sglang.arguments
    return {"max-lora-rank": config.trainer.rank} | sglang.arguments


def _served(server: Server, config: Config, model_path: Path) -> Engine:
    from inference.served_engine import ServedEngine

    inference = config.inference
    return ServedEngine(
        server,
        model_path,
        slots=inference.slots,
        max_context=inference.max_context,
        max_resident=inference.max_resident,
        storage=_storage(config),
        stall_timeout_s=inference.engine_timeout,
    )


def _dtype(config: Config) -> str:
    return config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype


def _routes(config: Config) -> bool:
    """Whether the trainer replays where tokens went here."""
    return config.algorithm.router_replay == "rollout"


def _storage(config: Config) -> Storage | None:
    """In what the trainer keeps the weights that it changes; None where it trains an adapter."""
    if config.trainer.kind == "lora":
        return None
    return "bfloat16" if config.model.dtype == "bfloat16" else "float32"


ENGINES: dict[str, Make] = {"torch": _torch, "vllm": _vllm, "sglang": _sglang}


def make_engine(config: Config, model_path: Path, log: Path | None = None) -> Engine:
    """Build the configured engine, and start the server that it has, which writes to `log`. Raises AsyncRLError when it
    cannot do what the config asks for, or is not that of one group."""
    if config.inference.group:
        config = with_group(config, "")  # says which there are
    engine = ENGINES[config.inference.engine](config, model_path, log)
    offered = engine.capabilities.in_flight
    if config.inference.in_flight not in offered:
        engine.close()
        raise AsyncRLError(
            f'[inference] in_flight = "{config.inference.in_flight}": engine "{config.inference.engine}" offers only '
            f"{', '.join(sorted(offered))}"
        )
    if _routes(config) and not engine.capabilities.routes:
        engine.close()
        raise AsyncRLError(
            f'[algorithm] router_replay = "rollout": engine "{config.inference.engine}" does not tell where tokens '
            "went: choose torch or sglang"
        )
    return engine

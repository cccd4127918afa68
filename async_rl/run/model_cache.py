"""Where a run's base model lies, and the name under which a made one is cached.

Nodes and the launcher need the place without being able to make the model (that is trainer/tiny_model.py), so this
imports neither torch nor transformers and only asks which versions are installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config import Config, ConfigError

CACHE_VARIABLE = "ASYNC_RL_CACHE"
RECIPE_VERSION = 1  # to be raised with every change in trainer/tiny_model.py that changes what comes out
OF_EXPERTS = frozenset({"experts", "experts_per_token", "expert_intermediate"})  # they decide nothing of a dense model
DECIDING_PACKAGES = ("torch", "transformers")  # another version may round, initialise or save otherwise


def model_path(config: Config) -> Path:
    """The directory of the base model: [model] path, or else the made model's place in the cache."""
    return Path(config.model.path) if config.model.path else tiny_model_path(config)


def tiny_model_path(config: Config) -> Path:
    """Where the model of [model.tiny] lies once it is made. Raises ConfigError without that table."""
    recipe = json.dumps(tiny_recipe(config), sort_keys=True, separators=(",", ":"), default=str)
    return cache_directory() / "tiny" / hashlib.sha256(recipe.encode()).hexdigest()[:16]


def tiny_recipe(config: Config) -> dict[str, Any]:
    """Everything that decides the made model, as plain values. Raises ConfigError without [model.tiny]."""
    if config.model.tiny is None:
        raise ConfigError("there is no table [model.tiny]: nothing says how to make a base model")
    tiny = msgspec.to_builtins(config.model.tiny)
    unused = {"words"} if not config.model.tiny.words else set()
    unused |= OF_EXPERTS if not config.model.tiny.experts else set()
    return {
        "recipe": RECIPE_VERSION,
        "tiny": {key: tiny[key] for key in tiny.keys() - unused},
        "task": config.task,
        "packages": {name: _version(name) for name in DECIDING_PACKAGES},
    }


def cache_directory() -> Path:
    """$ASYNC_RL_CACHE, or async-rl in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "async-rl"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"  # a checkout that only reads configs; it will find no model here, and needs none

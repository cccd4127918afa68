"""What an SGLang server's answers to one call say, and what has to be known of the model to read them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.trajectory import Finish
from inference.engine import EngineError
from inference.server import Call, Piece

EXPERTS_EACH = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


class Model(NamedTuple):
    """`ends`: the tokens at which the server ends by itself. `experts_each`: the experts a token goes to, 0 for a dense
    model."""

    vocabulary: int
    ends: frozenset[int]
    experts_each: int


def read_model(path: Path) -> Model:
    """Of a checkpoint in Hugging Face layout, as SGLang reads it. Raises EngineError when there is none."""
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes())
        text = config.get("text_config", config)
        vocabulary = int(text["vocab_size"])
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise EngineError(f"{path / 'config.json'} cannot be read as a model's configuration: {error!r}") from error
    ends = _ids(text.get("eos_token_id"))
    generation = path / "generation_config.json"
    if generation.exists():
        ends |= _ids(msgspec.json.decode(generation.read_bytes()).get("eos_token_id"))
    experts = next((int(text[name]) for name in EXPERTS_EACH if text.get(name)), 0)
    return Model(vocabulary, ends, experts)


class Answer:
    """Turns the events of a call into pieces. An event tells how many tokens there are by now, and brings those since
    the last one (or, from a server without incremental-streaming-output, all)."""

    def __init__(self, call: Call, model: Model, *, labelled: bool, routed: bool) -> None:
        self._call, self._model, self._labelled, self._routed = call, model, labelled, routed
        self._kept = call.temperature != 0 and call.top_p < 1
        self._seen = 0
        self.retracted = 0  # how often its KV cache was given up

    def read(self, event: Mapping[str, Any], stopped: bool) -> Piece:
        """`stopped`: we asked for its end. Raises EngineError when the server refuses, or says what cannot be."""
        if "error" in event:
            raise EngineError(f"{self._name}: the SGLang server refuses it: {event['error'].get('message')}")
        meta = event["meta_info"]
        finish = self._finish(meta["finish_reason"], stopped)
        total = int(meta["completion_tokens"])
        count = total - self._seen
        tokens = _last(event["output_ids"], count)
        rows = _last(meta.get("output_token_logprobs") or [], count)
        logprobs = [row[0] for row in rows]
        if self._kept:
            logprobs = _last(meta.get("output_token_sampling_logprobs") or [], count)
        if not len(tokens) == len(rows) == len(logprobs) == count or [row[1] for row in rows] != list(tokens):
            raise EngineError(
                f"{self._name}: the SGLang server sent {len(tokens)} tokens and {len(logprobs)} log-probabilities for "
                f"{count} new tokens"
            )
        labels = self._labels(meta, total) if self._labelled else None
        routes = self._routes(meta, total) if self._routed and finish is not None else None
        self._seen = total
        self.retracted = int(meta.get("num_retractions") or 0)
        return Piece(tokens, logprobs, labels, finish, routes)

    @property
    def _name(self) -> str:
        return f"call {self._call.name}"

    def _finish(self, reason: Mapping[str, Any] | None, stopped: bool) -> Finish | None:
        if reason is None:
            return None
        kind = reason["type"]
        if kind == "abort" and not stopped:
            raise EngineError(f"{self._name}: the SGLang server gave it up: {reason.get('message')}")
        if kind not in ("stop", "length", "abort"):
            raise EngineError(f"{self._name}: the SGLang server ended it with {kind!r}, which is not known here")
        finish: Finish = kind
        return finish

    def _labels(self, meta: Mapping[str, Any], total: int) -> list[tuple[str, int]]:
        runs = []
        for span in meta.get("weight_versions") or ():
            count = min(span["end"], total) - max(span["start"], self._seen)
            if count > 0:
                runs.append((str(span["version"]), count))
        if sum(count for _, count in runs) != total - self._seen:
            raise EngineError(f"{self._name}: {meta.get('weight_versions')} is not all of its {total} tokens")
        return runs

    def _routes(self, meta: Mapping[str, Any], total: int) -> npt.NDArray[np.int32] | None:
        """int32 [prompt + sampled - 1, layers, experts each]; None of a call that was given up before its first."""
        packed = meta.get("routed_experts")
        if packed is None:
            return None
        positions = len(self._call.ids) + total - 1
        return np.frombuffer(base64.b64decode(packed), np.int32).reshape(positions, -1, self._model.experts_each)


def _last(values: Sequence[Any], count: int) -> Sequence[Any]:
    return values[len(values) - count :] if count else []


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)

"""What an SGLang server's answers to one call say, and what has to be known of the model to read them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.routes import SGLANG_SEES_NO_DENSE, UNKNOWN, RouteShape, dense_unseen_by_sglang, route_shape
from async_rl.trajectory import Finish
from inference.engine import EngineError
from inference.server import Call, Piece


class Model(NamedTuple):
    """`ends`: the tokens at which the server ends by itself. `routes`: their shape, None for a dense model."""

    vocabulary: int
    ends: frozenset[int]
    routes: RouteShape | None


def read_model(path: Path) -> Model:
    """Of a checkpoint in Hugging Face layout, as SGLang reads it. Raises EngineError when there is none, and for a
    model that SGLang takes for another."""
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes())
        text = config.get("text_config", config)
        vocabulary = int(text["vocab_size"])
        routes, dense = route_shape(config), dense_unseen_by_sglang(config)
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise EngineError(f"{path / 'config.json'} cannot be read as a model's configuration: {error!r}") from error
    if dense:
        raise EngineError(f"{path}: {SGLANG_SEES_NO_DENSE.format(dense=dense)}")
    ends = _ids(text.get("eos_token_id"))
    generation = path / "generation_config.json"
    if generation.exists():
        ends |= _ids(msgspec.json.decode(generation.read_bytes()).get("eos_token_id"))
    return Model(vocabulary, ends, routes)


class Answer:
    """Turns the events of a call into pieces. An event tells how many tokens there are by now, and brings those since
    the last one (or, from a server without incremental-streaming-output, all).

    With a `label` (of the weights when the call was sent) it says which weights made each token. An event names those
    that the server has when it passes it on, which may be newer than those that made a token that was under way; only
    the last event brings its account of all tokens. So tokens are given as they come while the label stays what it
    was; with another one they, and what follows them, are kept back until the end. What was given has to agree with
    the account."""

    def __init__(self, call: Call, model: Model, *, label: str | None, routed: bool) -> None:
        self._call, self._model, self._routed = call, model, routed
        self._filtered = call.temperature != 0 and call.top_p < 1
        self._label = label
        self._tokens: list[int] = []  # kept back
        self._logprobs: list[float] = []
        self._seen = 0
        self.retracted = 0  # how often its KV cache was given up, so far

    def read(self, event: Mapping[str, Any], stopped: bool) -> Piece:
        """`stopped`: we asked for its end. Raises EngineError when the server refuses, or says what cannot be."""
        if "error" in event:
            raise EngineError(f"{self._name}: the SGLang server refuses it: {event['error'].get('message')}")
        meta = event["meta_info"]
        finish = self._finish(meta["finish_reason"], stopped)
        self.retracted = int(meta.get("num_retractions") or 0)
        self._take(event["output_ids"], meta)
        if self._label is None:
            labels = None
        elif finish is None:
            labels = self._labels_so_far(str(meta["weight_version"]))
            if labels is None:
                return Piece((), (), ())
        else:
            labels = self._labels_at_the_end(meta)
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        return Piece(tokens, logprobs, labels, finish, self._routes(meta) if finish is not None else None)

    def _take(self, ids: Sequence[int], meta: Mapping[str, Any]) -> None:
        count = int(meta["completion_tokens"]) - self._seen
        tokens = _last(ids, count)
        rows = _last(meta.get("output_token_logprobs") or [], count)
        logprobs = [row[0] for row in rows]
        if self._filtered:
            logprobs = list(_last(meta.get("output_token_sampling_logprobs") or [], count))
        if not len(tokens) == len(logprobs) == count or [row[1] for row in rows] != list(tokens):
            raise EngineError(
                f"{self._name}: the SGLang server sent {len(tokens)} tokens and {len(logprobs)} log-probabilities for "
                f"{count} new tokens"
            )
        self._tokens += tokens
        self._logprobs += logprobs
        self._seen += count

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

    def _labels_so_far(self, label: str) -> list[tuple[str, int]] | None:
        """None while there is doubt."""
        count = len(self._tokens)
        if label != self._label:
            return None
        return [(label, count)] if count else []

    def _labels_at_the_end(self, meta: Mapping[str, Any]) -> list[tuple[str, int]]:
        spans = meta.get("weight_versions") or ()
        account = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        given = self._seen - len(self._tokens)
        if len(account) != self._seen or account[:given] != [self._label] * given:
            raise EngineError(
                f"{self._name}: the server's account {spans} of {self._seen} tokens is not what it said before"
            )
        return [(label, len(list(run))) for label, run in groupby(account[given:])]

    def _routes(self, meta: Mapping[str, Any]) -> npt.NDArray[np.int32] | None:
        """int32 [prompt + sampled - 1, layers, experts each], UNKNOWN in dense layers, for which the server says
        something too; None of a call that was given up before its first. Raises EngineError for another number."""
        packed, shape = meta.get("routed_experts") if self._routed else None, self._model.routes
        if packed is None or shape is None:
            return None
        told = np.frombuffer(base64.b64decode(packed), np.int32)
        positions = len(self._call.ids) + self._seen - 1
        if told.size != positions * shape.layers * shape.each:
            raise EngineError(
                f"{self._name}: the SGLang server told {told.size} experts of {positions} positions, not "
                f"{shape.layers} layers · {shape.each} experts of each"
            )
        routes = np.full((positions, shape.layers, shape.each), UNKNOWN, np.int32)
        routed = list(shape.routed)
        routes[:, routed] = told.reshape(routes.shape)[:, routed]
        return routes


def _last(values: Sequence[Any], count: int) -> Sequence[Any]:
    return values[len(values) - count :] if count else []


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)

"""What an engine refuses before it queues anything: pure checks of requests and token ids, naming the request."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from async_rl.version import tokens_of
from inference.engine import EngineError, Request

# Below this, logits / temperature leave float32; who wants the most likely token says 0.
MIN_TEMPERATURE = 1e-4


def check_ids(what: str, ids: npt.NDArray[np.int32], vocab: int) -> None:
    """At least one id, all in [0, vocab)."""
    if ids.ndim != 1 or not len(ids):
        raise EngineError(f"{what} is empty (or not one-dimensional): need at least one token id")
    if ids.min() < 0 or ids.max() >= vocab:
        bad = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise EngineError(f"{what} holds token id {bad}, outside the model's vocabulary of {vocab}")


def check_top_tokens(top: int, vocab: int) -> None:
    if not 0 <= top <= vocab:
        raise EngineError(
            f"[algorithm] center_scores = {top}: the model's vocabulary has {vocab} tokens, so at most these"
        )


def check_request(request: Request, vocab: int, max_context: int, top: int = 0, top_p: bool = False) -> None:
    """Prompt and sampling parameters that an engine can serve within `max_context` tokens, with the `top` likeliest
    tokens at each; `top_p`: it can sample from the likeliest alone."""
    prompt, sampling = request.prompt, request.sampling
    name = request_name(request)
    check_ids(f"the prompt of {name}", prompt, vocab)
    if len(prompt) >= max_context:
        raise EngineError(
            f"{name}: a prompt of {len(prompt)} tokens leaves no room for a new one in a context of "
            f"{max_context}: shorten it or raise [inference] max_context"
        )
    if request.prefix is not None:
        if top:
            raise EngineError(
                f"the prefix of {name} lacks the likeliest tokens at each place, which [algorithm] center_scores = "
                f'{top} needs: set [inference] handover = "discard" on every node'
            )
        _check_prefix(request, vocab, max_context)
    if sampling.top_p != 1.0 and not top_p:
        raise EngineError(f"{name}: top_p is {sampling.top_p}, but this engine samples with top_p = 1 only")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"{name}: top_p is {sampling.top_p}: above 0, and at most 1")
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature < math.inf:
        raise EngineError(f"{name}: temperature is {sampling.temperature}: 0 or at least {MIN_TEMPERATURE}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{name}: max_new_tokens is {sampling.max_new_tokens}, must be at least 1")


def _check_prefix(request: Request, vocab: int, max_context: int) -> None:
    assert request.prefix is not None
    tokens, logprobs, versions = request.prefix[:3]
    what = f"the prefix of {request_name(request)}"
    check_ids(what, tokens, vocab)
    if len(logprobs) != len(tokens) or tokens_of(versions) != len(tokens):
        raise EngineError(f"{what} has {len(tokens)} tokens, {len(logprobs)} log-probabilities and runs {versions}")
    if len(tokens) >= min(request.sampling.max_new_tokens, max_context - len(request.prompt)):
        raise EngineError(f"{what} of {len(tokens)} tokens leaves no room for a new one")


def request_name(request: Request) -> str:
    return f"request {request.key[0]}/{request.key[1]}"

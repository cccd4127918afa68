"""The contract of an inference engine, as the node sees it.

An engine samples tokens for requests, many at a time, under policies that change while it works. The node calls it
from one thread: `submit` and `abort` return at once, and `step` advances the work and returns what finished. An engine
that owns a loop of its own (vLLM, SGLang) hides it behind a queue that `step` waits on.

What takes long with a large policy is `read`, which reads and hashes every byte of it, and which alone another thread
may call. Of what was read, `install` copies an adapter to the device; in place it looks at names and shapes, but the
first time that a base comes it hashes the model, and to go back to one it loads the checkpoint. In place `flip` takes
as long as changing all weights does.

What every engine guarantees:
  - token ids in, token ids out; nothing is tokenised here;
  - the (version, digest) on a token is that of the weights which produced its log-probability, stamped when it is
    sampled, never from anyone's belief about which version is current;
  - log-probabilities are the *processed* ones: after temperature (and top-p), of the distribution sampled from. At
    temperature 0 (greedy) they are those of temperature 1;
  - the tokens of a request depend only on (weights, prompt, sampling, seed), not on what else is in the batch, up to
    the rounding of batched arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.top_tokens import TopTokens
from async_rl.trajectory import Finish
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import SamplingParams

InFlight = Literal["finish", "continue", "recompute"]


class EngineError(AsyncRLError):
    """The engine cannot do what was asked; the message says what and what to do."""


class BaseMoved(EngineError):
    """What a policy's files change are weights that the engine has left meanwhile; another way may lead to it."""


class Capabilities(NamedTuple):
    """What an engine can do; a config that asks for more is refused before anything starts. `logprob_bound`: how far,
    in nats, its log-probabilities may be from those of another program with the same policy. `in_place`: there is one
    copy of the weights, so a flip ends the policy that served; one installed policy may wait for its flip. `top_p`: it
    can sample from the likeliest tokens alone. `routes`: it was made to tell where every position went (Completion).
    `experts`: it serves adapters on the experts of a mixture."""

    name: str
    in_flight: frozenset[InFlight]
    resident_versions: int
    attests: Literal["span", "name"]
    logprob_bound: float
    in_place: bool = False
    top_p: bool = False
    routes: bool = False
    experts: bool = False


class Prefix(NamedTuple):
    """What was sampled of a request so far, arrays and times as in Completion. `policy`: who goes on from it does so
    under that policy if it is resident when the request is submitted, and unpinned; else under the serving one. The
    first `resumed` tokens came with a prefix themselves."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    queued_s: float = 0.0
    sampling_s: float = 0.0
    policy: PolicyId | None = None
    resumed: int = 0


class Request(NamedTuple):
    """One attempt to sample. `policy` pins it to a resident policy (evaluation); None means the serving one. Requests
    with equal prompts are worth submitting together: an engine may prefill the prompt once. With a `prefix` the engine
    goes on after it: it prefills prompt and prefix once, samples none of its tokens again, and takes the next random
    number of the same seed."""

    key: tuple[int, int]
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    policy: PolicyId | None = None
    prefix: Prefix | None = None


class Completion(NamedTuple):
    """What came of a request: tokens int32[m] including the stop token, logprobs float32[m] (natural log), version
    runs over the m tokens; `queued_s` and `sampling_s` in seconds. An aborted one carries what was sampled. All of it
    includes the request's prefix, whose tokens are the first `resumed`. `top`: what was likeliest at each of the m
    places, where the engine was made to say so. `routes` int[prompt + m - 1, layers, experts each]: where each position
    went in a mixture-of-experts model (async_rl.routes), where it was made to tell: of a position that was computed
    more than once, as after `recompute`, when it was computed last, which is what the KV cache of the later ones holds.
    Those of a prefix are among them, as it is computed again."""

    key: tuple[int, int]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish: Finish
    queued_s: float
    sampling_s: float
    resumed: int = 0
    top: TopTokens | None = None
    routes: npt.NDArray[np.integer[Any]] | None = None


class Installed(NamedTuple):
    """The report of an install: the model's modules that the adapter's tensors matched, sorted."""

    policy: PolicyId
    matched_modules: tuple[str, ...]


class PolicyContent:
    """What an engine's `read` made of a policy's files, for its own `install` to look into."""


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""

    @property
    def serving(self) -> PolicyId | None:
        """The policy under which new requests start; None before the first flip."""

    @property
    def resident(self) -> Mapping[PolicyId, int]:
        """Resident policies and how many requests (waiting pinned, or running) use each."""

    @property
    def limit(self) -> int:
        """How many requests it would have in flight by now: its slots, or fewer where it follows its own load
        (inference.concurrency)."""

    @property
    def free_slots(self) -> int:
        """How many more requests could start sampling now."""

    def first_token(self, policy: PolicyId) -> float | None:
        """When the first token was sampled under a policy that was resident then and still is, in seconds of the
        monotonic clock; None when none was."""

    @property
    def active(self) -> int:
        """Requests submitted and not yet returned by `step`."""

    def read(self, policy: PolicyId, path: Path) -> PolicyContent:
        """What `install` needs of an adapter file (async_rl.policy.adapter), checked as far as it can be by itself.
        Nothing of the engine is touched, so any thread may do this; the files may be removed afterwards. Raises
        EngineError when one cannot be read, is broken, or does not lead to this policy.

        Of an engine that changes its weights `in_place`, `path` is a file of all weights, a base's or a factor update
        (async_rl.policy.update_file), or a folder of such files, to be applied in the order of their names."""

    def install(self, policy: PolicyId, files: Path | PolicyContent) -> Installed:
        """Load an adapter into an inactive slot, without disturbing what runs: what `read` made of its file, or the
        file, to be read first. Raises EngineError, and leaves everything as it was, when a tensor matches no module, a
        target module gets no tensor, a shape is wrong, or no slot is free. Installing a resident policy again does
        nothing.

        In place, the files lead from the serving policy or one before it (what was applied already is skipped), or
        begin with one that stands alone. All of it is checked against the model here, and nothing is changed. Raises
        BaseMoved where the first update begins somewhere else than the engine is by now.

        An engine that can only load weights (vLLM, SGLang) keeps a master of them in host memory, in the trainer's
        dtype: `install` checks, `flip` applies to the master and hands the parameters that changed to the engine's own
        reloading of weights between two of its steps (vLLM: a worker extension's load_weights, SGLang:
        update_weights_from_tensor), in the engine's dtype, and drops its prefix cache."""

    def flip(self, policy: PolicyId, in_flight: InFlight) -> None:
        """Serve a resident policy from the next step on, and treat requests in flight as `in_flight` says:
        finish (they keep their policy), continue (they go on under the new one with their KV cache), recompute (the
        KV cache of prompt and tokens so far is built again under the new one). Pinned requests keep their policy.

        In place, the weights become the new policy's, and the old one is not resident any more. Raises EngineError, and
        changes nothing, when requests are pinned to that, or when the weights are not any more what the new policy was
        checked against when it was installed. A flip that fails half-way leaves an engine which computes
        nothing at all: every call that would need the weights raises EngineError."""

    def evict(self, policy: PolicyId) -> None:
        """Free the slot of a policy that no request uses and that is not serving; raises EngineError otherwise."""

    def rebind(self, policy: PolicyId) -> int:
        """Move the unpinned requests of an old policy to the serving one, by recomputing; returns how many."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError for an empty prompt, an id outside the vocabulary, a prompt (and prefix)
        with no room for one new token, or a pinned policy that is not resident."""

    def abort(self, key: tuple[int, int]) -> None:
        """Stop a request; it comes back from `step` with finish "abort". Unknown keys are ignored."""

    def waiting(self) -> list[Request]:
        """Requests that were submitted and have not begun."""

    def take_out(self, key: tuple[int, int]) -> Prefix | None:
        """Stop a request that is to go on elsewhere, without a completion: all that was sampled of it, its own prefix
        included; None when nothing was, or for an unknown key."""

    def step(self) -> list[Completion]:
        """Advance every running request by at least one token; returns what finished. Returns at once when idle."""

    def finished(self) -> list[Completion]:
        """What is done by now and was not returned yet, without sampling; also of an engine that died. To be called
        before what is left is taken out."""

    def score(self, policy: PolicyId, tokens: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities at temperature 1 of given sequences under a resident policy: for each of n tokens,
        float32[n-1], entry t for token t+1. The measure by which a served policy is compared with the trainer's."""

    def describe(self) -> dict[str, Any]:
        """Facts for the log: model, dtype, device, slots, adapter targets."""

    def close(self) -> None: ...

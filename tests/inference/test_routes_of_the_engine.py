"""Where the torch engine says that tokens went, against transformers' own routers over the same sequence: of the right
position, of the right layer, of the weights that computed it, whatever else the batch did."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_moe import live_routes, routers

from async_rl.trajectory import check_trajectory, segment_arrays
from async_rl.wire.messages import Lease
from inference.engine import EngineError, Prefix
from inference.rollout import Open, RolloutBook


@pytest.fixture(scope="module")
def moe(tiny_model):
    return tiny_model("qwen3_moe")


def expected(moe, version, request, tokens):
    """[prompt + m - 1, layers, k], sets in ascending order."""
    sequence = np.concatenate([request.prompt, tokens])[:-1]
    return np.sort(live_routes(moe.oracle(version).base_model.model, sequence), axis=2)


def check(moe, request, completion, version=0, positions=slice(None)):
    routes = completion.routes
    assert routes.shape == (len(request.prompt) + len(completion.tokens) - 1, 3, 2)
    assert (routes[:, 0] == -1).all()  # dense, and still the first
    assert (routes[:, 1:] >= 0).all()
    found = np.sort(routes, axis=2)
    np.testing.assert_array_equal(found[positions], expected(moe, version, request, completion.tokens)[positions])


def test_routes_are_those_of_one_forward_over_the_sequence(moe, finish_all):
    """More requests than slots: rows start, end and move."""
    engine = moe.engine(routes=True)
    assert engine.capabilities.routes
    shapes = [(2 + 3 * (i % 4), 3 + 5 * i % 17, (1.0, 0.0)[i % 2]) for i in range(11)]
    requests = [moe.request(i, *shape) for i, shape in enumerate(shapes)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        check(moe, request, done[i])
    used = np.concatenate([completion.routes[:, 1:].ravel() for completion in done.values()])
    assert len(set(used.tolist())) == 6  # a buffer that nothing is written to holds one number


def test_a_shared_prompt_has_its_routes_in_every_row(moe, finish_all):
    engine = moe.engine(routes=True, slots=3)
    requests = [moe.request(i, length=9, new=4 + 3 * i, prompt_seed=1) for i in range(8)]
    for request in requests[:3]:
        engine.submit(request)
    done = {}
    for request in requests[3:]:  # late members copy a prompt from a row that runs
        done |= {completion.key[1]: completion for completion in engine.step()}
        engine.submit(request)
    done |= finish_all(engine)
    for i, request in enumerate(requests):
        check(moe, request, done[i])


def test_rows_of_two_policies_keep_their_own(moe, finish_all):
    engine = moe.engine(versions=(0, 1), slots=5, routes=True)
    requests = [moe.request(i, length=3 + i, new=4 + 5 * i % 14, policy=moe.policy(i % 2)[0]) for i in range(9)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        check(moe, request, done[i], version=i % 2)


def flipped(moe, finish_all, in_flight):
    engine = moe.engine(versions=(0, 1), routes=True)
    request = moe.request(0, length=6, new=14)
    engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.flip(moe.policy(1)[0], in_flight)
    return request, finish_all(engine)[0]


def test_after_a_recompute_routes_are_those_of_the_weights_that_computed_last(moe, finish_all):
    request, completion = flipped(moe, finish_all, "recompute")
    assert [run.version for run in completion.versions] == [0, 1]
    check(moe, request, completion, version=1)


def test_under_continue_each_position_keeps_the_route_with_which_its_token_was_computed(moe, finish_all):
    request, completion = flipped(moe, finish_all, "continue")
    before = len(request.prompt) + completion.versions[0].count - 1
    check(moe, request, completion, version=0, positions=slice(before))
    differ = np.sort(completion.routes, axis=2)[before:] != expected(moe, 0, request, completion.tokens)[before:]
    assert differ.any()


def test_what_goes_on_from_a_prefix_has_the_routes_of_the_prefix_too(moe, finish_all):
    request = moe.request(0, length=6, new=12)
    engine = moe.engine(routes=True)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    prefix = engine.take_out(request.key)
    assert isinstance(prefix, Prefix)
    other = moe.engine(routes=True)
    other.submit(request._replace(prefix=prefix))
    completion = finish_all(other)[0]
    assert completion.resumed == len(prefix.tokens)
    check(moe, request, completion)


def test_scoring_and_an_engine_that_is_not_asked_leave_routes_alone(moe, finish_all):
    engine = moe.engine(routes=True)
    request = moe.request(0, length=6, new=9)
    engine.submit(request)
    while engine.active:
        for completion in engine.step():
            check(moe, request, completion)
        engine.score(moe.policy(0)[0], [moe.prompt(3, 20), moe.prompt(4, 11)])
    plain = moe.engine()
    plain.submit(request)
    assert finish_all(plain)[0].routes is None
    assert not plain.capabilities.routes


def test_a_dense_model_is_refused_and_so_is_a_router_that_is_not_asked(qwen, moe):
    with pytest.raises(EngineError, match="Qwen3ForCausalLM has no router"):
        qwen.engine(routes=True)
    engine = moe.engine(routes=True)
    gate = routers(engine._runner.model)[2]
    gate.__class__ = type("Bare", (type(gate),), {"__call__": lambda self, hidden: self.forward(hidden)})
    engine.submit(moe.request(0))
    with pytest.raises(EngineError, match=r"routers of layers \[2\] were not called"):
        engine.step()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_node_sends_them_with_what_trains_and_hands_them_over(split, moe, finish_all):
    engine = moe.engine(routes=True)
    request = moe.request(0, length=6, new=9)
    engine.submit(request)
    completion = finish_all(engine)[0]
    lease = Lease(
        lease=request.key[0], ticket=0, try_=0, instance=0, split=split, samples=(0,), seeds=(1,), min_version=0,
        sampling=request.sampling,
    )  # fmt: skip
    book = RolloutBook(None, None, "node", "torch")  # type: ignore[arg-type]
    book._open[lease.lease], book._left[lease.lease] = Open(lease, request.prompt), {0}
    trajectory = book.handed_over(completion)
    check_trajectory(trajectory)
    (arrays,) = segment_arrays(trajectory)
    if split == "eval":
        assert not arrays.extras
        return
    assert arrays.extras["routes"].dtype == np.int16
    np.testing.assert_array_equal(arrays.extras["routes"][:-1], completion.routes)
    assert (arrays.extras["routes"][-1] == -1).all()  # what follows the last token was never computed
    taken, _ = book._completion_of(lease, trajectory)
    np.testing.assert_array_equal(taken.routes[:-1], completion.routes)

"""Router replay in every layout: tokens that are forced to random experts go through what Hugging Face's model computes
when its routers are forced to the same, layer for layer, forward and backward, computed again or not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from near import assert_near
from rank_pool import run_ranks
from routed_models import Expected, routes_of
from sharded_models import make_model

from trainer.megatron.replay import RouterReplay, Served, on_this_rank

SEQUENCE = {"tensor": 2, "sequence": True}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], bool]]] = {
    2: [
        ("mixture", SEQUENCE, True),
        ("mixture", SEQUENCE | {"expert": 2}, False),
        ("mixture", SEQUENCE | {"expert_tensor": 2}, True),
        ("mixture", {"data": 2, "expert": 2}, True),
        ("mixture", {"pipeline": 2}, False),
        ("leading", {"pipeline": 2}, True),
        ("leading", SEQUENCE | {"expert": 2}, True),
    ],
    4: [
        ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, True),
        ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, True),
        ("mixture", {"pipeline": 4}, True),
        ("mixture", {"pipeline": 2, "data": 2, "expert": 2}, False),
        ("leading", SEQUENCE | {"pipeline": 2, "expert_tensor": 2}, True),
    ],
}
KNOWN = (1.0, 0.6)  # all routes, and some: where there is none the live router chooses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(folder: Path, kind: str, known: float) -> tuple[Path, Any, Expected]:
    path = make_model(kind, folder / kind)
    routes = routes_of(path, known)
    return path, routes, Expected(path, routes)


@pytest.mark.parametrize("world", LAYOUTS)
def test_forced_routes_give_what_one_process_gives_in_every_layout(folder: Path, world: int) -> None:
    names, cases = [], []
    for kind, parallel, recompute in LAYOUTS[world]:
        for known in KNOWN:
            path, routes, _ = expected(folder, kind, known)
            names.append((kind, known))
            cases.append({"path": str(path), "parallel": parallel, "recompute": recompute, "routes": routes})
    by_rank = run_ranks(world, "routed_models:compute", cases)
    for number, (kind, known) in enumerate(names):
        name = f"{kind} {cases[number]['parallel']} recompute={cases[number]['recompute']} known={known}"
        _, routes, wanted = expected(folder, kind, known)
        _check(name, [results[number] for results in by_rank], wanted)
        _check_counts(name, by_rank[0][number]["counts"], routes)


def _check(name: str, found: list[dict[str, Any]], wanted: Expected) -> None:
    assert {index for rank in found for index in rank["logprobs"]} == set(range(len(wanted.logprobs))), name
    for rank in found:
        if rank["logprobs"]:  # of the last stage
            by_index = {index: wanted.logprobs[index] for index in rank["logprobs"]}
            assert_near(rank["logprobs"], by_index, f"{name}: log-probabilities")
        for index, went in rank["went"].items():
            for (start, length), of_sequence in zip(rank["spans"][index], wanted.went[index], strict=True):
                np.testing.assert_array_equal(  # sets: the order of a token's experts says nothing
                    np.sort(went[start : start + length], axis=2), np.sort(of_sequence[:length], axis=2), name
                )
    gradients = found[0]["gradients"]
    of_layers = {key: gradient for key, gradient in wanted.gradients.items() if key != "lm_head.weight"}
    assert_near(gradients, of_layers, f"{name}: gradients")
    assert any(key.endswith("mlp.gate.weight") and np.abs(value).max() > 0 for key, value in gradients.items()), name


def _check_counts(name: str, counts: dict[str, int], routes: Any) -> None:
    known = _known(routes)
    assert counts["known"] == known.sum(), name
    assert counts["tokens"] == known.any(axis=1).sum(), name
    # Random experts are hardly ever the live router's.
    assert 0.5 * counts["known"] < counts["changed"] <= counts["known"], name
    assert counts["changed_tokens"] <= counts["tokens"], name


def _known(routes: Any) -> Any:
    """Bool [tokens, layers] of what is computed: the last token of a sequence is not."""
    return (np.concatenate([each[:-1] for batch in routes for each in batch]) >= 0).all(axis=2)


def test_what_a_pass_recorded_is_replayed_as_it_was(folder: Path) -> None:
    """R2: the routes of a pass without any, given to another layout, leave every number as it was there."""
    path = make_model("leading", folder / "recorded")
    nothing = [[np.full_like(each, -1) for each in batch] for batch in routes_of(path, 1.0)]
    wanted = Expected(path, nothing)
    live = {"path": str(path), "parallel": {"pipeline": 2}, "recompute": True, "routes": None}
    found = [results[0] for results in run_ranks(2, "routed_models:compute", [live])]
    _check("recorded", found, wanted)
    assert found[0]["counts"]["known"] == found[0]["counts"]["changed"] == 0
    again = [
        [np.concatenate([went[start : start + length], went[:1] * 0 - 1]) for start, length in found[0]["spans"][index]]
        for index, went in sorted(found[0]["went"].items())
    ]
    replayed = {**live, "parallel": SEQUENCE | {"expert": 2}, "routes": again}
    found = [results[0] for results in run_ranks(2, "routed_models:compute", [replayed])]
    _check("replayed", found, wanted)
    counts = found[0]["counts"]
    assert counts["known"] == _known(routes_of(path, 1.0)).sum() > 0
    assert counts["changed"] == 0  # neither shifted by a layer or a token, nor zero


# --- one router ------------------------------------------------------------------------------------------------------


def test_experts_that_the_router_would_not_choose_have_weights_and_gradients() -> None:
    router = RouterReplay(1)
    scores = torch.tensor([[5.0, 4.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    routes = torch.tensor([[[-1, -1], [3, 2]], [[0, 1], [-1, -1]]], dtype=torch.int16)
    router.served = Served(routes, 2, traced=True)
    values, chosen = router.get_replay_topk(scores, 2, default_compute_topk=_top)
    assert chosen.tolist() == [[3, 2], [3, 2]]  # as served, and as the router says
    assert values.tolist() == [[0.5, 1.0], [4.0, 3.0]]
    values[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert router.served.live is not None
    assert router.served.live[1].tolist() == [[0, 1], [3, 2]]


def test_routes_of_another_number_of_tokens_layers_or_experts_are_refused() -> None:
    router = RouterReplay(2)
    for shape in ((3, 4, 2), (2, 2, 2), (2, 4, 3)):
        router.served = Served(torch.zeros(shape, dtype=torch.int16), shape[0], traced=False)
        with pytest.raises(ValueError, match=r"are served to layer 2, which has \[2, 2\]"):
            router.get_replay_topk(torch.rand(2, 4), 2, default_compute_topk=_top)


def test_a_tensor_rank_has_the_routes_of_its_own_tokens_and_padding_has_none() -> None:
    routes = torch.arange(5)[:, None, None].expand(5, 3, 2)
    parts = [on_this_rank(routes, 6, rank, 2)[:, 0, 0].tolist() for rank in range(2)]
    assert parts == [[0, 1, 2], [3, 4, -1]]


def _top(scores: torch.Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:
    return torch.topk(scores, topk, dim=1)

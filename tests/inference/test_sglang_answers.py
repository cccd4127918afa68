"""What is made of an SGLang server's answers; the server itself is tested in tests/engines."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.routes import RouteShape
from inference.engine import EngineError
from inference.server import Call, Piece
from inference.sglang_answers import Answer, Model, read_model

MODEL = Model(vocabulary=50, ends=frozenset(), routes=RouteShape(3, (1, 2), 99, 2))


def call(top_p: float = 1.0) -> Call:
    return Call("7-1", np.array([1, 2, 3], np.int32), 9, 1.0, top_p, 1, (), None, "")


def event(total: int, tokens: list[int], version: str = "old", **more: Any) -> dict[str, Any]:
    rows = [[-token / 10, token, None] for token in tokens]
    meta = {"completion_tokens": total, "output_token_logprobs": rows, "finish_reason": None, "num_retractions": 0}
    return {"output_ids": tokens, "meta_info": meta | {"weight_version": version} | more}


def ended(total: int, tokens: list[int], *spans: tuple[str, int, int], kind: str = "length") -> dict[str, Any]:
    account = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return event(total, tokens, finish_reason={"type": kind, "message": "Aborted"}, weight_versions=account)


def test_events_bring_what_is_new_whether_they_hold_the_rest_or_not() -> None:
    answer = Answer(call(), MODEL, label=None, routed=False)
    assert answer.read(event(2, [4, 5]), False) == Piece([4, 5], [-0.4, -0.5], None)
    assert answer.read(event(3, [6]), False) == Piece([6], [-0.6], None)
    assert answer.read(event(4, [4, 5, 6, 7]), False) == Piece([7], [-0.7], None)
    assert answer.read(ended(4, [7]), False) == Piece([], [], None, "length")


def test_with_top_p_log_probabilities_are_those_of_what_was_left() -> None:
    answer = Answer(call(top_p=0.5), MODEL, label=None, routed=False)
    assert answer.read(event(2, [4, 5], output_token_sampling_logprobs=[-1.0, -2.0]), False).logprobs == [-1.0, -2.0]


def test_each_token_has_the_label_of_the_weights_that_made_it() -> None:
    answer = Answer(call(), MODEL, label="old", routed=False)
    assert answer.read(event(2, [4, 5]), False).labels == [("old", 2)]
    assert answer.read(event(3, [6]), False).labels == [("old", 1)]
    assert answer.read(ended(4, [7], ("old", 0, 4)), False).labels == [("old", 1)]


def test_a_token_that_was_under_way_at_a_change_is_of_the_weights_before_it() -> None:
    answer = Answer(call(), MODEL, label="old", routed=False)
    assert answer.read(event(1, [4]), False).tokens == [4]
    assert answer.read(event(2, [5], "new"), False).tokens == ()
    last = answer.read(ended(3, [6], ("old", 0, 2), ("new", 2, 3)), False)
    assert (last.tokens, last.labels) == ([5, 6], [("old", 1), ("new", 1)])


def test_tokens_that_came_together_across_a_change_wait_for_the_servers_account() -> None:
    answer = Answer(call(), MODEL, label="old", routed=False)
    assert answer.read(event(1, [4]), False).tokens == [4]
    assert answer.read(event(3, [5, 6], "new"), False).tokens == ()
    assert answer.read(event(4, [7], "new"), False).tokens == ()
    last = answer.read(ended(5, [8], ("old", 0, 2), ("new", 2, 5)), False)
    assert (last.tokens, last.labels) == ([5, 6, 7, 8], [("old", 1), ("new", 3)])


@pytest.mark.parametrize("spans", [[("new", 0, 3)], [("old", 0, 2)], []])
def test_an_account_that_is_not_what_was_said_before_is_refused(spans: list[tuple[str, int, int]]) -> None:
    answer = Answer(call(), MODEL, label="old", routed=False)
    answer.read(event(2, [4, 5]), False)
    with pytest.raises(EngineError, match=r"7-1.*account"):
        answer.read(ended(3, [6], *spans), False)


def test_an_end_that_we_did_not_ask_for_is_a_refusal() -> None:
    with pytest.raises(EngineError, match=r"7-1.*Aborted"):
        Answer(call(), MODEL, label=None, routed=False).read(ended(0, [], kind="abort"), False)
    assert Answer(call(), MODEL, label=None, routed=False).read(ended(1, [4], kind="abort"), True).finish == "abort"


@pytest.mark.parametrize(
    "broken",
    [event(2, [4]), event(1, [4], output_token_logprobs=[]), event(1, [4], output_token_logprobs=[[-0.5, 5, None]])],
)
def test_tokens_without_their_log_probabilities_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="7-1"):
        Answer(call(), MODEL, label=None, routed=False).read(broken, False)


def test_an_error_in_the_stream_is_a_refusal_in_the_servers_words() -> None:
    with pytest.raises(EngineError, match="too long"):
        Answer(call(), MODEL, label=None, routed=False).read({"error": {"message": "too long"}}, False)


def test_routes_come_with_the_last_piece_for_every_position_but_the_last() -> None:
    routes = np.arange((3 + 2 - 1) * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    packed = base64.b64encode(routes.tobytes()).decode()
    answer = Answer(call(), MODEL, label=None, routed=True)
    assert answer.read(event(1, [4]), False).routes is None
    last = answer.read(event(2, [5], finish_reason={"type": "length"}, routed_experts=packed), False)
    assert last.routes is not None
    np.testing.assert_array_equal(last.routes[:, 1:], routes[:, 1:])
    assert (last.routes[:, 0] == -1).all()  # the server says something of a dense layer too


def test_routes_of_another_number_of_layers_are_refused() -> None:
    packed = base64.b64encode(np.zeros((4, 2, 2), np.int32).tobytes()).decode()
    last = event(2, [4, 5], finish_reason={"type": "length"}, routed_experts=packed)
    with pytest.raises(EngineError, match="told 16 experts of 4 positions, not 3 layers · 2 experts of each"):
        Answer(call(), MODEL, label=None, routed=True).read(last, False)


def test_a_model_ends_where_any_of_its_configurations_says(tmp_path: Path) -> None:
    experts = {"num_experts_per_tok": 2, "num_experts": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": 1} | experts))
    assert read_model(tmp_path) == Model(9, frozenset([1]), RouteShape(2, (0, 1), 4, 2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert read_model(tmp_path).ends == {1, 3}
    with pytest.raises(EngineError, match=r"config\.json"):
        read_model(tmp_path / "none")


@pytest.mark.parametrize("where", [{}, {"text_config": {}}])
def test_a_model_whose_dense_layers_it_would_fill_with_experts_is_refused_before_it_starts(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    """The bare model's log-probabilities were seen to be NaN."""
    text = {"model_type": "qwen3_moe", "vocab_size": 9, "num_hidden_layers": 4, "num_experts": 4,
            "num_experts_per_tok": 2, "decoder_sparse_step": 1}  # fmt: skip
    for changes, dense in (({"mlp_only_layers": [0, 2]}, r"\(0, 2\)"), ({"decoder_sparse_step": 2}, r"\(0, 2\)")):
        own = text | changes
        (tmp_path / "config.json").write_text(json.dumps({"text_config": own} if where else own))
        with pytest.raises(EngineError, match=rf"layers {dense} have no experts"):
            read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert read_model(tmp_path).routes == RouteShape(4, (0, 1, 2, 3), 4, 2)

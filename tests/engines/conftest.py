"""The tests of this folder ask of every engine what it declares of itself; `--engine` chooses which one is started.

A fixture gives the engine of a kind: `adapters` (finish, recompute), `continuing` (an engine that was started for
in-flight policy continue), `whole` (policies that are all weights). Tests are put in an order in which each kind is
started once. What an engine doesn't declare (engine_house.DECLARES) isn't collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_house import ADAPTERS, CONTINUING, DECLARES, WHOLE, Bed, Engines
from served_model import ServedModel

from inference import served_policies
from inference.served_policies import memory_scratch

HERE = Path(__file__).resolve().parent
KINDS = {"adapters": ADAPTERS, "continuing": CONTINUING, "whole": WHOLE}
START_S = 300  # what a test may take that has to start an engine, on a slow machine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engine = config.getoption("--engine")
    here = [item for item in items if item.path.is_relative_to(HERE)]
    left_out = [item for item in here if not is_for(engine, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(HERE)]
    for place, item in zip(places, sorted((items[place] for place in places), key=kind_of), strict=True):
        items[place] = item
        if engine != "torch" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S))


def is_for(engine: str, item: pytest.Item) -> bool:
    if any(engine not in mark.args for mark in item.iter_markers("only")):
        return False
    kind = KINDS.get(kind_of(item), ADAPTERS)
    declared = DECLARES[engine].get(kind, set())
    needed = {name for mark in item.iter_markers("needs") for name in mark.args}
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return kind in DECLARES[engine] and needed | {parameters.get("in_flight", "")} - {""} <= declared


def kind_of(item: pytest.Item) -> str:
    """The fixture by which a test gets its engine; empty for one that starts its own."""
    return next((name for name in KINDS if name in getattr(item, "fixturenames", ())), "")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest, model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Their files in memory lie in a folder that no other process has anything in."""
    memory = memory_scratch()
    made = Engines(request.config.getoption("--engine"), model, tmp_path_factory.mktemp("engines"), memory.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_policies, "MEMORY", memory.path)
        yield made
        made.close()
    left = list(memory.path.iterdir())
    memory.remove()
    assert left == []


@pytest.fixture
def adapters(engines: Engines) -> Bed:
    return engines.bed(ADAPTERS)


@pytest.fixture
def continuing(engines: Engines) -> Bed:
    return engines.bed(CONTINUING)


@pytest.fixture
def whole(engines: Engines) -> Bed:
    return engines.bed(WHOLE)

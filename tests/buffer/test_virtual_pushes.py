"""Who comes to serve what, and when: one pull at a time, the newest at its beginning, of the living alone."""

from __future__ import annotations

import numpy as np

from buffer.scenario import Constant, Values
from buffer.virtual_pushes import IDLE, Pushes


def pushes(places: int, distribution: Constant | Values) -> Pushes:
    made = Pushes(places, distribution, np.random.default_rng(0))
    for place in range(places):
        made.join(place, 0.0)
    return made


def finished(made: Pushes, until: float) -> list[tuple[float, int, int]]:
    out = []
    while made.next_at <= until:
        out.append(made.finish())
    return out


def test_every_node_pulls_what_is_announced_in_the_order_of_time():
    made = pushes(5, Values((1.0, 2.0, 3.0)))
    made.announce(0, 10.0)
    done = finished(made, 20.0)
    assert [when for when, _, _ in done] == sorted(when for when, _, _ in done)
    assert {(place, version) for _, place, version in done} == {(place, 0) for place in range(5)}
    assert all(10.0 < when <= 13.0 for when, _, _ in done)


def test_a_slow_pull_is_finished_then_the_newest_is_pulled_and_those_between_are_skipped():
    made = pushes(2, Constant(5.0))
    for version, now in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 7.0)):
        assert finished(made, now) == ([(5.0, 0, 0), (5.0, 1, 0)] if version == 3 else [])
        made.announce(version, now)
    assert finished(made, 30.0) == [(10.0, 0, 2), (10.0, 1, 2), (15.0, 0, 3), (15.0, 1, 3)]


def test_the_dead_finish_nothing_and_a_new_life_pulls_anew():
    made = pushes(2, Constant(5.0))
    made.announce(0, 0.0)
    made.leave(0)
    made.leave(1)
    made.join(1, 3.0)
    done = finished(made, 20.0)
    assert [entry for entry in done if entry[1] != IDLE] == [(8.0, 1, 0)]
    made.announce(1, 20.0)
    assert finished(made, 30.0) == [(25.0, 1, 1)]

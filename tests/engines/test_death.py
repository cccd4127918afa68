"""An engine's processes are killed, or stand still, under load: nothing of what was begun is lost, nothing is left."""

from __future__ import annotations

import psutil
import pytest
from engine_house import ADAPTERS, LONG, Bed, Engines, children, unheld_memory
from served_model import VOCABULARY

from inference.engine import Prefix, Request

pytestmark = pytest.mark.needs("process")
LENGTHS = (5, 130, 300)
STALL_S = 25.0


def take_over(bed: Bed, requests: list[Request]) -> list[Request]:
    """What a dead engine gives up of its requests: every one, with all tokens that came before it died."""
    prefixes = [bed.engine.take_out(request.key) for request in requests]
    again = []
    for request, prefix in zip(requests, prefixes, strict=True):
        assert isinstance(prefix, Prefix)
        assert prefix.versions == bed.runs((0, len(prefix.tokens)))
        again.append(request._replace(prefix=prefix._replace(policy=None)))
    assert bed.engine.active == 0
    return again


def assert_nothing_is_left(processes: list[psutil.Process], in_memory: set[str]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert unheld_memory() - in_memory == set()


@pytest.mark.timeout(600)
def test_an_engine_that_is_killed_or_stands_still_gives_up_what_it_began_and_a_new_one_goes_on(
    engines: Engines,
) -> None:
    engines.close()
    before, in_memory = set(children()), unheld_memory()
    first = engines.extra(ADAPTERS)
    first.serve(0)
    processes = [process for process in children() if process not in before]
    requests = [first.model.request(i, length=length, new=LONG) for i, length in enumerate(LENGTHS)]
    first.begin(requests)
    max(processes, key=lambda process: process.memory_info().rss).kill()
    assert engines.name in first.death().lower()
    requests = take_over(first, requests)
    first.engine.close()
    assert_nothing_is_left(processes, in_memory)

    second = engines.extra(ADAPTERS, stop_tokens=(VOCABULARY - 1,), stall_timeout_s=STALL_S)
    second.serve(0)
    processes = [process for process in children() if process not in before]
    done = second.run(requests)
    for request in requests:
        completion = done[request.key[1]]
        assert request.prefix is not None
        assert completion.resumed == len(request.prefix.tokens)
        ended = VOCABULARY - 1 in completion.tokens[completion.resumed :].tolist()
        assert completion.finish == ("stop" if ended else "length")
        assert completion.tokens[completion.resumed :].tolist()[:-1].count(VOCABULARY - 1) == 0
        second.assert_sampled_by(0, request, completion)

    requests = [second.model.request(10 + i, length=length, new=LONG) for i, length in enumerate(LENGTHS)]
    second.begin(requests, steps=0)
    stopped = max(processes, key=lambda process: process.memory_info().rss)
    stopped.suspend()
    assert "engine_timeout" in second.death()
    take_over(second, requests)
    second.engine.close()
    assert_nothing_is_left(processes, in_memory)

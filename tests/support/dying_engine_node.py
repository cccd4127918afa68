"""An inference node whose engine dies in the middle of its work, once: started instead of inference.node.

    DIES="AFTER_STEPS FILE" python dying_engine_node.py --config … --dir … --name …

Everything else is the real node. The file is where it is noted that the death was had. What was sampled stays in the
engine's books, as it does with a server that is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.run.process import pool_main
from inference.engine import Completion
from inference.node import body
from inference.server import EngineDied
from inference.torch_engine import TorchEngine

AFTER, MARK = os.environ["DIES"].split()
step = TorchEngine.step
steps = 0


def step_and_die(engine: TorchEngine) -> list[Completion]:
    global steps
    steps += engine.active > 0
    if steps > int(AFTER) and not Path(MARK).exists():
        Path(MARK).touch()
        raise EngineDied("the server ended with exit code 9; its log: /some/server.log")
    return step(engine)


if __name__ == "__main__":
    TorchEngine.step = step_and_die  # type: ignore[method-assign]
    pool_main(__file__, body)

import pytest

from async_rl.config import TrainerConfig
from trainer.schedule import rate_at


def rates(steps: int, warmup: int, final: float) -> list[float]:
    trainer = TrainerConfig(learning_rate=2.0, warmup_steps=warmup, final_learning_rate=final)
    return [rate_at(step, steps, trainer) for step in range(steps)]


def test_warm_up_then_linear_decay_to_the_final_fraction() -> None:
    assert rates(9, 4, 0.0) == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.6, 1.2, 0.8, 0.4, 0.0])
    assert rates(5, 0, 0.1) == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2])


def test_short_runs_and_steps_beyond_the_last() -> None:
    assert rates(1, 0, 0.1) == [2.0]
    assert rates(2, 5, 0.1) == pytest.approx([0.4, 0.8])
    trainer = TrainerConfig(learning_rate=2.0, warmup_steps=0, final_learning_rate=0.5)
    assert rate_at(99, 10, trainer) == 1.0
    with pytest.raises(ValueError, match="step -1"):
        rate_at(-1, 10, trainer)


def test_a_sketchs_update_ratio_follows_the_same_course() -> None:
    sketch = TrainerConfig(kind="sketch", update_ratio=2.0, warmup_steps=3, final_learning_rate=0.25)
    lora = TrainerConfig(learning_rate=2.0, warmup_steps=3, final_learning_rate=0.25)
    assert [rate_at(step, 9, sketch) for step in range(9)] == [rate_at(step, 9, lora) for step in range(9)]

from hypothesis import given
from hypothesis import strategies as st

from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig, split_of
from async_rl.tasks.task import instance_of

TASK = DigitSort(DigitSortConfig(digits=8))


@given(split=st.sampled_from(["train", "eval"]), instance=st.integers(0, 2**40), digits=st.integers(2, 32))
def test_the_answer_has_the_digits_of_the_prompt_in_order(split, instance, digits):
    made = DigitSort(DigitSortConfig(digits=digits)).instance(split, instance)
    assert made.messages is None
    assert len(made.prompt) == digits + 1
    assert made.prompt.endswith("=")
    assert list(made.answer) == sorted(made.prompt[:-1])


def test_an_instance_is_a_pure_function_of_split_and_id():
    assert TASK.instance("train", 3) == DigitSort(DigitSortConfig()).instance("train", 3)
    # Pinned: two machines, or two releases, must agree on what instance 0 is.
    assert TASK.instance("train", 0).prompt == "61030032="
    assert TASK.instance("eval", 0).prompt == "46079134="


@given(instance=st.integers(0, 2**40), digits=st.integers(2, 8))
def test_train_and_eval_share_no_instance(instance, digits):
    task = DigitSort(DigitSortConfig(digits=digits))
    for split in ("train", "eval"):
        assert split_of(task.instance(split, instance).prompt[:-1]) == split


def test_many_ids_give_many_instances():
    prompts = {TASK.instance("train", n).prompt for n in range(2000)}
    assert len(prompts) == 2000
    assert {prompt[0] for prompt in prompts} == set("0123456789")


def test_there_is_no_end_of_instances():
    assert TASK.size("train") is None
    assert instance_of(TASK, "eval", 10**9) == TASK.instance("eval", 10**9)


def test_only_exactly_the_sorted_digits_earn_a_reward():
    instance = TASK.instance("train", 0)
    assert TASK.score(instance, instance.answer) == (1.0, {"positions": 1.0})
    assert TASK.score(instance, instance.answer + " ").reward == 0.0
    assert TASK.score(instance, "").components == {"positions": 0.0}
    swapped = instance.answer[:-1] + "9"
    assert swapped != instance.answer
    assert TASK.score(instance, swapped) == (0.0, {"positions": 7 / 8})


def test_a_completion_that_is_too_long_is_not_all_right_positions():
    instance = TASK.instance("train", 0)
    assert TASK.score(instance, instance.answer * 2).components == {"positions": 0.5}

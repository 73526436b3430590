"""Rules: exact final answers."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.rules import calculator, gsm8k, last_number, marked_number, shop
from jax_agent_rl.types import FinishReason, ToolCallRecord, Trajectory
from tests.messages import raises
from tests.trajectories import session, trajectory

ANSWERED = {"finish_reason": FinishReason.ANSWER}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("12 + 30 = 42", "42"),
        ("It is **1,234.50**!", "1234.50"),
        ("3, 4", "4"),
        ("1,2345", "2345"),
        ("-7", "-7"),
        ("= −7", "-7"),
        ("10-3", "3"),
        ("(2)-3", "3"),
        ("10 - 3", "3"),
        ("$-5", "-5"),
        ("x3", "3"),
        (".5", "0.5"),
        ("3.33333e-07", "3.33333e-07"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(), st.text(alphabet="abc .!\n"))
def test_any_integer_is_read_back_with_or_without_separators(n, tail):
    assert last_number(f"12 is not it: {n} {tail}") == n
    assert last_number(f"12 is not it: {n:,} {tail}") == n
    assert last_number(f"12 is not it: {n}.0 {tail}") == n


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("The answer is 1,234.0.", "1234", 1.0),
        ("The answer is 1234", 1234, 1.0),
        ("1234 is the answer to question 7", "1234", 0.0),
        ("2.5", 2.5, 1.0),
        ("2.50001", 2.5, 0.0),
        ("", "3", 0.0),
    ],
)
def test_calculator_wants_the_last_number_to_be_the_truth(answer, truth, score):
    assert calculator("calculator", answer, truth, ANSWERED) == score


@pytest.mark.parametrize("reason", [r for r in FinishReason if r is not FinishReason.ANSWER])
def test_a_trajectory_that_never_answered_earns_nothing(reason):
    assert calculator("calculator", "42", "42", {"finish_reason": reason}) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 9 + 9 = 18. #### 18", "18"),
        ("#### 1,000", "1000"),
        ("####-5", "-5"),
        ("#### $3.50", "3.5"),
        ("18", None),
    ],
)
def test_the_marked_number(text, number):
    assert marked_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_is_strict_unless_asked():
    truth = "Janet sells 9 eggs. #### 18"
    assert gsm8k("gsm8k", "#### 18", truth, {}) == 1.0
    assert gsm8k("gsm8k", "it is 18", truth, {}) == 0.0
    assert gsm8k("gsm8k", "it is 18", truth, {"answer_format": "flexible"}) == 1.0
    assert gsm8k("gsm8k", "#### 17 or 18", truth, {"answer_format": "flexible"}) == 0.0


def test_a_row_without_a_numeric_truth_is_an_error():
    with raises(RewardError, value=None, fix="a number"):
        calculator("calculator", "3", None, ANSWERED)


PRICE_THEN_PRODUCT = ["57", "2052"]


def called(*observations: str) -> Trajectory:
    return trajectory(
        [1],
        [2],
        calls=[[ToolCallRecord(name="t", arguments={}, observation=o) for o in observations]],
    )


@pytest.mark.parametrize(
    ("observations", "answer", "score"),
    [
        (["57", "2052"], "= 2052", 1.0),
        ([], "= 2052", 1.0),  # a guess that is right
        (["57", "2052"], "= 2053", 0.5),
        (["57"], "= 57", 0.25),
        (["no item", "57", "12"], "= 12", 0.25),
        (["2052", "57"], "I cannot", 0.25),  # the second call before the first
        (["57", "57"], "= 57", 0.15),  # the second call repeats the first
        (["57", "2052", "2052"], "= 2052", 0.9),
        ([], "= 57", 0.0),
    ],
)
def test_a_wrong_answer_in_the_shop_earns_part_of_the_reward_for_its_calls(
    observations, answer, score
):
    scored = shop("shop/price", answer, "2052", ANSWERED, called(*observations), PRICE_THEN_PRODUCT)
    assert (scored["score"], scored["accuracy"]) == (score, float(score >= 0.9))


def test_the_progress_of_a_shop_trajectory_is_the_score_of_its_calls_so_far():
    """The first call of two, then it again, then the second; at last the answer."""
    calls = called("57", "57", "2052").tool_calls
    played = trajectory(
        [1], [2, 9, 2, 9, 2, 9, 2], mask=[1, 0, 1, 0, 1, 0, 1], calls=[[call] for call in calls]
    )
    right = shop("shop/price", "= 2052", "2052", ANSWERED, played, PRICE_THEN_PRODUCT)
    assert right["progress"] == pytest.approx([0.25, 0.15, 0.4, 0.4])
    assert right["score"] == pytest.approx(0.9)
    wrong = shop("shop/price", "= 1", "2052", ANSWERED, played, PRICE_THEN_PRODUCT)
    assert wrong["progress"] == right["progress"]
    assert wrong["score"] == wrong["progress"][-1]


def test_the_progress_of_several_contexts_is_in_the_order_in_which_turns_were_sampled():
    """The main agent's first turn makes the first call, the sub-agent's last one the second."""
    first, second = called(*PRICE_THEN_PRODUCT).tool_calls
    main = session()
    again, sub_agent = main.segments
    begun, ended = main.turns
    asked, answered = sub_agent.turns
    played = replace(
        main,
        turns=(replace(begun, tool_calls=(first,)), ended),
        segments=(
            again,
            replace(sub_agent, turns=(asked, replace(answered, tool_calls=(second,)))),
        ),
    )
    scored = shop("shop/price", "= 1", "2052", ANSWERED, played, PRICE_THEN_PRODUCT)
    assert scored["progress"] == [0.25, 0.25, 0.25, 0.5, 0.5]


def test_a_shop_trajectory_without_an_answer_keeps_the_reward_of_its_calls():
    cut = {"finish_reason": FinishReason.RESPONSE_LENGTH}
    scored = shop("shop/price", "= 2052", "2052", cut, called("57", "2052"), PRICE_THEN_PRODUCT)
    assert (scored["score"], scored["accuracy"]) == (0.5, 0.0)


def test_a_call_that_failed_may_be_repeated():
    failed = ToolCallRecord(name="t", arguments={}, observation="no item 'Mug'", error="raised")
    retried = trajectory(
        [1], [2], calls=[[failed, failed, *called(*PRICE_THEN_PRODUCT).tool_calls]]
    )
    assert shop("shop/price", "= 2052", "2052", ANSWERED, retried, PRICE_THEN_PRODUCT)["score"] == 1


def test_a_failed_call_earns_nothing_even_if_its_error_reads_like_a_result():
    played = called("57")
    (failed,) = (replace(call, error="raised") for call in played.tool_calls)
    turns = (replace(played.turns[0], tool_calls=(failed,)),)
    assert (
        shop(
            "shop/price", "= 1", "2052", ANSWERED, replace(played, turns=turns), PRICE_THEN_PRODUCT
        )["score"]
        == 0
    )

"""Question answering. The golden F1 values are worked out by hand from the definition in SQuAD's
evaluation script.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.rules import (
    boxed,
    exact_match,
    f1,
    has_format,
    normalize_answer,
    qa_exact_match,
    qa_f1,
    tagged,
)
from tests.messages import raises


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("  an   Apple, a day. ", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("A", ""),
        ("42%", "42"),
    ],
)
def test_squads_normalisation(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("answer", "truths", "expected"),
    [
        ("The Beatles", ["beatles"], 1.0),
        ("the cat sat on mat", ["cat sat on a mat"], 1.0),
        ("cat sat", ["cat sat on mat"], 2 * (1.0 * 0.5) / 1.5),  # precision 2/2, recall 2/4
        ("dog", ["cat"], 0.0),
        ("dog dog", ["dog"], 2 * (0.5 * 1.0) / 1.5),  # a repeated word counts once
        ("dog", ["cat", "big dog"], 2 * (1.0 * 0.5) / 1.5),  # the best truth counts
        ("", ["cat"], 0.0),
        ("the", ["a"], 0.0),  # both are empty after normalisation, and nothing equals nothing
    ],
)
def test_f1(answer, truths, expected):
    assert f1(answer, truths) == pytest.approx(expected)


@given(st.text(), st.text())
def test_f1_is_symmetric_bounded_and_one_on_an_exact_match(a, b):
    assert f1(a, [b]) == pytest.approx(f1(b, [a]))
    assert 0 <= f1(a, [b]) <= 1
    assert exact_match(a, [b]) <= f1(a, [b])


@pytest.mark.parametrize(
    "truth", ["Paris", ["Lyon", "paris"], {"target": "Paris"}, {"target": ["Lyon", "Paris"]}]
)
def test_the_truth_is_read_in_all_its_forms(truth):
    reply = "I <think>hm</think> looked it up. <answer>Lima</answer> no: <answer> paris. </answer>"
    assert qa_exact_match("nq", reply, truth) == {"score": 1.0, "f1": 1.0, "answered": 1.0}


def test_an_answer_that_is_not_marked_earns_nothing():
    assert qa_exact_match("nq", "Paris", "Paris") == {"score": 0.0, "f1": 0.0, "answered": 0.0}
    assert qa_f1("qa_f1", "<answer>old Paris</answer>", "Paris")["score"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("truth", [None, [], {}, {"target": []}, {"answer": "x"}])
def test_a_row_without_answers_is_an_error(truth):
    with raises(RewardError, key=("ground_truth", "'nq'"), fix="answers"):
        qa_exact_match("nq", "<answer>x</answer>", truth)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer><answer>2</answer>", "2"),
        ("</answer>", None),
        ("<answer>", None),
        ("", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_closed_tag_counts(text, inside):
    assert tagged(text) == inside


def test_a_hostile_number_of_tags_is_read_in_no_time():
    assert tagged("<answer>" * 200_000) is None
    assert not has_format("<think>" * 100_000 + "</think>" * 100_000)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        (r"\boxed{}", ""),
        ("1", None),
    ],
)
def test_the_last_box_with_its_braces(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("so <think>a</think><answer>c</answer>", False),
        ("<think>a</think> so <answer>c</answer>", False),
        ("<answer>c</answer><think>a</think>", False),
        ("<think>a</think><answer>c</answer><answer>d</answer>", False),
        ("<think>a</think><answer>c", False),
        ("", False),
    ],
)
def test_the_format_is_each_block_once_in_order_and_nothing_else(text, right):
    assert has_format(text) is right

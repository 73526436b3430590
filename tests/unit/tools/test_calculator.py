"""The calculator: right, strict and bounded."""

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools.calculator import calculator, evaluate, format_number

BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def _leaf(number):
    return str(number), Fraction(number)


def _combine(symbol, a, b):
    if symbol in ("/", "//", "%") and b[1] == 0:
        symbol = "+"
    return f"({a[0]} {symbol} {b[0]})", Fraction(BINARY[symbol](a[1], b[1]))


expressions = st.recursive(
    st.integers(0, 9999).map(_leaf),
    lambda inner: (
        st.builds(_combine, st.sampled_from(sorted(BINARY)), inner, inner)
        | inner.map(lambda e: (f"-{e[0]}", -e[1]))
    ),
    max_leaves=8,
)


@given(expressions)
def test_values_are_those_of_pythons_fractions(expression):
    """Golden source: Python's operators on Fraction, applied while the expression is written."""
    text, value = expression
    if len(text) <= 200:
        assert evaluate(text) == value


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("2 * 3 + 4", "10"),
        ("10 - 4 - 3", "3"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("2 * -3", "-6"),
        ("7 // 2 * 2 + 7 % 2", "7"),
        ("-7 // 2", "-4"),
        ("6 / 3", "2"),
        ("7 / 3", "2.333333"),
        ("-7 / 3", "-2.333333"),
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 2.", "1"),
        ("2 / 3", "0.666667"),
        ("1 / 3000000", "3.33333e-07"),
        ("10 ** 30 / 7", "142857142857142857142857142857.142857"),
        ("2 ** 0.5", "1.414214"),
        ("1.05 ** 10", "1.628895"),
        ("3.0", "3"),
        ("0 ** 0", "1"),
        ("1 ** (10 ** 90)", "1"),
    ],
)
def test_known_results(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("3 x 4", "unexpected token 'x' in '3 x 4'"),
        ("3 × 4", "unexpected token '×'"),
        ("1,000 + 1", "unexpected token ','"),
        ("2 3", "unexpected token '3'"),
        ("1.2.3", "unexpected token '.3'"),
        ("__import__('os')", "unexpected token '__import__'"),
        ("2 +", "unexpected end"),
        ("(2", "unexpected end"),
        ("", "unexpected end"),
        ("1e5", "unexpected token 'e5'"),
        ("3 / (2 - 2)", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9**9**9", "more than 100 digits"),
        ("9**(9**9)*0", "more than 100 digits"),
        ("2 ** (10 ** 60)", "more than 100 digits"),
        ("0.5 ** -(10 ** 9)", "more than 100 digits"),
        ("(-8) ** 0.5", "is not a real number"),
        ("9" * 101, "more than 100 digits"),
        ("1+" * 200 + "1", "at most 256"),
        ("(" * 100 + "1" + ")" * 100, "nested deeper"),
        ("-" * 100 + "1", "nested deeper"),
        ("²", "unexpected token"),
    ],
)
def test_errors_are_words_for_the_model(expression, message):
    with pytest.raises(ToolError) as error:
        calculator(expression)
    assert message in str(error.value)


@given(st.text(alphabet="0123456789.+-*/%() x", max_size=40))
def test_any_text_gives_a_number_or_a_tool_error(text):
    try:
        assert format_number(evaluate(text))
    except ToolError:
        pass

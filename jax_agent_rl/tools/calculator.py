"""A calculator a policy can be trained on: exact, strict about what it reads, never hanging.

Grammar, with Python's precedence (``-2 ** 2`` is -4, ``**`` groups to the right)::

    sum     = product { ("+" | "-") product }
    product = unary { ("*" | "/" | "//" | "%") unary }
    unary   = ("+" | "-") unary | power
    power   = atom [ "**" unary ]
    atom    = number | "(" sum ")"

Values are fractions, so ``0.1 + 0.2`` is 0.3 and ``1 / 3 * 3`` is 1; only powers with a broken base
or exponent go through floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools.function_tool import function_tool

MAX_CHARS = 256
MAX_DEPTH = 32
"""Nested parentheses, signs and exponents."""
MAX_DIGITS = 100
"""Before the decimal point, of every number on the way."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<symbol>\*\*|//|[-+*/%()])|(?P<other>\w+|\S))"
)
_LIMIT = 10**MAX_DIGITS


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, e.g. "(12 + 7) * 3".
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Evaluate an expression.

    Raises:
        ToolError: not an expression, a division by zero, or a limit of this module is exceeded.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(
            f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed"
        )
    parser = _Parser(expression)
    try:
        return parser.parse()
    except ZeroDivisionError:
        raise ToolError(f"division by zero in {expression!r}") from None


def format_number(value: Fraction) -> str:
    """Format integers as integers, and other numbers with six decimals.

    Below 1, six significant digits count instead. Trailing zeros are dropped.
    """
    if value.denominator == 1:
        return str(value.numerator)
    if abs(value) < 1:
        return f"{float(value):.6g}"

    millionths = round(abs(value) * 10**6)
    text = f"{millionths // 10**6}.{millionths % 10**6:06d}".rstrip("0").rstrip(".")
    if value < 0:
        text = "-" + text
    return text


class _Parser:
    """Recursive descent that computes on the way."""

    def __init__(self, expression: str):
        self._expression = expression
        self._tokens = [match[0].strip() for match in _TOKEN.finditer(expression)]
        self._position = 0
        self._depth = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._next:
            raise self._unexpected()
        return value

    @property
    def _next(self) -> str:
        """The next token; empty at the end."""
        if self._position >= len(self._tokens):
            return ""
        return self._tokens[self._position]

    def _take(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1]

    def _unexpected(self) -> ToolError:
        problem = "unexpected end"
        if self._next:
            problem = f"unexpected token {self._next!r}"
        return ToolError(f"{problem} in {self._expression!r}")

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next in ("+", "-"):
            operator = self._take()
            operand = self._product()
            if operator == "-":
                operand = -operand
            value = _checked(value + operand)
        return value

    def _product(self) -> Fraction:
        value = self._unary()
        while self._next in _PRODUCTS:
            operation = _PRODUCTS[self._take()]
            value = _checked(operation(value, self._unary()))
        return value

    def _unary(self) -> Fraction:
        self._depth += 1  # every nesting of the grammar passes through here
        if self._depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested deeper than {MAX_DEPTH}")
        if self._next in ("+", "-"):
            operator = self._take()
            value = self._unary()
            if operator == "-":
                value = -value
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if self._next != "**":
            return base
        self._take()
        return _power(base, self._unary())

    def _atom(self) -> Fraction:
        if self._next == "(":
            self._take()
            value = self._sum()
            if self._next != ")":
                raise self._unexpected()
            self._take()
            return value
        if not self._next.replace(".", "").isdecimal():
            raise self._unexpected()
        return _checked(Fraction(self._take()))


_PRODUCTS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(a // b),
    "%": lambda a, b: a % b,
}


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute ``base ** exponent``, exactly for integers.

    Refuse it beforehand if the result would be too long.
    """
    are_integers = base.denominator == 1 and exponent.denominator == 1
    if are_integers and exponent >= 0:
        if abs(base) >= 2 and exponent * math.log10(abs(base)) >= MAX_DIGITS:
            raise _too_long()
        return base**exponent.numerator
    if base < 0 and exponent.denominator != 1:
        raise ToolError(f"{format_number(base)} ** {format_number(exponent)} is not a real number")
    try:
        return _checked(Fraction(float(base) ** float(exponent)))
    except OverflowError:
        raise _too_long() from None


def _checked(value: Fraction) -> Fraction:
    if abs(value) >= _LIMIT:
        raise _too_long()
    return value


def _too_long() -> ToolError:
    return ToolError(f"a number has more than {MAX_DIGITS} digits")

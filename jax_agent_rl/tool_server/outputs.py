"""What programs print, compared with what is expected: for code rewards and the judge alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_agent_rl.errors import UnusableTestsError


def same_output(output: str, expected: str) -> bool:
    r"""Compare line by line, ignoring white space at the ends of lines and of the text.

    >>> same_output("1 \n2\n\n", "1\n2"), same_output("1\n 2", "1\n2")
    (True, False)
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(output) == lines(expected)


def as_text(value: Any) -> str:
    r"""Return an input or an output as a program reads or prints it: a list has one item per line.

    >>> as_text(["1", 2]), as_text(3.5)
    ('1\n2', '3.5')
    """
    if isinstance(value, list):
        return "\n".join(str(item) for item in value)
    return str(value)


def require_values(values: Sequence[Any]) -> None:
    """Check that the tests expect a function to return something.

    Raises:
        UnusableTestsError: every expected value is None, so a function that does nothing would
            pass.
    """
    if all(value is None for value in values):
        raise UnusableTestsError("the tests expect that the function returns nothing")


def require_outputs(outputs: Sequence[str]) -> None:
    """Check that the tests expect a program to print something.

    Raises:
        UnusableTestsError: every expected output is blank, so a program that does nothing would
            pass.
    """
    if not any(output.strip() for output in outputs):
        raise UnusableTestsError("the tests expect that programs print nothing")

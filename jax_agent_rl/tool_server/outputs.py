"""What programs print, compared with what is expected: for code rewards and the judge alike."""

from __future__ import annotations

from collections.abc import Sequence

from jax_agent_rl.errors import UnusableTestsError


def same_output(found: str, expected: str) -> bool:
    r"""Compare line by line, ignoring white space at the ends of lines and of the text.

    >>> same_output("1 \n2\n\n", "1\n2"), same_output("1\n 2", "1\n2")
    (True, False)
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(found) == lines(expected)


def require_outputs(outputs: Sequence[str]) -> None:
    """Check that a program has to print something.

    Raises:
        UnusableTestsError: no expected output holds anything, so a program that does nothing would pass.
    """
    if not any(output.strip() for output in outputs):
        raise UnusableTestsError("the tests expect that programs print nothing")

"""When what a program printed is what was expected."""

import pytest

from jax_agent_rl.errors import UnusableTestsError
from jax_agent_rl.tool_server.outputs import require_outputs, same_output


def test_outputs_are_compared_line_by_line_without_trailing_space():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1\n 2", "1\n2")
    assert not same_output("12", "1 2")


def test_one_output_at_least_holds_something():
    require_outputs(["", "1"])
    for outputs in ([], [""], [" \n", "\t"]):
        with pytest.raises(UnusableTestsError):
            require_outputs(outputs)

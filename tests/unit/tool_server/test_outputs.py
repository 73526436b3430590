"""When what a program printed is what was expected."""

import pytest

from jax_agent_rl.errors import UnusableTestsError
from jax_agent_rl.tool_server.outputs import as_text, require_outputs, require_values, same_output


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


def test_one_value_at_least_is_returned():
    require_values([None, 0])
    for values in ([], [None, None]):
        with pytest.raises(UnusableTestsError):
            require_values(values)


def test_the_items_of_a_list_are_lines():
    assert as_text(["1 2", 3]) == "1 2\n3"
    assert as_text("1\n") == "1\n"

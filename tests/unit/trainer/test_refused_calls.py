"""A step tells of the calls that could not be run in one line: how many, what share, which kind,
where to look.
"""

from typing import Any

from jax_agent_rl.trainer.observing import describe_refused_calls


def said(errors: dict[str, int], calls: int) -> str:
    count = sum(errors.values())
    line: dict[str, Any] = {"step": 3, "tool_errors": count, "tool_error_share": count / calls}
    return describe_refused_calls({**line, "tool_errors_by_kind": errors}, "runs/x")


def test_count_share_kind_and_place_are_named():
    assert (
        said({"malformed": 11, "bad_arguments": 2, "timeout": 5}, 60)
        == "13 of 60 tool calls could not be run (22%), most of them malformed: "
        "jax-agent-rl view runs/x --step 3 --tool-error malformed"
    )


def test_nothing_is_said_where_all_calls_were_run():
    assert said({"timeout": 5}, 60) == "" and said({}, 1) == ""

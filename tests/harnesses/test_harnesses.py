"""Harnesses that people use, unmodified, each on a small task to its end: they read a file, edit
it, run it and finish, with this project's endpoint as their model.

They run in the sandbox, which shows them the task's files and their own installation. What each of
them was seen to do is in docs/harnesses.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from jax_agent_rl.trajectory_graph import session_graph
from jax_agent_rl.types import Trajectory
from tests.capabilities import needs_bwrap
from tests.harnesses.running import (
    INSTALLED,
    MINI_SWE_AGENT_REPLIES,
    OPENCODE_REPLIES,
    OPENCODE_TITLE,
    OPENHANDS_REPLIES,
    TASK_MARK,
    WITH_PYTHON,
    Run,
    call,
    run,
)

pytestmark = [
    pytest.mark.harnesses,
    pytest.mark.timeout(900),  # seconds; runtimes of hundreds of megabytes start from a cold disk
    needs_bwrap,
    INSTALLED,
]


def graph(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return, of each context in the order of their first turns, its turns and those it shares
    with an earlier context.
    """
    return [(segment.sequence.num_turns, segment.turns) for segment in session_graph(trajectory)]


async def finished(
    script: str, replies: Sequence[str], others: Mapping[str, Sequence[str]] | None = None
) -> Run:
    """Run a harness on the task, whose file is right in the end.

    Args:
        replies: what the policy says in the main conversation.
        others: what it says in others, see :class:`ScriptedPolicy`.
    """
    result = await run(script, {**(others or {}), TASK_MARK: replies})
    assert result.output["exit_code"] == 0, result.output["stderr"]
    assert result.output["reward"] == 1.0, result.output["verifier"]
    result.assert_all_on_record()
    return result


@WITH_PYTHON
async def test_mini_swe_agent():
    result = await finished("sh /tmp/agent/mini_swe_agent.sh", MINI_SWE_AGENT_REPLIES)
    assert graph(result.trajectory) == [(4, 0)]
    assert result.refused == []


@WITH_PYTHON
async def test_openhands():
    replies = [
        call("file_editor", command="view", path="/tmp/app/total.py"),
        call(
            "file_editor",
            command="str_replace",
            path="/tmp/app/total.py",
            old_str="4",
            new_str="3",
        ),
        call("run", command="python3 total.py"),
        call("finish", message="It prints 6 now."),
    ]
    result = await finished("sh /tmp/agent/openhands.sh", replies)
    assert graph(result.trajectory) == [(4, 0)]
    assert result.refused == []


@WITH_PYTHON
async def test_openhands_for_a_small_context():
    result = await finished("sh /tmp/agent/openhands.sh small", OPENHANDS_REPLIES)
    assert graph(result.trajectory) == [(4, 0)]
    assert result.refused == []


async def test_codex_and_an_agent_that_it_starts():
    agent = "multi_agent_v1.spawn_agent"
    replies = [
        call(agent, message="HELPER: look at total.py"),
        call("exec_command", cmd="cat total.py"),
        call("exec_command", cmd="sed -i s/4/3/ total.py"),
        call("exec_command", cmd="python3 total.py"),
        "It prints 6 now.",
    ]
    helper = ["It adds 1, 2 and 4."]
    result = await finished("sh /tmp/agent/codex.sh", replies, {"HELPER": helper})
    assert sorted(graph(result.trajectory)) == [(1, 0), (5, 0)]
    assert result.refused == []


@pytest.mark.parametrize("size", ["", "small"])
async def test_opencode_and_the_title_it_asks_for(size: str):
    script = f"sh /tmp/agent/opencode.sh {size}"
    result = await finished(script, OPENCODE_REPLIES, OPENCODE_TITLE)
    assert sorted(graph(result.trajectory)) == [(1, 0), (4, 0)]
    assert result.refused == []


async def test_gemini_cli():
    replies = [
        call("read_file", file_path="/tmp/app/total.py"),
        call(
            "replace",
            file_path="/tmp/app/total.py",
            old_string="4",
            new_string="3",
            instruction="take 3",
        ),
        call("run_shell_command", command="python3 total.py", description="run it"),
        "It prints 6 now.",
    ]
    result = await finished("sh /tmp/agent/gemini.sh", replies)
    assert graph(result.trajectory) == [(4, 0)]
    assert result.refused == []


async def test_claude_code_and_the_title_it_asks_for():
    """It sends the edit back with ``replace_all: false``, the default that the policy left out."""
    replies = [
        call("Read", file_path="/app/total.py"),
        call("Edit", file_path="/app/total.py", old_string="4", new_string="3"),
        call("Bash", command="python3 total.py"),
        "It prints 6 now.",
    ]
    result = await finished(
        "sh /tmp/agent/claude_code.sh", replies, {"Write the title": ["Wrong sum"]}
    )
    assert sorted(graph(result.trajectory)) == [(1, 0), (4, 0)]
    _check_probes(result)


async def test_claude_code_with_a_sub_agent_and_a_compacted_history():
    replies = [
        call("Agent", description="look", prompt="HELPER: look", subagent_type="general-purpose"),
        call("Read", file_path="/app/total.py"),
        call("Edit", file_path="/app/total.py", old_string="4", new_string="3"),
        "It prints 6 now.",
    ]
    lines = {
        "Write the title": ["Wrong sum"],
        "an <analysis> block followed by a <summary> block": [
            "<summary>The sum is right.</summary>"
        ],
        "The sum is right.": ["I changed the last number."],
        "HELPER": ["The last number is 4."],
    }
    claude_code = "sh /tmp/agent/claude_code.sh"
    compact = f"{claude_code} --continue /compact"
    ask = f"{claude_code} --continue 'What did you do?'"
    result = await finished(f"{claude_code} && {compact} && {ask}", replies, lines)
    # the title, the sub-agent, the history after its compaction; the request for it; the main one
    assert sorted(graph(result.trajectory)) == [(1, 0), (1, 0), (1, 0), (1, 3), (4, 0)]
    _check_probes(result)


async def test_of_claude_code_in_a_small_context_the_title_alone_remains():
    lines = {"Write the title": ["Wrong sum"]}
    result = await run("sh /tmp/agent/claude_code.sh", lines, longest=8192)
    assert result.output["exit_code"] == 1
    assert graph(result.trajectory) == [(1, 0)]
    result.assert_all_on_record()
    (refusal,) = [message for message in result.refused if "HEAD" not in message]
    assert "rollout.max_model_len=8192" in refusal


def _check_probes(result: Run) -> None:
    """Claude Code asks whether there is a server, without a key, and goes on when it is refused."""
    for message in result.refused:
        assert " HEAD " in message, result.refused

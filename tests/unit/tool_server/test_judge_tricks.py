"""The judge and the code rewards give nothing for programs that act on the process that scores
them.
"""

import pytest

from jax_agent_rl.rewards.code import code_tests
from jax_agent_rl.tool_server.plugins.base import Failure
from jax_agent_rl.tool_server.sandbox import SandboxLimits, open_sandbox
from tests.capabilities import needs_bwrap
from tests.tool_serving import agent

pytestmark = needs_bwrap
TESTS = ["assert f(2) == 4", "assert f(3) == 9"]
EQUALS_EVERYTHING = """
class Any:
    def __eq__(self, other): return True
def f(x): return Any()
"""
EXITS = "import os\ndef f(x):\n    print({verdict}, end='', flush=True)\n    os._exit(0)"
MARK = "getattr(__import__('sys').modules['__main__'], 'mark', '')"
CONSTANTS = (
    "[c for c in __import__('sys')._getframe(1).f_code.co_consts"
    " if isinstance(c, str) and len(c) > 30][-1]"
)


@pytest.mark.parametrize(
    "program",
    [
        EQUALS_EVERYTHING,
        "import os\nos._exit(0)",
        EXITS.format(verdict=MARK),
        EXITS.format(verdict=CONSTANTS),
        EXITS.format(verdict="'2 of 2 tests passed'"),
    ],
)
async def test_nothing_is_earned_by_a_trick(program):
    async with agent("tools=[judge]") as act:
        reply = await act(f"<python>{program}</python>", tests=TESTS)
        assert reply.observation["reward"] == 0.0 and not reply.done
    sandbox = await open_sandbox(limits=SandboxLimits(wall_seconds=10))
    result = await code_tests("code", f"```python\n{program}\n```", {"tests": TESTS}, sandbox)
    assert result["score"] == 0.0 and result["has_code"] == 1.0


async def test_tests_that_ask_nothing_are_an_error_of_the_task():
    async with agent("tools=[judge]") as act:
        reply = await act(
            "<python>def f(x): return 5</python>",
            tests=["assert f(5) == 5", "def check(): assert f(2) == 4"],
        )
        assert reply.error is Failure.TOOL
        assert "ask the program nothing" in reply.observation["obs"]


async def test_the_program_cannot_read_the_tests_of_the_judge():
    async with agent("tools=[judge]") as act:
        program = "import os\nprint([open(name).read() for name in os.listdir() if 'test' in name])"
        reply = await act(f"<python>{program}\ndef f(x): return 5</python>", tests=TESTS)
        assert "Got: []" in reply.observation["obs"]

"""Programs scored by tests, in the real sandbox."""

import json

import pytest

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.code import code_tests, extract_program
from jax_agent_rl.tool_server.sandbox import SandboxLimits, open_sandbox
from tests.messages import raises

SUM_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
SUM_TRUTH = {"inputs": ["1 2\n", "3 4\n", "0 -1\n"], "outputs": ["3\n", "7", "-1  \n\n"]}
ADD = "def add(a, b):\n    return a + b\n"
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
ASSERTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"


@pytest.fixture
async def sandbox():
    return await open_sandbox("bubblewrap", limits=SandboxLimits(wall_seconds=10, cpu_seconds=5))


def reply(program):
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.mark.parametrize(
    ("program", "truth", "rate"),
    [
        (SUM_PROGRAM, SUM_TRUTH, 1.0),
        (SUM_PROGRAM, json.dumps(SUM_TRUTH), 1.0),
        ("print(3)", SUM_TRUTH, 1 / 3),
        (SUM_PROGRAM, {"inputs": [["1 2"], "3 4"], "outputs": [["3"], 7]}, 1.0),
        (
            "print(input(), input(), sep='\\n')",
            {"inputs": [["a", "b"]], "outputs": [["a", "b"]]},
            1.0,
        ),
        ("print(['a', 'b'])", {"inputs": [["a", "b"]], "outputs": [["a", "b"]]}, 0.0),
        ("raise SystemExit(1)", SUM_TRUTH, 0.0),
        ("this is no Python", SUM_TRUTH, 0.0),
        (ADD, CALLS, 1.0),
        (
            (
                "class Solution:\n"
                "    def add(self, a, b):\n"
                "        print('noise')\n"
                "        return a + b"
            ),
            CALLS,
            1.0,
        ),
        ("def add(a, b):\n    return 3", CALLS, 0.5),
        ("def add(a, b):\n    raise KeyboardInterrupt", CALLS, 0.0),
        ("import os\nos._exit(0)", CALLS, 0.0),
        ("def sub(a, b):\n    return a - b", CALLS, 0.0),
        (ADD, ASSERTS, 1.0),
        (ADD, {"tests": ASSERTS.splitlines()}, 1.0),
        ("def add(a, b):\n    return 3", ASSERTS, 0.0),
        (ADD + "raise SystemExit(0)", ASSERTS, 0.0),
        (ADD + "import os\nprint('ok')\nos._exit(0)", ASSERTS, 0.0),
    ],
)
async def test_a_program_earns_what_it_passes(program, truth, rate, sandbox):
    result = await code_tests("code", reply(program), truth, sandbox)
    assert result == {
        "score": float(rate == 1.0),
        "pass_rate": pytest.approx(rate),
        "has_code": 1.0,
    }
    partial = await code_tests("code", reply(program), truth, sandbox, partial_credit=True)
    assert partial["score"] == pytest.approx(rate)


async def test_a_program_that_never_ends_fails_its_tests():
    sandbox = await open_sandbox("bubblewrap", limits=SandboxLimits(wall_seconds=1))
    assert (await code_tests("code", reply("while True: pass"), ASSERTS, sandbox))["score"] == 0.0


async def test_expected_outputs_never_enter_the_sandbox():
    class Spy:
        python = "python3"
        seen = b""

        async def run(self, argv, *, stdin=b"", files=None):
            self.seen += stdin + b"".join((files or {}).values())

            class Result:
                stdout = ""
                ok = True

            return Result()

    for truth in (
        {"inputs": ["1"], "outputs": ["secret"]},
        {"fn_name": "f", "inputs": [[1]], "outputs": ["secret"]},
    ):
        spy = Spy()
        assert (await code_tests("code", reply("pass"), truth, spy))["score"] == 0.0
        assert b"pass" in spy.seen and b"secret" not in spy.seen


async def test_a_reply_without_a_program_earns_nothing():
    assert (await code_tests("code", "def add(): …", ASSERTS, None)) == {
        "score": 0.0,
        "pass_rate": 0.0,
        "has_code": 0.0,
    }


@pytest.mark.parametrize(
    "truth", [None, {}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"], "outputs": ["1", "2"]}]
)
async def test_a_row_without_tests_is_an_error(truth):
    with raises(RewardError, key=("ground_truth", "'code'"), fix="tests"):
        await code_tests("code", reply("pass"), truth, None)


@pytest.mark.parametrize(
    "truth",
    [
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        "def test_add():\n    assert add(1, 2) == 3",
        (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test(self): self.assertEqual(add(1, 2), 3)"
        ),
        {"tests": ["import math", "add(1, 2)"]},
        {"tests": "assert add(1, 2) =="},
        {"tests": [1]},
        {"inputs": ["1", "2"], "outputs": ["", " \n"]},
        {"inputs": ["1"], "outputs": [["", " "]]},
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [None, None]},
        "import os\ntry:\n    assert add(1, 2) == 3\nfinally:\n    os._exit(0)",
    ],
)
@pytest.mark.parametrize("program", [ADD, "pass"])
async def test_tests_that_say_nothing_about_a_program_are_an_error(program, truth, sandbox):
    with raises(RewardError, key=("ground_truth", "'humaneval'")):
        await code_tests("humaneval", reply(program), truth, sandbox)


@pytest.mark.parametrize("status", [0, 1])
async def test_tests_that_end_their_own_process_have_compared_before(status, sandbox):
    tests = {"tests": f"import os\nassert add(1, 2) == 3\nos._exit({status})"}
    assert (await code_tests("code", reply(ADD), tests, sandbox))["score"] == float(status == 0)
    assert (await code_tests("code", reply("def add(a, b):\n    return 4"), tests, sandbox))[
        "score"
    ] == 0.0


@pytest.mark.parametrize("error", ["StopIteration", "IndexError"])
async def test_an_error_of_the_program_does_not_end_a_comparison(error, sandbox):
    tests = (
        "for got, expected in zip(map(lambda a: add(a, 1), [1, 2]), [2, 3]):\n"
        "    assert got == expected"
    )
    program = f"def add(a, b):\n    raise {error}"
    assert (await code_tests("code", reply(program), {"tests": tests}, sandbox))["score"] == 0.0
    assert (await code_tests("code", reply(ADD), {"tests": tests}, sandbox))["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("First\n```bash\npip install x\n```\nthen\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nprints\n```\n1\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nprints\n```output\n1\n```", "print(1)\n"),
        ("```\nold\n```\n```\nnew\n```", "new\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("````markdown\n```python\na\n```\n````", None),
        ("~~~python\na\n~~~", "a\n"),
        ("```python\na\n```\n```python\ncut", "a\n"),
        ("```\na\n```", "a\n"),
        ("``` Python\r\na\n```", "a\n"),
        ("```python\na", None),
        ("```json\n{}\n```", None),
    ],
)
def test_the_last_python_block_is_the_program(text, program):
    assert extract_program(text) == program

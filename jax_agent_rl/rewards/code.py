r"""Programs scored by tests in the sandbox.

The program is the last fenced block of the solution that is tagged as Python, else the last without
a tag. The truth is a mapping (or its JSON text) of one of three kinds::

    {"inputs": ["1 2\n", …], "outputs": ["3\n", …]}
        stdin -> stdout: texts or lists of lines, a run for each pair
    {"inputs": [[1, 2], …], "outputs": [3, …], "fn_name": "add"}
        calls of a function, or of a method of Solution, in one run
    {"tests": "assert add(1, 2) == 3"}
        asserts, a text or a list, in one run

Expected results never enter the process that runs the program: outputs are compared here, and
asserts run in their own sandboxed process, which calls the program's functions and gets plain data
back (:mod:`jax_agent_rl.tool_server.sandbox`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.errors import RewardError, UnusableTestsError
from jax_agent_rl.rewards.registry import register_reward
from jax_agent_rl.tool_server.outputs import as_text, require_outputs, require_values, same_output
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.fences import fenced_blocks

if TYPE_CHECKING:
    from jax_agent_rl.tool_server.sandbox import Sandbox

PROGRAM_LANGUAGES = ("python", "python3", "py")
"""Tags of fenced blocks that hold programs."""


@register_reward("code", "apps", "codecontests", "codeforces", "taco", "mbpp", "humaneval")
async def code_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    sandbox: Sandbox,
    partial_credit: bool = False,
) -> dict[str, float]:
    """Score 1 if the program passes all tests, else 0.

    With the row field ``partial_credit``, the score is the share of tests that it passes.
    ``pass_rate`` and ``has_code`` are parts.

    Raises:
        RewardError: the truth has an unknown form, or its tests say nothing about a program.
    """
    truth = _truth(ground_truth, data_source)
    program = extract_program(solution_str)
    if program is None:
        return {"score": 0.0, "pass_rate": 0.0, "has_code": 0.0}
    try:
        verdicts = await _run(program, truth, sandbox)
    except UnusableTestsError as error:
        raise RewardError(f"ground_truth of a {data_source!r} row: {error}") from None

    pass_rate = sum(verdicts) / len(verdicts)
    score = pass_rate if partial_credit else float(pass_rate == 1.0)
    return {"score": score, "pass_rate": pass_rate, "has_code": 1.0}


async def _run(program: str, truth: Mapping[str, Any], sandbox: Sandbox) -> list[bool]:
    """Run a program; return whether it passed each test."""
    if "tests" in truth:
        tests = truth["tests"]
        if not isinstance(tests, str):
            tests = "\n".join(tests)
        result = await sandbox.run_tests(program, tests)
        return [result.ok]

    if truth.get("fn_name"):
        require_values(truth["outputs"])
        return await _run_function(program, truth, sandbox)

    require_outputs([as_text(output) for output in truth["outputs"]])
    return await _run_programs(program, truth, sandbox)


def extract_program(text: str) -> str | None:
    r"""Return the program of an answer, or None: its last block that is tagged as Python.

    Without a tagged block, it is the last block without a tag; beside one, such blocks show what it
    prints. A block that is not closed is not a program: the model was cut off.

    >>> extract_program("So:\n```python\nprint(1)\n```\nprints\n```\n1\n```")
    'print(1)\n'
    """
    tagged = None
    untagged = None
    for block in fenced_blocks(answer_of(text)):
        if not block.is_closed:
            continue
        if block.language in PROGRAM_LANGUAGES:
            tagged = block.content
        elif not block.language:
            untagged = block.content
    return untagged if tagged is None else tagged


def _truth(ground_truth: Any, data_source: str) -> Mapping[str, Any]:
    """Return the mapping of one of the module's three kinds; raise RewardError if it is none."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:  # it is not JSON, but the asserts themselves
            truth = {"tests": truth}

    if isinstance(truth, Mapping):
        tests = truth.get("tests")
        if tests:
            if isinstance(tests, str) or all(isinstance(test, str) for test in tests):
                return truth
        else:
            inputs = truth.get("inputs")
            outputs = truth.get("outputs")
            if inputs and outputs and len(inputs) == len(outputs):
                # Data sets leave an empty "tests" in rows of the other kinds.
                return {key: value for key, value in truth.items() if key != "tests"}

    raise RewardError(
        f"ground_truth of a {data_source!r} row must hold tests, or as many inputs as outputs; "
        f"got {ground_truth!r:.200}"
    )


async def _run_programs(program: str, truth: Mapping[str, Any], sandbox: Sandbox) -> list[bool]:
    """Run a program once per input; return whether each run printed the expected output."""
    files = {"main.py": program.encode("utf-8", "replace")}

    async def passes(stdin: str, expected: str) -> bool:
        result = await sandbox.run(
            [sandbox.python, "main.py"], stdin=stdin.encode("utf-8", "replace"), files=files
        )
        return result.ok and same_output(result.stdout, expected)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for stdin, expected in zip(truth["inputs"], truth["outputs"], strict=True):
            run = passes(as_text(stdin), as_text(expected))
            tasks.append(group.create_task(run))
    return [task.result() for task in tasks]


_CALL_DRIVER = """\
import json, sys
calls = json.load(sys.stdin)
import solution
owner = solution.Solution() if hasattr(solution, "Solution") else solution
function = getattr(owner, calls["fn_name"])
for arguments in calls["inputs"]:
    try:
        line = json.dumps({"value": function(*arguments)})
    except BaseException as error:
        line = json.dumps({"error": repr(error)[:200]})
    sys.stdout.write("\\n" + calls["mark"] + line + "\\n")
    sys.stdout.flush()
"""


async def _run_function(program: str, truth: Mapping[str, Any], sandbox: Sandbox) -> list[bool]:
    """Call a function once per input; return whether each call returned the expected output."""
    mark = secrets.token_hex(16)  # distinguishes results from the program's own output
    calls = {"fn_name": truth["fn_name"], "inputs": list(truth["inputs"]), "mark": mark}
    files = {"solution.py": program.encode("utf-8", "replace"), "driver.py": _CALL_DRIVER.encode()}
    result = await sandbox.run(
        [sandbox.python, "driver.py"], stdin=json.dumps(calls).encode(), files=files
    )

    answers = []
    for line in result.stdout.splitlines():
        if line.startswith(mark):
            answers.append(_json_or_none(line.removeprefix(mark)))

    verdicts = []
    for number, expected in enumerate(truth["outputs"]):
        if number >= len(answers):
            verdicts.append(False)  # the program ended before this call
        else:
            verdicts.append(_has_value(answers[number], expected))
    return verdicts


def _has_value(answer: Any, expected: Any) -> bool:
    """Return whether the driver reported this value, as JSON holds it (a tuple is a list there)."""
    if not isinstance(answer, Mapping) or "value" not in answer:
        return False
    return answer["value"] == json.loads(json.dumps(expected))


def _json_or_none(text: str) -> Any:
    try:
        return decode_json(text.encode(), non_finite=True, lone_surrogates=True)
    except ValueError:  # the program may have written the line itself
        return None

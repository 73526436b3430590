r"""Programs scored by tests in the sandbox.

The program is the last fenced block of the solution that is tagged as Python, else the last without
a tag. The truth is a mapping (or its JSON text) of one of three kinds::

    {"inputs": ["1 2\n", …], "outputs": ["3\n", …]}           stdin -> stdout, texts or lists of lines, one run each
    {"inputs": [[1, 2], …], "outputs": [3, …], "fn_name": "add"}          a function (or method of Solution), one run
    {"tests": "assert add(1, 2) == 3"}                                    asserts (a text or a list), one run

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
    """Score 1 if the program passes all tests, else 0; with the row field ``partial_credit``, the share it passes.

    ``pass_rate`` and ``has_code`` are parts.

    Raises:
        RewardError: the truth has an unknown form, or its tests say nothing about a program.
    """
    truth = _truth(ground_truth, data_source)
    program = extract_program(solution_str)
    if program is None:
        return {"score": 0.0, "pass_rate": 0.0, "has_code": 0.0}
    try:
        passed = await _run(program, truth, sandbox)
    except UnusableTestsError as error:
        raise RewardError(f"ground_truth of a {data_source!r} row: {error}") from None
    rate = sum(passed) / len(passed)
    return {
        "score": rate if partial_credit else float(rate == 1.0),
        "pass_rate": rate,
        "has_code": 1.0,
    }


async def _run(program: str, truth: Mapping[str, Any], sandbox: Sandbox) -> list[bool]:
    """Run a program; return whether it passed each test."""
    if "tests" in truth:
        tests = truth["tests"] if isinstance(truth["tests"], str) else "\n".join(truth["tests"])
        return [(await sandbox.run_tests(program, tests)).ok]
    if truth.get("fn_name"):
        require_values(truth["outputs"])
        return await _run_function(program, truth, sandbox)
    require_outputs([as_text(output) for output in truth["outputs"]])
    return await _run_programs(program, truth, sandbox)


def extract_program(text: str) -> str | None:
    r"""Return the last block of an answer that is tagged as Python, else the last one without a tag, or None.

    Beside a tagged block, those without a tag show what it prints. A block that is not closed is no
    program: the model was cut off.

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
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = {"tests": truth}
    if isinstance(truth, Mapping):
        tests, inputs, outputs = truth.get("tests"), truth.get("inputs"), truth.get("outputs")
        if isinstance(tests, str) or (tests and all(isinstance(test, str) for test in tests)):
            if tests:
                return truth
        if not tests and inputs and outputs and len(inputs) == len(outputs):
            return {key: value for key, value in truth.items() if key != "tests"}
    raise RewardError(
        f"ground_truth of a {data_source!r} row must hold tests, or as many inputs as outputs; "
        f"got {ground_truth!r:.200}"
    )


async def _run_programs(program: str, truth: Mapping[str, Any], sandbox: Sandbox) -> list[bool]:
    async def passes(given: str, expected: str) -> bool:
        stdin = given.encode("utf-8", "replace")
        files = {"main.py": program.encode("utf-8", "replace")}
        result = await sandbox.run([sandbox.python, "main.py"], stdin=stdin, files=files)
        return result.ok and same_output(result.stdout, expected)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(passes(as_text(given), as_text(expected)))
            for given, expected in zip(truth["inputs"], truth["outputs"], strict=True)
        ]
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
    mark = secrets.token_hex(16)  # distinguishes results from the program's own output
    calls = {"fn_name": truth["fn_name"], "inputs": list(truth["inputs"]), "mark": mark}
    files = {"solution.py": program.encode("utf-8", "replace"), "driver.py": _CALL_DRIVER.encode()}
    result = await sandbox.run(
        [sandbox.python, "driver.py"], stdin=json.dumps(calls).encode(), files=files
    )
    answers = [
        _json_or_none(line[len(mark) :])
        for line in result.stdout.splitlines()
        if line.startswith(mark)
    ]
    answers += [None] * (len(truth["outputs"]) - len(answers))  # it ended before the last call
    return [
        isinstance(answer, Mapping)
        and "value" in answer
        and answer["value"] == json.loads(json.dumps(expected))
        for answer, expected in zip(answers, truth["outputs"], strict=False)
    ]


def _json_or_none(text: str) -> Any:
    try:
        return decode_json(text.encode(), non_finite=True, lone_surrogates=True)
    except ValueError:  # the program may have written the line itself
        return None

"""Judge that runs the model's program against the tests of its task.

``extra_fields.public_tests`` (or ``tests``) is ``{"inputs": [str], "outputs": [str]}``, stdin against stdout, or a list
of Python statements that follow the program, such as ``assert add(1, 2) == 3``. Either may be a JSON string of that.

Statements run in another process than the program (:mod:`jax_agent_rl.tool_server.sandbox.runner`), so the program can
neither read them nor influence the verdict. Outputs are compared here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.interpreters import Code, describe_result, parse_python
from jax_agent_rl.tool_server.plugins.markup import result_block
from jax_agent_rl.tool_server.sandbox import SandboxResult

_SHOWN_CHARS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One test: either a statement that must not raise, or an input and its expected output."""

    statement: str | None = None
    stdin: str = ""
    expected: str = ""


class JudgeTool(ServerTool[Code, None]):
    """The reward is the share of tests passed; passing all ends the trajectory."""

    name = "judge"
    usage = "<python>program</python> or a fenced python block; it is run against the task's tests."
    needs_sandbox = True

    def parse_action(self, action: str) -> Code | None:
        return parse_python(action)

    async def act(self, action: ToolAction[Code, None]) -> ToolObservation:
        cases = read_cases(action.extra)[: self.context.settings.judge.max_tests]
        source = action.parsed.source
        outcomes = await asyncio.gather(*(self._run(source, case) for case in cases))
        results, passed = [result for result, _ in outcomes], [passed for _, passed in outcomes]
        lines = [f"{sum(passed)} of {len(cases)} tests passed."]
        if not all(passed):
            first = passed.index(False)
            lines.append(self._explain(first, cases[first], results[first]))
        return ToolObservation(
            text=result_block(action.parsed.action, "\n".join(lines)),
            done=all(passed),
            reward=sum(passed) / len(cases),
            metrics={"tests_passed": sum(passed), "tests": len(cases)},
        )

    async def _run(self, source: str, case: Case) -> tuple[SandboxResult, bool]:
        """Run one test; return the result and whether it passed."""
        sandbox = self.context.sandbox
        if case.statement is not None:
            result = await sandbox.run_tests(source, case.statement)
            return result, result.ok
        stdin, files = case.stdin.encode("utf-8", "replace"), {"main.py": source.encode("utf-8", "replace")}
        result = await sandbox.run([sandbox.python, "main.py"], stdin=stdin, files=files)
        return result, result.ok and same_output(result.stdout, case.expected)

    def _explain(self, index: int, case: Case, result: SandboxResult) -> str:
        lines = [f"Test {index + 1} failed."]
        if case.statement is None:
            lines += [f"Input: {_clip(case.stdin)}", f"Expected: {_clip(case.expected)}"]
        else:
            lines.append(f"Test: {_clip(case.statement)}")
        return "\n".join([*lines, f"Got: {_clip(describe_result(result, self.context.sandbox.limits))}"])


def read_cases(extra: Mapping[str, Any]) -> list[Case]:
    """Parse the tests of a task.

    Raises:
        ToolError: there are none, or they have an unknown form.
    """
    tests = extra.get("public_tests", extra.get("tests"))
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ToolError(f"extra_fields.public_tests is not JSON: {error}") from error
    match tests:
        case [_, *_] if all(isinstance(test, str) for test in tests):
            return [Case(statement=test) for test in tests]
        case {"inputs": [_, *_] as inputs, "outputs": [*outputs]} if len(inputs) == len(outputs):
            return [Case(stdin=_text(i), expected=_text(o)) for i, o in zip(inputs, outputs, strict=True)]
    raise ToolError(
        'the task has no tests: extra_fields.public_tests must be {"inputs", "outputs"} or a list of asserts'
    )


def same_output(found: str, expected: str) -> bool:
    """Compare line by line, ignoring white space around each line and the text."""

    def lines(text: str) -> list[str]:
        return [line.strip() for line in text.strip().splitlines()]

    return lines(found) == lines(expected)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"

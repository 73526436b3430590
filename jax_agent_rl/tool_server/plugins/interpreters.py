"""Code in an interpreter: Python and bash per action or trajectory, SQL, and a judge of programs.

Programs and SQL queries run in the sandbox. A query can read only its task's database, and write
nothing.

The judge runs the model's program against the tests of its task. ``extra_fields.public_tests`` (or
``tests``) is ``{"inputs": [str], "outputs": [str]}``, stdin against stdout, or a list of Python
statements that follow the program, such as ``assert add(1, 2) == 3``. Both forms may be encoded as
a JSON string. Statements run in another process than the program
(:mod:`jax_agent_rl.tool_server.sandbox`), so the program can neither read them nor influence the
verdict. Outputs are compared in the worker's process.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.outputs import as_text, require_outputs, same_output
from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import (
    code_blocks,
    extract_code,
    last_tag,
    parse_tool_call,
    resolve_file,
    result_block,
)
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, SandboxProcess, SandboxResult
from jax_agent_rl.tool_server.sandbox.isolation import Files


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """Code of an action.

    Attributes:
        stdin: from an ```` ```input ```` block; None if there is none.
        action: the whole action, which decides how the result is formatted.
    """

    source: str
    stdin: str | None
    action: str


def parse_python(action: str) -> Code | None:
    """Parse an action's Python code.

    It is in ``<python>…</python>``, in fenced ``python`` blocks, or the argument ``code`` of a call
    of the tool ``python``.
    """
    source = extract_code(action, "python", "python", "py")
    if source is None:
        call = parse_tool_call(action)
        if call is not None:
            name, arguments = call
            if name == "python":
                source = arguments.get("code")
    if not isinstance(source, str):
        return None

    stdin = next(code_blocks(action, "input"), None)
    return Code(source=source, stdin=stdin, action=action)


class PythonTool(ServerTool[Code, None]):
    """Runs each action's code in a new interpreter; its output is the observation.

    ``extra_fields.stdin`` is the code's input unless the action contains one.
    """

    name = "python"
    usage = "<python>code</python> or a fenced python block; print what you want to see."
    needs_sandbox = True

    def parse_action(self, action: str) -> Code | None:
        return parse_python(action)

    async def act(self, action: ToolAction[Code, None]) -> ToolObservation:
        code = action.parsed
        sandbox = self.context.sandbox
        stdin = code.stdin
        if stdin is None:
            stdin = str(action.extra.get("stdin") or "")
        files = {"main.py": code.source.encode("utf-8", "replace")}
        result = await sandbox.run(
            [sandbox.python, "main.py"], stdin=stdin.encode("utf-8", "replace"), files=files
        )
        text = result_block(code.action, describe_result(result, sandbox.limits))
        return ToolObservation(text=text, metrics=failure_metrics(result.ok))


def failure_metrics(ok: bool) -> dict[str, float]:
    """Return an action's metrics: a success has none, so its observation is plain text."""
    if ok:
        return {}
    return {"failed": 1.0}


def describe_result(result: SandboxResult, limits: SandboxLimits) -> str:
    """Return a program's output, then what went wrong."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.stopped is not None:
        parts.append(f"({result.stopped.describe(limits)})")
    elif result.exit_code and not result.stderr:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part for part in parts if part)


# --- sessions -------------------------------------------------------------------------------------

_KERNEL = Path(__file__).with_name("kernel.py").read_bytes()
_RESTARTED = "(the session ended; the next action starts a new one, in which nothing is defined)"


@dataclass(kw_only=True)
class ProgramSession:
    """Long-lived program in the sandbox that runs one piece of code after another.

    A program that ended (the code exited, or exceeded a limit) is restarted for the next piece; the
    model reads that all definitions are lost.

    Attributes:
        argv: the program and its arguments.
        files: contents of its working folder, by name.
        limits: limits of the program; ``wall_seconds`` holds for each piece of code.
        encode: converts code and a mark to the program's input. The program runs the code, then
            writes the mark and an exit code on a line.
    """

    sandbox: Sandbox
    argv: Sequence[str]
    files: Files
    limits: SandboxLimits
    encode: Callable[[str, str], bytes]
    _process: SandboxProcess | None = None

    async def start(self) -> None:
        """Start the program unless it is running.

        Raises:
            ToolError: the sandbox failed.
        """
        if self._process is None or not self._process.alive:
            await self.close()
            self._process = await self.sandbox.start(
                self.argv, files=self.files, limits=self.limits
            )

    async def run(self, code: str) -> tuple[str, bool]:
        """Run code; return its output, with notes on what went wrong, and whether it succeeded."""
        await self.start()
        assert self._process is not None
        # Random, so that no program's ordinary output contains it.
        mark = f"\x1e{secrets.token_hex(16)}"
        output, status, stopped = await self.sandbox.exchange(
            self._process, self.encode(code, mark), mark.encode()
        )

        parts = [output.decode("utf-8", "replace").rstrip("\n")]
        if stopped is not None:
            parts.append(f"({stopped.describe(self.limits)})")
        if not status:  # the program ended before it wrote the mark
            await self.close()
            parts.append(_RESTARTED)
        text = "\n".join(part for part in parts if part)
        return text, status.strip() == b"0"

    async def close(self) -> None:
        """End the program and its child processes; idempotent."""
        process = self._process
        self._process = None  # before the await, so that it is closed once
        if process is not None:
            await process.close()


class StatefulPythonTool(ServerTool[Code, ProgramSession]):
    """Runs code in the trajectory's interpreter.

    Names stay defined between actions, and the value of a last expression is printed.
    """

    name = "stateful_python"
    usage = (
        "<python>code</python> or a fenced python block; variables stay defined between actions."
    )
    stateful = True
    needs_sandbox = True

    def parse_action(self, action: str) -> Code | None:
        return parse_python(action)

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> ProgramSession:
        limits = SandboxLimits.from_settings(self.context.settings.limits, session=True)
        session = self.make_session(limits)
        await session.start()
        return session

    def make_session(self, limits: SandboxLimits) -> ProgramSession:
        """Return the program that runs a trajectory's code, not started."""
        sandbox = self.context.sandbox
        return ProgramSession(
            sandbox=sandbox,
            argv=[sandbox.python, "kernel.py"],
            files={"kernel.py": _KERNEL},
            limits=limits,
            encode=_encode_python,
        )

    async def act(self, action: ToolAction[Code, ProgramSession]) -> ToolObservation:
        output, ok = await action.environment.run(action.parsed.source)
        text = result_block(action.parsed.action, output)
        return ToolObservation(text=text, metrics=failure_metrics(ok))

    async def close(self, environment: ProgramSession) -> None:
        await environment.close()


def _encode_python(code: str, mark: str) -> bytes:
    """Encode code as a request of ``kernel.py``."""
    return json.dumps({"code": code, "mark": mark}).encode() + b"\n"


class BashTool(StatefulPythonTool):
    """Runs commands in the trajectory's shell, which keeps its folder, variables and files."""

    name = "bash"
    usage = (
        "<bash>commands</bash> or a fenced bash block; the shell keeps its folder and variables,"
        " not its jobs."
    )

    def parse_action(self, action: str) -> Code | None:
        commands = extract_code(action, "bash", "bash", "sh", "shell", "terminal")
        if commands is None:
            return None
        return Code(source=commands, stdin=None, action=action)

    def make_session(self, limits: SandboxLimits) -> ProgramSession:
        return ProgramSession(
            sandbox=self.context.sandbox,
            argv=["bash", "--noprofile", "--norc"],
            files={},
            limits=limits,
            encode=_encode_shell,
        )


def _encode_shell(commands: str, mark: str) -> bytes:
    """Encode commands as one line that no quote or syntax error can break.

    The commands cannot read beyond that line: their stdin is empty.
    """
    encoded = base64.b64encode(commands.replace("\0", "").encode("utf-8", "replace")).decode()
    decode = f'"$(printf %s {encoded} | base64 -d)"'
    return f"eval {decode} </dev/null; printf '{mark} %d\\n' \"$?\"\n".encode()


class SqlTool(ServerTool[tuple[str, str], None]):
    """Runs queries of the task's database.

    ``extra_fields.db_id`` names the database. ``extra_fields.turns_left``, if given, is shown with
    each result.
    """

    name = "sql"
    usage = "<sql>query</sql> to try a query, <solution>query</solution> for the final one."
    needs_sandbox = True

    async def start(self) -> None:
        folder = Path(self.context.settings.sql.databases or "")
        if not folder.is_dir():
            raise ConfigError(f"sql.databases={str(folder)!r}: no such folder")
        self._folder = folder.resolve()

    def parse_action(self, action: str) -> tuple[str, str] | None:
        for kind in ("sql", "solution"):
            query = last_tag(action, kind)
            if query is not None:
                return kind, query
        return None

    async def act(self, action: ToolAction[tuple[str, str], None]) -> ToolObservation:
        kind, query = action.parsed
        if kind == "solution":
            return ToolObservation(done=True, valid=False)  # like an answer of the search tool

        sandbox = self.context.sandbox
        files = {
            "query.py": query_program(),
            "database.sqlite": self._database(action.extra.get("db_id")),
        }
        request = json.dumps({"query": query, "max_rows": self.context.settings.sql.max_rows})
        result = await sandbox.run(
            [sandbox.python, "-I", "query.py"], stdin=request.encode(), files=files
        )

        text = describe_result(result, sandbox.limits)
        ok = result.ok and not text.startswith("Error: ")
        metrics = failure_metrics(ok)
        turns_left = action.extra.get("turns_left")
        if isinstance(turns_left, int):
            reminder = f"You have {turns_left} turns left to complete the task."
            text += f"\n<reminder>{reminder}</reminder>"
        return ToolObservation(text=f"\n\n<observation>{text}</observation>\n\n", metrics=metrics)

    def _database(self, db_id: object) -> Path:
        """Find ``ID.sqlite``, ``ID/ID.sqlite`` (the layout of Spider and BIRD), or ``ID``."""
        if not isinstance(db_id, str) or not db_id:
            raise ToolError(f"extra_fields.db_id={db_id!r} must name a database")
        for name in (f"{db_id}.sqlite", f"{db_id}/{db_id}.sqlite", db_id):
            path = resolve_file(self._folder, name)
            if path is not None:
                return path
        raise ToolError(f"extra_fields.db_id={db_id[:200]!r}: there is no such database")


def _run_query() -> None:
    """Run a query of ``database.sqlite`` and print its rows.

    This is the program in the sandbox, made from this function's source: standard library only.
    """
    import json
    import os
    import sqlite3
    import sys

    request = json.load(sys.stdin)
    path = os.path.abspath("database.sqlite")
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    try:
        cursor = connection.execute(request["query"])
        rows = cursor.fetchmany(request["max_rows"] + 1)  # one more tells whether there are more
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        print(f"Error: {error}")
        return
    except MemoryError:
        print("Error: out of memory")
        return

    if cursor.description is not None:
        print(" | ".join(column[0] for column in cursor.description))
    for row in rows[: request["max_rows"]]:
        cells = []
        for value in row:
            cells.append("NULL" if value is None else str(value))
        print(" | ".join(cells))
    if len(rows) > request["max_rows"]:
        print(f"(more rows; the first {request['max_rows']} are shown)")
    elif not rows:
        print("(no rows)")


@cache
def query_program() -> bytes:
    """Return the program that runs a query in the sandbox."""
    return f"{inspect.getsource(_run_query)}\n_run_query()\n".encode()


# --- judge ----------------------------------------------------------------------------------------

_MAX_QUOTED_CHARS = 300


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
        runs = [self._run(source, case) for case in cases]
        outcomes = await asyncio.gather(*runs)

        passed_count = 0
        first_failure = ""
        for index, (result, passed) in enumerate(outcomes):
            if passed:
                passed_count += 1
            elif not first_failure:
                first_failure = self._explain(index, cases[index], result)

        text = f"{passed_count} of {len(cases)} tests passed."
        if first_failure:
            text += f"\n{first_failure}"
        return ToolObservation(
            text=result_block(action.parsed.action, text),
            done=passed_count == len(cases),
            reward=passed_count / len(cases),
            metrics={"tests_passed": passed_count, "tests": len(cases)},
        )

    async def _run(self, source: str, case: Case) -> tuple[SandboxResult, bool]:
        """Run one test; return the result and whether it passed."""
        sandbox = self.context.sandbox
        if case.statement is not None:
            result = await sandbox.run_tests(source, case.statement)
            return result, result.ok

        result = await sandbox.run(
            [sandbox.python, "main.py"],
            stdin=case.stdin.encode("utf-8", "replace"),
            files={"main.py": source.encode("utf-8", "replace")},
        )
        passed = result.ok and same_output(result.stdout, case.expected)
        return result, passed

    def _explain(self, index: int, case: Case, result: SandboxResult) -> str:
        """Describe a failed test to the model."""
        lines = [f"Test {index + 1} failed."]
        if case.statement is None:
            lines += [f"Input: {_clip(case.stdin)}", f"Expected: {_clip(case.expected)}"]
        else:
            lines.append(f"Test: {_clip(case.statement)}")
        output = describe_result(result, self.context.sandbox.limits)
        lines.append(f"Got: {_clip(output)}")
        return "\n".join(lines)


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
            expected_outputs = [as_text(output) for output in outputs]
            require_outputs(expected_outputs)
            cases = []
            for stdin, expected in zip(inputs, expected_outputs, strict=True):
                cases.append(Case(stdin=as_text(stdin), expected=expected))
            return cases
    raise ToolError(
        'the task has no tests: extra_fields.public_tests must be {"inputs", "outputs"} or a list'
        " of asserts"
    )


def _clip(text: str) -> str:
    if len(text) <= _MAX_QUOTED_CHARS:
        return text
    return text[:_MAX_QUOTED_CHARS] + "…"

"""SQL over SQLite files: ``<sql>`` runs a query, ``<solution>`` ends the trajectory.

Queries run in the sandbox, where only the one database can be read and nothing written, with the limits of any program.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.interpreters import describe_result
from jax_agent_rl.tool_server.plugins.markup import last_tag, resolve_file


class SqlTool(ServerTool[tuple[str, str], None]):
    """``extra_fields.db_id`` names the database, ``turns_left`` (if given) is shown with each result."""

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
            if (query := last_tag(action, kind)) is not None:
                return kind, query
        return None

    async def act(self, action: ToolAction[tuple[str, str], None]) -> ToolObservation:
        kind, query = action.parsed
        if kind == "solution":
            return ToolObservation(done=True, valid=False)  # like an answer of the search tool
        sandbox = self.context.sandbox
        files = {"query.py": _query_program(), "database.sqlite": self._database(action.extra.get("db_id"))}
        request = json.dumps({"query": query, "max_rows": self.context.settings.sql.max_rows})
        result = await sandbox.run([sandbox.python, "-I", "query.py"], stdin=request.encode(), files=files)
        text = describe_result(result, sandbox.limits)
        turns_left = action.extra.get("turns_left")
        if isinstance(turns_left, int):
            text += f"\n<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return ToolObservation(text=f"\n\n<observation>{text}</observation>\n\n")

    def _database(self, db_id: object) -> Path:
        """Resolve ``ID.sqlite``, ``ID/ID.sqlite`` (the layout of Spider and BIRD) or ``ID`` itself."""
        if not isinstance(db_id, str) or not db_id:
            raise ToolError(f"extra_fields.db_id={db_id!r} must name a database")
        for name in (f"{db_id}.sqlite", f"{db_id}/{db_id}.sqlite", db_id):
            if path := resolve_file(self._folder, name):
                return path
        raise ToolError(f"extra_fields.db_id={db_id[:200]!r}: there is no such database")


def _run_query() -> None:
    """Run a query of ``database.sqlite`` and print its rows: the program in the sandbox, standard library only."""
    import json
    import os
    import sqlite3
    import sys

    request = json.load(sys.stdin)
    connection = sqlite3.connect(f"file:{os.path.abspath('database.sqlite')}?mode=ro&immutable=1", uri=True)
    try:
        cursor = connection.execute(request["query"])
        rows = cursor.fetchmany(request["max_rows"] + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        print(f"Error: {error}")
        return
    except MemoryError:
        print("Error: out of memory")
        return
    if cursor.description is not None:
        print(" | ".join(column[0] for column in cursor.description))
    for row in rows[: request["max_rows"]]:
        print(" | ".join("NULL" if value is None else str(value) for value in row))
    if len(rows) > request["max_rows"]:
        print(f"(more rows; the first {request['max_rows']} are shown)")
    elif not rows:
        print("(no rows)")


@cache
def _query_program() -> bytes:
    return f"{inspect.getsource(_run_query)}\n_run_query()\n".encode()

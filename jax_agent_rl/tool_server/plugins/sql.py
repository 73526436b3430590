"""SQL over SQLite files: ``<sql>`` tries a query out, ``<solution>`` ends the trajectory.

Queries run in the sandbox, where nothing but the one database can be read, nor it written; what a query may use is
limited as for any program.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import file_below, tagged
from jax_agent_rl.tool_server.plugins.python import describe


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
            if (query := tagged(action, kind)) is not None:
                return kind, query
        return None

    async def act(self, action: ToolAction[tuple[str, str], None]) -> ToolObservation:
        kind, query = action.parsed
        if kind == "solution":
            return ToolObservation(done=True, valid=False)  # as an answer of the search tool
        text = await self._run(query, self._database(action.extra.get("db_id")))
        turns_left = action.extra.get("turns_left")
        if isinstance(turns_left, int):
            text += f"\n<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return ToolObservation(text=f"\n\n<observation>{text}</observation>\n\n")

    def _database(self, db_id: object) -> Path:
        """Resolve ``ID.sqlite``, ``ID/ID.sqlite`` (as Spider and BIRD lay them out) or ``ID`` itself."""
        if not isinstance(db_id, str) or not db_id:
            raise ToolError(f"extra_fields.db_id={db_id!r} must name a database")
        for name in (f"{db_id}.sqlite", f"{db_id}/{db_id}.sqlite", db_id):
            if path := file_below(self._folder, name):
                return path
        raise ToolError(f"extra_fields.db_id={db_id[:200]!r}: there is no such database")

    async def _run(self, query: str, database: Path) -> str:
        sandbox = self.context.sandbox
        files = {"query.py": _program(), "database.sqlite": database}
        request = json.dumps({"query": query, "max_rows": self.context.settings.sql.max_rows})
        result = await sandbox.run([sandbox.python, "-I", "query.py"], stdin=request.encode(), files=files)
        return describe(result, sandbox.limits)


@cache
def _program() -> bytes:
    return Path(__file__).with_name("query.py").read_bytes()

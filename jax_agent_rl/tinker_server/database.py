"""The server's database: sessions, models, checkpoints, and every request with its result."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_agent_rl.utils.files import make_folder

RESULT_SECONDS = 3600.0
"""How long a result can be fetched again, at least."""
RESULTS_KEPT = 1000
"""Results of the newest requests are kept longer."""
RECORD_SECONDS = 24 * 3600.0
"""How long it is known that a sample was computed, so that it is not computed again.

A training request is known as long as its session.
"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, created REAL NOT NULL, heard REAL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, settings TEXT NOT NULL, created REAL NOT NULL,
    used REAL NOT NULL, snapshot INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL,
    settings TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    kind TEXT NOT NULL, body BLOB, state TEXT NOT NULL DEFAULT 'queued', result BLOB,
    created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS identity (content TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, number);
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request and, once it has run, its result.

    Attributes:
        number: in order of arrival.
        id: of its future.
        owner: the model, or the sampling session.
        kind: which operation.
        body: as the client sent it; None once nothing can repeat the request.
        state: ``queued``, ``done`` or ``failed``.
        result: protobuf or JSON; of a failed request, JSON with ``error`` and ``category``.
    """

    number: int
    id: str
    owner: str
    kind: str
    body: bytes | None
    state: str
    result: bytes | None


_COLUMNS = ", ".join(field.name for field in fields(Request))


class Database:
    """An sqlite database; its methods may be called from any thread.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            folder / "tinker.sqlite", check_same_thread=False, isolation_level=None
        )
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.executescript(_SCHEMA)
        columns = [row["name"] for row in self._run("PRAGMA table_info(sessions)")]
        if "heard" not in columns:  # of a server before sessions were removed
            self._run("ALTER TABLE sessions ADD COLUMN heard REAL")
        self._run("UPDATE sessions SET heard = ? WHERE heard IS NULL", time.time())

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _run(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    # --- identity ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any] | None:
        """Return the base model and settings of all states; None if there are no states yet."""
        rows = self._run("SELECT content FROM identity")
        is_used = self._run("SELECT 1 FROM models UNION ALL SELECT 1 FROM checkpoints LIMIT 1")
        if not rows or not is_used:
            return None
        return json.loads(rows[0]["content"])

    def set_identity(self, identity: Mapping[str, Any]) -> None:
        """Record the base model and settings of all states."""
        self._run("DELETE FROM identity")
        self._run("INSERT INTO identity VALUES (?)", json.dumps(identity))

    # --- sessions, models, samplers ---------------------------------------------------------------

    def add_session(self, session: str) -> None:
        """Add a client's session."""
        now = time.time()
        self._run(
            "INSERT OR IGNORE INTO sessions (id, created, heard) VALUES (?, ?, ?)",
            session,
            now,
            now,
        )

    def hear(self, session: str) -> None:
        """Note that a session's client is there."""
        self._run("UPDATE sessions SET heard = ? WHERE id = ?", time.time(), session)

    def quiet_sessions(self, seconds: float) -> list[str]:
        """Return the sessions whose clients were not heard of for so long and await nothing."""
        rows = self._run(
            """SELECT id FROM sessions WHERE heard < ?1 AND NOT EXISTS (
                SELECT 1 FROM requests
                WHERE owner >= sessions.id || ':' AND owner < sessions.id || ';'
                AND (state = 'queued' OR created >= ?1))""",
            time.time() - seconds,
        )
        return [row["id"] for row in rows]

    def remove_session(self, session: str) -> list[str]:
        """Remove a session with its models, samplers and requests; return the models.

        Their checkpoints stay.
        """
        models = self.models(session)
        # Ids of a session's objects begin with its id and ":"; ";" is the next character.
        id_range = (f"{session}:", f"{session};")
        with self._lock:
            self._connection.execute(
                "DELETE FROM requests WHERE owner >= ? AND owner < ?", id_range
            )
            self._connection.execute("DELETE FROM samplers WHERE id >= ? AND id < ?", id_range)
            self._connection.execute("DELETE FROM models WHERE session = ?", (session,))
            self._connection.execute("DELETE FROM sessions WHERE id = ?", (session,))
        return models

    def has_session(self, session: str) -> bool:
        """Return whether there is such a session."""
        return bool(self._run("SELECT 1 FROM sessions WHERE id = ?", session))

    def add_model(self, model: str, session: str, settings: Mapping[str, Any]) -> None:
        """Add a model in training; one that exists stays as it is."""
        now = time.time()
        self._run(
            "INSERT OR IGNORE INTO models (id, session, settings, created, used)"
            " VALUES (?, ?, ?, ?, ?)",
            model,
            session,
            json.dumps(settings),
            now,
            now,
        )

    def model(self, model: str) -> dict[str, Any] | None:
        """Return a model's settings; None if there is no such model.

        With them are ``created`` and ``used``, in seconds since the epoch, and ``snapshot``, the
        number of the last request whose effect is in the snapshot.
        """
        rows = self._run("SELECT settings, created, used, snapshot FROM models WHERE id = ?", model)
        if not rows:
            return None
        row = rows[0]
        return json.loads(row["settings"]) | {
            "created": row["created"],
            "used": row["used"],
            "snapshot": row["snapshot"],
        }

    def models(self, session: str | None = None) -> list[str]:
        """Return all models, or a session's, the newest first."""
        rows = self._run(
            "SELECT id FROM models WHERE ?1 IS NULL OR session = ?1 ORDER BY created DESC", session
        )
        return [row["id"] for row in rows]

    def set_snapshot(self, request: Request, result: bytes) -> None:
        """Note that a snapshot holds the effect of a model's requests up to this one.

        They will not be repeated. The request's result is noted in the same transaction: a request
        whose effect is in the snapshot is done.
        """
        up_to = (request.owner, request.number)
        with self._lock, self._transaction():
            self._connection.execute("UPDATE models SET snapshot = ?2 WHERE id = ?1", up_to)
            self._connection.execute(
                "UPDATE requests SET state = 'done', result = ? WHERE id = ?", (result, request.id)
            )
            self._connection.execute(
                "UPDATE requests SET body = NULL WHERE owner = ? AND number <= ?", up_to
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit everything that is executed in this context, or nothing. The lock is held."""
        self._connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def add_sampler(self, sampler: str, path: str | None) -> None:
        """Add a sampling session of a checkpoint, or of the base model."""
        self._run("INSERT OR REPLACE INTO samplers VALUES (?, ?)", sampler, path)
        if path is not None:
            self._keep_unnamed(path)

    def sampler(self, sampler: str) -> sqlite3.Row | None:
        """Return a sampling session; None if there is no such session.

        Its ``path`` is the path of its checkpoint, None for the base model.
        """
        rows = self._run("SELECT * FROM samplers WHERE id = ?", sampler)
        return rows[0] if rows else None

    # --- checkpoints ------------------------------------------------------------------------------

    def add_checkpoint(
        self, path: str, model: str, kind: str, size: int, settings: Mapping[str, Any]
    ) -> None:
        """Add a checkpoint that is on disk, or replace the one of its path."""
        values = (path, model, kind, size, json.dumps(settings), time.time())
        self._run("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", *values)

    def checkpoints(
        self, model: str | None = None, *, expired: bool = False
    ) -> list[dict[str, Any]]:
        """Return the checkpoints of a model, or all, the newest first.

        Args:
            expired: return only expired ones, instead of only the others.
        """
        rows = self._run(
            "SELECT * FROM checkpoints WHERE ?1 IS NULL OR model = ?1 ORDER BY created DESC", model
        )
        now = time.time()
        checkpoints = []
        for row in rows:
            settings = json.loads(row["settings"])
            expires = settings.get("expires")
            has_expired = expires is not None and expires < now
            if has_expired == expired:
                checkpoints.append(dict(row) | {"settings": settings, "expires": expires})
        return checkpoints

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Set when a checkpoint expires, in seconds since the epoch; None means never.

        Sampling from it does not change that any more.
        """
        changed = "json_remove(json_set(settings, '$.expires', ?), '$.idle_seconds')"
        self._run(f"UPDATE checkpoints SET settings = {changed} WHERE path = ?", expires, path)

    def _keep_unnamed(self, path: str) -> None:
        """Put off the expiry of a checkpoint that is kept as long as it is used."""
        idle = "json_extract(settings, '$.idle_seconds')"
        changed = f"json_set(settings, '$.expires', ? + {idle})"
        self._run(
            f"UPDATE checkpoints SET settings = {changed} WHERE path = ? AND {idle} > 0",
            time.time(),
            path,
        )

    def remove_expired(self) -> list[str]:
        """Remove the checkpoints that have expired; return their paths.

        Checkpoints that a waiting request needs stay.
        """
        queued = (
            "SELECT * FROM requests WHERE state = 'queued' AND kind IN ('sample', 'load_weights')"
        )
        removed = []
        needed = set()
        with self._lock:
            for row in self._connection.execute(queued).fetchall():
                needed.add(self._path_of(row["owner"], row["body"]))
            expired = "SELECT path FROM checkpoints WHERE json_extract(settings, '$.expires') < ?"
            for row in self._connection.execute(expired, (time.time(),)).fetchall():
                if row["path"] not in needed:
                    self._connection.execute(
                        "DELETE FROM checkpoints WHERE path = ?", (row["path"],)
                    )
                    removed.append(row["path"])
        return removed

    def _path_of(self, owner: str, body: bytes | None) -> str | None:
        """Return the checkpoint that a request samples from or loads; None for the base model.

        The lock is held.
        """
        sampler = self._connection.execute(
            "SELECT path FROM samplers WHERE id = ?", (owner,)
        ).fetchone()
        if sampler is not None:
            return sampler["path"]
        fields = json.loads(body or b"{}")
        return fields.get("model_path") or fields.get("path")

    def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint."""
        self._run("DELETE FROM checkpoints WHERE path = ?", path)

    def checkpoint(self, path: str) -> dict[str, Any] | None:
        """Return one checkpoint."""
        for checkpoint in self.checkpoints():
            if checkpoint["path"] == path:
                return checkpoint
        return None

    # --- requests ---------------------------------------------------------------------------------

    def add_request(self, request_id: str, owner: str, kind: str, body: bytes) -> Request | None:
        """Add a request; return None if it was there already."""
        with self._lock:
            inserted = self._connection.execute(
                "INSERT OR IGNORE INTO requests (id, owner, kind, body, created)"
                " VALUES (?, ?, ?, ?, ?)",
                (request_id, owner, kind, body, time.time()),
            )
            is_new = inserted.rowcount > 0
            self._connection.execute(
                "UPDATE models SET used = ? WHERE id = ?", (time.time(), owner)
            )
            path = self._path_of(owner, body) if kind == "sample" else None
        if path is not None:
            self._keep_unnamed(path)
        return self.request(request_id) if is_new else None

    def request(self, request_id: str) -> Request | None:
        """Return a request by the id of its future."""
        requests = self._requests("id = ?", request_id)
        return requests[0] if requests else None

    def queued(self) -> list[Request]:
        """Return the requests that have not run, in order."""
        return self._requests("state = 'queued'")

    def since(self, model: str, number: int) -> list[Request]:
        """Return the requests of a model that ran after the one of this number, in order."""
        return self._requests("owner = ? AND number > ? AND state = 'done'", model, number)

    def finish(self, request: Request, result: bytes, *, failed: bool = False) -> None:
        """Record a result. A failed request is not repeated."""
        state = "failed" if failed else "done"
        body = request.body
        if failed or request.kind in ("sample", "forward"):
            body = None  # nothing repeats it
        if request.kind == "sample":
            with self._lock:
                path = self._path_of(request.owner, request.body)
            if path is not None:
                self._keep_unnamed(path)
        self._run(
            "UPDATE requests SET state = ?, result = ?, body = ? WHERE id = ?",
            state,
            result,
            body,
            request.id,
        )
        # Old results are dropped now and then, which is cheaper than with every request.
        if request.number % RESULTS_KEPT == 0:
            self._run(
                "UPDATE requests SET result = NULL"
                " WHERE number <= ? AND created < ? AND state != 'queued'",
                request.number - RESULTS_KEPT,
                time.time() - RESULT_SECONDS,
            )

    def remove_old_requests(self) -> None:
        """Remove the records of finished samples whose results were dropped long ago."""
        self._run(
            "DELETE FROM requests WHERE kind IN ('sample', 'forward') AND state != 'queued'"
            " AND result IS NULL AND created < ?",
            time.time() - RECORD_SECONDS,
        )

    def _requests(self, condition: str, *values: Any) -> list[Request]:
        rows = self._run(
            f"SELECT {_COLUMNS} FROM requests WHERE {condition} ORDER BY number", *values
        )
        return [Request(**dict(row)) for row in rows]

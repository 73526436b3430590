"""Routes about what the server holds: sessions, training runs, samplers and checkpoints."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.tinker_server.database import Database
from jax_agent_rl.tinker_server.requests import (
    MAX_BODY_BYTES,
    ModelRequest,
    TtlRequest,
    WeightsInfoRequest,
)
from jax_agent_rl.tinker_server.training import PREFIX, Models
from jax_agent_rl.utils.http_server import Refused, read_body

HOUR, TEN_YEARS = 3600, 10 * 366 * 24 * 3600


class RestRoutes:
    """Answers questions about the database, and removes from it.

    Args:
        settings: of the server.
        models: removes checkpoints and forgets models.
        database: of the server.
        training: one thread, in which ``models`` runs.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        models: Models,
        database: Database,
        training: ThreadPoolExecutor,
    ) -> None:
        self._settings, self._models, self._database, self._training = (
            settings,
            models,
            database,
            training,
        )
        self._name = settings.model_name or settings.model.path

    def routes(self) -> list[tuple[str, str, Callable]]:
        """Return methods, paths and handlers."""
        checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
        return [
            ("POST", "create_session", self._create_session),
            ("POST", "sessions/{session}/finish", self._finish),
            ("POST", "get_info", self._info),
            ("POST", "weights_info", self._weights_info),
            ("GET", "samplers/{sampler}", self._sampler),
            ("GET", "training_runs", self._training_runs),
            ("GET", "training_runs/{model}", self._training_run),
            ("GET", "training_runs/{model}/checkpoints", self._checkpoints),
            ("GET", "checkpoints", self._checkpoints),
            ("DELETE", checkpoint, self._delete),
            ("PUT", f"{checkpoint}/ttl", self._set_ttl),
        ]

    def known(self, model: str) -> str:
        """Return the name of a model; refuse one that does not exist."""
        if self._database.model(model) is None:
            raise Refused(404, f"there is no model {model!r}")
        return model

    def checkpoint(self, path: str) -> dict[str, Any]:
        """Return a checkpoint; refuse one that does not exist."""
        found = self._database.checkpoint(path)
        if found is None:
            raise Refused(404, f"there is no checkpoint {path!r}")
        return found

    # --- sessions ---------------------------------------------------------------------------------

    async def _create_session(self, http: web.Request) -> web.Response:
        session = uuid.uuid4().hex[:12]
        self._database.add_session(session)
        covers = (
            ""
            if self._settings.lora is None
            else f"adapters cover {', '.join(self._settings.lora.targets)}"
        )
        note = f"{covers}; train_unembed is not supported" if covers else ""
        return web.json_response(
            {"type": "create_session", "session_id": session, "info_message": note or None}
        )

    async def _finish(self, http: web.Request) -> web.Response:
        """Free the memory of a session's models; a request for one would restore it."""
        models = self._database.models(http.match_info["session"])
        await asyncio.get_running_loop().run_in_executor(
            self._training, self._models.forget, models
        )
        return web.json_response({})

    # --- models and samplers ----------------------------------------------------------------------

    async def _info(self, http: web.Request) -> web.Response:
        model = self.known((await read_body(http, ModelRequest, max_bytes=MAX_BODY_BYTES)).model_id)
        data = {"model_name": self._name, "tokenizer_id": self._name}
        return web.json_response(
            {"type": "get_info", "model_data": data, "model_id": model, **self._lora_fields()}
        )

    async def _weights_info(self, http: web.Request) -> web.Response:
        self.checkpoint(
            (await read_body(http, WeightsInfoRequest, max_bytes=MAX_BODY_BYTES)).tinker_path
        )
        return web.json_response({"base_model": self._name, **self._lora_fields()})

    async def _sampler(self, http: web.Request) -> web.Response:
        sampler = http.match_info["sampler"]
        found = self._database.sampler(sampler)
        if found is None:
            raise Refused(404, f"there is no sampling session {sampler!r}")
        return web.json_response(
            {"sampler_id": sampler, "base_model": self._name, "model_path": found["path"]}
        )

    def _lora_fields(self) -> dict[str, Any]:
        lora = self._settings.lora
        return {"is_lora": lora is not None, "lora_rank": lora and lora.rank}

    async def _training_runs(self, http: web.Request) -> web.Response:
        begin, count = _page(http, 20)
        names = self._database.models()
        runs = [self._described(name) for name in names[begin : begin + count]]
        cursor = {"offset": begin, "limit": count, "total_count": len(names)}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _training_run(self, http: web.Request) -> web.Response:
        return web.json_response(self._described(self.known(http.match_info["model"])))

    def _described(self, model: str) -> dict[str, Any]:
        settings = self._database.model(model) or {}
        return {
            "training_run_id": model,
            "base_model": self._name,
            "model_owner": "local",
            "last_request_time": _time(settings["used"]),
            "user_metadata": settings.get("user_metadata"),
            **self._lora_fields(),
        }

    # --- checkpoints ------------------------------------------------------------------------------

    async def _checkpoints(self, http: web.Request) -> web.Response:
        model = http.match_info.get("model")
        found = self._database.checkpoints(model)
        begin, count = (0, len(found)) if model else _page(http, 100)
        listed = [
            {
                "checkpoint_id": "/".join(one["path"].split("/")[-2:]),
                "checkpoint_type": one["kind"],
                "time": _time(one["created"]),
                "tinker_path": one["path"],
                "size_bytes": one["bytes"],
                "user_metadata": one["settings"].get("user_metadata"),
                "expires_at": _time(one["expires"]),
            }
            for one in found[begin : begin + count]
        ]
        cursor = {"offset": begin, "limit": count, "total_count": len(found)}
        return web.json_response({"checkpoints": listed, "cursor": cursor})

    def _named(self, http: web.Request) -> str:
        names = http.match_info
        return self.checkpoint(f"{PREFIX}{names['model']}/{names['kind']}/{names['name']}")["path"]

    async def _delete(self, http: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._training, self._models.remove_checkpoint, self._named(http)
        )
        return web.json_response({})

    async def _set_ttl(self, http: web.Request) -> web.Response:
        path = self._named(http)
        seconds = (await read_body(http, TtlRequest, max_bytes=MAX_BODY_BYTES)).ttl_seconds
        self._database.set_expiry(path, expiry(seconds))
        return web.json_response({})


def expiry(seconds: float | None) -> float | None:
    """Return when something expires that may stay for this long; seconds since the epoch, None for never."""
    if seconds is None:
        return None
    if not HOUR <= seconds <= TEN_YEARS:
        raise Refused(
            400,
            f"ttl_seconds={seconds:g}; it must be between {HOUR} (an hour) and {TEN_YEARS} (ten"
            " years)",
        )
    return time.time() + seconds


def _page(http: web.Request, default: int) -> tuple[int, int]:
    try:
        begin, count = int(http.query.get("offset", 0)), int(http.query.get("limit", default))
    except ValueError as error:
        raise Refused(400, f"offset and limit are integers: {error}") from error
    if begin < 0 or count < 0:
        raise Refused(400, f"offset={begin} and limit={count} must not be negative")
    return begin, count


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()

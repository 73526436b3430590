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

HOUR = 3600
TEN_YEARS = 10 * 366 * 24 * 3600


class RestRoutes:
    """Answers questions about the database, and removes from it.

    Args:
        models: removes checkpoints and forgets models.
        training: one thread, in which ``models`` runs.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        models: Models,
        database: Database,
        training: ThreadPoolExecutor,
    ) -> None:
        self._settings = settings
        self._models = models
        self._database = database
        self._training = training
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
        checkpoint = self._database.checkpoint(path)
        if checkpoint is None:
            raise Refused(404, f"there is no checkpoint {path!r}")
        return checkpoint

    # --- sessions ---------------------------------------------------------------------------------

    async def _create_session(self, http: web.Request) -> web.Response:
        session = uuid.uuid4().hex[:12]
        self._database.add_session(session)
        note = None
        lora = self._settings.lora
        if lora is not None:
            note = f"adapters cover {lora.targets_text()}; train_unembed is not supported"
        return web.json_response(
            {"type": "create_session", "session_id": session, "info_message": note}
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
        body = await read_body(http, ModelRequest, max_bytes=MAX_BODY_BYTES)
        model = self.known(body.model_id)
        data = {"model_name": self._name, "tokenizer_id": self._name}
        return web.json_response(
            {"type": "get_info", "model_data": data, "model_id": model, **self._lora_fields()}
        )

    async def _weights_info(self, http: web.Request) -> web.Response:
        body = await read_body(http, WeightsInfoRequest, max_bytes=MAX_BODY_BYTES)
        self.checkpoint(body.tinker_path)
        return web.json_response({"base_model": self._name, **self._lora_fields()})

    async def _sampler(self, http: web.Request) -> web.Response:
        sampler_id = http.match_info["sampler"]
        sampler = self._database.sampler(sampler_id)
        if sampler is None:
            raise Refused(404, f"there is no sampling session {sampler_id!r}")
        return web.json_response(
            {"sampler_id": sampler_id, "base_model": self._name, "model_path": sampler["path"]}
        )

    def _lora_fields(self) -> dict[str, Any]:
        lora = self._settings.lora
        rank = None if lora is None else lora.rank
        return {"is_lora": lora is not None, "lora_rank": rank}

    async def _training_runs(self, http: web.Request) -> web.Response:
        begin, count = _page(http, 20)
        names = self._database.models()
        runs = [self._training_run_fields(name) for name in names[begin : begin + count]]
        cursor = {"offset": begin, "limit": count, "total_count": len(names)}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _training_run(self, http: web.Request) -> web.Response:
        model = self.known(http.match_info["model"])
        return web.json_response(self._training_run_fields(model))

    def _training_run_fields(self, model: str) -> dict[str, Any]:
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
        checkpoints = self._database.checkpoints(model)
        if model:
            begin = 0
            count = len(checkpoints)
        else:
            begin, count = _page(http, 100)
        listed = [_checkpoint_fields(one) for one in checkpoints[begin : begin + count]]
        cursor = {"offset": begin, "limit": count, "total_count": len(checkpoints)}
        return web.json_response({"checkpoints": listed, "cursor": cursor})

    def _requested_path(self, http: web.Request) -> str:
        """Return the path of the checkpoint in a request's URL; refuse one that does not exist."""
        names = http.match_info
        path = f"{PREFIX}{names['model']}/{names['kind']}/{names['name']}"
        return self.checkpoint(path)["path"]

    async def _delete(self, http: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        path = self._requested_path(http)
        await loop.run_in_executor(self._training, self._models.remove_checkpoint, path)
        return web.json_response({})

    async def _set_ttl(self, http: web.Request) -> web.Response:
        path = self._requested_path(http)
        body = await read_body(http, TtlRequest, max_bytes=MAX_BODY_BYTES)
        self._database.set_expiry(path, expiry(body.ttl_seconds))
        return web.json_response({})


def _checkpoint_fields(checkpoint: dict[str, Any]) -> dict[str, Any]:
    kind_and_name = checkpoint["path"].split("/")[-2:]
    return {
        "checkpoint_id": "/".join(kind_and_name),
        "checkpoint_type": checkpoint["kind"],
        "time": _time(checkpoint["created"]),
        "tinker_path": checkpoint["path"],
        "size_bytes": checkpoint["bytes"],
        "user_metadata": checkpoint["settings"].get("user_metadata"),
        "expires_at": _time(checkpoint["expires"]),
    }


def expiry(seconds: float | None) -> float | None:
    """Return when something expires that may stay for so many seconds.

    The time is in seconds since the epoch; None means never.
    """
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
    """Return the index of the first entry, and how many are asked for."""
    try:
        begin = int(http.query.get("offset", 0))
        count = int(http.query.get("limit", default))
    except ValueError as error:
        raise Refused(400, f"offset and limit are integers: {error}") from error
    if begin < 0 or count < 0:
        raise Refused(400, f"offset={begin} and limit={count} must not be negative")
    return begin, count


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat()

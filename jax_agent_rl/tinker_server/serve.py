"""Assembly of a server from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.servers import TinkerServerSettings
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.runtime.policy import resolve_model
from jax_agent_rl.tinker_server.app import TinkerServer
from jax_agent_rl.tinker_server.database import Database
from jax_agent_rl.tinker_server.sampling import Sampler
from jax_agent_rl.tinker_server.training import Models
from jax_agent_rl.utils.network import token_from


@asynccontextmanager
async def open_server(
    settings: TinkerServerSettings, *, print_line: Callable[[str], None]
) -> AsyncIterator[TinkerServer]:
    """Load the model, compile, serve, and close everything in the end.

    Raises:
        ConfigError: the address cannot be used, or the token is missing.
        ModelError: the model cannot be read.
    """
    token = token_from(settings.token_env, key="token_env")
    folder = resolve_model(settings.model.path)
    print_line(f"loading {folder}")
    codec = ChatCodec.from_pretrained(folder)
    model, params = load_hf(folder)
    database = Database(Path(settings.state_dir))
    training = ThreadPoolExecutor(1, thread_name_prefix="training")
    models = Models(settings, model, params, database)

    async def read(path: str | None) -> Any:
        def found() -> Any:
            return models.merged(path) if settings.lora is None or path is None else models.adapter(path)

        return await asyncio.get_running_loop().run_in_executor(training, found)

    sampler = Sampler(settings, model, params, codec, read=read, print_line=print_line)
    server = TinkerServer(settings, models, sampler, database, training=training, token=token)
    server.http.listen()  # a bad address is refused before anything is compiled
    try:
        await sampler.start()
        await server.start()
        yield server
    finally:
        await server.close()
        await sampler.close()
        training.shutdown(cancel_futures=True)
        database.close()


async def serve(settings: TinkerServerSettings, *, print_line: Callable[[str], None]) -> None:
    """Serve until cancelled (``jax-agent-rl tinker-server``); for errors see :func:`open_server`."""
    async with open_server(settings, print_line=print_line) as server:
        name = settings.model_name or settings.model.path
        print_line(f"serving {name} on {server.http.url}: set TINKER_BASE_URL={server.http.url}")
        await asyncio.Event().wait()

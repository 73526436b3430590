"""A rollout server: the configured engine behind an address, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.runtime.engines import UNTRAINED, check_engine, make_engine
from jax_agent_rl.utils.network import token_from


async def serve_rollouts(config: Config, *, policy: str, host: str, port: int, say: Callable[[str], None]) -> None:
    """Loads, compiles, serves until it is cancelled, and closes everything.

    Args:
        policy: what its weights are called, for people.

    Raises:
        ConfigError: ``rollout.backend`` is remote itself, the token is missing, or the address cannot be used.
    """
    if config.rollout.backend == "remote":
        raise ConfigError("a rollout server needs an engine of its own: set rollout.backend=jetstream rollout.urls=[]")
    token = token_from(config.rollout.token_env, key="rollout.token_env")
    check_engine(config)
    say(f"loading {policy}")
    backend = make_engine(config, version=UNTRAINED, say=say)
    folder = config.rollout.weight_dir
    # Before minutes of compiling: it may refuse.
    server = RolloutServer(backend, host=host, port=port, token=token, weight_dir=folder)
    try:
        await backend.start()
        await server.start()
        say(f"serving {policy} on {server.url}")
        await asyncio.Event().wait()
    finally:
        await server.close()
        await backend.close()

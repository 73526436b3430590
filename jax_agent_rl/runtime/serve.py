"""Serving the configured model: an OpenAI-compatible endpoint, or a rollout server for trainers."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.endpoint.app import Endpoint
from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.chat.grammar_limits import in_grammar_thread, warm_up
from jax_agent_rl.config import AgentConfig, Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.shapes import page_size
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.rollout.engine_metrics import engine_families
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engine_devices import engine_mesh, engine_shapes, idle_device_warnings
from jax_agent_rl.runtime.engines import (
    UNTRAINED,
    backend_factories,
    check_engine,
    load_model,
    make_client,
    make_engine,
)
from jax_agent_rl.runtime.rollouts import open_codec
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.network import token_from

if TYPE_CHECKING:
    from prometheus_client.core import Metric

UNLIMITED_TURNS = 1_000_000


async def serve_openai(
    config: Config,
    *,
    policy: str,
    host: str,
    port: int,
    token_env: str | None,
    model_name: str,
    fixed_length: bool,
    print_line: Callable[[str], None],
) -> None:
    """Serve the model to OpenAI clients until cancelled (``jax-agent-rl serve``).

    Args:
        policy: name of the weights, for messages.
        host: address to listen on.
        port: 0 takes a free one.
        token_env: environment variable with the API key; None: no key, on loopback only.
        model_name: the name under ``/v1/models``.
        fixed_length: keep ``rollout.max_model_len``, see :func:`serving_config`.
        print_line: prints a line of progress.

    Raises:
        ConfigError: the address cannot be used, or a token is missing.
        ModelError: the model cannot be read.
    """
    api_key = token_from(token_env, key="--token-env")
    config = serving_config(config, fixed_length=fixed_length)
    max_model_len = config.rollout.max_model_len
    print_line(f"loading {policy}, for contexts of {max_model_len:,} tokens")
    check_engine(config)
    codec = open_codec(config)
    weights = functools.partial(load_model, config, codec)
    factories = backend_factories(
        config, codec, weights=weights, print_line=print_line, serving=True
    )
    client = make_client(config, codec)
    context = AgentContext(
        client=client, codec=codec, limits=config.agent, max_model_len=max_model_len
    )
    sampling = SamplingParams(max_tokens=max_model_len, temperature=config.rollout.eval_temperature)

    def make_session(session_id: str, key: str | None = api_key) -> Session:
        recorder = ChatRecorder(context, session_id=session_id)
        return Session(
            session_id=session_id,
            recorder=recorder,
            sampling=sampling,
            api_key=key,
            free_sampling=True,
        )

    limits = config.agent.endpoint
    server = Endpoint(
        SessionStore(max_sessions=limits.max_sessions, ttl=limits.session_ttl, create=make_session),
        model=model_name,
        adapters=list(config.rollout.adapters),
        limits=limits,
        host=host,
        port=port,
        api_key=api_key,
        # A session for one request, which nobody asks for again.
        stateless=lambda: make_session(f"once-{uuid.uuid4().hex}"),
        able=lambda: [server.backend.capabilities for server in client.pool.servers],
        require_engine=client.require_server,
        engines=lambda: read_engines(client.pool.servers),
    ).server
    server.listen()  # a bad address is refused before minutes of compiling
    try:
        await client.pool.start(factories)
        if all(engine.backend.capabilities.grammars for engine in client.pool.servers):
            # So that the first request with a schema is answered as fast as others.
            await in_grammar_thread(warm_up)
        await server.start()
        print_line(f"serving {policy} as {model_name!r}: base_url={server.url}/v1")
        await asyncio.Event().wait()
    finally:
        await server.close()
        await client.pool.close()


async def serve_rollouts(
    config: Config, *, policy: str, host: str, port: int, print_line: Callable[[str], None]
) -> None:
    """Serve the configured engine to trainers until cancelled (``jax-agent-rl rollout-server``).

    Args:
        policy: name of the weights, for messages.
        host: address to listen on.
        port: 0 takes a free one.
        print_line: prints a line of progress.

    Raises:
        ConfigError: ``rollout.backend`` is remote, the token is missing, or the address cannot be
            used.
    """
    if config.rollout.backend == "remote":
        raise ConfigError(
            "a rollout server needs an engine of its own: set rollout.backend=jetstream"
            " rollout.urls=[]"
        )
    token = token_from(config.rollout.token_env, key="rollout.token_env")
    check_engine(config)
    print_line(f"loading {policy}")
    if config.rollout.backend == "jetstream":
        for line in idle_device_warnings(config, engine_mesh(config), None):
            print_line(line)

    backend = make_engine(config, version=UNTRAINED, print_line=print_line)
    # A bad address is refused before minutes of compiling.
    server = RolloutServer(
        backend, host=host, port=port, token=token, weight_dir=config.rollout.weight_dir
    )
    try:
        await backend.start()
        await server.start()
        print_line(f"serving {policy} on {server.url}")
        await asyncio.Event().wait()
    finally:
        await server.close()
        await backend.close()


async def read_engines(servers: Sequence[AsyncServer]) -> list[Metric]:
    """Return the metrics of every engine, for Prometheus."""
    families: list[Metric] = []
    for server in servers:
        backend = server.backend
        metrics = await backend.metrics()
        health = await backend.health()
        families += engine_families(metrics, health, backend.capabilities, engine=server.name)
    return families


def serving_config(config: Config, *, fixed_length: bool) -> Config:
    """Return a configuration for clients instead of training.

    Its lengths and turns are not budgets. A context of an embedded engine may be as long as the
    model reads and the KV cache holds. The cache and the chunks of prompts keep the sizes they have
    in training.

    Args:
        fixed_length: keep ``rollout.max_model_len`` instead.
    """
    rollout = config.rollout
    if rollout.backend == "jetstream":
        engine = rollout.jetstream
        shapes = engine_shapes(config)
        cache_tokens = shapes.kv_cache_tokens

        max_model_len = rollout.max_model_len
        if not (fixed_length or rollout.deterministic or engine.engine_factory):
            whole_pages = cache_tokens - cache_tokens % page_size(cache_tokens)
            model_limit = load_config(config.model.path).max_position_embeddings
            max_model_len = max(max_model_len, min(whole_pages, model_limit))

        # Fixed before the lengths grow, from which they would follow.
        engine = engine.model_copy(
            update={"kv_cache_tokens": cache_tokens, "prefill_buckets": shapes.prefill_buckets}
        )
        rollout = rollout.model_copy(update={"max_model_len": max_model_len, "jetstream": engine})

    agent = serving_limits(config.agent, rollout.max_model_len)
    return config.model_copy(update={"rollout": rollout, "agent": agent})


def serving_limits(agent: AgentConfig, max_model_len: int) -> AgentConfig:
    """Return limits without training budgets, in which only the context length binds clients.

    The prompt explains a client's tools, whether or not training rows explain theirs.
    """
    return agent.model_copy(
        update={
            "max_prompt_length": max_model_len,
            "max_response_length": max_model_len,
            "max_assistant_turns": UNLIMITED_TURNS,
            "max_user_turns": UNLIMITED_TURNS,
            "edited_history": "segment",
            "tool_prompt": "template",
        }
    )

"""Frozen models in engines of their own: judges, and players of roles that are not trained."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from jax_agent_rl.agents import FrozenModel
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.client import LLMServerClient


@asynccontextmanager
async def open_frozen_model(
    folder: str, codec: ChatCodec, *, max_model_len: int, max_concurrent: int, stall_seconds: float | None
) -> AsyncIterator[LLMServerClient]:
    """Load a model, start an engine of its own, and yield its client; close both in the end.

    Args:
        folder: of the model (Hugging Face).
        codec: the model's own.
        max_model_len: longest context, in tokens.
        max_concurrent: requests that decode at the same time.
        stall_seconds: ``rollout.stall_seconds``: an engine without progress for so long is lost.

    Raises:
        ModelError: the model cannot be loaded.
    """
    model, params = load_hf(folder)
    shapes = EngineShapes(
        max_model_len=max_model_len,
        max_concurrent_decodes=max_concurrent,
        kv_cache_tokens=kv_cache_tokens(max_model_len, max_concurrent, max_concurrent),
        decode_steps=16,
        prefill_buckets=(128, 512),
    )
    decode = functools.partial(codec.decode, skip_special_tokens=False)
    client = LLMServerClient(decode_text=decode, stall_seconds=stall_seconds)
    try:
        await client.start(
            {f"frozen {folder}": lambda: JetStreamBackend(model, params, shapes, seed=0, decode_text=decode)}
        )
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def open_role_models(config: Config) -> AsyncIterator[dict[str, FrozenModel]]:
    """Yield the models of ``agent.role_models`` by role; roles with the same folder share an engine.

    Raises:
        ModelError: a model cannot be loaded.
    """
    opened: dict[str, FrozenModel] = {}
    async with AsyncExitStack() as stack:
        for folder in dict.fromkeys(config.agent.role_models.values()):
            codec = ChatCodec.from_pretrained(
                folder, tool_format=config.agent.tool_format, tool_prompt=config.agent.tool_prompt
            )
            client = await stack.enter_async_context(
                open_frozen_model(
                    folder,
                    codec,
                    max_model_len=config.rollout.max_model_len,
                    max_concurrent=min(config.rollout.max_in_flight, config.rollout.jetstream.max_concurrent_decodes),
                    stall_seconds=config.rollout.stall_seconds,
                )
            )
            opened[folder] = FrozenModel(client=client, codec=codec)
        yield {role: opened[folder] for role, folder in config.agent.role_models.items()}

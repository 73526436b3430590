"""The OpenAI-compatible endpoint over a scripted engine, and clients of it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import openai

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.endpoint.app import Endpoint
from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.config import AgentConfig, EndpointConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.serve import read_engines
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "what is 1 + 2 ?"}]
JSON = {"Content-Type": "application/json"}
CALL = '<call>add {"a": 1, "b": 2}</call>'


class Stage:
    """An endpoint over a scripted engine, or that of a given context, and clients of it."""

    def __init__(
        self,
        script=(),
        *,
        context=None,
        api_key=None,
        clock=None,
        limits=None,
        adapters=(),
        codec=None,
        **agent,
    ):
        limits = EndpointConfig(**(limits or {}))
        if context is None:
            self.codec = codec or FakeCodec()
            self.backend = ScriptedBackend(self.codec, script)
            self.backend.capabilities = replace(self.backend.capabilities, lora=bool(adapters))
            context = AgentContext(
                client=LLMServerClient([AsyncServer(self.backend)]),
                codec=self.codec,
                limits=AgentConfig(endpoint=limits, **agent),
                max_model_len=1000,
            )
        self.context = context
        self.sampling = SamplingParams(max_tokens=1000)
        self.api_key = api_key
        extra = {"clock": clock} if clock else {}
        self.store = SessionStore(
            max_sessions=limits.max_sessions, ttl=limits.session_ttl, create=self.session, **extra
        )
        endpoint = Endpoint(
            self.store,
            model="policy",
            adapters=adapters,
            limits=limits,
            api_key=api_key,
            stateless=lambda: self.session("once"),
            able=lambda: [server.backend.capabilities for server in self.servers],
            engines=lambda: read_engines(self.servers),
        )
        self.server = endpoint.server

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        client = self.context.client
        assert isinstance(client, LLMServerClient)
        return client.pool.servers

    def session(self, session_id: str, key: str | None = None) -> Session:
        recorder = ChatRecorder(self.context, session_id=session_id)
        return Session(
            session_id=session_id,
            recorder=recorder,
            sampling=self.sampling,
            api_key=key,
            free_sampling=True,
        )

    def client(self, path="/v1", key="any", retries=0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.server.url + path, api_key=key, max_retries=retries, timeout=30
        )


@contextlib.asynccontextmanager
async def serving(*args, **kwargs):
    stage = Stage(*args, **kwargs)
    await stage.server.start()
    try:
        yield stage
    finally:
        await stage.server.close()

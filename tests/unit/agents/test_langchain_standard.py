"""LangChain's own standard tests of chat models, package ``langchain-tests``: on the real engine,
and with tools.

A random model calls no tool that a test asks for, so the tests of tools run over a scripted engine.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest

pytest.importorskip("langchain_tests")

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.langgraph import ChatModel
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.tiny_chat import tiny_context


class BackgroundLoop:
    """An event loop in a thread, as sync callers meet it."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Unforced:
    """What is true of this model: its session's sampling is fixed, and nothing forces a call."""

    model_params: dict

    @property
    def chat_model_class(self):
        return ChatModel

    @property
    def standard_chat_model_params(self):
        return {"max_tokens": 100, "stop": []}

    @property
    def chat_model_params(self):
        return self.model_params

    @property
    def has_tool_choice(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_model_override(self):
        return False


@pytest.fixture(scope="class")
def on_the_engine(request):
    background = BackgroundLoop()
    manager = tiny_context(max_assistant_turns=1000, max_user_turns=1000)
    context = background.run(manager.__aenter__())
    recorder = ChatRecorder(context, session_id="s")
    request.cls.model_params = {
        "recorder": recorder,
        "sampling": SamplingParams(max_tokens=30, seed=0),
        "loop": background.loop,
    }
    yield
    background.run(manager.__aexit__(None, None, None))
    background.close()


@pytest.mark.usefixtures("on_the_engine")
class TestOnTheEngine(Unforced, ChatModelIntegrationTests):
    @property
    def has_tool_calling(self):
        return False


def obliging(request) -> list[int]:
    """What a model would say that does as the standard tests ask."""
    codec = CODEC
    text = codec.decode(request.prompt_ids)
    names = re.findall(r'"function": \{"name": "(\w+)"', text)
    arguments = {
        "magic_function": {"input": 3},
        "magic_function_no_args": {},
        "get_weather": {"location": "here"},
    }
    arguments |= {
        "greeting_generator": {"answer_style": "Pirate"},
        "my_adder_tool": {"a": 1, "b": 2},
    }
    if names and "tool:" not in text.rpartition("user:")[2]:
        quoted = re.findall("'(.+?)'", text.rpartition("user:")[2])
        call_arguments = json.dumps(
            arguments[names[0]] if names[0] in arguments else {"customer_name": quoted[0]},
            ensure_ascii=False,
        )
        return codec.reply_ids(f"<call>{names[0]} {call_arguments}</call>")
    return codec.reply_ids("it is done")


CODEC = FakeCodec()


@pytest.fixture(scope="class")
def on_a_script(request):
    background = BackgroundLoop()
    client = LLMServerClient([AsyncServer(ScriptedBackend(CODEC, obliging))])
    limits = AgentConfig(max_assistant_turns=1000, max_user_turns=1000, max_prompt_length=4000)
    context = AgentContext(client=client, codec=CODEC, limits=limits, max_model_len=4096)
    request.cls.model_params = {
        "recorder": ChatRecorder(context, session_id="s"),
        "sampling": SamplingParams(max_tokens=100),
        "loop": background.loop,
    }
    yield
    background.close()


@pytest.mark.usefixtures("on_a_script")
class TestToolsOnAScript(Unforced, ChatModelIntegrationTests):
    pass


@pytest.mark.usefixtures("on_a_script")
class TestUnits(Unforced, ChatModelUnitTests):
    pass

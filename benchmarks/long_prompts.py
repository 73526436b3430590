r"""Processor time of an agent's turns at the endpoint where its prompt is long.

    python benchmarks/long_prompts.py [--prompt 20000] [--turns 10]

A coding agent's session over Anthropic's API: instructions and tools of ``--prompt`` ids together,
and in every turn a call of a tool and its result. The client sends the whole conversation with each
request. The engine is scripted, so all that is measured is the endpoint's thread, from the bytes of
a request to those of its answer. The last line is one JSON object: ``first_ms`` of the first
request, ``turn_ms``, the median of the session's later turns, and ``last_ms`` of the last one;
``edited_ms`` of a conversation that is on record nowhere, because its question was changed, as long
as the last one; and ``other_ms`` of the first request of another session with the same
instructions and tools. ``encode_ms`` is what rendering and tokenizing the last conversation takes
where nothing of it was seen before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.endpoint.app import Endpoint
from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AgentConfig, EndpointConfig
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput, digest_ids

LONGEST = 1_000_000
TOOLS = 24
RESULT_WORDS = 200
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen2.5 shows tools and their results."""


class ScriptedClient:
    """Engines that say one thing in every turn."""

    modalities: frozenset[str] = frozenset()

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], **options: Any
    ) -> TokenOutput:
        count = len(self._ids)
        return TokenOutput(
            token_ids=self._ids,
            log_probs=(-1.0,) * count,
            policy_versions=(0,) * count,
            stop_reason=StopReason.EOS,
            context_digest=digest_ids([*prompt_ids, *self._ids]),
        )

    def fork_session(self, parent_id: str, session_id: str) -> None: ...

    def end_session(self, session_id: str) -> None: ...

    def partial(self, request_id: str) -> TokenOutput | None: ...


def words(rng: random.Random, count: int) -> str:
    """Return made-up text, about a word and a half in ids for each word."""
    letters = "etaoinshrdlu"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(count))


def long_prompt(codec: ChatCodec, prompt_ids: int) -> tuple[str, list[dict[str, Any]]]:
    """Return instructions and tools that take so many ids, half of them each."""
    rng = random.Random(0)
    text = words(rng, prompt_ids)
    ids = codec.encode_text(text)[: prompt_ids // 2]
    instructions = codec.decode(ids)
    characters = len(instructions) // TOOLS
    tools = []
    for number in range(TOOLS):
        start = number * characters
        description = instructions[start : start + characters * 3 // 4]
        argument = instructions[start + characters * 3 // 4 : start + characters]
        properties = {"argument": {"type": "string", "description": argument}}
        schema = {"type": "object", "properties": properties, "required": ["argument"]}
        tools.append({"name": f"tool_{number}", "description": description, "input_schema": schema})
    return instructions, tools


class Sessions:
    """Sessions of one endpoint over a scripted engine, and a client that takes their time."""

    def __init__(self, codec: ChatCodec, prompt_ids: int, turns: int) -> None:
        call = '{"name": "tool_1", "arguments": {"argument": "x"}}'
        reply = f"I look.\n<tool_call>\n{call}\n</tool_call>"
        self._context = AgentContext(
            client=ScriptedClient([*codec.encode_markup(reply), codec.eos_token_ids[0]]),
            codec=codec,
            limits=AgentConfig(
                max_prompt_length=LONGEST,
                max_response_length=LONGEST,
                max_assistant_turns=turns + 1,
                max_user_turns=turns + 1,
            ),
            max_model_len=LONGEST,
        )
        self._store = SessionStore(max_sessions=10, ttl=3600)
        self.server = Endpoint(self._store, model="policy", limits=EndpointConfig()).server
        self.instructions, self.tools = long_prompt(codec, prompt_ids)

    def open(self, session_id: str) -> ChatRecorder:
        recorder = ChatRecorder(self._context, session_id=session_id)
        sampling = SamplingParams(max_tokens=1000)
        self._store.add(Session(session_id=session_id, recorder=recorder, sampling=sampling))
        return recorder

    async def ask(
        self, session_id: str, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], float]:
        """Return the content of an answer, and milliseconds of the endpoint's thread."""
        body = {
            "model": "m",
            "max_tokens": 1000,
            "system": self.instructions,
            "tools": self.tools,
            "messages": messages,
        }
        request = urllib.request.Request(
            f"{self.server.url}/sessions/{session_id}/v1/messages",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        # The client is in a thread of its own, whose time is not counted.
        start = time.thread_time()
        answer = await asyncio.to_thread(post, request)
        return answer["content"], 1000 * (time.thread_time() - start)


async def measure(codec: ChatCodec, prompt_ids: int, turns: int) -> dict[str, Any]:
    rng = random.Random(1)
    sessions = Sessions(codec, prompt_ids, turns)
    recorder = sessions.open("first")
    sessions.open("other")
    await sessions.server.start()
    try:
        messages: list[dict[str, Any]] = [{"role": "user", "content": words(rng, RESULT_WORDS)}]
        milliseconds: list[float] = []
        for _ in range(turns):
            content, turn_ms = await sessions.ask("first", messages)
            milliseconds.append(turn_ms)
            (use,) = [block for block in content if block["type"] == "tool_use"]
            result = {
                "type": "tool_result",
                "tool_use_id": use["id"],
                "content": words(rng, RESULT_WORDS),
            }
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": [result]})

        question = {"role": "user", "content": words(rng, RESULT_WORDS)}
        _, edited_ms = await sessions.ask("first", [question, *messages[1:-2]])
        _, other_ms = await sessions.ask("other", [question])
    finally:
        await sessions.server.close()

    first = recorder.turns[0]
    last = recorder.turns[turns - 1]
    assert last.path() == recorder.turns[:turns], "a turn was not found on record"
    return {
        "prompt_ids": len(first.prompt_ids),
        "last_prompt_ids": len(last.prompt_ids),
        "milliseconds": milliseconds,
        "edited_ms": edited_ms,
        "other_ms": other_ms,
        "encode_ms": encoding_ms(codec, last, sessions.tools),
    }


def encoding_ms(codec: ChatCodec, last: RecordedTurn, tools: Sequence[Mapping[str, Any]]) -> float:
    """Return the time of rendering and tokenizing a prompt as a whole."""
    messages: list[Mapping[str, Any]] = []
    for turn in last.path():
        messages += [*turn.inserted, turn.message]
    schemas = []
    for tool in tools:
        function = {
            "name": tool["name"],
            "description": tool["description"],
            "parameters": tool["input_schema"],
        }
        schemas.append({"type": "function", "function": function})

    fresh_codec = ChatCodec(codec.tokenizer, eos_token_ids=codec.eos_token_ids)
    fresh_codec.encode_prompt(messages[:1])  # what a codec finds out once about its template
    start = time.thread_time()
    fresh_codec.encode_prompt(messages[:-1], schemas)
    return 1000 * (time.thread_time() - start)


def post(request: urllib.request.Request) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()

    folder = fetch_quickstart_model()
    codec = ChatCodec.from_pretrained(folder)
    codec.tokenizer.chat_template = TEMPLATE
    codec = ChatCodec(codec.tokenizer, eos_token_ids=codec.eos_token_ids)
    measured = asyncio.run(measure(codec, arguments.prompt, arguments.turns))

    first_ms, *turn_ms = measured["milliseconds"]
    print(f"first prompt: {measured['prompt_ids']} ids, {first_ms:.1f} ms")
    for number, milliseconds in enumerate(turn_ms, start=2):
        print(f"turn {number:2}: {milliseconds:6.1f} ms")
    print(f"last prompt: {measured['last_prompt_ids']} ids")
    figures = {
        "first_ms": first_ms,
        "turn_ms": statistics.median(turn_ms),
        "last_ms": turn_ms[-1],
        "edited_ms": measured["edited_ms"],
        "other_ms": measured["other_ms"],
        "encode_ms": measured["encode_ms"],
    }
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

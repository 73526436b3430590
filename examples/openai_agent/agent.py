"""An agent that knows nothing of training: an OpenAI client, a tool of its own, a loop."""

from __future__ import annotations

import json

import openai

from jax_agent_rl.agents import openai_agent
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools.calculator import calculator

MAX_TURNS = 3


@openai_agent("calculator_client")
async def run(base_url, api_key, row):
    """Answers the row's question, calling the calculator as often as the model wants."""
    messages = [dict(message) for message in row["prompt"]]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[calculator.schema]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = await compute(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


async def compute(arguments: str) -> str:
    """The calculator's answer, or what is wrong with the call, for the model to read."""
    try:
        return str(
            await calculator.execute("", {"expression": str(json.loads(arguments)["expression"])})
        )
    except (ToolError, KeyError) as error:
        return f"Error: {error}"

"""With ``agent.constrain_tool_calls`` every turn of a tool agent is sampled under the grammar of
its tools.
"""

from __future__ import annotations

from jax_agent_rl.agents import ToolAgent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tools import function_tool
from jax_agent_rl.tools.registry import list_schemas
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.messages import raises
from tests.tiny_chat import tiny_context, tokenizer

ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "calculator"}


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


async def trajectory_of(codec: ChatCodec, **limits):
    async with tiny_context(tools=(add,), codec=codec, max_assistant_turns=2, **limits) as context:
        agent = ToolAgent(context)
        await agent.preflight()
        sampling = SamplingParams(max_tokens=30, seed=1)
        trajectory = await agent.play(episode_request(ROW, sampling))
        return (
            trajectory,
            context.client.pool.servers[0].backend.seen,
            list_schemas(context.tools.select(None)),
        )


async def test_every_turn_has_the_grammar_of_its_tools_and_learns_over_what_it_left():
    codec = ChatCodec(tokenizer())
    trajectory, seen, schemas = await trajectory_of(codec, constrain_tool_calls=True)
    grammar = codec.free_turn_grammar(tools=schemas, several=False)
    assert [request.sampling.grammar for request, _ in seen] == [grammar] * len(trajectory.turns)
    sampled = [
        s for s, mine in zip(trajectory.supports, trajectory.response_mask, strict=True) if mine
    ]
    assert all(sampled)
    assert trajectory.loss_mask == trajectory.response_mask


async def test_turns_are_free_by_default():
    trajectory, seen, _ = await trajectory_of(ChatCodec(tokenizer()))
    assert [request.sampling.grammar for request, _ in seen] == [None] * len(trajectory.turns)
    assert not trajectory.restricted


async def test_a_format_whose_calls_cannot_be_told_from_text_is_refused_before_a_run():
    codec = ChatCodec(tokenizer(), tool_format="llama3_json")
    with raises(
        ConfigError,
        key=("constrain_tool_calls", "agent.tool_format"),
        value=("true", "llama3_json"),
    ):
        await trajectory_of(codec, constrain_tool_calls=True)

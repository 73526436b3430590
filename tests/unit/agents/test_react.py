"""Real LangGraph graphs on a real engine."""

from __future__ import annotations

import pytest

pytest.importorskip("langgraph")

from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.graph import START, MessagesState, StateGraph

from jax_agent_rl.agents import ReactAgentLoop
from jax_agent_rl.agents.langgraph import ChatModel
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.errors import HistoryEditedError, TrajectoryError
from jax_agent_rl.tools import function_tool
from jax_agent_rl.types import FinishReason, SamplingParams
from tests.agent_testbed import episode_request
from tests.messages import raises
from tests.tiny_chat import assert_exact, tiny_context

ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}


@function_tool
def add(a: int, b: int) -> tuple[str, float]:
    """Adds."""
    return str(a + b), 0.5


async def run(loop: ReactAgentLoop, seed: int):
    return await loop.play(
        episode_request(ROW, SamplingParams(max_tokens=12, seed=seed), trajectory_id=f"t-{seed}")
    )


async def test_the_default_graph_calls_tools_and_its_trajectory_is_exact():
    async with tiny_context(tools=[add]) as context:
        trajectories = [await run(ReactAgentLoop(context), seed) for seed in range(5)]
        for trajectory in trajectories:
            assert_exact(trajectory, context.client.pool.servers[0].backend)
    assert max(t.num_turns for t in trajectories) >= 3
    for trajectory in trajectories:
        assert trajectory.segments == ()
        assert trajectory.metrics["tool_errors"] == 0
        before_the_last = trajectory.turns[:-1]
        assert [len(turn.tool_calls) for turn in before_the_last] == [1] * len(before_the_last)
        assert [call.reward for call in trajectory.tool_calls] == [0.5] * len(before_the_last)
        for turn in before_the_last:
            assert turn.tool_calls[0].observation == str(1 + len(turn.output.token_ids))


async def test_the_turn_limit_ends_a_graph_and_its_trajectory_stands():
    async with tiny_context(tools=[add], max_assistant_turns=2) as context:
        trajectories = [await run(ReactAgentLoop(context), seed) for seed in range(6)]
        for trajectory in trajectories:
            assert_exact(trajectory, context.client.pool.servers[0].backend)
    limited = [t for t in trajectories if t.finish_reason is FinishReason.MAX_ASSISTANT_TURNS]
    assert limited
    assert all(t.num_turns == 2 for t in limited)


class Forgetful(ReactAgentLoop):
    """Asks, replaces what was said by a summary, asks again."""

    name = "forgetful"

    def build_graph(self, model, tools):
        async def ask(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        async def forget(state):
            gone = [RemoveMessage(id=message.id) for message in state["messages"]]
            return {"messages": [*gone, HumanMessage(f"so far: {state['messages'][-1].content}")]}

        graph = StateGraph(MessagesState)
        graph.add_node("first", ask)
        graph.add_node("forget", forget)
        graph.add_node("second", ask)
        graph.add_edge(START, "first")
        graph.add_edge("first", "forget")
        graph.add_edge("forget", "second")
        return graph.compile()


async def test_a_graph_that_edits_its_history_gives_a_segment_for_each_context():
    async with tiny_context() as context:
        trajectory = await run(Forgetful(context), 1)
        assert_exact(trajectory, context.client.pool.servers[0].backend)
    assert trajectory.num_turns == 1
    assert len(trajectory.segments) == 1
    assert "so far:" in trajectory.messages[0]["content"]
    assert trajectory.segments[0].messages[0]["content"] == "what is one plus two"


async def test_an_edited_history_is_dropped_with_its_reason_where_the_config_says_so():
    async with tiny_context(edited_history="drop") as context:
        with raises(HistoryEditedError, fix="agent.edited_history=segment"):
            await run(Forgetful(context), 1)


class Broken(ReactAgentLoop):
    name = "broken"

    async def run_graph(self, row, model, tools):
        await model.ainvoke("hello")
        raise LookupError("no such page")


async def test_a_graph_that_fails_loses_its_trajectory_with_what_it_raised():
    async with tiny_context() as context:
        with raises(TrajectoryError, value="LookupError: no such page") as caught:
            await run(Broken(context), 1)
    assert caught.value.drop_reason == "agent_error"


async def test_ids_mask_and_logprobs_ride_in_the_metadata_of_messages():
    async with tiny_context() as context:
        recorder = ChatRecorder(context, session_id="s")
        model = ChatModel(recorder=recorder, sampling=SamplingParams(max_tokens=8, seed=2))
        first = await model.ainvoke([("user", "question one")])
        second = await model.ainvoke([("user", "question one"), first, ("user", "and two")])
    turns = recorder.turns
    metadata = second.response_metadata
    assert tuple(metadata["prompt_ids"] + metadata["response_ids"]) == turns[1].context_ids
    first_length, inserted_length, second_length = (
        len(x)
        for x in (turns[0].output.token_ids, turns[1].inserted_ids, turns[1].output.token_ids)
    )
    assert (
        metadata["response_mask"]
        == [1] * first_length + [0] * inserted_length + [1] * second_length
    )
    sampled = turns[0].output.log_probs, turns[1].output.log_probs
    assert metadata["rollout_logprobs"] == [*sampled[0], *[0.0] * inserted_length, *sampled[1]]
    assert second.usage_metadata["input_tokens"] == len(turns[1].context_ids) - second_length


async def test_a_stream_is_the_answer_in_pieces_and_is_continued_by_its_ids():
    async with tiny_context() as context:
        recorder = ChatRecorder(context, session_id="s")
        model = ChatModel(recorder=recorder, sampling=SamplingParams(max_tokens=24, seed=2))
        pieces = [piece async for piece in model.astream([("user", "question")])]
        answer = pieces[0]
        for piece in pieces[1:]:
            answer += piece
        assert answer.content == recorder.turns[0].reply.content
        await model.ainvoke([("user", "question"), answer, ("user", "more")])
    assert recorder.turns[1].parent is recorder.turns[0]


async def test_a_blocking_call_in_the_engines_own_loop_is_refused_instead_of_hanging():
    async with tiny_context() as context:
        model = ChatModel(
            recorder=ChatRecorder(context, session_id="s"), sampling=SamplingParams(max_tokens=8)
        )
        with raises(RuntimeError, fix="ainvoke"):
            model.invoke("hello")


async def test_a_prompt_with_worked_tool_calls_in_plain_text_is_told_as_it_stands():
    worked = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "[add]"},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "the answer is three"},
        *ROW["prompt"],
    ]
    async with tiny_context() as context:
        sampling = SamplingParams(max_tokens=8, seed=1)
        trajectory = await ReactAgentLoop(context).play(
            episode_request({**ROW, "prompt": worked}, sampling)
        )
        assert trajectory.prompt_ids == tuple(context.codec.encode_prompt(worked))

"""Agents written against the real ``openai`` client, on a real engine: what is trained on is what
was sampled.
"""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import replace

import pytest

openai = pytest.importorskip("openai")

from jax_agent_rl.agents.frameworks import OpenAIAgentLoop  # noqa: E402
from jax_agent_rl.errors import (  # noqa: E402
    AgentTimeoutError,
    HistoryEditedError,
    PromptTooLongError,
    TrajectoryError,
)
from jax_agent_rl.rollout.client import LLMServerClient  # noqa: E402
from jax_agent_rl.rollout.http.client import RemoteBackend  # noqa: E402
from jax_agent_rl.rollout.http.server import RolloutServer  # noqa: E402
from jax_agent_rl.rollout.server import AsyncServer  # noqa: E402
from jax_agent_rl.tracing import Tracer  # noqa: E402
from jax_agent_rl.types import FinishReason, SamplingParams  # noqa: E402
from tests.agent_testbed import episode_request  # noqa: E402
from tests.messages import raises  # noqa: E402
from tests.tiny_chat import assert_exact, tiny_context, tokenizer  # noqa: E402

ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


def client_of(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60)


async def trajectory_of(function, context, *, row=ROW, seed=1):
    loop_class = type(
        "Loop", (OpenAIAgentLoop,), {"function": staticmethod(function), "name": "test_agent"}
    )
    loop = loop_class(context)
    sampling = SamplingParams(max_tokens=12, seed=seed)
    try:
        return await loop.play(episode_request(row, sampling, trajectory_id=f"t-{seed}"))
    finally:
        await loop.close()


async def tool_agent(base_url, api_key, row):
    """The loop everybody writes: call tools until the model answers."""
    async with client_of(base_url, api_key) as client:
        messages = [dict(m) for m in row["prompt"]]
        while True:
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=[TOOL]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def test_requests_over_http_are_traced_as_part_of_their_trajectory():
    traces = []
    tracer = Tracer(traces.append, max_per_step=1)
    async with tiny_context() as context:
        with tracer.trajectory(
            trajectory_id="t",
            group_id="g",
            group_size=1,
            step=1,
            sample=0,
            rollout=0,
            validate=False,
        ):
            trajectory = await trajectory_of(tool_agent, context)
    generated = [span for span in traces[0].spans if span.name == "generate"]
    assert [span.attributes["sampled_tokens"] for span in generated] == [
        len(t.output.token_ids) for t in trajectory.turns
    ]
    assert {span.parent for span in generated} == {0}


async def test_many_turns_of_a_tool_calling_client_are_one_exact_trajectory():
    async with tiny_context() as context:
        trajectories = [await trajectory_of(tool_agent, context, seed=seed) for seed in range(6)]
        backend = context.client.pool.servers[0].backend
        for trajectory in trajectories:
            assert trajectory.segments == ()
            assert_exact(trajectory, backend)
    assert max(t.num_turns for t in trajectories) >= 3
    has_drift = False
    for trajectory in trajectories:
        if trajectory.finish_reason is FinishReason.ANSWER:
            answer = trajectory.messages[-1]["content"].strip()
            assert trajectory.row["extra_info"]["agent_output"] == answer
        for turn in trajectory.turns:
            text = tokenizer().decode(turn.output.token_ids)
            ids_again = tokenizer().encode(text, add_special_tokens=False)
            has_drift |= ids_again != list(turn.output.token_ids)
    assert has_drift, "the test would not notice re-tokenization"


async def test_a_rollout_server_gives_an_agent_the_same_trajectory_as_an_engine():
    async with tiny_context() as context:
        backend = context.client.pool.servers[0].backend
        on_engine = await trajectory_of(tool_agent, context)
        server = RolloutServer(backend)
        await server.start()
        remote = RemoteBackend(server.url)
        try:
            await remote.start()
            decode = functools.partial(context.codec.decode, skip_special_tokens=False)
            client = LLMServerClient([AsyncServer(remote)], decode_text=decode)
            on_server = await trajectory_of(tool_agent, replace(context, client=client))
        finally:
            await remote.close()
            await server.close()
        assert_exact(on_server, backend)
    assert (on_server.prompt_ids, on_server.response_ids) == (
        on_engine.prompt_ids,
        on_engine.response_ids,
    )
    assert on_server.rollout_logprobs == pytest.approx(on_engine.rollout_logprobs, abs=1e-5)


async def test_concurrent_sub_agents_are_segments_trained_on_once():
    async def agent(base_url, api_key, row):
        async with client_of(base_url, api_key) as client:

            async def ask(messages):
                answer = await client.chat.completions.create(model="m", messages=messages)
                return answer.choices[0].message.content

            subjects = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]
            answers = await asyncio.gather(*map(ask, subjects))
            for answer, messages in zip(answers, subjects, strict=True):
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "more"},
                ]
            await asyncio.gather(*map(ask, subjects))
            return await ask([{"role": "user", "content": "sum it up"}])

    async with tiny_context() as context:
        trajectory = await trajectory_of(agent, context)
        assert_exact(trajectory, context.client.pool.servers[0].backend)
        assert len(context.client.pool.servers[0].backend.seen) == 7
    assert [s.num_turns for s in trajectory.sequences] == [2, 2, 2, 1]
    assert trajectory.messages[0]["content"] == "sum it up"
    assert trajectory.metrics["segments"] == 3


async def test_all_samples_of_a_request_are_trained_on_whichever_is_continued():
    async def agent(base_url, api_key, row):
        async with client_of(base_url, api_key) as client:
            messages = [dict(m) for m in row["prompt"]]
            answer = await client.chat.completions.create(model="m", messages=messages, n=3)
            chosen = answer.choices[1].message.content
            messages += [
                {"role": "assistant", "content": chosen},
                {"role": "user", "content": "more"},
            ]
            await client.chat.completions.create(model="m", messages=messages, n=2)

    async with tiny_context() as context:
        trajectory = await trajectory_of(agent, context)
        assert_exact(trajectory, context.client.pool.servers[0].backend)
        sampled = sum(
            len(output.token_ids) for _, output in context.client.pool.servers[0].backend.seen
        )
    assert sum(t.num_sampled for t in trajectory.sequences) == sampled, "each id once"
    assert sorted(s.num_turns for s in trajectory.sequences) == [1, 1, 1, 2]
    assert trajectory.num_turns == 2
    assert trajectory.metrics["segments"] == 3
    assert trajectory.metrics["lost_requests"] == 0
    assert all(
        s.prompt_ids[: len(trajectory.prompt_ids)] == trajectory.prompt_ids
        for s in trajectory.segments
    )


async def test_a_function_that_is_not_async_runs_in_a_thread():
    def agent(base_url, api_key, row):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        return (
            client.chat.completions.create(model="m", messages=row["prompt"])
            .choices[0]
            .message.content
        )

    async with tiny_context() as context:
        trajectory = await trajectory_of(agent, context)
        assert_exact(trajectory, context.client.pool.servers[0].backend)
    assert trajectory.finish_reason in (FinishReason.ANSWER, FinishReason.RESPONSE_LENGTH)


async def test_temperature_and_seed_of_an_agent_do_not_change_how_the_policy_samples():
    async def asks(client, row, **settings):
        await client.chat.completions.create(model="m", messages=row["prompt"], **settings)

    def agent(**settings):
        async def run(base_url, api_key, row):
            async with client_of(base_url, api_key) as client:
                await asks(client, row, **settings)

        return run

    async with tiny_context() as context:
        plain = await trajectory_of(agent(), context, seed=3)
        with_settings = await trajectory_of(
            agent(temperature=0.0, top_p=0.1, seed=9), context, seed=3
        )
        third = await trajectory_of(agent(), context, seed=4)
    assert plain.response_ids == with_settings.response_ids != third.response_ids


async def test_a_budget_that_ends_an_agent_leaves_a_trajectory_that_stands():
    async def talks_on(base_url, api_key, row):
        async with client_of(base_url, api_key) as client:
            messages = [dict(m) for m in row["prompt"]]
            while True:
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "and"})

    async with tiny_context(max_assistant_turns=3) as context:
        by_turns = await trajectory_of(talks_on, context)
        assert_exact(by_turns, context.client.pool.servers[0].backend)
    async with tiny_context(
        max_assistant_turns=50, max_user_turns=50, max_response_length=60
    ) as context:
        by_length = await trajectory_of(talks_on, context)
        assert_exact(by_length, context.client.pool.servers[0].backend)
    assert by_turns.finish_reason is FinishReason.MAX_ASSISTANT_TURNS
    assert by_turns.num_turns == 3
    assert by_length.finish_reason is FinishReason.RESPONSE_LENGTH
    assert len(by_length.response_ids) <= 60


async def test_failures_of_an_agent_lose_its_trajectory_with_their_reason():
    async def fails(base_url, api_key, row):
        raise LookupError("no such page")

    async def hangs(base_url, api_key, row):
        await asyncio.Event().wait()

    async def is_idle(base_url, api_key, row):
        return "done"

    async def edits(base_url, api_key, row):
        async with client_of(base_url, api_key) as client:
            for text in ("one", "two"):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": text}]
                )

    async with tiny_context(run_timeout=0.5) as context:
        with raises(AgentTimeoutError, key="agent.run_timeout", value=0.5):
            await trajectory_of(hangs, context)
    async with tiny_context(edited_history="drop", max_prompt_length=200) as context:
        for agent, words in (
            (fails, "LookupError: no such page"),
            (is_idle, "without asking the model"),
        ):
            with raises(TrajectoryError, value=words):
                await trajectory_of(agent, context)
        with pytest.raises(HistoryEditedError):
            await trajectory_of(edits, context)
        long = {"prompt": [{"role": "user", "content": "long " * 300}]}
        with raises(PromptTooLongError, key="max_prompt_length", value=200):
            await trajectory_of(tool_agent, context, row=long)


async def test_programs_that_share_an_address_are_told_apart_by_their_keys():
    anthropic = pytest.importorskip("anthropic")
    asked = []

    async def with_key_alone(base_url, api_key, row):
        shared = base_url.partition("/sessions/")[0]
        asked.append((shared, api_key))
        messages = [dict(message) for message in row["prompt"]]
        async with client_of(f"{shared}/v1", api_key) as client:
            await client.chat.completions.create(model="m", messages=messages)
        async with anthropic.AsyncAnthropic(base_url=shared, api_key=api_key) as client:
            await client.messages.create(model="m", max_tokens=5, messages=messages)

    rows = [
        {**ROW, "prompt": [{"role": "user", "content": text}]} for text in ("add one", "add two")
    ]
    async with tiny_context() as context:
        loop_class = type(
            "Loop",
            (OpenAIAgentLoop,),
            {"function": staticmethod(with_key_alone), "name": "test_agent"},
        )
        loop = loop_class(context)
        runs = (
            loop.play(
                episode_request(row, SamplingParams(max_tokens=12, seed=i), trajectory_id=f"t-{i}")
            )
            for i, row in enumerate(rows)
        )
        trajectories = await asyncio.gather(*runs)
        await loop.close()
    assert len({address for address, _ in asked}) == 1
    assert len({key for _, key in asked}) == 2
    for trajectory, text in zip(trajectories, ("add one", "add two"), strict=True):
        sequences = trajectory.sequences
        assert sum(sequence.num_turns for sequence in sequences) == 2
        assert all(text in context.codec.decode(sequence.prompt_ids) for sequence in sequences)


async def test_a_session_is_over_with_its_trajectory():
    seen = {}

    async def agent(base_url, api_key, row):
        seen.update(base_url=base_url, api_key=api_key)
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=row["prompt"])

    async with tiny_context() as context:
        loop_class = type(
            "Loop", (OpenAIAgentLoop,), {"function": staticmethod(agent), "name": "test_agent"}
        )
        loop = loop_class(context)
        await loop.play(episode_request(ROW, SamplingParams(max_tokens=8)))
        async with client_of(**seen) as client:
            with raises(openai.NotFoundError, value="may be over"):
                await client.chat.completions.create(model="m", messages=ROW["prompt"])
            await loop.close()
            with pytest.raises(openai.APIConnectionError):
                await client.with_options(max_retries=0).models.list()

"""``return_token_ids``: the recorded ids and log-probs where clients of vLLM look for them."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")

from tests.endpoint_testbed import ASK, CALL, TOOL, serving
from tests.fakes import EOS

IDS = {"return_token_ids": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_a_chat_are_the_recorded_ones_where_vllm_has_them(stream: bool):
    script = [CALL, "it is 3"]
    async with serving(script) as stage, stage.client("/sessions/s/v1") as client:
        answers = []
        history = list(ASK)
        for _ in script:
            answer = await client.chat.completions.create(
                model="x",
                messages=history,
                tools=[TOOL],
                logprobs=True,
                stream=stream,
                extra_body=IDS,
            )
            chunks = [chunk async for chunk in answer] if stream else [answer]
            answers.append(chunks)
            turn = stage.store.known("s", "any").recorder.turns[-1]
            history.append(turn.message)
            for call in turn.reply.tool_calls:
                history.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        turns = stage.store.known("s", "any").recorder.turns

    for chunks, turn in zip(answers, turns, strict=True):
        assert chunks[0].prompt_token_ids == list(turn.prompt_ids)
        token_ids = []
        logprobs = []
        for chunk in chunks:
            token_ids += getattr(chunk.choices[0], "token_ids", [])
            if chunk.choices[0].logprobs is not None:
                logprobs += [token.logprob for token in chunk.choices[0].logprobs.content]
        assert token_ids == list(turn.output.token_ids)
        assert logprobs == list(turn.output.log_probs)
    first_ids = list(turns[0].context_ids)
    assert answers[1][0].prompt_token_ids[: len(first_ids)] == first_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_each_text_completion_has_its_prompts_ids(stream: bool):
    prompts = [[1, 3], [1, 4, 5]]
    async with serving(["one two"]) as stage, stage.client() as client:
        stage.codec.encode_text("a b c d")  # so that there are words of these ids
        answer = await client.completions.create(
            model="policy", prompt=prompts, n=2, max_tokens=9, stream=stream, extra_body=IDS
        )
        choices = []
        if stream:
            async for chunk in answer:
                choices += chunk.choices
        else:
            choices = answer.choices

    for index in range(4):
        pieces = [choice for choice in choices if choice.index == index]
        assert pieces[0].prompt_token_ids == prompts[index // 2]
        assert not any(hasattr(piece, "prompt_token_ids") for piece in pieces[1:])
        assert pieces[-1].token_ids == [*stage.codec.encode_text("one two"), EOS]


async def test_ids_are_in_no_answer_that_does_not_ask_for_them():
    async with serving(["one"]) as stage, stage.client() as client:
        answer = await client.chat.completions.create(model="policy", messages=ASK)
    assert not hasattr(answer, "prompt_token_ids")
    assert not hasattr(answer.choices[0], "token_ids")


async def test_harbors_terminus_finds_the_ids(monkeypatch):
    """As ``harbor/llms/lite_llm.py`` asks, and where it looks."""
    # Otherwise LiteLLM asks the network for prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    async with serving(["the answer is 3"]) as stage:
        answer = await litellm.acompletion(
            model="hosted_vllm/m",
            api_base=f"{stage.server.url}/sessions/s/v1",
            api_key="any",
            drop_params=True,
            messages=ASK,
            logprobs=True,
            extra_body={**IDS, "session_id": "other"},
            extra_headers={"X-Session-ID": "other"},
        )
        (turn,) = stage.store.known("s", "any").recorder.turns
    assert answer.prompt_token_ids == list(turn.prompt_ids)
    choice = answer.choices[0]
    assert choice.provider_specific_fields["token_ids"] == list(turn.output.token_ids)
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert logprobs == list(turn.output.log_probs)

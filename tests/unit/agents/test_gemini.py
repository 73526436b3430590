"""Google's Gemini API with the real client: shapes, streams, calls, errors, exact ids."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import httpx
import pytest

genai = pytest.importorskip("google.genai")

from google.genai import errors, types  # noqa: E402

from jax_agent_rl.agents.endpoint import gemini as ours  # noqa: E402
from jax_agent_rl.agents.endpoint.gemini import GeminiRequest, json_schema  # noqa: E402
from jax_agent_rl.errors import EngineDiedError  # noqa: E402
from jax_agent_rl.rollout.protocol import TokenChunk  # noqa: E402
from tests.endpoint_testbed import CALL, serving  # noqa: E402

QUESTION = "what is 1 + 2 ?"
OTHER_CALL = CALL.replace("1", "3")
ADD = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="add", description="adds", parameters_json_schema={"type": "object"}
        )
    ]
)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def gemini(stage, path="", key="any", version=None):
    options = types.HttpOptions(
        base_url=stage.server.url + path, api_version=version, timeout=30_000
    )
    return genai.Client(api_key=key, http_options=options).aio


async def generate(client, contents, *, stream: bool, model="policy", **config):
    """Return the pieces of an answer: one unless it is streamed."""
    fields = {"model": model, "contents": contents, "config": config}
    if not stream:
        return [await client.models.generate_content(**fields)]
    return [piece async for piece in await client.models.generate_content_stream(**fields)]


def stream_each_id(backend, *, dies_after: int | None = None):
    """Let an engine send every id as it is sampled, and die after some."""

    async def chunks(request):
        output = await backend.generate(request)
        count = len(output.token_ids)
        for index in range(count):
            if index == dies_after:
                backend.die()
                raise EngineDiedError("the scripted engine died")
            place = slice(index, index + 1)
            yield TokenChunk(
                token_ids=output.token_ids[place],
                log_probs=output.log_probs[place],
                policy_versions=output.policy_versions[place],
                final=output if index == count - 1 else None,
            )

    backend.capabilities = replace(backend.capabilities, streaming=True)
    backend.chunks = chunks


def parts_of(pieces) -> list[types.Part]:
    parts = []
    for piece in pieces:
        parts += piece.candidates[0].content.parts
    return parts


def text_of(pieces) -> str:
    return "".join(part.text or "" for part in parts_of(pieces))


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v1beta"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_googles_shape_and_usage(stream: bool, version: str):
    async with serving(["the answer is 3"]) as stage, gemini(stage, version=version) as client:
        pieces = await generate(client, QUESTION, stream=stream, system_instruction="be brief")
        (request,) = stage.backend.requests
        prompt = stage.codec.decode(request.prompt_ids)
    assert text_of(pieces) == "the answer is 3"
    assert prompt.startswith("system: be brief")
    assert pieces[-1].candidates[0].finish_reason is types.FinishReason.STOP
    assert pieces[-1].model_version == "policy"
    usage = pieces[-1].usage_metadata
    assert usage.prompt_token_count == len(request.prompt_ids)
    assert usage.candidates_token_count == 5
    assert usage.total_token_count == usage.prompt_token_count + 5


async def test_counting_opens_no_session_and_counts_what_a_generation_reads():
    async with serving(["one"]) as stage, gemini(stage, "/sessions/s") as client:
        count = await client.models.count_tokens(model="m", contents=QUESTION)
        assert len(stage.store) == 0
        whole_request = {
            "generateContentRequest": {
                "model": "models/m",
                "contents": [{"parts": [{"text": QUESTION}]}],
                "systemInstruction": {"parts": [{"text": "be brief"}]},
            }
        }
        async with httpx.AsyncClient(base_url=stage.server.url) as http:
            answer = await http.post("/sessions/s/v1beta/models/m:countTokens", json=whole_request)
        await generate(client, QUESTION, stream=False)
        await generate(client, QUESTION, stream=False, system_instruction="be brief")
    lengths = [len(request.prompt_ids) for request in stage.backend.requests]
    assert [count.total_tokens, answer.json()["totalTokens"]] == lengths


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_where_it_is_told_to(stream: bool):
    async with serving(["one two three four"]) as stage, gemini(stage) as client:
        stopped = await generate(client, "count", stream=stream, stop_sequences=[" three"])
        cut = await generate(client, "count", stream=stream, max_output_tokens=1)
    assert text_of(stopped) == "one two"
    assert stopped[-1].candidates[0].finish_reason is types.FinishReason.STOP
    assert text_of(cut) == "one"
    assert cut[-1].candidates[0].finish_reason is types.FinishReason.MAX_TOKENS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_thoughts_are_parts_of_their_own_where_they_are_asked_for(
    stream: bool, include: bool
):
    thinking = types.ThinkingConfig(include_thoughts=include)
    script = ["<think>one and two</think>it is 3"]
    async with serving(script) as stage, gemini(stage) as client:
        pieces = await generate(client, QUESTION, stream=stream, thinking_config=thinking)
    parts = [(part.thought or False, part.text.strip()) for part in parts_of(pieces)]
    thoughts = [text for is_thought, text in parts if is_thought]
    texts = [text for is_thought, text in parts if not is_thought]
    assert thoughts == (["one and two"] if include else [])
    assert " ".join(texts) == "it is 3"
    assert pieces[-1].usage_metadata.thoughts_token_count == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_candidates_and_the_recorded_ids_and_logprobs_of_their_tokens(stream: bool):
    script = lambda request: [*request.prompt_ids[:2], 2]  # noqa: E731
    async with serving(script) as stage, gemini(stage, "/sessions/s") as client:
        pieces = await generate(
            client, QUESTION, stream=stream, candidate_count=2, response_logprobs=True
        )
        turns = stage.store.known("s", "any").recorder.turns
    ended = []
    for piece in pieces:
        ended += [candidate for candidate in piece.candidates if candidate.finish_reason]
    assert sorted(candidate.index for candidate in ended) == [0, 1]
    for candidate in ended:
        tokens = candidate.logprobs_result.chosen_candidates
        assert [token.token_id for token in tokens] == list(turns[0].output.token_ids)
        assert candidate.avg_logprobs == pytest.approx(
            sum(token.log_probability for token in tokens) / len(tokens)
        )


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_results_of_parallel_calls_without_ids_extend_the_turn_in_order(stream: bool):
    script = ["first " + CALL + OTHER_CALL, "they are 3 and 5"]
    async with serving(script) as stage, gemini(stage, "/sessions/s") as client:
        contents = [types.Content(role="user", parts=[types.Part(text=QUESTION)])]
        pieces = await generate(client, contents, stream=stream, tools=[ADD])
        contents += [piece.candidates[0].content for piece in pieces]
        results = []
        for call in [part.function_call for part in parts_of(pieces) if part.function_call]:
            total = {"output": str(add(call.args["a"], call.args["b"]))}
            results.append(types.Part.from_function_response(name=call.name, response=total))
        contents.append(types.Content(role="user", parts=results))
        second_pieces = await generate(client, contents, stream=stream, tools=[ADD])
        first, second = stage.store.known("s", "any").recorder.turns

    assert text_of(pieces).strip() == "first"
    assert text_of(second_pieces) == "they are 3 and 5"
    assert second.parent is first
    assert second.context_ids[: len(first.context_ids)] == first.context_ids
    assert [message["content"] for message in second.inserted] == ["3", "5"]
    sent_ids = [message["tool_call_id"] for message in second.inserted]
    assert sent_ids == [call.id for call in first.reply.tool_calls]
    assert len(set(sent_ids)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_calls_python_functions_is_one_exact_sequence(stream: bool):
    script = [CALL, "it is 3", "it is 3 still"]
    async with serving(script) as stage, gemini(stage, "/sessions/s") as client:
        chat = client.chats.create(model="m", config={"tools": [add]})
        texts = []
        for question in (QUESTION, "are you sure ?"):
            if stream:
                pieces = [piece async for piece in await chat.send_message_stream(question)]
            else:
                pieces = [await chat.send_message(question)]
            texts.append("".join(piece.text or "" for piece in pieces))
        turns = stage.store.known("s", "any").recorder.turns
    assert texts == ["it is 3", "it is 3 still"]
    assert [turn.parent for turn in turns] == [None, *turns[:-1]]
    (result,) = turns[1].inserted
    assert json.loads(result["content"]) == {"result": 3}
    assert result["name"] == "add"


async def test_a_streamed_turn_comes_back_in_pieces_and_is_found():
    async with serving(["one two three four", "five"]) as stage:
        stream_each_id(stage.backend)
        async with gemini(stage, "/sessions/s") as client:
            chat = client.chats.create(model="m")
            sizes = []
            for question in ("count", "on"):
                stream = await chat.send_message_stream(question)
                sizes.append(len([piece async for piece in stream]))
            assert sizes[0] > 1
            first, second = stage.store.known("s", "any").recorder.turns
    assert second.parent is first


# --- errors and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_googles_shape(stream: bool):
    search = types.Tool(google_search=types.GoogleSearch())
    mode = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["add", "other"])
    async with serving(["x"], api_key="secret", limits={"max_body_bytes": 2000}) as stage:
        for key, fields, code, status, named in (
            ("wrong", {}, 401, "UNAUTHENTICATED", "token"),
            ("secret", {"model": "other"}, 404, "NOT_FOUND", "other"),
            ("secret", {"tools": [search]}, 400, "INVALID_ARGUMENT", "google_search"),
            ("secret", {"presence_penalty": 1.0}, 400, "INVALID_ARGUMENT", "presence_penalty"),
            ("secret", {"logprobs": 3}, 400, "INVALID_ARGUMENT", "responseLogprobs"),
            ("secret", {"temperature": 3}, 400, "INVALID_ARGUMENT", "temperature"),
            (
                "secret",
                {"tools": [ADD], "tool_config": {"function_calling_config": mode}},
                400,
                "INVALID_ARGUMENT",
                "allowedFunctionNames",
            ),
            ("secret", {"system_instruction": "x" * 3000}, 413, "INVALID_ARGUMENT", "larger"),
        ):
            async with gemini(stage, key=key) as client:
                with pytest.raises(errors.ClientError) as caught:
                    await generate(client, QUESTION, stream=stream, **fields)
            assert (caught.value.code, caught.value.status) == (code, status)
            assert named in caught.value.message
        assert stage.backend.requests == []

        async with httpx.AsyncClient(base_url=stage.server.url) as http:
            answer = await http.post("/v1beta/models/m:other?key=secret", json={})
        assert answer.json()["error"]["status"] == "NOT_FOUND"


async def test_an_engine_that_dies_in_a_stream_is_an_error_of_the_stream():
    async with serving(["one two three four five six"]) as stage, gemini(stage) as client:
        stream_each_id(stage.backend, dies_after=4)
        pieces = []
        with pytest.raises(errors.ServerError) as caught:
            async for piece in await client.models.generate_content_stream(
                model="policy", contents="count"
            ):
                pieces.append(piece)
    assert text_of(pieces).startswith("one two")
    assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize("place", ["header", "address"])
async def test_a_key_is_read_where_googles_clients_send_it(place: str):
    headers = {"x-goog-api-key": "secret"} if place == "header" else {}
    params = {"key": "secret"} if place == "address" else {}
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with serving(["one"], api_key="secret") as stage:
        async with httpx.AsyncClient(base_url=stage.server.url) as http:
            path = "/v1beta/models/policy:generateContent"
            refused = await http.post(path, json=body)
            answer = await http.post(path, json=body, headers=headers, params=params)
    assert refused.status_code == 401
    assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": "one"}]


async def test_a_stream_that_is_not_server_sent_events_is_refused():
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with serving(["one"]) as stage:
        async with httpx.AsyncClient(base_url=stage.server.url) as http:
            answer = await http.post("/v1beta/models/policy:streamGenerateContent", json=body)
    assert answer.status_code == 400
    assert "alt=sse" in answer.json()["error"]["message"]


# --- requests -------------------------------------------------------------------------------------

OF_THE_CLIENT = {
    "automatic_continuation",
    "automatic_function_calling",
    "http_options",
    "should_return_http_response",
}
"""Settings of the client itself, which it does not send."""


def known_of(model) -> set[str]:
    return set(model.model_fields) | model.WITHOUT_EFFECT | model.REFUSED.keys()


def test_every_parameter_of_the_official_client_is_decided_on():
    known = known_of(ours.GeminiRequest) | known_of(ours.GeminiGenerationConfig)
    official = set(types.GenerateContentConfig.model_fields) - OF_THE_CLIENT
    assert official - known == set(), "serve, refuse or list it as without effect"


@pytest.mark.parametrize(
    "name",
    [
        "Blob",
        "Content",
        "FunctionCall",
        "FunctionCallingConfig",
        "FunctionDeclaration",
        "FunctionResponse",
        "FunctionResponsePart",
        "Part",
        "ThinkingConfig",
        "Tool",
        "ToolConfig",
    ],
)
def test_every_field_of_the_official_types_is_decided_on_once(name: str):
    model = getattr(ours, f"Gemini{name}")
    assert set(getattr(types, name).model_fields) - known_of(model) == set()
    assert not model.WITHOUT_EFFECT & model.REFUSED.keys()
    assert not set(model.model_fields) & (model.WITHOUT_EFFECT | model.REFUSED.keys())


def chat_request(**body):
    body = {"contents": [{"parts": [{"text": "q"}]}], **body}
    return GeminiRequest.model_validate(body).chat_request("m")


def test_names_are_read_in_both_spellings():
    camel = {"topP": 0.5, "maxOutputTokens": 3, "thinkingConfig": {"includeThoughts": True}}
    snake = {"top_p": 0.5, "max_output_tokens": 3, "thinking_config": {"include_thoughts": True}}
    assert chat_request(generationConfig=camel) == chat_request(generation_config=snake)
    assert chat_request(generationConfig=camel).top_p == 0.5


def test_images_of_users_and_results_are_read_in_either_alphabet_of_base64():
    data = base64.urlsafe_b64encode(b"\xff\xfe\xfd" * 3).decode()
    assert "_" in data or "-" in data
    blob = {"inlineData": {"mimeType": "image/png", "data": data}}
    result = {"name": "look", "response": {"output": "seen"}, "parts": [blob]}
    request = chat_request(
        contents=[
            {"role": "user", "parts": [blob, {"text": "what"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "look"}}]},
            {"role": "user", "parts": [{"functionResponse": result}]},
        ]
    )
    user, _, tool = request.messages
    url = "data:image/png;base64," + base64.b64encode(b"\xff\xfe\xfd" * 3).decode()
    assert user["content"][0]["image_url"]["url"] == url
    assert tool["content"][0]["image_url"]["url"] == url
    assert tool["content"][1]["text"] == "seen"
    assert tool["tool_call_id"] == "c"


def test_thoughts_and_signatures_that_come_back_are_reasoning_and_nothing():
    request = chat_request(
        contents=[
            {"parts": [{"text": "q"}]},
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "a"}]},
            {"role": "model", "parts": [{"text": "b", "thoughtSignature": "c2ln"}]},
            {"parts": [{"text": "and?"}]},
        ]
    )
    _, turn, _ = request.messages
    assert turn["reasoning"] == "hm"
    assert [part["text"] for part in turn["content"]] == ["a", "b"]


def test_a_last_content_of_the_model_is_continued():
    prefill = [{"parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "it is"}]}]
    assert chat_request(contents=prefill).continue_final_message
    assert not chat_request().continue_final_message


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({}, "auto"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["add", "sub"]}, "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["add"]}, "add"),
    ],
)
def test_calls_are_demanded_as_by_tool_choice(config, choice):
    tools = [{"functionDeclarations": [{"name": "add"}, {"name": "sub"}]}]
    request = chat_request(tools=tools, toolConfig={"functionCallingConfig": config})
    found = request.tool_choice
    assert (found if isinstance(found, str) else found.function.name) == choice


def test_an_answers_schema_is_json_schema():
    schema = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "STRING", "nullable": True, "enum": ["x"]},
            "a": {"type": "ARRAY", "items": {"type": "INTEGER"}, "maxItems": "3"},
        },
        "propertyOrdering": ["a", "b"],
        "required": ["a"],
    }
    converted = json_schema(schema)
    assert converted == {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "b": {"type": ["string", "null"], "enum": ["x", None]},
        },
        "required": ["a"],
    }
    assert list(converted["properties"]) == ["a", "b"]
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    assert chat_request(generationConfig=config).answer_schema == converted
    config = {"responseMimeType": "application/json"}
    assert chat_request(generationConfig=config).answer_schema == {"type": "object"}

"""Requests are compared with the types of the official clients, so that a field they add is noticed
here.
"""

from __future__ import annotations

import logging
import typing

import pytest
from pydantic import ValidationError

openai_types = pytest.importorskip("openai.types")
anthropic_types = pytest.importorskip("anthropic.types")

import anthropic.types.beta as anthropic_beta  # noqa: E402
import openai  # noqa: E402
import openai.types.chat.completion_create_params as openai_chat  # noqa: E402
import openai.types.completion_create_params as openai_text  # noqa: E402
import openai.types.responses.response_create_params as openai_responses  # noqa: E402

from jax_agent_rl.agents.endpoint import messages, requests, responses  # noqa: E402
from jax_agent_rl.agents.endpoint.requests import ChatRequest, CompletionRequest  # noqa: E402
from tests.endpoint_testbed import ASK, serving  # noqa: E402
from tests.messages import raises  # noqa: E402


def fields_of(params) -> set[str]:
    return set(typing.get_type_hints(params))


def known_of(model) -> set[str]:
    return set(model.model_fields) | model.WITHOUT_EFFECT | model.REFUSED.keys()


OFFICIAL = {
    "chat": (ChatRequest, [openai_chat.CompletionCreateParamsBase]),
    "completions": (CompletionRequest, [openai_text.CompletionCreateParamsBase]),
    "responses": (responses.ResponsesRequest, [openai_responses.ResponseCreateParamsBase]),
    "messages": (
        messages.MessagesRequest,
        [
            anthropic_types.message_create_params.MessageCreateParamsBase,
            anthropic_beta.message_create_params.MessageCreateParamsBase,
        ],
    ),
    "count_tokens": (
        messages.CountTokensRequest,
        [
            anthropic_types.message_count_tokens_params.MessageCountTokensParams,
            anthropic_beta.message_count_tokens_params.MessageCountTokensParams,
        ],
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_parameter_of_the_official_client_is_decided_on(name):
    model, official = OFFICIAL[name]
    for params in official:
        assert fields_of(params) - known_of(model) == set(), (
            "serve, refuse or list it as without effect"
        )


@pytest.mark.parametrize("name", OFFICIAL)
def test_no_parameter_is_decided_on_twice(name):
    model, _ = OFFICIAL[name]
    assert not model.WITHOUT_EFFECT & model.REFUSED.keys()
    assert not set(model.model_fields) & (model.WITHOUT_EFFECT | model.REFUSED.keys())


def test_every_field_of_an_anthropic_tool_is_decided_on():
    for params in (anthropic_types.ToolParam, anthropic_beta.BetaToolParam):
        assert fields_of(params) - known_of(messages.AnthropicTool) == set()


SMALLEST = {
    "chat": (ChatRequest, {"model": "m", "messages": ASK}),
    "completions": (CompletionRequest, {"model": "m", "prompt": "q"}),
    "responses": (responses.ResponsesRequest, {"model": "m", "input": "q"}),
    "messages": (messages.MessagesRequest, {"model": "m", "max_tokens": 5, "messages": ASK}),
    "count_tokens": (messages.CountTokensRequest, {"model": "m", "messages": ASK}),
}
EVERY_NAME = [
    (name, field) for name, (model, _) in SMALLEST.items() for field in sorted(known_of(model))
]


@pytest.mark.parametrize(("name", "field"), EVERY_NAME)
def test_a_parameter_that_is_null_was_not_given(name, field):
    model, body = SMALLEST[name]
    model.model_validate({**dict.fromkeys([field]), **body})


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name, (model, _) in SMALLEST.items() for field in sorted(model.REFUSED)],
)
def test_what_would_change_the_answer_is_refused_by_name_and_says_what_to_do(name, field):
    model, body = SMALLEST[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**body, field: {"a": 1}})
    (problem,) = caught.value.errors()
    assert problem["type"] == requests.REFUSED
    assert problem["ctx"]["name"] == field
    assert model.REFUSED[field] in problem["msg"]


async def test_unknown_parameters_are_ignored_with_one_warning(caplog):
    caplog.set_level(logging.WARNING)
    async with serving(["one", "two"]) as stage, stage.client() as client:
        for _ in range(2):
            await client.chat.completions.create(
                model="policy",
                messages=ASK,
                extra_body={"brand_new_field": {"x": 1}, "prediction": None},
            )
    assert [record.getMessage().count("brand_new_field") for record in caplog.records] == [1]


async def test_a_refused_parameter_is_an_answer_with_its_name():
    async with serving(["one"]) as stage, stage.client() as client:
        with raises(openai.BadRequestError, fix="response_format") as caught:
            await client.chat.completions.create(
                model="policy", messages=ASK, extra_body={"guided_json": {"a": 1}}
            )
    assert caught.value.param == "guided_json"


# --- what current clients send --------------------------------------------------------------------

CURRENT = {
    "system message": {"messages": [*ASK, {"role": "system", "content": "be brief"}]},
    "system blocks": {
        "messages": [*ASK, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    },
    "eager tool": {
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True}]
    },
    "context management": {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    },
    "null content": {"messages": [*ASK, {"role": "assistant", "content": None}, *ASK]},
}


@pytest.mark.parametrize("name", CURRENT)
def test_the_messages_api_takes_what_current_clients_send(name):
    body = {"model": "m", "max_tokens": 5, "messages": ASK, **CURRENT[name]}
    fields = messages.MessagesRequest.model_validate(body).chat_fields()
    ChatRequest.model_validate(fields)


def test_a_system_message_keeps_its_place():
    body = {"model": "m", "max_tokens": 5, **CURRENT["system message"]}
    sent = messages.MessagesRequest.model_validate(body).chat_fields()["messages"]
    assert sent == [*ASK, {"role": "system", "content": "be brief"}]


def test_text_documents_and_search_results_are_shown_as_text():
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "THE FILE"},
    }
    result = {
        "type": "search_result",
        "source": "s",
        "title": "t",
        "content": [{"type": "text", "text": "FOUND"}],
    }
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [document, result]}],
    }
    (message,) = messages.MessagesRequest.model_validate(body).chat_fields()["messages"]
    assert [part["text"] for part in message["content"]] == ["THE FILE", "FOUND"]

"""Structured output: calls that a request demands, and answers in JSON, as the grammar of a turn.

::

    tool_choice       required, or a function's name   ─► a call of any tool, or of that one
    response_format   json_object, json_schema         ─► an answer in JSON; with tools, or a call
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax_agent_rl.agents.endpoint.failures import ApiError
from jax_agent_rl.agents.endpoint.wire import ChatRequest, CompletionRequest
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.grammar import GrammarError
from jax_agent_rl.rollout.protocol import Capabilities

_ANY_OBJECT = {"type": "object"}


def check_structure(asked: ChatRequest | CompletionRequest, engines: Iterable[Capabilities]) -> None:
    """Refuse structured output that one of the engines cannot do.

    Raises:
        ApiError: it cannot.
    """
    param = structure_param(asked)
    if param is not None and not all(able.grammars for able in engines):
        raise ApiError(400, f"{param}: this engine cannot follow a grammar; ask for it in words", param=param)


def structure_param(asked: ChatRequest | CompletionRequest) -> str | None:
    """Return the parameter that demands a structure, if any."""
    if not isinstance(asked, ChatRequest):
        return None
    if asked.forces_call:
        return "tool_choice"
    return None if _answer_schema(asked.response_format) is None else "response_format"


def grammar_of(asked: ChatRequest | CompletionRequest, codec: ChatCodec) -> str | None:
    """Return the grammar that a request demands of its turn, if any.

    Raises:
        ApiError: there is none for the format, a schema cannot be followed, or parameters contradict each other.
    """
    if not isinstance(asked, ChatRequest):
        return None
    if asked.parallel_tool_calls is False and asked.prompt_tools and not asked.forces_call:
        message = "one call at a time is supported with a tool_choice that forces a call only; leave it out"
        raise ApiError(400, message, param="parallel_tool_calls")
    if (param := structure_param(asked)) is None:
        return None
    several = asked.parallel_tool_calls is not False
    try:
        if not asked.forces_call:
            answer = _answer_schema(asked.response_format)
            return codec.turn_grammar(tools=asked.prompt_tools, several=several, answer=answer)
        if isinstance(asked.tool_choice, str):
            return codec.turn_grammar(tools=asked.prompt_tools, several=several)
        return codec.turn_grammar(tools=[_named(asked)], several=False)
    except GrammarError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _named(asked: ChatRequest) -> Mapping[str, Any]:
    """Return the tool that ``tool_choice`` names."""
    assert asked.tool_choice is not None and not isinstance(asked.tool_choice, str)
    name = asked.tool_choice.function.name
    return next(tool for tool in asked.prompt_tools if tool["function"]["name"] == name)


def _answer_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema of an answer; None if it may be any text. The request's own check has seen it."""
    match response_format:
        case {"type": "json_object"}:
            return _ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
    return None

"""The APIs that the endpoint speaks: where each is served, what reads and answers its requests.

::

    body, path  ─► generations[path] ─► ApiAnswer: a ChatRequest or CompletionRequest ─► generation
                                                   whole, chunks, closing             ◄─ pieces
                ─► counts[path]      ─► ApiCount:  a ChatRequest ─► number of ids of its prompt
    a failure   ─► failure           ─► body of an error

All that is different is here and in the modules of the APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_agent_rl.agents.endpoint.answers import (
    ApiAnswer,
    ApiCall,
    ApiCount,
    ChatAnswer,
    CompletionAnswer,
)
from jax_agent_rl.agents.endpoint.gemini import GeminiAnswer, GeminiCount, GeminiStream
from jax_agent_rl.agents.endpoint.messages import MessagesAnswer, MessagesCount
from jax_agent_rl.agents.endpoint.requests import ApiError
from jax_agent_rl.agents.endpoint.responses import ResponsesAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The APIs of one company.

    Attributes:
        marks: parts of a path by which its errors are told as in these APIs, whether it is served
            or not.
        generations: what reads the requests that sample, by path.
        counts: what reads the requests that count a prompt's ids, by path.
        failure: makes the body of an error.
    """

    marks: tuple[str, ...] = ()
    generations: Mapping[str, Callable[[ApiCall], ApiAnswer]]
    counts: Mapping[str, Callable[[ApiCall], ApiCount]] = field(default_factory=dict)
    failure: Callable[[ApiError], dict[str, Any]]


OPENAI = Dialect(
    generations={
        "/v1/chat/completions": ChatAnswer,
        "/v1/completions": CompletionAnswer,
        "/v1/responses": ResponsesAnswer,
    },
    failure=ApiAnswer.failure,
)
ANTHROPIC = Dialect(
    marks=("/v1/messages",),
    generations={"/v1/messages": MessagesAnswer},
    counts={"/v1/messages/count_tokens": MessagesCount},
    failure=MessagesAnswer.failure,
)
_V1 = "/v1/models/{model:.+}"  # a model's name may hold slashes
_V1_BETA = "/v1beta/models/{model:.+}"
GOOGLE = Dialect(
    marks=("/v1beta/", ":generateContent", ":streamGenerateContent", ":countTokens"),
    generations={
        f"{_V1}:generateContent": GeminiAnswer,
        f"{_V1}:streamGenerateContent": GeminiStream,
        f"{_V1_BETA}:generateContent": GeminiAnswer,
        f"{_V1_BETA}:streamGenerateContent": GeminiStream,
    },
    counts={f"{_V1}:countTokens": GeminiCount, f"{_V1_BETA}:countTokens": GeminiCount},
    failure=GeminiAnswer.failure,
)
DIALECTS = (OPENAI, ANTHROPIC, GOOGLE)


def dialect_of(path: str) -> Dialect:
    """Return the dialect in which errors of a path are told."""
    for dialect in (ANTHROPIC, GOOGLE):
        if any(mark in path for mark in dialect.marks):
            return dialect
    return OPENAI

"""What a client sends is read up to what is wrong first, in every API: a problem is an object, and
a request may hold millions of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from jax_agent_rl.agents.endpoint.answers import ApiCall, ChatAnswer, CompletionAnswer
from jax_agent_rl.agents.endpoint.gemini import GeminiAnswer
from jax_agent_rl.agents.endpoint.messages import MessagesAnswer
from jax_agent_rl.agents.endpoint.responses import ResponsesAnswer

WRONG = [1.5] * 1000
ASK = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": ASK}
MESSAGES = {**CHAT, "max_tokens": 1}
RESPONSES = {"model": "m", "input": "hi"}
GEMINI = {"contents": [{"parts": [{"text": "hi"}]}]}


def gemini_result(parts: list[Any]) -> dict[str, Any]:
    return {"parts": [{"functionResponse": {"name": "f", "parts": parts}}]}


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (ChatAnswer, {**CHAT, "messages": WRONG}),
        (ChatAnswer, {**CHAT, "tools": WRONG}),
        (ChatAnswer, {**CHAT, "stop": WRONG}),
        (CompletionAnswer, {"model": "m", "prompt": WRONG}),
        (MessagesAnswer, {**MESSAGES, "messages": WRONG}),
        (MessagesAnswer, {**MESSAGES, "system": WRONG}),
        (MessagesAnswer, {**MESSAGES, "tools": WRONG}),
        (MessagesAnswer, {**MESSAGES, "stop_sequences": WRONG}),
        (ResponsesAnswer, {**RESPONSES, "input": WRONG}),
        (ResponsesAnswer, {**RESPONSES, "tools": WRONG}),
        (ResponsesAnswer, {**RESPONSES, "include": WRONG}),
        (GeminiAnswer, {"contents": WRONG}),
        (GeminiAnswer, {"contents": [{"parts": WRONG}]}),
        (GeminiAnswer, {"contents": [gemini_result(WRONG)]}),
        (GeminiAnswer, {**GEMINI, "tools": WRONG}),
        (GeminiAnswer, {**GEMINI, "tools": [{"functionDeclarations": WRONG}]}),
        (GeminiAnswer, {**GEMINI, "generationConfig": {"stopSequences": WRONG}}),
    ],
)
def test_a_list_is_read_up_to_its_first_wrong_value(
    read: Callable[[ApiCall], Any], body: dict[str, Any]
):
    with pytest.raises(ValidationError) as caught:
        read(ApiCall(body=body))
    kinds_that_a_value_may_have = 4  # each of a union's tells its problem
    assert caught.value.error_count() <= kinds_that_a_value_may_have

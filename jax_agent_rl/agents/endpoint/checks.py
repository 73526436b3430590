"""Checks of a request, before anything is tokenized or sampled for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.endpoint.failures import ApiError
from jax_agent_rl.agents.endpoint.wire import ChatRequest, CompletionRequest
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import SamplingParams


def check_prompt(asked: ChatRequest | CompletionRequest, context: AgentContext) -> None:
    """Refuses what cannot fit, whatever the tokenizer makes of it: an id stands for a bounded number of characters.

    Raises:
        ApiError: the prompt is too long, empty, or has ids that the tokenizer does not know.
    """
    most = context.longest * context.codec.longest_token
    if isinstance(asked, ChatRequest):
        # A message takes an id at least.
        if len(asked.messages) > context.longest or sum(map(_characters, asked.messages)) > most:
            raise _too_long("messages", context)
        return
    for prompt in asked.prompts:
        if not prompt:
            raise ApiError(400, "prompt is empty", param="prompt")
        if len(prompt) > (most if isinstance(prompt, str) else context.longest):
            raise _too_long("prompt", context)
        if isinstance(prompt, list) and not all(0 <= token < context.codec.vocab_size for token in prompt):
            wrong = next(token for token in prompt if not 0 <= token < context.codec.vocab_size)
            message = f"prompt has the id {wrong}; those of this model are 0 to {context.codec.vocab_size - 1}"
            raise ApiError(400, message, param="prompt")


def check_sampling(sampling: SamplingParams, engines: Iterable[Capabilities]) -> None:
    """Refuses what one of the engines cannot do.

    Raises:
        ApiError: it cannot.
    """
    for able in engines:
        if not able.any_sampling:
            plain = {"temperature": sampling.temperature in (0, 1), "top_p": sampling.top_p == 1}
            plain["top_k"] = not sampling.top_k
            for param, is_plain in plain.items():
                if not is_plain:
                    message = f"{param}={getattr(sampling, param)} is not supported by this engine; leave it out"
                    raise ApiError(400, message, param=param)
        if sampling.stop and not able.stop_strings:
            raise ApiError(400, "stop is not supported by this engine; leave it out", param="stop")


def _characters(message: Mapping[str, Any]) -> int:
    """Of a message's text; what is no text is refused later."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    return sum(len(text) for part in parts if isinstance(part, Mapping) and isinstance(text := part.get("text"), str))


def _too_long(param: str, context: AgentContext) -> ApiError:
    message = f"{param} cannot fit into a context of {context.longest} ids; shorten the conversation"
    return ApiError(400, message, code="context_length_exceeded", param=param)

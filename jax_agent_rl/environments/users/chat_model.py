"""A language model that answers messages: behind an OpenAI-compatible endpoint, or the run's own engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax_agent_rl.errors import InteractionError
from jax_agent_rl.types import SamplingParams, TokenOutput
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings, bearer

Message = Mapping[str, Any]


class UserModel(Protocol):
    """Continues a conversation."""

    async def complete(
        self, messages: Sequence[Message], *, request_id: str, max_tokens: int, temperature: float
    ) -> str: ...

    async def close(self) -> None: ...


class OpenAIChat:
    """``POST {base_url}/chat/completions``.

    Args:
        base_url: e.g. ``http://localhost:8000/v1``.
        model: the model's name there.
        api_key_env: environment variable with the key, if it wants one.
        timeout: seconds one answer may take.
        max_retries: repetitions of a request that failed.
        retry_delay: seconds before each repetition.
        where: what configures it, for messages.

    Raises:
        ConfigError: ``base_url`` is not a URL, or ``api_key_env`` names a variable that is not set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 3,
        retry_delay: float = 1.0,
        where: str = "config",
    ):
        self._model = model
        settings = ServiceSettings(
            url=f"{base_url.rstrip('/')}/chat/completions",
            url_key=f"{where}.base_url",
            timeout=timeout,
            timeout_key=f"{where}.timeout",
            max_retries=max_retries,
            retry_delay=retry_delay,
            headers=bearer(api_key_env, key=f"{where}.api_key_env"),
            token_hint=f"set {where}.api_key_env to the environment variable that holds it",
            trust_env=True,
        )
        self._service = JsonService(settings, error=InteractionError)

    async def complete(
        self, messages: Sequence[Message], *, request_id: str, max_tokens: int, temperature: float
    ) -> str:
        """Return the assistant's next message.

        Raises:
            InteractionError: the endpoint failed, took too long, or gave no text.
        """
        del request_id
        payload = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        try:
            answer = await self._service.post(payload, repeatable=True)
        except TimeoutError as error:
            raise InteractionError(str(error)) from None
        try:
            content = answer["choices"][0]["message"]["content"]
        except (TypeError, KeyError, IndexError):
            content = None
        if not isinstance(content, str):
            raise InteractionError(f"{self._service.settings.url} answered without a message's text: {answer!r:.200}")
        return content.encode("utf-8", "replace").decode()

    async def close(self) -> None:
        await self._service.close()


class _Client(Protocol):
    """The part of :class:`~jax_agent_rl.rollout.client.LLMServerClient` used here."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams
    ) -> TokenOutput: ...


class _Codec(Protocol):
    """The part of :class:`~jax_agent_rl.chat.codec.ChatCodec` used here."""

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class EngineChat:
    """The engine of the run, so the policy itself, as a chat model.

    Args:
        client: generates tokens.
        codec: messages to ids and back.
        max_model_len: most ids of one context.
    """

    def __init__(self, client: _Client, codec: _Codec, *, max_model_len: int):
        self._client = client
        self._codec = codec
        self._max_model_len = max_model_len

    async def complete(
        self, messages: Sequence[Message], *, request_id: str, max_tokens: int, temperature: float
    ) -> str:
        """Return the assistant's next message.

        Raises:
            InteractionError: the conversation fills the engine's context.
            TrajectoryError: the engine failed, or the chat template refuses the conversation.
        """
        prompt = self._codec.encode_prompt(messages)
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise InteractionError(
                f"the simulated user's conversation has {len(prompt)} ids, which leaves no room in "
                f"rollout.max_model_len={self._max_model_len}; raise it"
            )
        sampling = SamplingParams(max_tokens=min(max_tokens, room), temperature=temperature)
        output = await self._client.generate(request_id, prompt_ids=prompt, sampling_params=sampling)
        return self._codec.decode(output.token_ids)

    async def close(self) -> None:
        """Do nothing: the run owns the engine."""

"""The users of this package: one with the answer sheet, and one played by a language model.

The model is behind an OpenAI-compatible endpoint, or the run's own engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pydantic import Field

from jax_agent_rl.chat.messages import alternating
from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.environments.users.base import BaseInteraction, Message, UserModel, UserReply
from jax_agent_rl.errors import ConfigError, InteractionError, TemplateError
from jax_agent_rl.rewards.rules import last_number, marked_number
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.network import JsonService, bearer
from jax_agent_rl.utils.surrogates import replace_lone_surrogates

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec
    from jax_agent_rl.rollout.client import LLMServerClient


class OpenAIChat:
    """``POST {base_url}/chat/completions``.

    Args:
        base_url: e.g. ``http://localhost:8000/v1``.
        model: the model's name there.
        api_key_env: environment variable with the key, if the endpoint wants one.
        timeout: seconds one answer may take.
        max_retries: repetitions of a request that failed.
        retry_delay: seconds before each repetition.
        where: the section that configures it, for messages.

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
        self._service = JsonService(
            url=f"{base_url.rstrip('/')}/chat/completions",
            url_key=f"{where}.base_url",
            timeout=timeout,
            timeout_key=f"{where}.timeout",
            max_retries=max_retries,
            retry_delay=retry_delay,
            headers=bearer(api_key_env, key=f"{where}.api_key_env"),
            token_hint=f"set {where}.api_key_env to the environment variable that holds it",
            trust_env=True,
            error=InteractionError,
        )

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
            raise InteractionError(
                f"{self._service.url} answered without a message's text: {answer!r:.200}"
            )
        # Servers without a reasoning parser leave the thoughts in the text.
        return _spoken(answer_of(replace_lone_surrogates(content)), wrote=content)

    async def close(self) -> None:
        await self._service.close()


class EngineChat:
    """The engine of the run, so the policy itself, as a chat model.

    Args:
        max_model_len: maximum number of token ids in one context.
    """

    def __init__(self, client: LLMServerClient, codec: ChatCodec, *, max_model_len: int):
        self._client = client
        self._codec = codec
        self._max_model_len = max_model_len

    async def complete(
        self, messages: Sequence[Message], *, request_id: str, max_tokens: int, temperature: float
    ) -> str:
        """Return the assistant's next message, without its thoughts.

        Raises:
            InteractionError: the conversation fills the engine's context, or the model only
                thought.
            TrajectoryError: the engine failed, or the chat template refuses the conversation.
        """
        prompt_ids = self._encode(messages)
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise InteractionError(
                f"the simulated user's conversation has {len(prompt_ids)} ids, which leaves no room"
                f" in rollout.max_model_len={self._max_model_len}; raise it"
            )

        sampling = SamplingParams(max_tokens=min(max_tokens, room), temperature=temperature)
        output = await self._client.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling
        )
        reply = self._codec.parse_reply(output.token_ids, context_ids=prompt_ids)
        text = reply.text_of("text", "call", "malformed")
        return _spoken(text, wrote=self._codec.decode(output.token_ids))

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self._codec.encode_prompt(messages)
        except TemplateError:
            if messages[0]["role"] != "system":
                raise
        # Some templates have no system role: its text then begins the first message.
        system, first, *later = messages
        first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        return self._codec.encode_prompt([first, *later])

    async def close(self) -> None:
        """Do nothing: the run owns the engine."""


def _spoken(text: str, *, wrote: str) -> str:
    """Return what a simulated user says.

    Args:
        text: what it wrote besides its thoughts.
        wrote: all that it wrote, for the message.

    Raises:
        InteractionError: it says nothing, as it was cut off while thinking.
    """
    if not text.strip():
        raise InteractionError(
            f"the simulated user only thought and said nothing: …{wrote[-100:]!r}; raise its"
            " max_tokens, or let it think less"
        )
    return text.strip()


RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Says whether ``#### number`` is right, and asks again if not; scores every turn 1 or 0.

    ``interaction_kwargs``: ``ground_truth``.

    Args:
        config: ``answer_format``: ``strict`` (the default) wants ``####``, ``flexible`` takes the
            last number without it; ``right`` and ``wrong``: what to say.

    Raises:
        ConfigError: ``config`` holds something else.
    """

    stateful = False

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        unknown = sorted(config.keys() - {"answer_format", "right", "wrong"})
        if unknown:
            raise ConfigError(
                f"{unknown[0]}: Gsm8kInteraction takes answer_format, right and wrong"
            )
        self._flexible = config.get("answer_format", "strict") == "flexible"

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        _true_answer(kwargs)

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply:
        text = messages[-1]["content"]
        answer = marked_number(text)
        if answer is None and self._flexible:
            answer = last_number(text)
        if answer == _true_answer(kwargs):
            return UserReply(True, self.config.get("right", RIGHT), 1.0)
        return UserReply(False, self.config.get("wrong", WRONG), 0.0)


def _true_answer(kwargs: Mapping[str, Any]) -> Decimal:
    """Return the number in ``ground_truth``; raise InteractionError if there is none."""
    ground_truth = kwargs.get("ground_truth")
    answer = last_number(str(ground_truth))
    if answer is None:
        raise InteractionError(
            f"interaction_kwargs.ground_truth={ground_truth!r} holds no number to compare with"
        )
    return answer


PERSONA = (
    "You play a user who talks to an assistant. Stay in that role: you are not the assistant. Write"
    " only the user's next message. When the user's goal is reached, write {done} and nothing else."
)


GREETING = "Hello! How can I help you?"
"""What the assistant says before the user's first message, as the roles of a conversation have to
alternate."""


class ModelUserConfig(Section):
    """The ``config`` mapping of a :class:`ModelUserInteraction`."""

    base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint; null: the run's own engine."
    )
    model: str = Field(default="default", description="The model's name there.")
    api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the endpoint's key."
    )
    persona: str = Field(
        default=PERSONA, description="System message; {done} stands for done_phrase."
    )
    done_phrase: str = Field(
        default="###DONE###",
        min_length=1,
        description="A reply that holds it ends the conversation.",
    )
    max_tokens: Positive = Field(default=256, description="Maximum tokens of one reply.")
    temperature: float = Field(default=0.7, ge=0, description="Sampling temperature of the user.")
    timeout: float = Field(default=60.0, gt=0, description="Seconds one reply may take.")
    max_retries: NonNegative = Field(default=3, description="Repetitions of a request that failed.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each repetition.")


class ModelUserInteraction(BaseInteraction):
    """A user that a language model plays: it sees the conversation with the roles exchanged.

    ``interaction_kwargs``: ``goal``, what the user wants. The turn after which the user ends the
    conversation scores 1, every other turn 0.

    Raises:
        ConfigError: a wrong ``config`` mapping.
    """

    stateful = False

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        settings = build_tree(ModelUserConfig, config)
        self._settings = settings
        self._chat: UserModel | None = None
        if settings.base_url is not None:
            self._chat = OpenAIChat(
                settings.base_url,
                settings.model,
                api_key_env=settings.api_key_env,
                timeout=settings.timeout,
                max_retries=settings.max_retries,
                retry_delay=settings.retry_delay,
            )

    def attach(self, engine: UserModel) -> None:
        if self._chat is None:
            self._chat = engine

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply:
        if self._chat is None:
            raise InteractionError("the simulated user has no model: give it a base_url")
        settings = self._settings
        roles = [message["role"] for message in messages]
        turn = roles.count("assistant") - 1
        text = await self._chat.complete(
            self._swap_roles(messages, kwargs.get("goal")),
            request_id=f"{instance_id}/user/{turn}",
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
        )
        is_done = settings.done_phrase in text
        text = text.replace(settings.done_phrase, "").strip()
        return UserReply(is_done, text, score=float(is_done))

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()

    def _swap_roles(self, messages: Sequence[Mapping[str, Any]], goal: Any) -> list[dict[str, Any]]:
        """Return the conversation with roles exchanged, without system and tool messages."""
        instructions = self._settings.persona.replace("{done}", self._settings.done_phrase)
        if goal:
            instructions += f"\n\nThe user's goal: {goal}"

        exchanged = {"user": "assistant", "assistant": "user"}
        swapped = [{"role": "system", "content": instructions}]
        for message in messages:
            role = message["role"]
            if role in exchanged and message["content"]:
                swapped.append({"role": exchanged[role], "content": message["content"]})
        return alternating(swapped, opening=GREETING)

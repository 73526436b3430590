"""What agent loops share: a client that generates, a codec, tools, limits, a listener for events.

:class:`Prefix` is the beginning of a trajectory that goes on. A branch inherits one from its
parent: ids, never text that would be tokenized again. A trajectory that was interrupted with its
run goes on from a prefix of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from weakref import WeakValueDictionary

from pydantic import Field

from jax_agent_rl.agents.prompt import codec_of_row
from jax_agent_rl.config import AgentConfig, SearchConfig, ToolClientConfig
from jax_agent_rl.environments.base import EnvironmentPools
from jax_agent_rl.environments.users import InteractionRegistry
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.types import (
    Fork,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.failures import FailureLog

if TYPE_CHECKING:
    from jax_agent_rl.agents.episode import Episode
    from jax_agent_rl.chat.codec import ChatCodec


class TokenClient(Protocol):
    """What a loop needs of :class:`~jax_agent_rl.rollout.client.LLMServerClient`."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        session_id: str | None = None,
        session_ends: bool = False,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        on_ids: Callable[[Sequence[int]], None] | None = None,
        lora: str | None = None,
        routed_experts_prompt_start: int = 0,
        resumed: int = 0,
    ) -> TokenOutput: ...

    @property
    def modalities(self) -> frozenset[str]: ...

    def fork_session(self, parent_id: str, session_id: str) -> None: ...

    def end_session(self, session_id: str) -> None: ...

    def partial(self, request_id: str) -> TokenOutput | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEvent:
    """A generation or tool call that just ended.

    Attributes:
        turn: index of the assistant turn.
        output: the generation; None for a tool call.
        tool_call: the tool call; None for a generation.
    """

    trajectory_id: str
    turn: int
    seconds: float
    output: TokenOutput | None = None
    tool_call: ToolCallRecord | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that plays a role and is not trained.

    It has an engine of its own, and a codec with its own tokenizer and template.
    """

    client: TokenClient
    codec: ChatCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    """The objects that all loops of a run share.

    Attributes:
        codec: messages to ids and back.
        limits: the ``agent`` section of the config.
        max_model_len: maximum ids of one context, ``rollout.max_model_len``.
        tool_config: the section of that name, for ``text_tool_agent``.
        search: the section of that name, for ``search_agent``.
        interactions: the simulated users of the run.
        keep_sessions: keep the KV of finished trajectories in the engine, as others may branch off
            them.
        failures: told of failures that repeat, of the user's code and of the model's calls.
        on_event: called after every generation and tool call; must be quick and must not raise.
        frozen: the models that play a role and are not trained, by role (``agent.role_models``).
        role: the role that an episode plays with this context, see :meth:`as_role`.
        episodes: the running episodes, by trajectory id.
    """

    client: TokenClient
    codec: ChatCodec
    limits: AgentConfig
    max_model_len: int
    tools: ToolRegistry = field(default_factory=ToolRegistry)
    tool_config: ToolClientConfig = field(default_factory=ToolClientConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    interactions: InteractionRegistry = field(default_factory=InteractionRegistry)
    environments: EnvironmentPools = field(default_factory=EnvironmentPools)
    keep_sessions: bool = False
    failures: FailureLog = field(default_factory=FailureLog)
    on_event: Callable[[AgentEvent], None] = lambda event: None
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    role: str | None = None
    episodes: WeakValueDictionary[str, Episode] = field(default_factory=WeakValueDictionary)

    def report_malformed(self, wrote: str, problem: str, *, hint: str) -> None:
        """Tell of a tool call that could not be decoded.

        Args:
            wrote: what the model wrote.
            problem: what is wrong with it; may be empty.
            hint: what to do about such calls.
        """
        message = f"Failed to decode tool call {wrote[:100]!r}"
        if problem:
            message += f": {problem[:80]}"
        self.failures.report("a tool call that could not be decoded", message, hint=hint, once=True)

    def as_role(self, role: str) -> AgentContext:
        """Return the context of a role: with the engine and codec of the model that plays it."""
        model = self.frozen.get(role)
        if model is None:
            return replace(self, role=role)
        return replace(self, role=role, client=model.client, codec=model.codec)

    def for_row(self, row: Mapping[str, Any]) -> AgentContext:
        """Return the context of a row's trajectories.

        The chat template gets the row's ``chat_template_kwargs``.

        Raises:
            DataError: the template cannot be given them.
        """
        if not row.get("chat_template_kwargs"):
            return self
        return replace(self, codec=codec_of_row(self.codec, row))

    @property
    def trained_adapter(self) -> str | None:
        """The adapter in training that plays :attr:`role`."""
        if not self.role:
            return None
        return self.limits.role_adapters.get(self.role)

    def lora(self, row: Mapping[str, Any]) -> str | None:
        """Return the LoRA adapter to sample with for a row; None: the plain model."""
        if self.role in self.frozen:
            return None
        return self.trained_adapter or row.get("adapter") or self.limits.adapter

    def is_trained(self, role: str | None) -> bool:
        """Return whether a role is trained: it is not if a model of its own plays it.

        Where adapters are trained, the model below them is not, nor the roles that have no adapter.
        """
        if role in self.frozen:
            return False
        return not self.limits.role_adapters or role in self.limits.role_adapters

    @property
    def longest(self) -> int:
        """Maximum ids of one context: the engine's limit, or ``agent.max_model_len`` if less."""
        return min(self.limits.max_model_len or self.max_model_len, self.max_model_len)

    def exceeded_limits(
        self, *, prompt_length: int, response_length: int, context_length: int
    ) -> list[str]:
        """Return the limits, as ``key=value``, that leave no room for a sampled id.

        The list is empty if there is room. A limit on prompts or responses is left out if it allows
        as much as a whole context: the context's own limit then explains the failure.

        Args:
            prompt_length: ids of the prompt.
            response_length: sampled and inserted ids after it.
            context_length: ids that the next turn is sampled from.
        """
        max_prompt_length = self.limits.max_prompt_length
        max_response_length = self.limits.max_response_length
        max_context_length = self.longest
        context_is_full = context_length >= max_context_length

        exceeded = []
        if prompt_length > max_prompt_length and max_prompt_length < max_context_length:
            exceeded.append(f"agent.max_prompt_length={max_prompt_length}")

        if response_length >= max_response_length:
            if max_response_length < max_context_length or not context_is_full:
                exceeded.append(f"agent.max_response_length={max_response_length}")

        if context_is_full:
            section = "rollout" if max_context_length == self.max_model_len else "agent"
            exceeded.append(f"{section}.max_model_len={max_context_length}")
        return exceeded

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that the chat template can show and the engine takes."""
        engine_modalities = self.client.modalities
        if not engine_modalities:
            return engine_modalities  # no need to try the chat template
        return engine_modalities & self.codec.modalities


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) from any parts: equal for equal parts, unrelated otherwise.

    >>> derive_seed(0, "train", 3) == derive_seed(0, "train", 3)
    True
    """
    text = json.dumps(parts)  # distinguishes 1 from "1", and (1, 23) from (12, 3)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A trajectory up to a fork, or up to where its run was interrupted.

    Attributes:
        fork: where it branched off another one; None if the trajectory itself goes on.
        prompt_media: images and videos of the prompt, by kind.
        turns: complete turns, with what was appended to them.
        partial_turn: the inherited ids of the next turn, as if it had been interrupted there, or
            all of it if it has not been answered; None if there are none. Checkpoints call it
            ``begun``.
        messages: the conversation as text, up to ``turns``.
    """

    fork: Fork | None
    prompt_ids: tuple[int, ...]
    prompt_media: Mapping[str, tuple[Any, ...]]
    turns: tuple[Turn, ...]
    partial_turn: Annotated[TokenOutput | None, Field(alias="begun")]
    messages: Messages

    @classmethod
    def of(cls, parent: Trajectory, fork: Fork) -> Prefix:
        """Return the beginning of ``parent`` up to ``fork``.

        Raises:
            ValueError: the fork is of another trajectory, does not leave a turn to sample, or the
                parent edited its history, so that its last context is not all of it.
        """
        if fork.parent_id != parent.trajectory_id or parent.segments:
            raise ValueError(f"{fork} is no place in trajectory {parent.trajectory_id}")
        if not 0 <= fork.turns < parent.num_turns:
            raise ValueError(
                f"{fork}: trajectory {parent.trajectory_id} has {parent.num_turns} turns;"
                " keep fewer"
            )
        forked_output = parent.turns[fork.turns].output
        sampled_count = len(forked_output.token_ids)
        if not 0 <= fork.tokens < sampled_count:
            raise ValueError(
                f"{fork}: turn {fork.turns} of {parent.trajectory_id} has {sampled_count} ids"
            )

        partial_turn = None
        if fork.tokens:
            partial_turn = forked_output.first(
                fork.tokens, stop_reason=StopReason.ABORTED, stop_match=None
            )
        positions = turn_positions(parent.messages, parent.num_turns)
        return cls(
            fork=fork,
            prompt_ids=parent.prompt_ids,
            prompt_media=parent.prompt_media,
            turns=parent.turns[: fork.turns],
            partial_turn=partial_turn,
            messages=parent.messages[: positions[fork.turns]],
        )

    @property
    def context_ids(self) -> list[int]:
        """The ids of the prompt and of the complete turns."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids

    def messages_before(self, turn: int) -> Messages:
        """Return the conversation before an inherited turn; before turn 0, that is the prompt."""
        if turn == len(self.turns):
            return self.messages
        return self.messages[: turn_positions(self.messages, len(self.turns))[turn]]

    def response_to(self, turn: int) -> Messages:
        """Return the messages that answered an inherited turn."""
        turn_position = len(self.messages_before(turn))
        return self.messages_before(turn + 1)[turn_position + 1 :]


def turn_positions(messages: Messages, turns: int) -> list[int]:
    """Return the index of each turn's message.

    The prompt may hold assistant messages as well, so the last ``turns`` of them are the turns.
    """
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return positions[len(positions) - turns :]

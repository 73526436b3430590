"""What agent loops share: a client that generates, a codec, tools, limits, a listener."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from jax_agent_rl.agents.prompt import codec_of_row
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.config import AgentConfig, SearchConfig, ToolClientConfig
from jax_agent_rl.environments.base import EnvironmentPools
from jax_agent_rl.environments.users import InteractionRegistry
from jax_agent_rl.rollout.merge_outputs import check_output
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.types import SamplingParams, TokenOutput, ToolCallRecord
from jax_agent_rl.utils.failures import FailureLog

if TYPE_CHECKING:
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


class RunningEpisode(Protocol):
    """A trajectory that is being sampled, as a checkpoint sees it."""

    def progress(self) -> Prefix | None:
        """Return what another process can continue from; None if it has to start again."""


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
        in_checkpoints: running trajectories are part of the run's checkpoints.
        failures: told of failures that repeat, of the user's code and of the model's calls.
        on_event: called after every generation and tool call; must be quick and must not raise.
        frozen: the models that play a role and are not trained, by role (``agent.role_models``).
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
    in_checkpoints: bool = False
    failures: FailureLog = field(default_factory=FailureLog)
    on_event: Callable[[AgentEvent], None] = lambda event: None
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    episodes: WeakValueDictionary[str, RunningEpisode] = field(default_factory=WeakValueDictionary)

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

    def shorten(self, text: str) -> str:
        """Return a tool's result within ``agent.max_tool_response_length`` tokens."""
        limits = self.limits
        return self.codec.truncate(
            text, limits.max_tool_response_length, limits.tool_response_truncate_side
        )

    def for_request(self, request: EpisodeRequest) -> AgentContext:
        """Return the context of one trajectory.

        If a model of its own plays the request's role, it has that model's engine and codec. The
        chat template gets the row's ``chat_template_kwargs``.

        Raises:
            DataError: the template cannot be given them.
        """
        codec = self.codec
        if request.role is not None and request.role in self.frozen:
            codec = self.frozen[request.role].codec
        return replace(
            self, client=self.client_of(request.role), codec=codec_of_row(codec, request.row)
        )

    def client_of(self, role: str | None) -> TokenClient:
        """Return the engines that sample a role's turns."""
        if role is not None and role in self.frozen:
            return self.frozen[role].client
        return self.client

    def trained_adapter(self, role: str | None) -> str | None:
        """Return the adapter in training that plays a role; None: there is none."""
        if not role:
            return None
        return self.limits.role_adapters.get(role)

    def lora(self, request: EpisodeRequest) -> str | None:
        """Return the LoRA adapter to sample with; None: the plain model."""
        if request.role in self.frozen:
            return None
        adapter = self.trained_adapter(request.role)
        return adapter or request.row.get("adapter") or self.limits.adapter

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

    async def sample(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        metrics: MutableMapping[str, float],
        *,
        label: str,
        previous_output: TokenOutput | None = None,
        **options: Any,
    ) -> TokenOutput:
        """Sample from a context, check the output, and count its ids in ``metrics``.

        Args:
            label: names the turn in errors.
            previous_output: the last output in the context; the engine reports routed experts from
                its end on. None: from the beginning.
            options: further arguments of :meth:`TokenClient.generate`.

        Raises:
            TokenDriftError: the engine conditioned on other ids than ours.
            AbortedError: the generation was aborted for good.
            BackendError: the engine failed, or returned no id or more than asked for.
        """
        if previous_output is not None and previous_output.routed_experts:
            options["routed_experts_prompt_start"] = previous_output.routed_experts.end
        output = await self.client.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling, **options
        )
        check_output(output, prompt_ids, sampling.max_tokens, what=label)
        metrics["prompt_tokens"] += len(prompt_ids)
        metrics["cached_tokens"] += output.cached_tokens
        return output

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that the chat template can show and the engine takes."""
        engine_modalities = self.client.modalities
        if not engine_modalities:
            return engine_modalities  # no need to try the chat template
        return engine_modalities & self.codec.modalities

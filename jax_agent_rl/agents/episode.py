"""One trajectory as it grows: ids are appended, never re-rendered; all budgets are enforced here.

::

    context = prompt_ids
    generate()   context += sampled ids       checked: the engine's digest of its context is ours
    append(…)    context += inserted ids      refused when no id could be sampled after them; they
                                              replace a stop token that opens another message
                                              (``ChatCodec.replaces_end``)
    finish(…)    Trajectory
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.context import AgentContext, AgentEvent
from jax_agent_rl.agents.prompt import encode_prompt, row_prompt
from jax_agent_rl.agents.request import EpisodeRequest, Prefix, derive_seed, turn_positions
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.chat.thinking import answer_of, outside_thinking
from jax_agent_rl.errors import PromptTooLongError
from jax_agent_rl.rollout.merge_outputs import merge_outputs
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.registry import list_schemas
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
    join_media,
)
from jax_agent_rl.utils.media import text_message

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec

_METRICS = ("generate_seconds", "tool_seconds", "prompt_tokens", "cached_tokens")


class Episode:
    """The trajectory of one run of an agent loop.

    Args:
        context: of the request, see :meth:`AgentContext.for_request`.
        request: with a prefix, the prompt is not rendered again; turn k samples with a seed derived
            from ``sampling.seed`` and k.
        tools: tools described in the prompt (unless ``agent.tool_prompt`` is ``none``).
        opening: messages that follow the row's prompt, e.g. an environment's first observation.
        tool_schemas: further tools described in the prompt, in OpenAI's format.

    Attributes:
        turns: assistant turns so far.
        messages: the conversation as text: the row's prompt, then what was decoded from ids.

    Raises:
        DataError: the row's ``prompt`` is not a list of messages.
        PromptTooLongError: the prompt has more ids than ``agent.max_prompt_length``.
        TemplateError: the chat template cannot render the prompt.
    """

    def __init__(
        self,
        context: AgentContext,
        request: EpisodeRequest,
        *,
        agent_name: str,
        tools: Mapping[str, BaseTool],
        opening: Sequence[Mapping[str, Any]] = (),
        tool_schemas: Sequence[Mapping[str, Any]] = (),
    ):
        self.request = request
        self.turns: list[Turn] = []
        self._prompt = row_prompt(request.row, opening)
        self.messages: list[Mapping[str, Any]] = [text_message(message) for message in self._prompt]
        self._context = context
        self._agent_name = agent_name
        self._schemas: tuple[Mapping[str, Any], ...] = ()
        if context.limits.tool_prompt == "template":
            self._schemas = (*list_schemas(tools), *tool_schemas)
        self._metrics: dict[str, float] = dict.fromkeys(_METRICS, 0.0)
        self._partial_turn: TokenOutput | None = None  # the inherited part of the next turn
        self._request_id: str | None = None  # the request that is being sampled
        # The same turn's ids from earlier requests.
        self._sampled_before_request: TokenOutput | None = None
        self._begins_thinking = False  # the context of the last turn opened a think block

        prefix = request.prefix
        if prefix is None:
            self._encode_prompt()
            self._ids = list(self._prompt_ids)
            self._check_prompt_length()
        else:
            self.turns = list(prefix.turns)
            self.messages = list(prefix.messages)
            self._prompt_ids = prefix.prompt_ids
            self._prompt_media = prefix.prompt_media
            self._partial_turn = prefix.partial_turn
            self._ids = prefix.context_ids

        context.episodes[request.trajectory_id] = self

    @property
    def tokens_left(self) -> int:
        """Ids that may still be added, sampled or inserted."""
        response = len(self._ids) - len(self._prompt_ids)
        budget = self._context.limits.max_response_length - response
        return min(budget, self._context.longest - len(self._context_ids()))

    def _turns_in_context(self) -> list[Turn]:
        """Return the turns in the next turn's context.

        These are all turns, or those within ``agent.history_window``.
        """
        window = self._context.limits.history_window or len(self.turns)
        return self.turns[-window:]

    def _context_ids(self) -> list[int]:
        """Return the ids of the next turn's context."""
        turns = self._turns_in_context()
        if len(turns) == len(self.turns):
            return self._ids
        ids = list(self._prompt_ids)
        for turn in turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids

    async def generate(
        self,
        *,
        session_ends: bool = False,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        action_stops: Sequence[str] = (),
        max_tokens: int | None = None,
        grammar: str | None = None,
    ) -> TokenOutput:
        """Sample the next assistant turn from the context so far.

        Args:
            session_ends: whether this is the last turn, after which the engine need not keep the
                context's KV.
            stop: strings that end the turn, besides ``sampling.stop``.
            stop_token_ids: ids that end the turn, besides ``sampling.stop_token_ids``.
            action_stops: strings that end the turn unless they are inside a think block.
            max_tokens: maximum ids of this turn, besides the budgets.
            grammar: what the turn must match, instead of ``sampling.grammar``.

        Raises:
            TokenDriftError: the engine conditioned on other ids than ours.
            AbortedError: the generation was aborted for good.
            BackendError: the engine failed, or returned no id or more than asked for.
        """
        output = self._partial_turn
        self._partial_turn = None
        context_ids = tuple(self._context_ids())
        self._begins_thinking = bool(self.codec.thinking_after(context_ids))

        sampling = self.request.sampling
        limit = min(self.tokens_left, sampling.max_tokens, max_tokens or self.tokens_left)
        seed = sampling.seed
        sampling = replace(
            sampling,
            max_tokens=limit,
            stop=(*sampling.stop, *stop, *action_stops),
            stop_token_ids=(*sampling.stop_token_ids, *stop_token_ids),
            seed=None if seed is None else derive_seed(seed, len(self.turns)),
            grammar=grammar or sampling.grammar,
        )

        start_time = time.perf_counter()
        # An inherited turn may be complete: it was sampled, and only its answer is missing.
        if output is None or output.stop_reason is StopReason.ABORTED:
            output = await self._sample(context_ids, output, sampling, session_ends)
        while self._stopped_while_thinking(output, action_stops):
            if len(output.token_ids) >= limit:
                output = replace(output, stop_reason=StopReason.LENGTH, stop_match=None)
                break
            output = await self._sample(context_ids, output, sampling, session_ends)
        seconds = time.perf_counter() - start_time
        self._metrics["generate_seconds"] += seconds

        self._ids += output.token_ids
        self.turns.append(Turn(output=output))
        text = self.codec.turn_text(output.token_ids, context_ids)
        self.messages.append({"role": "assistant", "content": text})
        self._emit(seconds, output=output)
        return output

    @property
    def codec(self) -> ChatCodec:
        """Messages to ids and back, with the row's arguments for the chat template."""
        return self._context.codec

    def read_turn(self, number: int = -1, tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """Parse a turn.

        Args:
            number: index of the turn, inherited turns included; the last one by default.
            tools: schemas of the tools it may call.
        """
        index = range(len(self.turns))[number]  # counts a negative number from the end
        return read_turn(self.codec, self._prompt_ids, self.turns[: index + 1], tools)

    def spoken_messages(self) -> list[Mapping[str, Any]]:
        """Return the conversation as whoever talks to the policy hears it.

        See :func:`spoken_messages`.
        """
        return spoken_messages(self.codec, self.messages, self._prompt_ids, self.turns)

    async def _sample(
        self,
        context_ids: Sequence[int],
        partial_turn: TokenOutput | None,
        sampling: SamplingParams,
        session_ends: bool,
    ) -> TokenOutput:
        """Return the turn after ``context_ids``, sampled by one request.

        If there is a ``partial_turn``, the request continues it.
        """
        turn_index = len(self.turns)
        trajectory_id = self.request.trajectory_id
        request_id = f"{trajectory_id}/{turn_index}"
        resumed_ids = partial_turn.token_ids if partial_turn else ()
        prompt_ids = (*context_ids, *resumed_ids)
        remaining = replace(sampling, max_tokens=sampling.max_tokens - len(resumed_ids))

        turns = self._turns_in_context()
        media = join_media([self._prompt_media, *(turn.appended_media for turn in turns)])
        # If turns have left the history window, the context is a new one.
        previous_output = partial_turn
        if previous_output is None and turns and len(turns) == len(self.turns):
            previous_output = turns[-1].output

        self._request_id = request_id
        self._sampled_before_request = partial_turn
        try:
            output = await self._context.sample(
                request_id,
                prompt_ids,
                remaining,
                self._metrics,
                label=f"{trajectory_id}: turn {turn_index}",
                previous_output=previous_output,
                session_id=trajectory_id,
                session_ends=session_ends and not self._context.keep_sessions,
                lora=self._context.lora(self.request),
                resumed=len(resumed_ids),
                **{f"{kind}_data": items for kind, items in media.items()},
            )
        finally:
            self._request_id = None

        if partial_turn is None:
            return output

        turn_request = GenerateRequest(
            request_id=request_id, prompt_ids=tuple(context_ids), sampling=sampling
        )
        partial_turn = replace(partial_turn, cached_tokens=output.cached_tokens)
        decode = partial(self.codec.decode, skip_special_tokens=False)
        return merge_outputs(turn_request, partial_turn, output, decode)

    def _stopped_while_thinking(self, output: TokenOutput, action_stops: Sequence[str]) -> bool:
        """Return whether an action stop ended this turn inside a think block."""
        if output.stop_reason is not StopReason.STOP or output.stop_match not in action_stops:
            return False
        text = self.outside_thinking(output)
        return not any(stop in text for stop in action_stops)

    def outside_thinking(self, output: TokenOutput) -> str:
        """Return the text of the turn last sampled, with its think blocks blanked.

        Special tokens are part of the text. Blanks keep its positions. If the context opened a
        think block, the turn begins inside it.
        """
        text = self.codec.decode(output.token_ids, skip_special_tokens=False)
        return outside_thinking(text, thinking=self._begins_thinking)

    def record_calls(self, calls: Sequence[ToolCallRecord], *, seconds: float) -> None:
        """Attach the tool calls of the last turn, which took ``seconds`` of wall time together."""
        self.turns[-1] = replace(self.turns[-1], tool_calls=tuple(calls))
        self._metrics["tool_seconds"] += seconds
        for call in calls:
            self._emit(call.seconds, tool_call=call)

    def append(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        media: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> bool:
        """Insert messages and the next generation prompt after the last turn.

        ``media`` holds the images and videos of the messages by kind, in order. A message that
        shows some lists their kinds under its key ``media`` (:func:`media_kinds`), e.g.
        ``["image"]``.

        Returns:
            False, and nothing is inserted, if that would leave no room for a sampled id.

        Raises:
            TemplateError: the chat template, or the model, cannot show them.
        """
        ids = self.codec.expand_media(self.encode_append(messages), media or {})
        return self.append_ids(ids, messages, media=media)

    def encode_append(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids that :meth:`append` would insert."""
        last = self.turns[-1].output.token_ids
        return self.codec.encode_append(last, messages, tools=self._schemas)

    def append_ids(
        self,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        media: Mapping[str, tuple[Any, ...]] | None = None,
        learn: bool = False,
    ) -> bool:
        """Insert ids unchanged after the last turn; they may replace its stop token.

        Args:
            messages: the same content for people and reward functions.
            media: as in :meth:`append`.
            learn: whether the ids carry loss.

        Returns:
            False, and nothing is inserted, if that would leave no room for a sampled id.
        """
        output = self.turns[-1].output
        replaces_end = self.codec.replaces_end(output.token_ids, ids)
        added = len(ids) - 1 if replaces_end else len(ids)
        if added >= self.tokens_left:
            return False

        if replaces_end:
            output = output.first(len(output.token_ids) - 1)
            self._ids.pop()
        self.turns[-1] = replace(
            self.turns[-1],
            output=output,
            appended_ids=tuple(ids),
            appended_media=media or {},
            learn_appended=learn,
        )
        self._ids += ids
        self.messages += messages
        return True

    def extend_prompt(
        self, messages: Sequence[Mapping[str, Any]], ids: Sequence[int] | None = None
    ) -> None:
        """Add messages to the prompt, before the first turn.

        Args:
            messages: follow the row's own messages.
            ids: the ids of ``messages``, placed after the generation prompt; None renders the
                prompt again.

        Raises:
            PromptTooLongError: the prompt is now longer than ``agent.max_prompt_length``.
            TemplateError: the chat template cannot render it.
        """
        self._prompt += messages
        self.messages += [text_message(message) for message in messages]
        if ids is None:
            self._encode_prompt()
        else:
            self._prompt_ids += tuple(ids)
        self._ids = list(self._prompt_ids)
        self._check_prompt_length()

    def _encode_prompt(self) -> None:
        continue_last = bool(self.request.row.get("continue_final_message"))
        self._prompt_ids, self._prompt_media = encode_prompt(
            self.codec, self._prompt, self._schemas, continue_last=continue_last
        )

    def add_score(self, score: float) -> None:
        """Add to ``Turn.score`` of the last turn."""
        turn = self.turns[-1]
        self.turns[-1] = replace(turn, score=(turn.score or 0.0) + score)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to ``Trajectory.metrics``."""
        for key, value in metrics.items():
            self._metrics[key] = self._metrics.get(key, 0.0) + value

    def progress(self) -> Prefix | None:
        """Return what another process can continue from.

        None if nothing was sampled yet, or if a checkpoint cannot hold it: images, videos, routed
        experts.
        """
        turns = self.turns
        messages = self.messages
        partial_turn = self._partial_turn
        if self._request_id is not None:
            partial_turn = self._sampled_before_request
            streamed = self._context.client.partial(self._request_id)
            if streamed is not None:
                partial_turn = streamed if partial_turn is None else partial_turn.then(streamed)
        elif partial_turn is None and turns and not turns[-1].appended_ids:
            # The last turn was sampled but not answered yet: the other process only answers it.
            partial_turn = turns[-1].output
            turns = turns[:-1]
            messages = messages[: turn_positions(tuple(messages), len(self.turns))[-1]]

        outputs = [turn.output for turn in turns]
        if partial_turn is not None:
            outputs.append(partial_turn)
        shows_media = self._prompt_media or any(turn.appended_media for turn in turns)
        if not outputs or shows_media or any(output.routed_experts for output in outputs):
            return None

        prefix = self.request.prefix
        snapshots = self._context.environments.snapshots
        return Prefix(
            fork=prefix.fork if prefix else None,
            prompt_ids=tuple(self._prompt_ids),
            prompt_media={},
            turns=tuple(turns),
            partial_turn=partial_turn,
            messages=tuple(messages),
            snapshot=snapshots.newest(self.request.trajectory_id, len(turns)),
        )

    def finish(
        self,
        reason: FinishReason,
        *,
        tool_scores: Mapping[str, float] | None = None,
        no_loss: DropReason | None = None,
    ) -> Trajectory:
        """Return the trajectory, not scored yet.

        Args:
            reason: why it ended.
            tool_scores: the result of :meth:`ToolSession.calc_rewards`.
            no_loss: why its ids carry no loss, see :class:`~jax_agent_rl.types.Trajectory`.
        """
        request = self.request
        calls = 0
        errors = 0
        for turn in self.turns:
            calls += len(turn.tool_calls)
            errors += sum(call.error is not None for call in turn.tool_calls)
        self.add_metrics({"tool_calls": calls, "tool_errors": errors})

        return Trajectory.from_turns(
            prompt_ids=self._prompt_ids,
            prompt_media=self._prompt_media,
            turns=self.turns,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            agent_name=self._agent_name,
            finish_reason=reason,
            no_loss=no_loss,
            metrics=self._metrics,
            row=request.row,
            messages=tuple(self.messages),
            tool_scores=tool_scores or {},
            fork=request.prefix.fork if request.prefix else None,
            history_window=self._context.limits.history_window,
            role=request.role,
            adapter=self._context.trained_adapter(request.role),
        )

    def _check_prompt_length(self) -> None:
        length = len(self._prompt_ids)
        exceeded = self._context.exceeded_limits(
            prompt_length=length, response_length=0, context_length=length
        )
        if exceeded:
            pronoun = "it" if len(exceeded) == 1 else "them"
            raise PromptTooLongError(
                f"the prompt has {length} ids, which leaves no room within"
                f" {' and '.join(exceeded)}; raise {pronoun} or shorten the prompt"
            )

    def _emit(
        self,
        seconds: float,
        *,
        output: TokenOutput | None = None,
        tool_call: ToolCallRecord | None = None,
    ) -> None:
        """Tell the listener of a generation or a tool call of the last turn."""
        event = AgentEvent(
            trajectory_id=self.request.trajectory_id,
            turn=len(self.turns) - 1,
            seconds=seconds,
            output=output,
            tool_call=tool_call,
        )
        self._context.on_event(event)


def read_turn(
    codec: ChatCodec,
    prompt_ids: Sequence[int],
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Reply:
    """Parse the last of ``turns``, which are a trajectory's so far.

    ``tools`` are the schemas that it may call.
    """
    context_ids = list(prompt_ids)
    for turn in turns[:-1]:
        context_ids += turn.output.token_ids + turn.appended_ids
    return codec.parse_reply(turns[-1].output.token_ids, tools, context_ids=context_ids)


def spoken_messages(
    codec: ChatCodec,
    messages: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[int],
    turns: Sequence[Turn],
) -> list[Mapping[str, Any]]:
    """Return a conversation as whoever talks to the policy hears it.

    That is without its thoughts and its calls. The last assistant messages are the ``turns``; the
    ones before them belong to the prompt.
    """
    spoken = list(messages)
    positions = turn_positions(tuple(messages), len(turns))
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if position in positions:
            turn_count = positions.index(position) + 1
            content = read_turn(codec, prompt_ids, turns[:turn_count]).content
        else:
            content = answer_of(message["content"]).strip()
        spoken[position] = {**message, "content": content}
    return spoken


def media_kinds(media: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the kind of each image and video, as a message lists them under ``media``."""
    kinds = []
    for kind, items in media.items():
        kinds += [kind] * len(items)
    return kinds

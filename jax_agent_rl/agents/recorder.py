"""Token-exact sessions for agents that speak in messages: their requests become recorded ids.

A framework sends its whole conversation each time. The recorder finds the turn it continues and
appends to that turn's *ids*; text that the model wrote is never tokenized again. If several samples
have the same text, the request continues the one whose reasoning and call ids come back, or else
the last one::

    request                                      what it is                        tree
    1  [system, user]                            no turn on record: rendered       root A
    2  [system, user, assistant A, tool]         extends A: A's ids + the tool's   A ─► B
    3  [system, user, assistant A, tool]         the same again: a sibling         A ─► C
    4  [system, "summary of what was", user]     edited history: rendered again    root D
    5  [system, user, assistant A, tool, X,      X is not on record: extends A     A ─► E
        user]

    tree  A ─┬─► B        sequences  [A B]    mask 1 on A and B
             ├─► C                   [A C]    mask 1 on C: A is trained on once
             └─► E                   [A E]    mask 1 on E; X is context, like the tool's result
          D                          [D]      mask 1 on D

So a request continues the longest beginning of its conversation that is on record. ``metrics``
count the requests whose later assistant messages were not on record (``spliced_calls``), and
requests without any recorded beginning (``unmatched_calls``). ``RecordedTurn.note`` says at which
message a request left the record.

The last turn's path is the trajectory. Other paths become its ``segments``, samples of the same
context (best of n, a retry) included: what was sampled is trained on. ``lost_requests`` counts
requests without a turn on record, because they failed or their client left.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from jax_agent_rl.agents.context import AgentContext, AgentEvent
from jax_agent_rl.agents.conversation import (
    ChatReply,
    Fingerprints,
    OnText,
    Traces,
    TurnStream,
    first_difference,
    plain_messages,
    raw_parts,
    read_reply,
)
from jax_agent_rl.agents.prompt import SessionImages, for_template, without_data
from jax_agent_rl.agents.request import derive_seed
from jax_agent_rl.agents.session_tree import RecordedTurn, TurnRequest
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import (
    HistoryEditedError,
    PromptTooLongError,
    TemplateError,
    TrajectoryError,
    TurnRefusedError,
)
from jax_agent_rl.tracing import current, under
from jax_agent_rl.types import FinishReason, SamplingParams, StopReason, TokenOutput, digest_ids

logger = logging.getLogger(__name__)
_METRICS = (
    "generate_seconds",
    "prompt_tokens",
    "cached_tokens",
    "spliced_calls",
    "unmatched_calls",
    "lost_requests",
)


OnPrompt = Callable[[tuple[int, ...]], None]
"""Receives the ids that a turn is sampled after."""


class ChatRecorder:
    """One session; its requests may run concurrently.

    Args:
        context: the run's shared objects; its length limits hold for each context, its turn limits
            for the session.
        session_id: id of the trajectory; keeps its requests on one server.
        adapter: LoRA adapter to sample with; None is ``agent.adapter``.

    Attributes:
        turns: completed turns, in order.
        metrics: seconds and counts for ``Trajectory.metrics``.
        refused: the limit that refused a turn, unless one was sampled since.
        failure: the error of the last request, if it failed: the reason of a drop.
    """

    def __init__(
        self, context: AgentContext, *, session_id: str, adapter: str | None = None
    ) -> None:
        self.turns: list[RecordedTurn] = []
        self.metrics: dict[str, float] = dict.fromkeys(_METRICS, 0.0)
        self.refused: FinishReason | None = None
        self.failure: TrajectoryError | None = None
        self.session_id = session_id
        self.context = context
        self._adapter = adapter or context.limits.adapter
        self._span = current()  # requests come in tasks of the HTTP server
        self._by_conversation: dict[str, list[RecordedTurn]] = {}
        self._images = SessionImages(max_pixels=context.limits.endpoint.max_session_pixels)
        # Requests so far by their context, which seeds derive from.
        self._requests: Counter[str] = Counter()
        # Tools looked for in a prompt that does not describe them.
        self._hidden: set[tuple[str, ...]] = set()
        self._open = 0  # requests that are being sampled

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: SamplingParams,
        on_prompt: OnPrompt | None = None,
        on_text: OnText | None = None,
        adapter: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> RecordedTurn:
        """Sample the next turn of a conversation.

        Args:
            messages: the whole conversation, OpenAI-style.
            tools: schemas in OpenAI's format; in the prompt unless ``agent.tool_prompt`` is
                ``none``.
            sampling: ``max_tokens`` caps the turn, besides the budgets. ``seed`` is the session's:
                what a request samples with is derived from it and from its context, so it does not
                matter what runs beside it.
            on_prompt: receives the ids that the turn is sampled after, before any text.
            on_text: receives the turn's text as it is sampled, all of it before the turn is
                returned. Only for requests without tools: whether text is a call shows at its end.
            adapter: LoRA adapter to sample with; None is the session's.
            template_kwargs: further arguments of the chat template for this request.
            continue_last: the last message, of the assistant, is the beginning of the turn to
                sample.

        Raises:
            TurnRefusedError: a budget allows no further turn.
            TrajectoryError: this request failed; ``failure`` keeps it.
        """
        with self._remember_failure():
            codec = self._codec(template_kwargs)
            plain = plain_messages(messages, self.context.modalities)
            schemas = self._prompt_tools(tools)
            if tools and not schemas:
                self._warn_if_hidden(tools, plain)

            prefill = _take_prefill(plain) if continue_last else None
            traces = [Traces.of(message) for message in messages[: len(plain)]]
            fingerprints = Fingerprints(plain, schemas)
            request = self._resolve_chat(codec, plain, schemas, traces, fingerprints)
            if prefill is not None:
                request = _with_prefill(request, prefill, codec, schemas)

            context_ids = request.prompt_ids
            if on_prompt is not None:
                on_prompt(context_ids)
            stream = None
            if on_text is not None:
                stream = TurnStream.of_chat(
                    codec, context_ids, stop=sampling.stop, on_text=on_text, continues=continue_last
                )
            output = await self._sample(request, sampling, stream, adapter)
            reply = read_reply(
                codec,
                output,
                tools=tools,
                stop=sampling.stop,
                context_ids=context_ids,
                continues=continue_last,
            )
            if stream is not None:
                reply = stream.finish(reply)

            turn = self._record(request, output, reply, max_tokens=sampling.max_tokens)
            conversation = fingerprints.add(turn.message)
            self._by_conversation.setdefault(conversation, []).append(turn)
            return turn

    def count_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> int:
        """Return how many ids a conversation is; arguments as in :meth:`chat`.

        Raises:
            TemplateError: the model cannot read it.
        """
        codec = self._codec(template_kwargs)
        plain = plain_messages(messages, self.context.modalities)
        schemas = self._prompt_tools(tools)
        prefill = _take_prefill(plain) if continue_last else None
        request = self._render(codec, plain, schemas)
        if prefill is not None:
            request = _with_prefill(request, prefill, codec, schemas)
        return len(request.prompt_ids)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams,
        on_prompt: OnPrompt | None = None,
        on_text: OnText | None = None,
        adapter: str | None = None,
    ) -> RecordedTurn:
        """Continue a raw prompt, given as text with special tokens or as ids, without a template.

        A prompt that begins with a recorded prompt and what was sampled for it extends that turn.

        Raises:
            TurnRefusedError, TrajectoryError: as :meth:`chat`.
        """
        with self._remember_failure():
            codec = self.context.codec
            if isinstance(prompt, str):
                request = self._resolve_text(prompt)
            else:
                request = self._resolve_ids(tuple(prompt))

            if on_prompt is not None:
                on_prompt(request.prompt_ids)
            stream = None
            if on_text is not None:
                stream = TurnStream.of_text(codec, stop=sampling.stop, on_text=on_text)
            output = await self._sample(request, sampling, stream, adapter)

            reply = read_reply(
                codec, output, tools=(), stop=sampling.stop, context_ids=request.prompt_ids
            )
            # A client that renders prompts itself also reads turns itself: it gets all of the text.
            parts = raw_parts(codec.decode(output.token_ids), sampling.stop)
            reply = replace(reply, parts=parts)
            if stream is not None:
                reply = stream.finish(reply)
            return self._record(request, output, reply, max_tokens=sampling.max_tokens)

    def _codec(self, template_kwargs: Mapping[str, Any] | None) -> ChatCodec:
        codec = self.context.codec
        if not template_kwargs:
            return codec
        try:
            return codec.with_template_kwargs(template_kwargs)
        except ValueError as error:
            raise TemplateError(f"chat_template_kwargs {error}") from None

    @contextmanager
    def _remember_failure(self) -> Iterator[None]:
        try:
            yield
        except TrajectoryError as error:
            self.failure = error
            raise

    # --- requests to ids --------------------------------------------------------------------------

    def _resolve_chat(
        self,
        codec: ChatCodec,
        plain: list[dict[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        traces: Sequence[Traces],
        fingerprints: Fingerprints,
    ) -> TurnRequest:
        """Append to the longest recorded beginning of the conversation.

        If no beginning is on record, the whole conversation is rendered.
        """
        # Where each assistant message ends: what is on record is a beginning up to one of them.
        ends = [i + 1 for i, message in enumerate(plain) if message["role"] == "assistant"]
        for count in range(len(ends), 0, -1):
            end = ends[count - 1]
            is_last = count == len(ends)
            new_messages = plain[end:]
            if not new_messages:
                continue

            # Samples of the same text differ in their reasoning and call ids. The last one counts
            # if several agree equally well.
            candidates = self._by_conversation.get(fingerprints.first(end), ())
            replies = [traces[i - 1] for i in ends[:count]]
            parent = max(
                candidates,
                key=lambda turn: (_agreement(turn, replies), turn.number),
                default=None,
            )
            if parent is None:
                continue

            sampled_ids = parent.output.token_ids
            media = self._images.read(new_messages)
            try:
                ids = codec.encode_append(sampled_ids, for_template(new_messages), tools=schemas)
                ids = codec.expand_media(ids, media)
            except TemplateError:
                if is_last:
                    raise
                break  # this template shows such messages in whole conversations only

            note = ""
            if not is_last:
                self.metrics["spliced_calls"] += 1
                note = self._difference(plain, parent)
            return TurnRequest(
                parent=parent,
                inserted_ids=tuple(ids),
                inserted=tuple(without_data(message) for message in new_messages),
                inserted_media=media,
                replaces_end=codec.replaces_end(sampled_ids, ids),
                note=note,
            )

        if ends and self.turns:
            self.metrics["unmatched_calls"] += 1
        return replace(self._render(codec, plain, schemas), note=self._difference(plain))

    def _render(
        self, codec: ChatCodec, plain: list[dict[str, Any]], schemas: Sequence[Mapping[str, Any]]
    ) -> TurnRequest:
        media = self._images.read(plain)
        ids = codec.encode_prompt(for_template(plain), tools=schemas)
        ids = codec.expand_media(ids, media)
        return TurnRequest(
            inserted_ids=tuple(ids),
            inserted=tuple(without_data(message) for message in plain),
            inserted_media=media,
        )

    def _difference(
        self, plain: Sequence[Mapping[str, Any]], parent: RecordedTurn | None = None
    ) -> str:
        """Say where a conversation leaves those on record; nothing if it is the first.

        It is compared with all of them, or with those that go through ``parent``, the turn that it
        continues.
        """
        parents = {turn.parent for turn in self.turns}
        conversations = []
        for turn in self.turns:
            if turn in parents:
                continue  # a part of its children's conversations
            path = turn.path()
            if parent is not None and parent not in path:
                continue
            conversation: list[Mapping[str, Any]] = []
            for step in path:
                conversation += [*step.inserted, step.message]
            conversations.append(conversation)
        return first_difference(plain, conversations) if conversations else ""

    def _prompt_tools(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the prompt describes."""
        if self.context.limits.tool_prompt != "template":
            return ()
        return tuple(tools)

    def _warn_if_hidden(
        self, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
    ) -> None:
        """Warn if no message mentions one of the tools.

        Conversations grow, so only their first request is read.
        """
        names: tuple[str, ...] = ()
        for tool in tools:
            function = tool.get("function") or tool
            names += (str(function.get("name")),)
        if names in self._hidden:
            return
        self._hidden.add(names)
        for message in messages:
            content = str(message.get("content"))
            if any(name in content for name in names):
                return
        _warn_about_hidden(names)

    def _resolve_text(self, prompt: str) -> TurnRequest:
        """Append to the longest recorded context that the prompt begins with."""
        codec = self.context.codec
        parent = None
        parent_length = 0
        for turn in self.turns:
            text = codec.decode(turn.context_ids, skip_special_tokens=False)
            if parent_length < len(text) < len(prompt) and prompt.startswith(text):
                parent = turn
                parent_length = len(text)
        new_text = prompt[parent_length:]
        return self._raw_request(parent, tuple(codec.encode_markup(new_text)), new_text)

    def _resolve_ids(self, ids: tuple[int, ...]) -> TurnRequest:
        """Append to the longest recorded context that the prompt begins with."""
        parent = None
        parent_length = 0
        for turn in self.turns:
            length = len(turn.context_ids)
            if parent_length < length < len(ids) and ids[:length] == turn.context_ids:
                parent = turn
                parent_length = length
        new_ids = ids[parent_length:]
        new_text = self.context.codec.decode(new_ids, skip_special_tokens=False)
        return self._raw_request(parent, new_ids, new_text)

    def _raw_request(
        self, parent: RecordedTurn | None, ids: tuple[int, ...], text: str
    ) -> TurnRequest:
        """Return a request that inserts ids after a turn; ``text`` is theirs."""
        inserted = ({"role": "user", "content": text},)
        note = "" if parent else self._difference(inserted)
        return TurnRequest(parent=parent, inserted_ids=ids, inserted=inserted, note=note)

    # --- sampling ---------------------------------------------------------------------------------

    async def _sample(
        self,
        request: TurnRequest,
        sampling: SamplingParams,
        stream: TurnStream | None,
        adapter: str | None,
    ) -> TokenOutput:
        """Sample the turn of a request; its pieces go to ``stream`` as they come."""
        prompt_ids = request.prompt_ids
        self._check_room(request)
        self._check_edit(request)

        seed = sampling.seed
        context_digest = digest_ids(prompt_ids)
        if seed is not None:
            # Derived from the context, so that the order of concurrent requests does not matter.
            seed = derive_seed(seed, context_digest, self._requests[context_digest])
        self._requests[context_digest] += 1
        number = self._requests.total()
        max_tokens = min(self._room(request), sampling.max_tokens)
        sampling = replace(sampling, max_tokens=max_tokens, seed=seed)

        self._open += 1
        self.metrics["lost_requests"] += 1  # until it has an answer
        start_time = time.perf_counter()
        try:
            with under(self._span):
                output = await self.context.sample(
                    f"{self.session_id}/{number}",
                    prompt_ids,
                    sampling,
                    self.metrics,
                    label=f"{self.session_id}: request {number}",
                    previous_output=request.parent.output if request.parent else None,
                    session_id=self.session_id,
                    on_ids=stream.on_ids if stream is not None else None,
                    lora=adapter or self._adapter,
                    image_data=request.media.get("image"),
                )
        finally:
            self._open -= 1
        seconds = time.perf_counter() - start_time
        self.metrics["lost_requests"] -= 1
        self.metrics["generate_seconds"] += seconds
        event = AgentEvent(
            trajectory_id=self.session_id,
            turn=len(self.turns),
            seconds=seconds,
            output=output,
        )
        self.context.on_event(event)
        return output

    def _record(
        self, request: TurnRequest, output: TokenOutput, reply: ChatReply, *, max_tokens: int
    ) -> RecordedTurn:
        """Add a turn to the session; ``max_tokens`` is what the client asked for."""
        is_cut = output.stop_reason is StopReason.LENGTH and len(output.token_ids) >= max_tokens
        request_fields = {field.name: getattr(request, field.name) for field in fields(request)}
        turn = RecordedTurn(
            **request_fields,
            number=len(self.turns),
            output=output,
            context_ids=request.prompt_ids + output.token_ids,
            reply=reply,
            text=self.context.codec.turn_text(output.token_ids, request.prompt_ids),
            cut_by_client=is_cut and max_tokens < self._room(request),
        )
        self.turns.append(turn)
        self.refused = None
        self.failure = None
        return turn

    def _room(self, request: TurnRequest) -> int:
        """Return how many ids the budgets leave for this turn."""
        context_length = len(request.prompt_ids)
        response_length = context_length - request.prompt_length
        response_room = self.context.limits.max_response_length - response_length
        return min(response_room, self.context.longest - context_length)

    def _check_room(self, request: TurnRequest) -> None:
        """Check that the budgets allow this turn.

        Raises:
            PromptTooLongError: the session's first prompt does not fit.
            TurnRefusedError: a later turn does not, or there were enough turns.
        """
        limits = self.context.limits
        if len(self.turns) + self._open >= limits.max_assistant_turns:
            message = f"agent.max_assistant_turns={limits.max_assistant_turns} is reached"
            raise self._refusal(message, FinishReason.MAX_ASSISTANT_TURNS)
        if request.parent is not None:
            user_turns = sum(turn.parent is not None for turn in self.turns)
            if user_turns >= limits.max_user_turns:
                message = f"agent.max_user_turns={limits.max_user_turns} is reached"
                raise self._refusal(message, FinishReason.MAX_USER_TURNS)

        context_length = len(request.prompt_ids)
        exceeded = self.context.exceeded_limits(
            prompt_length=request.prompt_length,
            response_length=context_length - request.prompt_length,
            context_length=context_length,
        )
        if not exceeded:
            return
        pronoun = "it" if len(exceeded) == 1 else "them"
        message = (
            f"a context of {context_length} ids ({request.prompt_length} of them the prompt) leaves"
            f" no room within {' and '.join(exceeded)}; raise {pronoun} or shorten the conversation"
        )
        if not self.turns:
            raise PromptTooLongError(message)
        raise self._refusal(message, FinishReason.RESPONSE_LENGTH)

    def _refusal(self, message: str, reason: FinishReason) -> TurnRefusedError:
        self.refused = reason
        return TurnRefusedError(f"{self.session_id}: {message}", reason)

    def _check_edit(self, request: TurnRequest) -> None:
        """Raise HistoryEditedError if the request leaves the last turn and must not.

        ``agent.edited_history`` says whether it may.
        """
        if self.context.limits.edited_history == "segment":
            return
        if not self.turns or request.parent is self.turns[-1]:
            return
        last_number = self.turns[-1].number
        message = f"{self.session_id}: a request does not extend turn {last_number}, the last one"
        if request.note:
            message += f": {request.note}"
        raise HistoryEditedError(
            f"{message}; set agent.edited_history=segment to train on both contexts"
        )


def _take_prefill(plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Remove the last message of a conversation, which a turn is to continue, and return it.

    Raises:
        TemplateError: it is not the assistant's.
    """
    role = plain[-1]["role"]
    if role != "assistant":
        raise TemplateError(
            f"the last message is of role {role!r}; only an assistant's can be continued"
        )
    return plain.pop()


def _with_prefill(
    request: TurnRequest,
    prefill: Mapping[str, Any],
    codec: ChatCodec,
    schemas: Sequence[Mapping[str, Any]],
) -> TurnRequest:
    """Return a request whose turn begins with an assistant message."""
    ids = codec.encode_prefill(prefill, schemas)
    return replace(
        request,
        inserted_ids=(*request.inserted_ids, *ids),
        prefill=prefill["content"],
    )


def _agreement(turn: RecordedTurn, replies: Sequence[Traces]) -> int:
    """Count the traces of assistant messages that agree with the turns up to this one."""
    agreeing = 0
    # From the end, as the prompt may hold assistant messages before the first turn.
    for recorded, trace in zip(reversed(turn.path()), reversed(replies), strict=False):
        reply = recorded.reply
        if (trace.reasoning or "").strip() == (reply.reasoning or "").strip():
            agreeing += 1
        if trace.call_ids == tuple(call.id for call in reply.tool_calls):
            agreeing += 1
    return agreeing


@functools.cache  # once for the same tools
def _warn_about_hidden(names: tuple[str, ...]) -> None:
    logger.warning(
        f"the model is not told of the tools {', '.join(names)} that a request carries, because"
        " agent.tool_prompt=none leaves them out of the prompt and no message names one; remove"
        " that key, or describe them in the rows"
    )

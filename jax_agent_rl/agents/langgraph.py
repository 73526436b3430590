"""The policy as LangChain's chat model, :class:`ChatModel`; tools as :class:`TrajectoryTool`.

Needs the extra ``langgraph``; nothing else of the package imports LangChain. Every call of the
model is a turn on record; ``AIMessage.response_metadata`` holds, for the context that the message
ends::

    prompt_ids         the rendered prompt it began with
    response_ids       everything after it, this message's ids last
    response_mask      1 = sampled by the policy
    rollout_logprobs   of the distribution sampled from; 0 where the mask is 0
    policy_versions    of each sampled id; -1 where the mask is 0
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
    ToolMessage,
)
from langchain_core.messages import convert_to_openai_messages as to_openai
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool as LangChainTool
from langchain_core.tools import ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langgraph.graph import END, MessagesState
from langgraph.prebuilt import ToolNode
from pydantic import ConfigDict, Field, SkipValidation

from jax_agent_rl.agents.conversation import MalformedCall, OnText
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import RecordedTurn, path_arrays
from jax_agent_rl.agents.tool_agent import malformed_call
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.types import SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")
Event = str | RecordedTurn | BaseException
"""New text; at last the turn; or why there is none."""


class ChatModel(BaseChatModel):
    """Chats with the policy in one recorded session.

    Other event loops than the engine's and plain threads may use it too: their calls run there.

    Attributes:
        recorder: the session. Models of one trajectory may share it.
        sampling: how the policy samples. A call may lower ``max_tokens`` and give ``stop``; nothing
            else.
        max_tokens: cap of every call, besides ``sampling.max_tokens``.
        stop: stop strings of every call.
        loop: the engine's event loop; default the running one.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    recorder: SkipValidation[ChatRecorder]
    sampling: SkipValidation[SamplingParams]
    max_tokens: int | None = None
    stop: list[str] | None = None
    loop: SkipValidation[asyncio.AbstractEventLoop] = Field(
        default_factory=asyncio.get_running_loop, exclude=True
    )

    @property
    def _llm_type(self) -> str:
        return "jax_agent_rl"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """Return the model's description for traces."""
        sampling = self._sampling(stop, kwargs.get("max_tokens"))
        params = LangSmithParams(
            ls_provider="jax_agent_rl",
            ls_model_name=kwargs.get("model", "policy"),
            ls_model_type="chat",
            ls_temperature=self.sampling.temperature,
            ls_max_tokens=sampling.max_tokens,
        )
        if sampling.stop:
            params["ls_stop"] = list(sampling.stop)
        return params

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable | Any],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with these LangChain tools or schemas in its prompt.

        A ``tool_choice`` other than ``auto`` and ``none`` (``any``, a tool's name) only warns:
        forcing a call would not be the policy's own sampling.
        """
        if tool_choice not in (None, "auto", "none"):
            logger.warning(
                "tool_choice=%r does not force the policy to call a tool; ask for it in words",
                tool_choice,
            )
        schemas = []
        if tool_choice != "none":
            schemas = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=schemas, **kwargs)

    # --- one message ------------------------------------------------------------------------------

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        work = self._chat(messages, stop, **kwargs)
        if asyncio.get_running_loop() is self.loop:
            return _result(await work)
        return _result(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(self._from_thread(self._chat(messages, stop, **kwargs)).result())

    def _chat(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        on_text: OnText | None = None,
        **unknown: Any,
    ) -> Coroutine[Any, Any, RecordedTurn]:
        if unknown:
            raise ValueError(
                f"{sorted(unknown)}: a call may set tools, max_tokens and stop;"
                " the run sets the rest"
            )
        return self.recorder.chat(
            openai_messages(messages),
            tools=tools,
            sampling=self._sampling(stop, max_tokens),
            on_text=on_text,
        )

    def _sampling(self, stop: list[str] | None, max_tokens: int | None) -> SamplingParams:
        cap = self.sampling.max_tokens
        if self.max_tokens is not None:
            cap = min(cap, self.max_tokens)
        if max_tokens is not None:
            cap = min(cap, max_tokens)
        return replace(self.sampling, max_tokens=cap, stop=tuple(stop or self.stop or ()))

    # --- a stream ---------------------------------------------------------------------------------

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        emit = partial(asyncio.get_running_loop().call_soon_threadsafe, events.put_nowait)
        pump = asyncio.run_coroutine_threadsafe(
            self._pump(emit, messages, stop, **kwargs), self.loop
        )
        try:
            while True:
                event = await events.get()
                chunk = _chunk(event)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk
                if not isinstance(event, str):
                    return
        finally:
            pump.cancel()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        pump = self._from_thread(self._pump(events.put, messages, stop, **kwargs))
        try:
            while True:
                event = events.get()
                chunk = _chunk(event)
                if run_manager is not None:
                    run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk
                if not isinstance(event, str):
                    return
        finally:
            pump.cancel()

    async def _pump(
        self,
        emit: Callable[[Event], Any],
        messages: list[BaseMessage],
        stop: list[str] | None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        """Emit text once it is certain, then the turn.

        With tools all of it comes at the end, when calls are complete.
        """

        def on_text(text: str, reasoning: str | None) -> None:
            if text:
                emit(text)

        try:
            listener = None if tools else on_text
            turn = await self._chat(messages, stop, tools=tools, on_text=listener, **kwargs)
        except BaseException as error:  # the reader of the stream must not wait forever
            emit(error)
            raise
        if tools and turn.reply.content:
            emit(turn.reply.content)
        emit(turn)

    def _from_thread(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run work on the engine's loop.

        Raises:
            RuntimeError: this is that loop; it would wait for itself.
        """
        try:
            running_loop = asyncio.get_running_loop()
        except RuntimeError:
            running_loop = None
        if running_loop is self.loop:
            work.close()
            raise RuntimeError(
                "invoke() and stream() would block the event loop of the engine;"
                " use ainvoke(), astream()"
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def openai_messages(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    """Return OpenAI-style dicts.

    The model's own messages become text, calls and reasoning, which distinguishes samples of the
    same text.
    """
    plain_messages: list[BaseMessage] = []
    reasonings: list[str | None] = []
    for message in messages:
        if isinstance(message, AIMessage):
            reasonings.append(message.additional_kwargs.get("reasoning_content"))
            message = message.model_copy(update={"content": str(message.text)})
        plain_messages.append(message)

    converted = to_openai(plain_messages)
    openai_messages: list[dict[str, Any]] = (
        converted if isinstance(converted, list) else [converted]
    )
    replies = [message for message in openai_messages if message["role"] == "assistant"]
    for reply, reasoning in zip(replies, reasonings, strict=False):
        if reasoning:
            reply["reasoning_content"] = reasoning
    return openai_messages


def _result(turn: RecordedTurn) -> ChatResult:
    calls = []
    for call in turn.reply.tool_calls:
        calls.append(
            ToolCall(name=call.name, args=dict(call.arguments), id=call.id, type="tool_call")
        )
    invalid_calls = []
    for call in turn.reply.malformed:
        invalid_calls.append(
            InvalidToolCall(
                name=None,
                args=_undecoded(call.text),
                id=call.id,
                error=call.problem,
                type="invalid_tool_call",
            )
        )
    message = AIMessage(
        content=turn.reply.content,
        tool_calls=calls,
        invalid_tool_calls=invalid_calls,
        **_metadata(turn),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(event: Event) -> ChatGenerationChunk:
    """Return a piece of a stream, or raise what the generation raised."""
    if isinstance(event, BaseException):
        raise event
    if isinstance(event, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=event))

    calls: list[ToolCallChunk] = []
    for index, call in enumerate(event.reply.calls):
        if isinstance(call, MalformedCall):
            name = None
            arguments = _undecoded(call.text)
        else:
            name = call.name
            arguments = json.dumps(call.arguments)
        calls.append(
            ToolCallChunk(
                name=name, args=arguments, id=call.id, index=index, type="tool_call_chunk"
            )
        )

    message = AIMessageChunk(
        content="", tool_call_chunks=calls, chunk_position="last", **_metadata(event)
    )
    return ChatGenerationChunk(message=message)


def _undecoded(text: str) -> str:
    """Return the text of a malformed call in a form that LangChain does not take for arguments.

    LangChain completes the JSON of a chunk: a beginning such as ``{"name": "f", "arg`` would become
    a call of no tool.
    """
    try:
        looks_decoded = not text or isinstance(parse_partial_json(text), dict)
    except ValueError:
        looks_decoded = False
    return json.dumps(text) if looks_decoded else text


def _metadata(turn: RecordedTurn) -> dict[str, Any]:
    """Return what a message has besides text and calls: ids, finish reason, usage, reasoning."""
    input_tokens = len(turn.prompt_ids)
    output_tokens = len(turn.output.token_ids)
    usage = UsageMetadata(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
        input_token_details=InputTokenDetails(cache_read=turn.output.cached_tokens),
    )
    additional_kwargs = {}
    if turn.reply.reasoning is not None:
        additional_kwargs["reasoning_content"] = turn.reply.reasoning
    return {
        "response_metadata": {
            "model_name": "policy",
            "finish_reason": turn.reply.finish_reason,
            **path_arrays(turn),
        },
        "usage_metadata": usage,
        "additional_kwargs": additional_kwargs,
    }


_CALL_ID: ContextVar[str | None] = ContextVar("tool_call_id", default=None)


class TrajectoryTool(LangChainTool):
    """One tool of one trajectory; limits, timeouts, truncation and rewards are the tool agent's.

    Attributes:
        session: where it runs.
        recorder: knows which turn made a call; the result is attached to it and reaches the reward
            function.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    session: SkipValidation[ToolSession]
    recorder: SkipValidation[ChatRecorder]

    @classmethod
    def wrap(cls, tool: BaseTool, *, session: ToolSession, recorder: ChatRecorder):
        """Return a tool as a LangChain tool."""
        return cls(
            name=tool.name,
            description=tool.description,
            args_schema=dict(tool.parameters),
            session=session,
            recorder=recorder,
        )

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See LangChain; remembers which call of the model this is."""
        token = _CALL_ID.set(input.get("id") if isinstance(input, dict) else None)
        try:
            return await super().ainvoke(input, config, **kwargs)
        finally:
            _CALL_ID.reset(token)

    def _run(self, *args: Any, **kwargs: Any) -> str:
        raise ToolException(f"tool {self.name!r} runs in the engine's event loop; use ainvoke()")

    async def _arun(self, **arguments: Any) -> str:
        turn, index, earlier_calls = self._find_call(_CALL_ID.get())
        record = await self.session.call(self.name, arguments, earlier_calls=earlier_calls)
        if turn is not None:
            turn.results[index] = record
        return record.observation

    def _find_call(self, call_id: str | None) -> tuple[RecordedTurn | None, int, int]:
        """Find the turn that made a call.

        Returns:
            The turn, or None if the graph called the tool itself; the call's index among the turn's
            calls; and how many decoded calls precede it.
        """
        for turn in reversed(self.recorder.turns):
            earlier_calls = 0
            for index, call in enumerate(turn.reply.calls):
                if call.id == call_id:
                    return turn, index, earlier_calls
                if not isinstance(call, MalformedCall):
                    earlier_calls += 1
        return None, 0, 0


class CallNode:
    """A node that answers every call of the last message, in the order of the calls.

    Malformed calls are answered with an error; LangGraph's ``ToolNode`` runs the others.
    ``recorder`` knows the calls of a message.
    """

    def __init__(self, recorder: ChatRecorder, tools: Sequence[TrajectoryTool]) -> None:
        self._recorder = recorder
        self._session = tools[0].session if tools else None
        self._node = ToolNode(tools)

    async def __call__(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        """Return the results as messages."""
        message = state["messages"][-1]
        assert isinstance(message, AIMessage)
        results: list[BaseMessage] = []
        if message.tool_calls:
            results = (await self._node.ainvoke(state, config))["messages"]
        if not message.invalid_tool_calls or self._session is None:
            return {"messages": results}

        by_id: dict[str, ToolMessage] = {}
        for result in results:
            if isinstance(result, ToolMessage):
                by_id[result.tool_call_id] = result
        turn = self._find_turn({call["id"] for call in message.invalid_tool_calls})
        for index, call in enumerate(turn.reply.calls):
            if isinstance(call, MalformedCall):
                record = malformed_call(
                    self._recorder.context, self._session, wrote=turn.text, problem=call.problem
                )
                turn.results[index] = record
                by_id[call.id] = ToolMessage(
                    record.observation, tool_call_id=call.id, status="error"
                )
        return {"messages": [by_id[call.id or ""] for call in turn.reply.calls]}

    def _find_turn(self, malformed_ids: set[str | None]) -> RecordedTurn:
        """Return the last turn that has one of these malformed calls."""
        for turn in reversed(self._recorder.turns):
            if any(call.id in malformed_ids for call in turn.reply.malformed):
                return turn
        raise ValueError(f"no recorded turn has a malformed call with an id among {malformed_ids}")


def calls_condition(state: MessagesState) -> str:
    """Return the next node of a graph that has a :class:`CallNode` named ``tools``.

    It is that node if the last message has calls. A turn that was cut ends the graph; what it began
    to write of a call is not a mistake.
    """
    message = state["messages"][-1]
    if getattr(message, "tool_calls", None):
        return "tools"
    is_cut = message.response_metadata.get("finish_reason") == "length"
    if getattr(message, "invalid_tool_calls", None) and not is_cut:
        return "tools"
    return END

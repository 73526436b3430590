"""The run's tools as LangChain tools: they run in the trajectory's tool session, and their results are on record."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool as LangChainTool
from langchain_core.tools import ToolException
from pydantic import ConfigDict, SkipValidation

from jax_agent_rl.agents.recorder import ChatRecorder, RecordedTurn
from jax_agent_rl.agents.tool_agent import over_the_limit
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.session import ToolSession

_CALL_ID: ContextVar[str | None] = ContextVar("tool_call_id", default=None)


class TrajectoryTool(LangChainTool):
    """One tool of one trajectory: limits, timeouts, truncation and rewards are those of the tool agent.

    Attributes:
        session: where it runs.
        recorder: knows which turn made a call; the result is attached to it and reaches the reward function.
        max_parallel_calls: calls of a turn that are run; further ones answer with an error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    session: SkipValidation[ToolSession]
    recorder: SkipValidation[ChatRecorder]
    max_parallel_calls: int

    @classmethod
    def wrap(cls, tool: BaseTool, *, session: ToolSession, recorder: ChatRecorder, max_parallel_calls: int):
        """Return a tool as a LangChain tool."""
        return cls(
            name=tool.name,
            description=tool.description,
            args_schema=dict(tool.parameters),
            session=session,
            recorder=recorder,
            max_parallel_calls=max_parallel_calls,
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
        turn, place = self._call(_CALL_ID.get())
        if place >= self.max_parallel_calls:
            record = over_the_limit(self.session, self.name, arguments, self.max_parallel_calls)
        else:
            record = await self.session.call(self.name, arguments)
        if turn is not None:
            turn.tool_calls.append(record)
        return record.observation

    def _call(self, call_id: str | None) -> tuple[RecordedTurn | None, int]:
        """Return the turn that made a call and the call's index; None if the graph called the tool itself."""
        for turn in reversed(self.recorder.turns):
            for place, call in enumerate(turn.reply.tool_calls):
                if call.id == call_id:
                    return turn, place
        return None, 0

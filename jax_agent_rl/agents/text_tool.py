"""Tools by markers in the text: ``<tool>code</tool>`` runs code, ``<search>query</search>`` looks something up.

::

      ┌─► generate to the closing marker ──► marker? ──no──► ANSWER, or RESPONSE_LENGTH when cut
      │                                        │ yes, but all calls are made ──► MAX_USER_TURNS
      │                                        ▼
      └── insert the result, if it fits ◄── call it ──► TOOL_DONE       no room ──► RESPONSE_LENGTH

The result continues the assistant's text, inside markers of its own, with mask 0. Markers in a think block are text.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.tool_environment import ToolEnvironment
from jax_agent_rl.tools.client import ServerObservation, ToolClient, tool_action
from jax_agent_rl.tools.search_client import SearchClient
from jax_agent_rl.tools.truncate import truncate_text
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, SamplingParams, StopReason, ToolCallRecord, Trajectory

Call = Callable[[str], Awaitable[ServerObservation]]
"""Runs what stands between the markers."""


class MarkerAgent(AgentLoop):
    """A loop whose calls stand between two markers."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    result: ClassVar[str]
    """How a result is written, with ``{}`` for its text."""

    @property
    @abstractmethod
    def max_calls(self) -> int:
        """Most calls of one trajectory."""

    async def _converse(self, episode: Episode, call: Call) -> FinishReason:
        for made in range(self.max_calls + 1):
            last = made == self.max_calls
            output = await episode.generate(session_ends=last, action_stops=[self.closing])
            before, closed, _ = episode.outside_thinking(output).partition(self.closing)
            if not closed:
                cut = output.stop_reason is StopReason.LENGTH
                return FinishReason.RESPONSE_LENGTH if cut else FinishReason.ANSWER
            if last:
                break
            observation, record = await self._call(before, call)
            episode.record_calls([record], seconds=record.seconds)
            if observation.done:
                return FinishReason.TOOL_DONE
            shown = self.result.format(record.observation)
            ids = self.context.codec.encode_text(shown)
            if not episode.append_ids(ids, [{"role": "tool", "content": record.observation}]):
                return FinishReason.RESPONSE_LENGTH
        return FinishReason.MAX_USER_TURNS

    async def _call(self, before: str, call: Call) -> tuple[ServerObservation, ToolCallRecord]:
        """``before``: the turn up to the closing marker."""
        _, opened, body = before.rpartition(self.opening)
        began = time.perf_counter()
        if opened:
            observation = await call(body)
        else:
            text = f"Error: {self.closing} without {self.opening}."
            observation = ServerObservation(text=text, error="malformed")
            self.context.malformed.tell(before[-100:] + self.closing)
        record = ToolCallRecord(
            name=self.opening.strip("<>") if opened else "",
            arguments={"text": body} if opened else None,
            observation=self._shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=time.perf_counter() - began,
        )
        return observation, record

    def _shorten(self, text: str) -> str:
        limits, codec = self.context.limits, self.context.codec
        side = limits.tool_response_truncate_side
        return truncate_text(text, limits.max_tool_response_length, side, encode=codec.encode_text, decode=codec.decode)


@register_agent("text_tool_agent")
class TextToolAgent(MarkerAgent):
    """Text between ``<tool>`` and ``</tool>`` is code for a tool server; settings: ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is missing or wrong.
    """

    opening, closing, result = "<tool>", "</tool>", "\n<result>\n{}\n</result>\n"

    def __init__(self, context: AgentContext):
        super().__init__(context)
        self.client = ToolClient(context.tool_config)

    @property
    def max_calls(self) -> int:
        return self.context.tool_config.max_tool_turns

    async def preflight(self) -> None:
        await self.client.server.check()

    async def close(self) -> None:
        await self.client.close()

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
        async with ToolEnvironment(self.client.server, self.client.execute, trajectory_id) as environment:
            extra = row.get("extra_info") or {}

            async def call(code: str) -> ServerObservation:
                observation, _ = await environment.step(
                    tool_action(code), name="tool", extra_fields=extra, shorten=lambda text: text
                )
                return observation

            reason = await self._converse(episode, call)
        episode.add_metrics({"tool_close_failures": environment.close_failures})
        return episode.finish(reason)


@register_agent("search_agent")
class SearchAgent(MarkerAgent):
    """Text between ``<search>`` and ``</search>`` is a query for a retrieval server; settings: ``search``.

    Raises:
        ConfigError: ``search.server_url`` is missing or wrong.
    """

    opening, closing, result = "<search>", "</search>", "\n<information>\n{}\n</information>\n"

    def __init__(self, context: AgentContext):
        super().__init__(context)
        self.client = SearchClient(context.search)

    @property
    def max_calls(self) -> int:
        return self.context.search.max_turns

    async def preflight(self) -> None:
        await self.client.check()

    async def close(self) -> None:
        await self.client.close()

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
        return episode.finish(await self._converse(episode, self._search))

    async def _search(self, query: str) -> ServerObservation:
        try:
            with span("tool", "search") as traced:
                if traced:
                    traced.set(arguments={"query": query})
                passages = await self.client.search(query.strip())
                if traced:
                    traced.set(observation="\n".join(passages))
        except TimeoutError:
            return ServerObservation(text="Error: the search did not answer in time.", error="timeout")
        text = "\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
        return ServerObservation(text=text or "No results found.")

"""Tools by markers in the text: ``<tool>code</tool>`` runs code, ``<search>query</search>`` looks something up.

::

      ┌─► generate to the closing marker ──► marker? ──no──► ANSWER, or RESPONSE_LENGTH when cut
      │                                        │ yes, but all calls are made ──► MAX_USER_TURNS
      │                                        ▼
      └── insert the result, if it fits ◄── call it ──► TOOL_DONE       no room ──► RESPONSE_LENGTH

The result continues the assistant's text, inside markers of its own, with mask 0. Markers in a think block are text.
"""

from __future__ import annotations

import textwrap
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jax_agent_rl.agents.branching import Prefix, check_replay, describe_call
from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.tool_environment import REPLAY_REMEDY, ToolEnvironment
from jax_agent_rl.agents.turn_loop import Responder, StartEpisode, TurnLoopAgent, answer_or_cut, run_turns
from jax_agent_rl.tools.client import SearchClient, ServerObservation, ToolClient
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, TokenOutput, ToolCallRecord, Trajectory


class MarkerAgent(TurnLoopAgent):
    """A loop whose calls are written between two markers."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    result: ClassVar[str]
    """How a result is written, with ``{}`` for its text."""
    stateful: ClassVar[bool] = True
    """Whether its calls leave state behind, so that branches repeat them."""

    @property
    @abstractmethod
    def max_calls(self) -> int:
        """Maximum calls of one trajectory."""


@dataclass
class MarkerResponder(Responder):
    """Runs the call between an agent's markers and inserts the result as text."""

    agent: MarkerAgent
    call: Callable[[str], Awaitable[ServerObservation]]

    def turn_limit(self, turns: int) -> FinishReason | None:
        return FinishReason.MAX_USER_TURNS if turns >= self.agent.max_calls else None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        return {"action_stops": [self.agent.closing]}

    async def respond(self, episode: Episode, output: TokenOutput, limit: FinishReason | None) -> FinishReason | None:
        before, closed, _ = episode.outside_thinking(output).partition(self.agent.closing)
        if not closed:
            return answer_or_cut(output)
        if limit is not None:
            return limit
        observation, record = await self._run(before)
        episode.record_calls([record], seconds=record.seconds)
        if observation.done:
            return FinishReason.TOOL_DONE
        ids = self.context.codec.encode_text(self.agent.result.format(record.observation))
        fits = episode.append_ids(ids, [{"role": "tool", "content": record.observation}])
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        (before,) = prefix.turns[turn].tool_calls
        if not self.agent.stateful or before.arguments is None:
            return 0
        _, now = await self._run(self.agent.opening + before.arguments["text"])
        check_replay(turn, before.name, describe_call(before), describe_call(now), remedy=REPLAY_REMEDY)
        return 1

    async def _run(self, before: str) -> tuple[ServerObservation, ToolCallRecord]:
        """Run the call of a turn, given its text before the closing marker."""
        opening, closing = self.agent.opening, self.agent.closing
        _, opened, body = before.rpartition(opening)
        began = time.perf_counter()
        if opened:
            observation = await self.call(body)
        else:
            observation = ServerObservation(text=f"Error: {closing} without {opening}.", error="malformed")
            self.context.malformed.report(before[-100:] + closing)
        record = ToolCallRecord(
            name=opening.strip("<>") if opened else "",
            arguments={"text": body} if opened else None,
            observation=self.shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=time.perf_counter() - began,
        )
        return observation, record


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

    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        episode = start()
        async with ToolEnvironment(self.client.server, self.client.execute, trajectory_id) as environment:
            extra = row.get("extra_info") or {}

            async def call(code: str) -> ServerObservation:
                observation, _ = await environment.step(
                    f"<python>{textwrap.dedent(code)}</python>",
                    name="tool",
                    extra_fields=extra,
                    shorten=lambda text: text,
                )
                return observation

            reason = await run_turns(episode, MarkerResponder(self.context, self, call))
        episode.add_metrics({"tool_close_failures": environment.close_failures})
        return episode.finish(reason)


@register_agent("search_agent")
class SearchAgent(MarkerAgent):
    """Text between ``<search>`` and ``</search>`` is a query for a retrieval server; settings: ``search``.

    Raises:
        ConfigError: ``search.server_url`` is missing or wrong.
    """

    opening, closing, result = "<search>", "</search>", "\n<information>\n{}\n</information>\n"
    stateful = False

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

    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        episode = start()
        return episode.finish(await run_turns(episode, MarkerResponder(self.context, self, self._search)))

    async def _search(self, query: str) -> ServerObservation:
        try:
            with span("tool", "search") as traced:
                traced.set(arguments={"query": query})
                passages = await self.client.search(query.strip())
                traced.set(observation="\n".join(passages))
        except TimeoutError:
            return ServerObservation(text="Error: the search did not answer in time.", error="timeout")
        text = "\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
        return ServerObservation(text=text or "No results found.")

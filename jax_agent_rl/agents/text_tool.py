"""Tools by markers in the text: ``<tool>code</tool>`` or ``<search>query</search>``.

::

      ┌─► generate to the closing marker ──► marker? ──no──► ANSWER, or RESPONSE_LENGTH when cut
      │                                        │ yes, but all calls are made ──► MAX_USER_TURNS
      │                                        ▼
      └── insert the result, if it fits ◄── call it ──► TOOL_DONE       no room ──► RESPONSE_LENGTH

The result continues the assistant's text, inside markers of its own, with mask 0. Markers in a
think block are text.

A retrieval server has the API of Search-R1's; a passage may also be plain text or ``{contents}``::

    {queries, topk, return_scores}  ──►  {result: [[{document: {contents}, score}]]}
"""

from __future__ import annotations

import asyncio
import logging
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.agents.turn_loop import (
    SERVER_REMEDY,
    Responder,
    answer_or_cut,
    check_replay,
    describe_call,
    run_turns,
)
from jax_agent_rl.config import SearchConfig, ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import (
    ServerAction,
    ServerObservation,
    ToolEnvironment,
    ToolServerClient,
    observation_url,
)
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, TokenOutput, ToolCallRecord, Trajectory
from jax_agent_rl.utils.network import JsonService, bearer

logger = logging.getLogger(__name__)


@dataclass
class MarkerResponder(Responder):
    """Runs the call between two markers and inserts the result as text.

    Attributes:
        call: runs the text between the markers.
        opening, closing: the markers.
        result: how a result is written, with ``{}`` for its text.
        max_calls: maximum calls of the trajectory.
        stateful: whether calls leave state behind, so that branches repeat them.
    """

    call: Callable[[str], Awaitable[ServerObservation]]
    opening: str
    closing: str
    result: str
    max_calls: int
    stateful: bool

    def turn_limit(self, turns: int) -> FinishReason | None:
        return FinishReason.MAX_USER_TURNS if turns >= self.max_calls else None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        return {"action_stops": [self.closing]}

    async def respond(
        self, episode: Episode, output: TokenOutput, limit: FinishReason | None
    ) -> FinishReason | None:
        text, closing, _ = episode.outside_thinking(output).partition(self.closing)
        if not closing:
            return answer_or_cut(output)
        if limit is not None:
            return limit

        observation, record = await self._run(text)
        episode.record_calls([record], seconds=record.seconds)
        if observation.done:
            return FinishReason.TOOL_DONE
        ids = self.context.codec.encode_text(self.result.format(record.observation))
        fits = episode.append_ids(ids, [{"role": "tool", "content": record.observation}])
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        (recorded_call,) = prefix.turns[turn].tool_calls
        if not self.stateful or recorded_call.arguments is None:
            return 0
        _, replayed_call = await self._run(self.opening + recorded_call.arguments["text"])
        check_replay(
            turn,
            recorded_call.name,
            describe_call(recorded_call),
            describe_call(replayed_call),
            remedy=SERVER_REMEDY,
        )
        return 1

    async def _run(self, text: str) -> tuple[ServerObservation, ToolCallRecord]:
        """Run the call of a turn, whose ``text`` ends before the closing marker."""
        _, opening, body = text.rpartition(self.opening)
        start_time = time.perf_counter()
        if opening:
            name = self.opening.strip("<>")
            arguments = {"text": body}
            observation = await self.call(body)
        else:
            name = ""
            arguments = None
            error_text = f"Error: {self.closing} without {self.opening}."
            observation = ServerObservation(text=error_text, error="malformed")
            hint = f"show the model a call in the prompt, between {self.opening} and {self.closing}"
            self.context.report_malformed(text[-100:] + self.closing, "", hint=hint)

        record = ToolCallRecord(
            name=name,
            arguments=arguments,
            observation=self.shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=time.perf_counter() - start_time,
        )
        return observation, record


@register_agent("text_tool_agent")
class TextToolAgent(AgentLoop):
    """Text between ``<tool>`` and ``</tool>`` is code for a tool server.

    Settings: ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is missing or wrong.
    """

    continues_prefix = True

    def __init__(self, context: AgentContext):
        super().__init__(context)
        self.client = ToolClient(context.tool_config)

    async def preflight(self) -> None:
        await self.client.server.check()

    async def close(self) -> None:
        await self.client.close()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        episode = self.start(request)
        extra_info = request.row.get("extra_info") or {}
        async with ToolEnvironment(
            self.client.server, self.client.execute, request.trajectory_id
        ) as environment:

            async def call(code: str) -> ServerObservation:
                action = f"<python>{textwrap.dedent(code)}</python>"
                return await environment.step(action, name="tool", extra_fields=extra_info)

            responder = MarkerResponder(
                self.context,
                call,
                opening="<tool>",
                closing="</tool>",
                result="\n<result>\n{}\n</result>\n",
                max_calls=self.context.tool_config.max_tool_turns,
                stateful=True,
            )
            reason = await run_turns(episode, responder)
        episode.add_metrics({"tool_close_failures": environment.close_failures})
        return episode.finish(reason)


@register_agent("search_agent")
class SearchAgent(AgentLoop):
    """Text between ``<search>`` and ``</search>`` is a query for a retrieval server.

    Settings: ``search``.

    Raises:
        ConfigError: ``search.server_url`` is missing or wrong.
    """

    continues_prefix = True

    def __init__(self, context: AgentContext):
        super().__init__(context)
        self.client = SearchClient(context.search)

    async def preflight(self) -> None:
        await self.client.check()

    async def close(self) -> None:
        await self.client.close()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        episode = self.start(request)
        responder = MarkerResponder(
            self.context,
            self._search,
            opening="<search>",
            closing="</search>",
            result="\n<information>\n{}\n</information>\n",
            max_calls=self.context.search.max_turns,
            stateful=False,
        )
        reason = await run_turns(episode, responder)
        return episode.finish(reason)

    async def _search(self, query: str) -> ServerObservation:
        try:
            with span("tool", "search") as traced:
                traced.set(arguments={"query": query})
                passages = await self.client.search(query.strip())
                traced.set(observation="\n".join(passages))
        except TimeoutError:
            return ServerObservation(
                text="Error: the search did not answer in time.", error="timeout"
            )
        if not passages:
            return ServerObservation(text="No results found.")
        numbered = [f"[{number}] {passage}" for number, passage in enumerate(passages, 1)]
        return ServerObservation(text="\n".join(numbered))


# --- clients --------------------------------------------------------------------------------------


class RateLimiter:
    """Bounds concurrent requests, and keeps their starts ``interval`` seconds apart.

    It warns that the interval is the bottleneck once requests have waited longer to start than they
    ran.

    Args:
        max_workers: ``tool_config.max_workers``.
        interval: ``tool_config.request_interval``.
        clock: monotonic seconds.
    """

    _MIN_REQUESTS = 50  # before the interval is judged

    def __init__(
        self,
        *,
        max_workers: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._workers = asyncio.Semaphore(max_workers)
        self._interval = interval
        self._clock = clock
        self._sleep = sleep
        self._next_start = float("-inf")
        self._requests = 0
        self._wait_seconds = 0.0
        self._run_seconds = 0.0
        self._warned = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn, and occupy a worker for the duration of the block."""
        async with self._workers:
            arrival_time = self._clock()
            planned_start = max(arrival_time, self._next_start)
            # Moved before waiting, so that later requests queue behind this one.
            self._next_start = planned_start + self._interval
            if planned_start > arrival_time:
                await self._sleep(planned_start - arrival_time)

            start_time = self._clock()
            try:
                yield
            finally:
                self._requests += 1
                self._wait_seconds += start_time - arrival_time
                self._run_seconds += self._clock() - start_time
                self._warn_of_bottleneck()

    def _warn_of_bottleneck(self) -> None:
        """Warn once if the interval holds requests up for longer than they run."""
        if self._warned or self._interval == 0 or self._requests < self._MIN_REQUESTS:
            return
        if self._wait_seconds <= self._run_seconds:
            return
        self._warned = True
        logger.warning(
            "tool_config.request_interval=%g is the bottleneck of tool calls: %d requests waited"
            " %.1f s to start and took %.1f s; no more than %.3g start in a second. Set"
            " tool_config.request_interval=0 if the tool server is yours alone, or lower it",
            self._interval,
            self._requests,
            self._wait_seconds,
            self._run_seconds,
            1 / self._interval,
        )


def _service(config: ToolClientConfig | SearchConfig, url: str, *, section: str) -> JsonService:
    return JsonService(
        url=url,
        url_key=f"{section}.server_url",
        timeout=config.timeout,
        timeout_key=f"{section}.timeout",
        max_retries=config.max_retries,
        retry_delay=config.retry_delay,
        headers=bearer(config.token_env, key=f"{section}.token_env"),
        token_hint=f"set {section}.token_env to the environment variable that holds it",
        error=ToolServerError,
    )


class ToolClient:
    """Client of a tool server for single actions, with the limits of ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is not set or not a URL.
    """

    def __init__(self, config: ToolClientConfig):
        if config.server_url is None:
            raise ConfigError(
                "text_tool_agent needs a tool server; set tool_config.server_url (or"
                " TOOL_SERVER_URL), e.g. http://localhost:5000, or tool_config.enabled=false"
            )
        self.server = ToolServerClient(
            _service(config, observation_url(config.server_url), section="tool_config")
        )
        self._limiter = RateLimiter(
            max_workers=config.max_workers, interval=config.request_interval
        )

    async def execute(self, action: ServerAction) -> ServerObservation:
        """Run one piece of code.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
        """
        async with self._limiter.slot():
            result = await self.server.step(action, repeatable=True)
        return replace(result, text=bare_result(result.text))

    async def close(self) -> None:
        await self.server.close()


def bare_result(text: str) -> str:
    r"""Return the output of code without the tags of the tool server.

    >>> bare_result("\n<result>\n42\n</result>\n")
    '42'
    """
    inner = text.strip()
    if inner.startswith("<result>") and inner.endswith("</result>"):
        return inner.removeprefix("<result>").removesuffix("</result>").strip("\n")
    return text


class SearchClient:
    """Client of a retrieval server.

    Raises:
        ConfigError: ``search.server_url`` is not set or not a URL.
    """

    def __init__(self, config: SearchConfig):
        if config.server_url is None:
            raise ConfigError(
                "search_agent needs a retrieval server; set search.server_url, e.g."
                " http://localhost:8000/retrieve, or agent.enable_search=false"
            )
        self._service = _service(config, config.server_url, section="search")
        self._topk = config.topk

    async def search(self, query: str) -> list[str]:
        """Return the passages found for a query, best first.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
            TimeoutError: it took longer than ``search.timeout``.
        """
        payload = {"queries": [query], "topk": self._topk, "return_scores": True}
        answer = await self._service.post(payload, repeatable=True)
        try:
            (passages,) = answer["result"]  # of the one query
            contents = [_contents(passage) for passage in passages]
            return contents[: self._topk]
        except (TypeError, KeyError, ValueError) as error:
            raise ToolServerError(
                f"{self._service.url} gave a wrong answer ({type(error).__name__}: {error}):"
                f" {answer!r:.200}; expected {{result: [[{{document: {{contents}}}}]]}}"
            ) from None

    async def check(self) -> None:
        """Send a query, the only request that Search-R1's servers take.

        Raises:
            ConfigError: it fails.
        """
        try:
            await self.search("Is anyone there?")
        except (ToolServerError, TimeoutError) as error:
            raise ConfigError(f"the retrieval server is not ready: {error}") from None
        finally:
            await self.close()  # a run may still end before its first trajectory

    async def close(self) -> None:
        await self._service.close()


def _contents(passage: Any) -> str:
    """Return the text of a passage.

    A passage is text, or has it as ``contents``, which may be within its ``document``.
    """
    if isinstance(passage, dict):
        inner = passage["document"] if "document" in passage else passage["contents"]
        return _contents(inner)
    if not isinstance(passage, str):
        raise TypeError(f"a passage must be text, got {type(passage).__name__}")
    return passage.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair

"""``ToolClient``: pieces of code to a tool server, side by side, without flooding it."""

from __future__ import annotations

import asyncio
import logging
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from jax_agent_rl.config import ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import ServerAction, ServerObservation, ToolServerClient, observation_url
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings, bearer

logger = logging.getLogger(__name__)

_JUDGED_AFTER = 50
"""Requests after which it can be said whether they wait for their start more than for the server."""


class Pace:
    """Admits at most ``max_workers`` at a time, and starts no two within ``interval`` seconds.

    Once requests have waited longer for their start than they took, it says so: the interval is then what bounds the
    rollout.

    Args:
        max_workers: ``tool_config.max_workers``.
        interval: ``tool_config.request_interval``.
        clock: seconds, monotonic.
        sleep: waits.
    """

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
        self._requests, self._waited, self._ran = 0, 0.0, 0.0
        self._warned = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn, and keep a worker for as long as the block lasts."""
        async with self._workers:
            arrived = self._clock()
            start = max(arrived, self._next_start)
            self._next_start = start + self._interval  # taken before waiting, so that others queue behind it
            if start > arrived:
                await self._sleep(start - arrived)
            began = self._clock()
            try:
                yield
            finally:
                self._judge(waited=began - arrived, ran=self._clock() - began)

    def _judge(self, *, waited: float, ran: float) -> None:
        self._requests += 1
        self._waited += waited
        self._ran += ran
        if self._warned or not self._interval or self._requests < _JUDGED_AFTER or self._waited <= self._ran:
            return
        self._warned = True
        logger.warning(
            "tool_config.request_interval=%g is the bottleneck of tool calls: %d requests waited %.1f s to start "
            "and took %.1f s; no more than %.3g start in a second. Set tool_config.request_interval=0 if the tool "
            "server is yours alone, or lower it",
            self._interval,
            self._requests,
            self._waited,
            self._ran,
            1 / self._interval,
        )


class ToolClient:
    """See the module docstring.

    Args:
        config: the ``tool_config`` section.
        pace: how requests are spread; None: as the section says.

    Raises:
        ConfigError: ``tool_config.server_url`` is not set or not a URL.
    """

    def __init__(self, config: ToolClientConfig, *, pace: Pace | None = None):
        if config.server_url is None:
            raise ConfigError(
                "text_tool_agent needs a tool server; set tool_config.server_url (or TOOL_SERVER_URL), e.g. "
                "http://localhost:5000, or tool_config.enabled=false"
            )
        settings = ServiceSettings(
            url=observation_url(config.server_url),
            url_key="tool_config.server_url",
            timeout=config.timeout,
            timeout_key="tool_config.timeout",
            max_retries=config.max_retries,
            retry_delay=config.retry_delay,
            headers=bearer(config.token_env, key="tool_config.token_env"),
            token_hint="set tool_config.token_env to the environment variable that holds it",
        )
        self.server = ToolServerClient(JsonService(settings, error=ToolServerError))
        self._pace = pace or Pace(max_workers=config.max_workers, interval=config.request_interval)

    async def execute(self, action: ServerAction) -> ServerObservation:
        """Run one piece of code.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or answers what it must not.
        """
        async with self._pace.slot():
            (result,) = await self.server.get_observation([action], repeatable=True)
        if isinstance(result, ToolServerError):
            raise result
        return replace(result, text=bare_result(result.text))

    async def close(self) -> None:
        await self.server.close()


def tool_action(code: str) -> str:
    """Wrap dedented code as the tool server's python tools recognize it.

    >>> tool_action(" print(1)")
    '<python>print(1)</python>'
    """
    return f"<python>{textwrap.dedent(code)}</python>"


def bare_result(text: str) -> str:
    r"""Return what the code printed, without the tags a tool server puts around it.

    >>> bare_result("\n<result>\n42\n</result>\n")
    '42'
    """
    inner = text.strip()
    if inner.startswith("<result>") and inner.endswith("</result>"):
        return inner.removeprefix("<result>").removesuffix("</result>").strip("\n")
    return text

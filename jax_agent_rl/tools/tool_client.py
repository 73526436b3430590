"""``ToolClient``: pieces of code to a tool server, a whole batch at a time, without flooding it."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_agent_rl.config import ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.json_service import JsonService, ServiceSettings, bearer
from jax_agent_rl.tools.client import Action, Observation, ToolServerClient, observation_url


class Pace:
    """Admits at most ``max_workers`` at a time, and starts no two within ``interval`` seconds.

    Args:
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

    async def __aenter__(self) -> None:
        await self._workers.acquire()
        now = self._clock()
        start = max(now, self._next_start)
        self._next_start = start + self._interval  # taken before waiting, so that others queue behind it
        try:
            if start > now:
                await self._sleep(start - now)
        except BaseException:
            self._workers.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._workers.release()


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

    async def execute(self, action: Action) -> Observation:
        """Runs one piece of code.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or answers what it must not.
        """
        async with self._pace:
            (result,) = await self.server.get_observation([action], repeatable=True)
        if isinstance(result, ToolServerError):
            raise result
        return replace(result, text=bare_result(result.text))

    async def execute_batch(self, codes: Mapping[str, str] | Sequence[str]) -> list[Observation | ToolServerError]:
        """Runs pieces of code side by side.

        Args:
            codes: by trajectory id, or a sequence, whose indices are then the ids.

        Returns:
            One result per piece, in the order of ``codes``; a piece that failed is an error and keeps none of the
            others from their results.
        """
        named: Mapping[str, Any] = codes if isinstance(codes, Mapping) else {str(i): c for i, c in enumerate(codes)}

        async def run(trajectory_id: str, code: str) -> Observation | ToolServerError:
            try:
                return await self.execute(Action(trajectory_id=trajectory_id, text=tool_action(code)))
            except ToolServerError as error:
                return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(trajectory_id, code)) for trajectory_id, code in named.items()]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        await self.server.close()


def tool_action(code: str) -> str:
    """Code as the tool server's python tools recognize it; a common indentation is taken off.

    >>> tool_action(" print(1)")
    '<python>print(1)</python>'
    """
    return f"<python>{textwrap.dedent(code)}</python>"


def bare_result(text: str) -> str:
    """What the code printed, without the tags a tool server puts around it.

    >>> bare_result("\\n<result>\\n42\\n</result>\\n")
    '42'
    """
    inner = text.strip()
    if inner.startswith("<result>") and inner.endswith("</result>"):
        return inner.removeprefix("<result>").removesuffix("</result>").strip("\n")
    return text

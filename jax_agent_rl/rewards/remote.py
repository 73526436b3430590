"""Client of a reward server: bounded concurrency and rate, retries with exponential backoff.

Request and answer are JSON::

    POST url  {"data_source": …, "solution_str": …, "ground_truth": …, "extra_info": {…}}
    200       1.0    or    {"score": 1.0, "format": 0.5}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.registry import Score
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings

if TYPE_CHECKING:
    import httpx


class RemoteReward:
    """Reward function that asks a server. Use one object from one event loop.

    Args:
        url: address of the server.
        timeout: seconds per attempt.
        max_retries: retries after connection errors, timeouts and statuses such as 429 and 503.
        retry_delay: seconds before the first retry, doubled each time; the server's ``Retry-After`` takes precedence.
        max_concurrency: limit of concurrent requests.
        requests_per_second: limit of requests started per second, evenly spaced; None: no limit.
        headers: headers of every request, e.g. an authorization.
        transport: httpx transport, for tests.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        max_retries: int = 3,
        retry_delay: float = 1.0,
        max_concurrency: int = 16,
        requests_per_second: float | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self.url = url
        self._slots = asyncio.Semaphore(max_concurrency)
        self._interval = 0.0 if requests_per_second is None else 1.0 / requests_per_second
        self._next_start = 0.0
        settings = ServiceSettings(
            url=url,
            url_key="reward.remote.url",
            timeout=timeout,
            timeout_key="reward.remote.timeout",
            max_retries=max_retries,
            retry_delay=retry_delay,
            backoff=2.0,
            headers=headers,
            token_hint="set it in reward.remote.headers",
            trust_env=True,
        )
        self._service = JsonService(
            settings, error=RewardError, pace=self._wait_for_turn, sleep=asyncio.sleep, transport=transport
        )

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Score:
        """Return the server's score.

        Raises:
            RewardError: no usable answer after all attempts; the message names the URL.
        """
        question = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": dict(extra_info),
        }
        async with self._slots:
            try:
                return await self._service.post(question, repeatable=True)
            except TimeoutError as late:
                raise RewardError(str(late)) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def _wait_for_turn(self) -> None:
        """Wait so that requests start at least ``interval`` seconds apart, first come first served."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        await asyncio.sleep(start - now)

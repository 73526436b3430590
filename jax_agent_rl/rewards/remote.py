"""Client of a reward server: bounded concurrency and rate, retries with exponential backoff.

Request and answer are JSON::

    POST url  {"data_source": …, "solution_str": …, "ground_truth": …, "extra_info": {…}}
    200       1.0    or    {"score": 1.0, "format": 0.5}
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.registry import Score

if TYPE_CHECKING:
    import httpx

_RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_PAUSE_SECONDS = 30.0


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
        self._timeout = timeout
        self._max_retries = max_retries
        self._retry_delay = retry_delay
        self._slots = asyncio.Semaphore(max_concurrency)
        self._interval = 0.0 if requests_per_second is None else 1.0 / requests_per_second
        self._next_start = 0.0
        self._headers = dict(headers or {})
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

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
            response = await self._post(question)
        try:
            return response.json()
        except ValueError:
            raise RewardError(f"the reward server {self.url} answered no JSON: {response.text[:200]!r}") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, question: Mapping[str, Any]) -> httpx.Response:
        import httpx

        client = self._client = self._client or httpx.AsyncClient(
            timeout=None, headers=self._headers, transport=self._transport
        )
        for attempt in itertools.count():
            await self._wait_for_turn()
            pause = self._retry_delay * 2**attempt
            try:
                async with asyncio.timeout(self._timeout):  # httpx's own limits each phase, not the whole
                    response = await client.post(self.url, json=question)
                if response.is_success:
                    return response
                problem = f"answered {response.status_code} {response.text[:200]!r}"
                if response.status_code not in _RETRIED_STATUSES:
                    raise RewardError(f"the reward server {self.url} {problem}")
                if (value := response.headers.get("Retry-After", "")).isdecimal():
                    pause = float(value)
            except TimeoutError:
                problem = f"gave no whole answer within reward.remote.timeout={self._timeout:g} seconds"
            except httpx.TransportError as error:
                problem = f"cannot be reached ({type(error).__name__}: {error})"
            if attempt == self._max_retries:
                raise RewardError(
                    f"the reward server {self.url} {problem}, {attempt + 1} attempts; start it or correct "
                    "reward.remote.url"
                )
            await asyncio.sleep(min(pause, _MAX_PAUSE_SECONDS))
        raise AssertionError("the last attempt returns or raises")

    async def _wait_for_turn(self) -> None:
        """Wait so that requests start at least ``interval`` seconds apart, first come first served."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        await asyncio.sleep(start - now)

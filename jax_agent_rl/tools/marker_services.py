"""The services that agents send actions to: tool servers and retrieval servers.

::

    async with service.open(trajectory_id, …) as session:
        session.ask(action, step) ──► ServerObservation      for each action of the trajectory

A retrieval server has the API of Search-R1's; a passage may also be plain text or ``{contents}``::

    {queries, topk, return_scores}  ──►  {result: [[{document: {contents}, score}]]}
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

from jax_agent_rl.config import SearchConfig, ServerToolConfig, ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import (
    ServerAction,
    ServerObservation,
    ToolEnvironment,
    ToolServerClient,
    observation_url,
)
from jax_agent_rl.tools.request_limiter import RequestLimiter
from jax_agent_rl.utils.network import JsonService, bearer


def tool_server(settings: ServerToolConfig) -> ToolServerClient:
    """Return the client of ``server_tool_agent``.

    Raises:
        ConfigError: ``agent.tool_server_url`` is not set or not a URL, or no turn would ever call
            the server.
    """
    if settings.tool_server_url is None:
        raise ConfigError(
            "server_tool_agent needs a tool server; set agent.tool_server_url, e.g."
            " http://localhost:5000, or agent.enable_agent=false for plain generation"
        )
    if not settings.action_stop_tokens and not settings.enable_mtrl and not settings.min_turns:
        raise ConfigError(
            "server_tool_agent would never call a tool: set agent.action_stop_tokens (e.g."
            " '</python>'), agent.enable_mtrl=true, or agent.min_turns"
        )
    service = JsonService(
        url=observation_url(settings.tool_server_url),
        url_key="agent.tool_server_url",
        timeout=settings.tool_call_timeout,
        timeout_key="agent.tool_call_timeout",
        max_retries=settings.tool_call_max_retries,
        backoff=2.0,
        headers=bearer(settings.tool_server_token_env, key="agent.tool_server_token_env"),
        token_hint="set agent.tool_server_token_env to the environment variable that holds it",
        error=ToolServerError,
    )
    return ToolServerClient(
        service, max_turns=settings.max_turns, in_lockstep=settings.rollout_mode == "sync"
    )


class ToolClient(ToolServerClient):
    """The client of ``text_tool_agent``: actions are code, within the limits of ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is not set or not a URL.
    """

    def __init__(self, config: ToolClientConfig):
        if config.server_url is None:
            raise ConfigError(
                "text_tool_agent needs a tool server; set tool_config.server_url (or"
                " TOOL_SERVER_URL), e.g. http://localhost:5000, or tool_config.enabled=false"
            )
        url = observation_url(config.server_url)
        super().__init__(_json_service(config, url, section="tool_config"))
        self._limiter = RequestLimiter(
            max_workers=config.max_workers, interval=config.request_interval
        )

    async def execute(self, action: ServerAction) -> ServerObservation:
        """Run one piece of code.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
        """
        code = textwrap.dedent(action.text)
        tagged = replace(action, text=f"<python>{code}</python>")
        async with self._limiter.slot():
            result = await self.step(tagged, repeatable=True)
        return replace(result, text=bare_result(result.text))


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
    """The client of ``search_agent``, for a retrieval server; all trajectories share a session.

    Raises:
        ConfigError: ``search.server_url`` is not set or not a URL.
    """

    metrics: Mapping[str, float] = {}
    """A search leaves nothing to close."""

    def __init__(self, config: SearchConfig):
        if config.server_url is None:
            raise ConfigError(
                "search_agent needs a retrieval server; set search.server_url, e.g."
                " http://localhost:8000/retrieve, or agent.enable_search=false"
            )
        self._service = _json_service(config, config.server_url, section="search")
        self._topk = config.topk

    def open(
        self, trajectory_id: str, extra_info: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[Self]:
        return nullcontext(self)

    async def ask(self, action: str, step: int) -> ServerObservation:
        """Return the passages found for a query, numbered."""
        try:
            passages = await self.search(action.strip())
        except TimeoutError:
            return ServerObservation(
                text="Error: the search did not answer in time.", error="timeout"
            )
        if not passages:
            return ServerObservation(text="No results found.")
        numbered = [f"[{number}] {passage}" for number, passage in enumerate(passages, 1)]
        return ServerObservation(text="\n".join(numbered))

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


Service = ToolServerClient | SearchClient
"""Answers the actions of all trajectories of a run."""
Session = ToolEnvironment | SearchClient
"""One trajectory's use of a service."""


def _json_service(
    config: ToolClientConfig | SearchConfig, url: str, *, section: str
) -> JsonService:
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

"""The client of a retrieval server: ``{queries, topk, return_scores} ──► {result: [[{document: {contents}, score}]]}``.

The API is that of Search-R1's retriever; a passage may also be plain text or ``{contents}``.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.config import SearchConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings, bearer


class SearchClient:
    """Client of a retrieval server; see the module.

    Raises:
        ConfigError: ``search.server_url`` is not set or not a URL.
    """

    def __init__(self, config: SearchConfig):
        if config.server_url is None:
            raise ConfigError(
                "search_agent needs a retrieval server; set search.server_url, e.g. http://localhost:8000/retrieve, "
                "or agent.enable_search=false"
            )
        settings = ServiceSettings(
            url=config.server_url,
            url_key="search.server_url",
            timeout=config.timeout,
            timeout_key="search.timeout",
            max_retries=config.max_retries,
            retry_delay=config.retry_delay,
            headers=bearer(config.token_env, key="search.token_env"),
            token_hint="set search.token_env to the environment variable that holds it",
        )
        self._service = JsonService(settings, error=ToolServerError)
        self._topk = config.topk

    async def search(self, query: str) -> list[str]:
        """Return the passages found for a query, best first.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or answers what it must not.
            TimeoutError: it took longer than ``search.timeout``.
        """
        payload = {"queries": [query], "topk": self._topk, "return_scores": True}
        answer = await self._service.post(payload, repeatable=True)
        try:
            (found,) = answer["result"]
            return [_contents(passage) for passage in found][: self._topk]
        except (TypeError, KeyError, ValueError) as error:
            raise ToolServerError(
                f"{self._service.settings.url} gave a wrong answer ({type(error).__name__}: {error}): "
                f"{answer!r:.200}; expected {{result: [[{{document: {{contents}}}}]]}}"
            ) from None

    async def check(self) -> None:
        """Send a query, as Search-R1's servers know no other request.

        Raises:
            ConfigError: the server is not there, or does not answer as it should.
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
    """Return the text of one passage; raise KeyError or TypeError if it has none."""
    if isinstance(passage, dict):
        return _contents(passage["document"] if "document" in passage else passage["contents"])
    if not isinstance(passage, str):
        raise TypeError(f"a passage must be text, got {type(passage).__name__}")
    return passage.encode("utf-8", "replace").decode()

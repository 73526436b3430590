"""Search over a local corpus: by words (BM25), or by meaning with ``search.encoder``."""

from __future__ import annotations

from typing import Any, Protocol

from jax_agent_rl.config.tool_server import SearchSettings
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import tag_blocks


class Index(Protocol):
    """A corpus that can be searched."""

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the best passages for each query, best first: ``{"document": {"id", "contents"}, "score"}``."""
        ...


def open_index(settings: SearchSettings) -> Index:
    """Open the configured index, building it if need be; raise ConfigError if that fails."""
    if settings.encoder is None:
        from jax_agent_rl.tool_server.plugins.bm25 import BM25Index

        return BM25Index.open(settings)
    from jax_agent_rl.tool_server.plugins.dense import DenseIndex

    return DenseIndex.open(settings)


class SearchTool(ServerTool[tuple[str, str], None]):
    """``<search>query</search>`` shows the best passages; ``<answer>…</answer>`` ends the trajectory.

    An answer is no valid action: valid actions are counted, and it is none that a tool carried out.
    """

    name = "search"
    usage = "<search>query</search> to look something up, <answer>text</answer> to answer."

    async def start(self) -> None:
        self._index = await self.context.threads.run(self._open, name=self.name)

    def _open(self) -> Index:
        return open_index(self.context.settings.search)

    def parse_action(self, action: str) -> tuple[str, str] | None:
        for kind in ("search", "answer"):
            if blocks := list(tag_blocks(action, kind)):
                return kind, blocks[-1].strip()
        return None

    async def act(self, action: ToolAction[tuple[str, str], None]) -> ToolObservation:
        kind, text = action.parsed
        if kind == "answer":
            return ToolObservation(done=True, valid=False)
        (found,) = await self.retrieve([text], self.context.settings.search.topk)
        passages = "\n".join(_format(number, hit["document"]["contents"]) for number, hit in enumerate(found, start=1))
        shown = passages or "No passage matches."
        return ToolObservation(text=f"\n\n<information>{shown}</information>\n\n")

    async def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Run :meth:`Index.search` off the event loop."""
        return await self.context.threads.run(lambda: self._index.search(queries, topk), name=self.name)


def _format(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}"

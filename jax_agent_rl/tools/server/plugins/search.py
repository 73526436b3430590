"""Search over a local corpus with BM25 (the library ``bm25s``).

The corpus is JSON Lines of ``{"id", "contents"}``, as Search-R1's; the first line of ``contents`` is the title. Its
index is made once, kept in a folder, and mapped into memory by every worker, so that they share one copy.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import bm25s

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tools.server.plugin import Action, Observation, ServerTool
from jax_agent_rl.tools.server.plugins.markup import tagged
from jax_agent_rl.tools.server.settings import SearchSettings

_STAMP = "corpus.json"


class Index:
    """A corpus that can be searched."""

    def __init__(self, retriever: bm25s.BM25, size: int):
        self._retriever = retriever
        self._size = size

    @classmethod
    def open(cls, settings: SearchSettings) -> Index:
        """Reads the index, after making it if it is missing or its corpus has changed.

        Raises:
            ConfigError: the corpus is missing, empty or of another form.
        """
        corpus = Path(settings.corpus or "")
        folder = Path(settings.index) if settings.index else corpus.with_name(corpus.name + ".bm25s")
        if not corpus.is_file():
            raise ConfigError(f"search.corpus={settings.corpus!r}: no such file (relative to {os.getcwd()})")
        status = corpus.stat()
        stamp = json.dumps({"bytes": status.st_size, "modified": status.st_mtime_ns, "bm25s": bm25s.__version__})
        if not (folder / _STAMP).is_file() or (folder / _STAMP).read_text() != stamp:
            _make(corpus, folder, stamp)
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every query without words
        retriever = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
        return cls(retriever, size=int(retriever.scores["num_docs"]))

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """The best passages for each query, best first: ``{"document": {"id", "contents"}, "score"}``.

        Passages that share no word with the query are left out.
        """
        words = bm25s.tokenize(queries, stopwords="en", return_ids=False, show_progress=False)
        topk = min(topk, self._size)
        passages, scores = self._retriever.retrieve(words, k=topk, show_progress=False)
        return [
            [{"document": p, "score": float(s)} for p, s in zip(row, row_scores, strict=True) if s > 0]
            for row, row_scores in zip(passages, scores, strict=True)
        ]


def _make(corpus: Path, folder: Path, stamp: str) -> None:
    """Writes the index beside its place, then moves it there: a half-made one is never read."""
    passages = _read(corpus)
    retriever = bm25s.BM25(corpus=passages)
    words = bm25s.tokenize([p["contents"] for p in passages], stopwords="en", show_progress=False)
    retriever.index(words, show_progress=False)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        retriever.save(made, show_progress=False)
        (made / _STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _read(corpus: Path) -> list[dict[str, str]]:
    passages = []
    with corpus.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                passages.append({"id": str(row.get("id", number - 1)), "contents": str(row["contents"])})
            except (ValueError, KeyError, AttributeError) as error:
                raise ConfigError(f'{corpus}:{number}: not {{"id", "contents"}} in JSON ({error!r})') from error
    if not passages:
        raise ConfigError(f"search.corpus={str(corpus)!r} is empty")
    return passages


class SearchTool(ServerTool[tuple[str, str], None]):
    """``<search>query</search>`` shows the best passages; ``<answer>…</answer>`` ends the trajectory."""

    name = "search"
    usage = "<search>query</search> to look something up, <answer>text</answer> to answer."

    async def start(self) -> None:
        self._index = await self.context.threads.run(self._open, name=self.name)

    def _open(self) -> Index:
        return Index.open(self.context.settings.search)

    def parse_action(self, action: str) -> tuple[str, str] | None:
        for kind in ("search", "answer"):
            if (text := tagged(action, kind)) is not None:
                return kind, text
        return None

    async def act(self, action: Action[tuple[str, str], None]) -> Observation:
        kind, text = action.parsed
        if kind == "answer":
            return Observation(done=True)
        (found,) = await self.retrieve([text], self.context.settings.search.topk)
        passages = "\n".join(_format(number, hit["document"]["contents"]) for number, hit in enumerate(found, start=1))
        shown = passages or "No passage matches."
        return Observation(text=f"\n\n<information>{shown}</information>\n\n", metrics={"passages": len(found)})

    async def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """:meth:`Index.search`, beside the event loop."""
        return await self.context.threads.run(lambda: self._index.search(queries, topk), name=self.name)


def _format(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}"

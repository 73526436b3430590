"""Passages by the words they share with a query: BM25 (the library ``bm25s``), mapped into memory by every worker."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import bm25s

from jax_agent_rl.config.tool_server import SearchSettings
from jax_agent_rl.tool_server.plugins.corpus import index_folder


class BM25Index:
    """A corpus that can be searched by words."""

    def __init__(self, retriever: bm25s.BM25, size: int):
        self._retriever = retriever
        self._size = size

    @classmethod
    def open(cls, settings: SearchSettings) -> BM25Index:
        """Load the index, building it if missing or stale; raise ConfigError if there is no corpus."""
        corpus = Path(settings.corpus or "")
        folder = Path(settings.index) if settings.index else corpus.with_name(corpus.name + ".bm25s")
        index_folder(corpus, folder, made_by={"bm25s": bm25s.__version__}, make=_make)
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every query without words
        retriever = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
        return cls(retriever, size=int(retriever.scores["num_docs"]))

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the best passages for each query, best first: ``{"document": {"id", "contents"}, "score"}``.

        Passages that share no word with the query are left out.
        """
        words = bm25s.tokenize(queries, stopwords="en", return_ids=False, show_progress=False)
        topk = min(topk, self._size)
        passages, scores = self._retriever.retrieve(words, k=topk, show_progress=False)
        return [
            [{"document": p, "score": float(s)} for p, s in zip(row, row_scores, strict=True) if s > 0]
            for row, row_scores in zip(passages, scores, strict=True)
        ]


def _make(passages: list[dict[str, str]], folder: Path) -> None:
    retriever = bm25s.BM25(corpus=passages)
    words = bm25s.tokenize([p["contents"] for p in passages], stopwords="en", show_progress=False)
    retriever.index(words, show_progress=False)
    retriever.save(folder, show_progress=False)

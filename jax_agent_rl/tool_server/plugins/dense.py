"""Passages by meaning: embeddings of a sentence-transformers model, compared with all of the corpus.

The embeddings are made once, float32 [N, D] of length 1, and mapped into memory by every worker. A search is one matrix
product over all of them, exact, and fast enough up to some millions of passages; beyond that name a server with an
approximate index in the trainer's ``search.server_url``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from bm25s.utils.corpus import JsonlCorpus

from jax_agent_rl.config.tool_server import SearchSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugins.corpus import index_folder

_EMBEDDINGS, _PASSAGES = "embeddings.npy", "passages.jsonl"


class DenseIndex:
    """A corpus that can be searched by meaning."""

    def __init__(self, encoder: Any, settings: SearchSettings, folder: Path):
        self._encoder = encoder
        self._query_prompt = settings.query_prompt
        self._embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r")
        self._passages = JsonlCorpus(folder / _PASSAGES, show_progress=False, verbosity=0)

    @classmethod
    def open(cls, settings: SearchSettings) -> DenseIndex:
        """Load the embeddings, computing them if missing or stale.

        Raises:
            ConfigError: no corpus, no model in ``search.encoder``, or sentence-transformers is not installed.
        """
        corpus, encoder = Path(settings.corpus or ""), _load_encoder(settings.encoder or "")
        folder = Path(settings.index) if settings.index else corpus.with_name(corpus.name + ".dense")

        def make(passages: list[dict[str, str]], unfinished: Path) -> None:
            texts = [settings.passage_prompt + passage["contents"] for passage in passages]
            np.save(unfinished / _EMBEDDINGS, _encode(encoder, texts))
            lines = (json.dumps(passage) + "\n" for passage in passages)
            (unfinished / _PASSAGES).write_text("".join(lines), encoding="utf-8")

        made_by = {"encoder": settings.encoder, "passage_prompt": settings.passage_prompt}
        return cls(encoder, settings, index_folder(corpus, folder, made_by=made_by, make=make))

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the nearest passages for each query, nearest first: ``{"document": {"id", "contents"}, "score"}``.

        The score is the cosine of the angle between the embeddings.
        """
        embedded = _encode(self._encoder, [self._query_prompt + query for query in queries])
        scores = embedded @ self._embeddings.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        return [
            [{"document": self._passages[int(i)], "score": float(own[i])} for i in row]
            for row, own in zip(best, scores, strict=True)
        ]


def _encode(encoder: Any, texts: list[str]) -> np.ndarray:
    """Embed texts: float32 [N, D], each of length 1."""
    made = encoder.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)
    return np.asarray(made, np.float32)


def _load_encoder(folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"search.encoder={folder!r}: no sentence-transformers model in this folder")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            f"search.encoder needs sentence-transformers ({error}); pip install 'jax_agent_rl[dense-search]'"
        ) from error
    return SentenceTransformer(folder, local_files_only=True)

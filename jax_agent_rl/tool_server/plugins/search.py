"""Search over a local corpus: by words (BM25), or by meaning with ``search.encoder``.

The corpus is JSON Lines of ``{"id", "contents"}``, like Search-R1's; the first line of ``contents``
is the title. Its index is built once, and every worker maps it into memory. It is built again when
the contents of the corpus or of the encoder have changed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from bm25s.utils.corpus import JsonlCorpus

from jax_agent_rl.config.commands import SearchSettings
from jax_agent_rl.data.reader import read_json_lines
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import tag_blocks
from jax_agent_rl.utils.files import file_stamp, make_folder, write_atomically
from jax_agent_rl.utils.fingerprints import file_fingerprint, folder_fingerprint
from jax_agent_rl.utils.packages import install_command


class SearchTool(ServerTool[tuple[str, str], None]):
    """Shows the best passages for a ``<search>query</search>``.

    ``<answer>…</answer>`` ends the trajectory. An answer is not a valid action, because valid
    actions are counted as uses of a tool, and no tool executes an answer.
    """

    name = "search"
    usage = "<search>query</search> to look something up, <answer>text</answer> to answer."

    async def start(self) -> None:
        settings = self.context.settings.search
        index_class = BM25Index if settings.encoder is None else DenseIndex
        self._index = await self.context.threads.run(
            lambda: index_class.open(settings), name=self.name
        )

    def parse_action(self, action: str) -> tuple[str, str] | None:
        for kind in ("search", "answer"):
            blocks = list(tag_blocks(action, kind))
            if blocks:
                return kind, blocks[-1].strip()
        return None

    async def act(self, action: ToolAction[tuple[str, str], None]) -> ToolObservation:
        kind, text = action.parsed
        if kind == "answer":
            return ToolObservation(done=True, valid=False)

        (hits,) = await self.retrieve([text], self.context.settings.search.topk)
        passages = []
        for number, hit in enumerate(hits, start=1):
            passages.append(_format(number, hit["document"]["contents"]))
        information = "\n".join(passages) or "No passage matches."
        return ToolObservation(text=f"\n\n<information>{information}</information>\n\n")

    async def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the best ``topk`` passages for each query; the index is searched in a thread."""
        return await self.context.threads.run(
            lambda: self._index.search(queries, topk), name=self.name
        )


def _format(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}"


_STAMP = "corpus.json"


def _read_passages(corpus: Path) -> list[dict[str, str]]:
    """Read all passages, ``{"id", "contents"}`` each.

    Raises:
        ConfigError: a line is malformed, or there is none.
    """
    passages = []
    try:
        for location, row in read_json_lines(corpus):
            if "contents" not in row:
                raise DataError(f'{location}: has {sorted(row)}, not "contents" and perhaps "id"')
            passages.append(
                {"id": str(row.get("id", len(passages))), "contents": str(row["contents"])}
            )
    except DataError as error:
        raise ConfigError(f"search.corpus: {error}") from None
    if not passages:
        raise ConfigError(f"search.corpus={str(corpus)!r} is empty")
    return passages


def _index_folder(
    settings: SearchSettings,
    suffix: str,
    *,
    made_by: dict[str, Any],
    make: Callable[[list[dict[str, str]], Path], None],
) -> Path:
    """Return the folder of a corpus's index, building it if it is missing or stale.

    Args:
        settings: ``corpus`` is the file; ``index`` is the folder, beside the corpus if None.
        suffix: ending of the folder's name beside the corpus.
        made_by: what the index depends on besides the corpus, as JSON: fingerprints, not names.
        make: writes the index of passages into a temporary folder, which is renamed when complete:
            an incomplete index is never read.

    Raises:
        ConfigError: the corpus is missing, empty or malformed.
    """
    corpus = Path(settings.corpus or "")
    folder = corpus.with_name(corpus.name + suffix)
    if settings.index:
        folder = Path(settings.index)
    if not corpus.is_file():
        raise ConfigError(
            f"search.corpus={str(corpus)!r}: no such file (relative to {os.getcwd()})"
        )

    # A corpus may have many gigabytes: it is read again only if its file was touched since.
    recorded = _read_stamp(folder / _STAMP)
    current: dict[str, Any] = {"file": list(file_stamp(corpus)), "made_by": made_by}
    is_same_file = recorded.get("file") == current["file"]
    is_same_maker = recorded.get("made_by") == made_by
    if is_same_file and is_same_maker:
        current["corpus"] = recorded["corpus"]
    else:
        current["corpus"] = file_fingerprint(corpus)

    if recorded.get("corpus") == current["corpus"] and is_same_maker:
        if not is_same_file:
            write_atomically(folder / _STAMP, json.dumps(current), message=_NO_INDEX)
        return folder

    passages = _read_passages(corpus)
    make_folder(folder.parent, message=_NO_INDEX)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        make(passages, unfinished)
        (unfinished / _STAMP).write_text(json.dumps(current))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


_NO_INDEX = (
    "{file} could not be written ({reason}); make space there, or set search.index to another"
    " folder"
)


def _read_stamp(file: Path) -> dict[str, Any]:
    """Return what an index was made of; nothing if there is none, or it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content


class BM25Index:
    """Index that ranks passages by the words that they share with a query (BM25, by ``bm25s``)."""

    def __init__(self, retriever: bm25s.BM25, size: int):
        self._retriever = retriever
        self._size = size

    @classmethod
    def open(cls, settings: SearchSettings) -> BM25Index:
        """Load the index, building it if missing or stale.

        Raises:
            ConfigError: there is no usable corpus.
        """

        def make(passages: list[dict[str, str]], unfinished: Path) -> None:
            retriever = bm25s.BM25(corpus=passages)
            texts = [passage["contents"] for passage in passages]
            words = bm25s.tokenize(texts, stopwords="en", show_progress=False)
            retriever.index(words, show_progress=False)
            retriever.save(unfinished, show_progress=False)

        folder = _index_folder(settings, ".bm25s", made_by={"bm25s": bm25s.__version__}, make=make)
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every query without words
        retriever = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
        return cls(retriever, size=int(retriever.scores["num_docs"]))

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the best passages for each query, best first.

        A hit is ``{"document": {"id", "contents"}, "score"}``. Passages that share no word with the
        query are left out.
        """
        words = bm25s.tokenize(queries, stopwords="en", return_ids=False, show_progress=False)
        topk = min(topk, self._size)
        passages, scores = self._retriever.retrieve(words, k=topk, show_progress=False)

        hits_by_query = []
        for query_passages, query_scores in zip(passages, scores, strict=True):
            hits = []
            for passage, score in zip(query_passages, query_scores, strict=True):
                if score > 0:
                    hits.append({"document": passage, "score": float(score)})
            hits_by_query.append(hits)
        return hits_by_query


_EMBEDDINGS = "embeddings.npy"
_PASSAGES = "passages.jsonl"


class DenseIndex:
    """Index that ranks passages by meaning: embeddings of a sentence-transformers model.

    Embeddings are float32 [N, D] of length 1. A search is one exact matrix product over all of
    them, fast enough for some millions of passages; beyond that, point the trainer's
    ``search.server_url`` to a server with an approximate index.
    """

    def __init__(self, encoder: Any, settings: SearchSettings, folder: Path):
        self._encoder = encoder
        self._query_prompt = settings.query_prompt
        self._embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r")
        self._passages = JsonlCorpus(folder / _PASSAGES, show_progress=False, verbosity=0)

    @classmethod
    def open(cls, settings: SearchSettings) -> DenseIndex:
        """Load the embeddings, computing them if missing or stale.

        Raises:
            ConfigError: no corpus, no model in ``search.encoder``, or sentence-transformers is not
                installed.
        """
        encoder = _load_encoder(settings.encoder or "")

        def make(passages: list[dict[str, str]], unfinished: Path) -> None:
            texts = [settings.passage_prompt + passage["contents"] for passage in passages]
            np.save(unfinished / _EMBEDDINGS, _encode(encoder, texts))
            lines = (json.dumps(passage) + "\n" for passage in passages)
            (unfinished / _PASSAGES).write_text("".join(lines), encoding="utf-8")

        made_by = {
            "encoder": folder_fingerprint(settings.encoder or ""),
            "passage_prompt": settings.passage_prompt,
        }
        folder = _index_folder(settings, ".dense", made_by=made_by, make=make)
        return cls(encoder, settings, folder)

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Return the nearest passages for each query, nearest first.

        A hit is ``{"document": {"id", "contents"}, "score"}``. The score is the cosine of the angle
        between the embeddings.
        """
        prompts = [self._query_prompt + query for query in queries]
        query_embeddings = _encode(self._encoder, prompts)
        scores = query_embeddings @ self._embeddings.T  # [queries, N]
        best_indices = np.argsort(-scores, axis=1, kind="stable")[:, :topk]

        hits_by_query = []
        for query_indices, query_scores in zip(best_indices, scores, strict=True):
            hits = []
            for index in query_indices:
                document = self._passages[int(index)]
                hits.append({"document": document, "score": float(query_scores[index])})
            hits_by_query.append(hits)
        return hits_by_query


def _encode(encoder: Any, texts: list[str]) -> np.ndarray:
    """Embed texts: float32 [N, D], each of length 1."""
    embeddings = encoder.encode(
        texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
    )
    return np.asarray(embeddings, np.float32)


def _load_encoder(folder: str) -> Any:
    """Load a sentence-transformers model from a local folder, without running code from there."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"search.encoder={folder!r}: no sentence-transformers model in this folder"
        )
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            f"search.encoder needs sentence-transformers ({error}):"
            f" {install_command('dense-search')}"
        ) from error
    return SentenceTransformer(folder, local_files_only=True, trust_remote_code=False)

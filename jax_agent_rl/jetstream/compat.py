"""Imports JetStream 0.2.2's engine API without its TensorFlow dependency.

``jetstream.engine.token_utils`` imports ``seqio`` (and through it TensorFlow, 3 GB) only for a tokenizer class that
an id-in, id-out engine never builds. Where seqio is not installed, two empty modules stand in for it while
JetStream is imported; where it is installed, the real one is used. ``third_party/jetstream.md`` has the whole note.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types

from jax_agent_rl.errors import ModelError


@functools.cache
def engine_api() -> types.ModuleType:
    """Import ``jetstream.engine.engine_api``.

    Raises:
        ModelError: google-jetstream is not installed.
    """
    if importlib.util.find_spec("jetstream") is None:
        raise ModelError(
            "google-jetstream is not installed; run ./launch/local.sh once, or: "
            "pip install --no-deps google-jetstream==0.2.2 && pip install grpcio prometheus_client shortuuid tiktoken"
        )
    if importlib.util.find_spec("seqio") is None:
        _stand_in_for_seqio()
    from jetstream.engine import engine_api as module

    return module


def orchestrator() -> types.ModuleType:
    """Import ``jetstream.core.orchestrator``, JetStream's own Driver.

    The module calls ``jax.tree_map``, which jax removed, so it alone gets a ``jax`` that has it. Its import sets the
    root logger to DEBUG and adds a handler; both are undone.
    """
    import logging

    import jax

    engine_api()
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    from jetstream.core import orchestrator as module

    root.setLevel(level)
    root.handlers[:] = handlers
    if not hasattr(jax, "tree_map"):
        module.jax = _JaxWithTreeMap()
    return module


class _JaxWithTreeMap:
    """The jax module plus ``tree_map``, which it had before 0.4.26."""

    def __getattr__(self, name: str) -> object:
        import jax

        return jax.tree_util.tree_map if name == "tree_map" else getattr(jax, name)


def _stand_in_for_seqio() -> None:
    """Register empty ``seqio`` modules with the two class names that JetStream's annotations use."""
    seqio = types.ModuleType("seqio")
    vocabularies = types.ModuleType("seqio.vocabularies")
    vocabulary = type("Vocabulary", (), {})
    sentence_piece = type("SentencePieceVocabulary", (vocabulary,), {})
    vars(vocabularies).update(Vocabulary=vocabulary, SentencePieceVocabulary=sentence_piece)
    vars(seqio).update(vocabularies=vocabularies)
    sys.modules.setdefault("seqio", seqio)
    sys.modules.setdefault("seqio.vocabularies", vocabularies)

"""Grammars, by llguidance: what a constrained output may be, as bits of the ids that may come next.

A grammar is text in llguidance's dialect of Lark, with JSON schemas (``%json``) and special tokens (``<[id]>``) in it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Compiled grammars that are kept: requests of a group, and turns of an agent, mostly have the same one."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is the library's reason."""


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further: it became too complex, or was broken; None if it can."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def consume(self, ids: Sequence[int]) -> None:
        """Move past sampled ids."""
        self._matcher.consume_tokens(list(ids))

    def fill_allowed(self, bits: np.ndarray) -> None:
        """Write which ids may come next: where the grammar is complete, or in error, only those that end an output.

        Args:
            bits: uint32 [n], a bit for each id of the model.
        """
        import numpy as np

        known = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(bits)]
        bits[: len(known)], bits[len(known) :] = known, 0


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be used from several threads.

    Args:
        tokenizer: a ``transformers`` fast tokenizer.
        eos_ids: ids that end an output where the grammar allows it to end.
        vocab_size: ids of the model; None: of the tokenizer.
    """

    def __init__(self, tokenizer: Any, *, eos_ids: Sequence[int], vocab_size: int | None = None) -> None:
        self._hf_tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raise GrammarError if the grammar cannot be compiled."""
        self.start(grammar)

    def start(self, grammar: str, ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of an output of a grammar after ``ids``.

        Raises:
            GrammarError: the grammar cannot be compiled, or does not allow ``ids``.
        """
        with self._lock:
            if (matcher := self._compiled.pop(grammar, None)) is None:
                matcher = self._compile(grammar)
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            state = GrammarState(matcher.deep_copy())
        state.consume(ids)
        if state.error:
            raise GrammarError(state.error)
        return state

    def is_special(self, token: int) -> bool:
        """Return whether an id is none of text, so that a grammar has to name it."""
        return self._tokenizer.is_special_token(token)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        import llguidance.hf

        count = max(self._vocab_size or 0, len(self._hf_tokenizer))
        return llguidance.hf.from_tokenizer(self._hf_tokenizer, count, eos_token=self._eos_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        import llguidance

        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return matcher


def _reason(matcher: LLMatcher) -> str:
    """Return the library's message without the place in the grammar's text, which users have not written."""
    return matcher.get_error().partition("\n")[0]

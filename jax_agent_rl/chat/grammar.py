"""Grammars: what a constrained output may be, as text, and by llguidance as bits of the ids that may come next.

:class:`TurnGrammar` writes those of assistant turns: a tool call that has to be made, an answer that has to be JSON,
calls that have to fit::

    turn      thinking? (calls | answer)            or thinking? text? calls?, where text has no opening of a call
    calls     begin call (between call)* end            call   before NAME, arguments as JSON, after
    answer    JSON

JSON is written on one line, as ``json.dumps`` and chat templates do: where white space is free, a
model may write nothing else until its limit. Control tokens stand as ids, so text that looks like
one does not count as one.

A grammar is text in llguidance's dialect of Lark, with JSON schemas (``%json``) and special tokens
(``<[id]>``) in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.grammar_limits import (
    GrammarBusyError,
    GrammarError,
    check_grammar,
    parser_limits,
)
from jax_agent_rl.utils.text import any_of

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

_NAME = re.compile(r"[\w.\-]+")
_OPENING = re.compile(r"<[^<>\s]+>|\[TOOL_CALLS\]")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_COMPILED = 64
"""Compiled grammars that are kept: requests of a group, and turns of an agent, mostly have the same
one."""
MAX_COMPILED_BYTES = 256 << 20
"""Memory of those together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSyntax:
    """How a format writes calls whose arguments are one JSON object.

    Attributes:
        before: text before the arguments; ``NAME`` in it is the tool's.
        after: text after them.
        begin: text before the first call.
        end: text after the last one.
        between: text between calls; None: a turn has one call.
        answer: text before an answer without calls.
        needs: a control token that the tokenizer must have, or else the format's next syntax
            counts; "": none.
        thinking: text before and after reasoning, where that is not what the chat template shows.
    """

    before: str
    after: str
    begin: str = ""
    end: str = ""
    between: str | None = None
    answer: str = ""
    needs: str = ""
    thinking: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """Reasoning at the beginning of a turn.

    Attributes:
        tags: text before and after it.
        opened: the generation prompt has begun it; else a turn may do without.
    """

    tags: tuple[str, str]
    opened: bool = False


class TurnGrammar:
    """Writes grammars for one tokenizer.

    Args:
        control_ids: ids of control tokens, by their text.
        is_special: whether a control token is none of text to the library.
        thinking: reasoning that a turn may begin with.
    """

    def __init__(
        self,
        control_ids: Mapping[str, int],
        *,
        is_special: Callable[[int], bool],
        thinking: Thinking | None,
    ) -> None:
        self._control_ids = control_ids
        self._special = is_special
        self._thinking = thinking
        self._control = re.compile(f"({any_of(control_ids)})")

    def turn(
        self,
        *,
        syntax: CallSyntax | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        several: bool = True,
        answer: Any = None,
    ) -> str:
        """Return the grammar of a turn: calls of ``tools``, or an answer, whichever are given.

        Args:
            syntax: of calls.
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.
            answer: JSON schema of an answer.

        Raises:
            GrammarError: a tool's name has characters that formats read as their own.
        """
        kinds, rules = [], []
        if tools and syntax is not None:
            kinds.append("calls")
            calls = f"call{self._further(syntax, several)} {self._text(syntax.end)}"
            rules += [
                f"calls: {self._text(syntax.begin)} {calls}",
                *self._call_rules("call", syntax, tools),
            ]
        if answer is not None:
            kinds.append("answer")
            rules.append(f"answer: {self._text(syntax.answer if syntax else '')} {_json(answer)}")
        before, thinking = self._thinking_rules(syntax)
        return "\n".join([f"start: {before} ({' | '.join(kinds)})", *rules, *thinking])

    def free_turn(
        self, *, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], several: bool
    ) -> str:
        """Return the grammar of a turn of any text, in which what begins as a call is one of ``tools``.

        Args:
            syntax: of calls.
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.

        Raises:
            GrammarError: nothing tells a call from text, or a tool's name has characters of the
                format's own.
        """
        opening = _OPENING.match(syntax.begin + syntax.before.partition("NAME")[0])
        if opening is None or syntax.answer:
            raise GrammarError("calls of this format have no opening that tells them from text")
        tag = opening.group()
        first = syntax if syntax.begin else replace(syntax, before=syntax.before.removeprefix(tag))
        text = rf"/(.|\n)+/ & ~/(.|\n)*{_pattern(tag)}(.|\n)*/"
        if self._is_special(tag):
            start, opened = "(TEXT calls? | calls)?", self._text(tag)
            rules = [f"TEXT: {text}"]
        else:
            start, opened = "(TEXT | calls)?", "opened"
            rules = [
                f"TEXT: {text}",
                rf"opened[lazy]: /(.|\n)*{_pattern(tag)}/",
            ]  # to the first tag
        calls = f"first{self._further(syntax, several)} {self._text(syntax.end)}"
        rules.append(f"calls: {opened} {self._text(syntax.begin.removeprefix(tag))} {calls}")
        closed = list(map(_closed, tools))
        rules += [
            *self._call_rules("first", first, closed),
            *self._call_rules("call", syntax, closed),
        ]
        before, thinking = self._thinking_rules(syntax)
        return "\n".join([f"start: {before} {start}", *rules, *thinking])

    def _is_special(self, text: str) -> bool:
        """Return whether a text begins with a control token that is none of text to the library."""
        first = self._control.match(text)
        return first is not None and self._special(self._control_ids[first.group()])

    def _further(self, syntax: CallSyntax, several: bool) -> str:
        """Return the expression for calls after the first one."""
        return (
            f" ({self._text(syntax.between)} call)*"
            if several and syntax.between is not None
            else ""
        )

    def _call_rules(
        self, kind: str, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Return the rule of a call of any of these tools, and one for each of them."""
        numbered = {
            f"{kind}_{number}": self._call(syntax, tool) for number, tool in enumerate(tools)
        }
        return [
            f"{kind}: {' | '.join(numbered)}",
            *(f"{name}: {call}" for name, call in numbered.items()),
        ]

    def _call(self, syntax: CallSyntax, tool: Mapping[str, Any]) -> str:
        function = tool["function"]
        if not _NAME.fullmatch(name := function["name"]):
            raise GrammarError(
                f"the tool name {name!r} has characters other than letters, digits, '_', '-'"
                " and '.'"
            )
        parameters = function.get("parameters") or {}
        schema = {"type": "object", **parameters}
        return (
            f"{self._text(syntax.before.replace('NAME', name))} {_json(schema)}"
            f" {self._text(syntax.after)}"
        )

    def _thinking_rules(self, syntax: CallSyntax | None) -> tuple[str, list[str]]:
        """Return the expression at the beginning of a turn, and its rules."""
        thinking = Thinking(tags=syntax.thinking) if syntax and syntax.thinking else self._thinking
        if thinking is None:
            return "", []
        begin, end = thinking.tags
        tag = _pattern(end)
        if self._is_special(end):
            words = [
                rf"WORDS: /(.|\n)*/ & ~/(.|\n)*{tag}(.|\n)*/",
                f"thought: WORDS {self._text(end)} SPACE",
            ]
        else:
            words = [rf"words[lazy]: /(.|\n)*{tag}/", "thought: words SPACE"]  # to the first tag
        rules = [*words, r"SPACE: /[ \n]{0,8}/"]
        if thinking.opened:
            return "thought", rules
        return "thinking?", [f"thinking: {self._text(begin)} thought", *rules]

    def _text(self, text: str) -> str:
        """Return the expression for a text of a format."""
        parts = [part for part in self._control.split(text) if part]
        ids = self._control_ids
        terms = [
            f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
            for part in parts
        ]
        return " ".join(terms) or '""'


def _closed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool that takes no arguments but those it names, unless its schema says otherwise."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if "properties" not in parameters:
        return tool
    return {
        **tool,
        "function": {**function, "parameters": {"additionalProperties": False, **parameters}},
    }


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_LINE})}"


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

    What has been compiled is kept, and what could not be, with the reason. A grammar is compiled by
    the thread that asks for it first, while others go on; see
    :mod:`jax_agent_rl.chat.grammar_limits` for what bounds its work.

    Args:
        tokenizer: a ``transformers`` fast tokenizer.
        eos_ids: ids that end an output where the grammar allows it to end.
        vocab_size: ids of the model; None: of the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, *, eos_ids: Sequence[int], vocab_size: int | None = None
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[bytes, Future[_Compiled]] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, grammar: str, ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of an output of a grammar after ``ids``.

        Raises:
            GrammarError: the grammar is too large, cannot be compiled, or does not allow ``ids``.
        """
        compiled = self._get(grammar)
        with self._lock:
            state = GrammarState(compiled.matcher.deep_copy())
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

    def _get(self, grammar: str) -> _Compiled:
        """Return a compiled grammar; compile it unless it is known, or another thread is compiling it."""
        key = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._compiled.get(key)
            if known is None:
                made: Future[_Compiled] = Future()
                self._compiled[key] = made
            else:
                self._compiled.move_to_end(key)
        if known is not None:
            try:
                return known.result()
            except GrammarError as error:
                raise type(error)(str(error)) from None  # a traceback of its own
        try:
            compiled = self._compile(grammar)
        except BaseException as error:
            is_final = isinstance(error, GrammarError) and not isinstance(error, GrammarBusyError)
            with self._lock:
                if not is_final:
                    self._compiled.pop(key, None)
                made.set_exception(error)
                self._forget_oldest()
            raise
        with self._lock:
            made.set_result(compiled)
            self._forget_oldest()
        return compiled

    def _forget_oldest(self) -> None:
        """Keep the newest grammars whose memory together is bounded; those that are being compiled stay."""
        kept = size = 0
        for key, future in list(reversed(self._compiled.items())):
            if not future.done():
                continue
            kept += 1
            if future.exception() is None:
                size += future.result().size
            if kept > MAX_COMPILED or (size > MAX_COMPILED_BYTES and kept > 1):
                del self._compiled[key]

    def _compile(self, grammar: str) -> _Compiled:
        import llguidance

        size = check_grammar(grammar)
        matcher = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=parser_limits()
        )
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return _Compiled(matcher=matcher, size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    size: int


def _reason(matcher: LLMatcher) -> str:
    """Return the library's message without the place in the grammar's text, which users have not written."""
    return matcher.get_error().partition("\n")[0]

"""Grammars of constrained outputs, and their compilation by llguidance.

A grammar is text; compiled, it tells which ids may come next. :class:`TurnGrammar` writes the
grammars of assistant turns: a tool call that has to be made, an answer that has to be JSON, calls
that have to fit::

    turn        thinking? (calls | answer)
    free turn   thinking? text? calls?          text has no opening of a call
    calls       begin call (between call)* end
    call        before NAME, arguments as JSON, after
    answer      JSON

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
"""Number of compiled grammars that are cached.

Requests of a group, and turns of an agent, mostly have the same one.
"""
MAX_COMPILED_BYTES = 256 << 20
"""Memory of all cached grammars together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSyntax:
    """How a format writes calls whose arguments are one JSON object.

    Attributes:
        before: text before the arguments; ``NAME`` in it stands for the tool's name.
        after: text after the arguments.
        begin: text before the first call.
        end: text after the last call.
        between: text between calls; None: a turn has one call.
        answer: text before an answer without calls.
        needs: a control token that the tokenizer must have, or else the format's next syntax
            counts; "": none.
        thinking: text before and after reasoning, if it differs from what the chat template shows.
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
        opened: whether the generation prompt has begun it; if not, a turn may do without.
    """

    tags: tuple[str, str]
    opened: bool = False


class TurnGrammar:
    """Writes grammars for one tokenizer.

    Args:
        control_ids: ids of control tokens, by their text.
        is_special: tells whether llguidance takes an id for a special token, which stands for no
            text.
        thinking: reasoning that a turn may begin with; None: none.
    """

    def __init__(
        self,
        control_ids: Mapping[str, int],
        *,
        is_special: Callable[[int], bool],
        thinking: Thinking | None,
    ) -> None:
        self._control_ids = control_ids
        self._is_special_id = is_special
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
        """Return the grammar of a turn: calls of tools, an answer in JSON, or either.

        Args:
            syntax: how calls are written; None: there is no grammar of calls.
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.
            answer: JSON schema of an answer; None: calls only.

        Raises:
            GrammarError: a tool's name has characters that formats read as their own.
        """
        alternatives = []
        rules = []
        if tools and syntax is not None:
            begin = self._text(syntax.begin)
            end = self._text(syntax.end)
            alternatives.append("calls")
            rules.append(f"calls: {begin} call{self._further_calls(syntax, several)} {end}")
            rules += self._call_rules("call", syntax, tools)
        if answer is not None:
            before_answer = self._text(syntax.answer if syntax else "")
            alternatives.append("answer")
            rules.append(f"answer: {before_answer} {_json(answer)}")

        beginning, thinking_rules = self._thinking_rules(syntax)
        start = f"start: {beginning} ({' | '.join(alternatives)})"
        return "\n".join([start, *rules, *thinking_rules])

    def free_turn(
        self, *, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], several: bool
    ) -> str:
        """Return the grammar of a turn of any text, in which what begins as a call is a valid one.

        Args:
            syntax: how calls are written.
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.

        Raises:
            GrammarError: nothing tells a call from text, or a tool's name has characters that
                formats read as their own.
        """
        opening = _OPENING.match(syntax.begin + syntax.before.partition("NAME")[0])
        if opening is None or syntax.answer:
            raise GrammarError("calls of this format have no opening that tells them from text")
        tag = opening.group()

        # Text may not hold the opening tag. If the tag is a special token, text ends before it; if
        # not, the first tag ends a lazy match, which includes the text.
        rules = [rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{_pattern(tag)}(.|\n)*/"]
        if self._begins_with_special(tag):
            turn = "(TEXT calls? | calls)?"
            opened = self._text(tag)
        else:
            turn = "(TEXT | calls)?"
            opened = "opened"
            rules.append(rf"opened[lazy]: /(.|\n)*{_pattern(tag)}/")

        # The tag is written already, so the first call, or what comes before it, lacks it.
        begin = self._text(syntax.begin.removeprefix(tag))
        end = self._text(syntax.end)
        rules.append(f"calls: {opened} {begin} first{self._further_calls(syntax, several)} {end}")
        first_syntax = syntax
        if not syntax.begin:
            first_syntax = replace(syntax, before=syntax.before.removeprefix(tag))
        closed_tools = [_without_further_arguments(tool) for tool in tools]
        rules += self._call_rules("first", first_syntax, closed_tools)
        rules += self._call_rules("call", syntax, closed_tools)

        beginning, thinking_rules = self._thinking_rules(syntax)
        return "\n".join([f"start: {beginning} {turn}", *rules, *thinking_rules])

    def _begins_with_special(self, text: str) -> bool:
        """Return whether a text begins with a special token of llguidance."""
        token = self._control.match(text)
        return token is not None and self._is_special_id(self._control_ids[token.group()])

    def _further_calls(self, syntax: CallSyntax, several: bool) -> str:
        """Return the expression for calls after the first one."""
        if not several or syntax.between is None:
            return ""
        return f" ({self._text(syntax.between)} call)*"

    def _call_rules(
        self, rule: str, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Return the rule of a call of any of these tools, and a rule for each of them."""
        call_of_tool = {}
        for index, tool in enumerate(tools):
            call_of_tool[f"{rule}_{index}"] = self._call(syntax, tool)
        rules = [f"{rule}: {' | '.join(call_of_tool)}"]
        for name, call in call_of_tool.items():
            rules.append(f"{name}: {call}")
        return rules

    def _call(self, syntax: CallSyntax, tool: Mapping[str, Any]) -> str:
        """Return the expression for a call of a tool."""
        function = tool["function"]
        name = function["name"]
        if not _NAME.fullmatch(name):
            raise GrammarError(
                f"the tool name {name!r} has characters other than letters, digits, '_', '-'"
                " and '.'"
            )
        parameters = function.get("parameters") or {}
        before = self._text(syntax.before.replace("NAME", name))
        arguments = _json({"type": "object", **parameters})
        after = self._text(syntax.after)
        return f"{before} {arguments} {after}"

    def _thinking_rules(self, syntax: CallSyntax | None) -> tuple[str, list[str]]:
        """Return the expression at the beginning of a turn, and its rules."""
        thinking = self._thinking
        if syntax is not None and syntax.thinking:
            thinking = Thinking(tags=syntax.thinking)
        if thinking is None:
            return "", []

        begin, end = thinking.tags
        if self._begins_with_special(end):
            rules = [
                rf"WORDS: /(.|\n)*/ & ~/(.|\n)*{_pattern(end)}(.|\n)*/",
                f"thought: WORDS {self._text(end)} SPACE",
            ]
        else:  # a lazy match ends at the first tag
            rules = [rf"words[lazy]: /(.|\n)*{_pattern(end)}/", "thought: words SPACE"]
        rules.append(r"SPACE: /[ \n]{0,8}/")
        if thinking.opened:
            return "thought", rules
        return "thinking?", [f"thinking: {self._text(begin)} thought", *rules]

    def _text(self, text: str) -> str:
        """Return the expression for a text of a format."""
        symbols = []
        for part in self._control.split(text):
            if part in self._control_ids:
                symbols.append(f"<[{self._control_ids[part]}]>")
            elif part:
                symbols.append(json.dumps(part, ensure_ascii=False))
        return " ".join(symbols) or '""'


def _without_further_arguments(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool that takes only the arguments it names, unless its schema says otherwise."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if "properties" not in parameters:
        return tool
    closed_parameters = {"additionalProperties": False, **parameters}
    return {**tool, "function": {**function, "parameters": closed_parameters}}


def _pattern(text: str) -> str:
    """Return the regular expression for a text, between slashes as Lark has them."""
    return re.escape(text).replace("/", r"\/")


def _json(schema: Any) -> str:
    """Return the expression for JSON of a schema, on one line."""
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_LINE})}"


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None if it can.

        It became too complex, or the output broke it.
        """
        return _reason(self._matcher) if self._matcher.is_error() else None

    def consume(self, ids: Sequence[int]) -> None:
        """Move past sampled ids."""
        self._matcher.consume_tokens(list(ids))

    def fill_allowed(self, bits: np.ndarray) -> None:
        """Write which ids may come next.

        Where the grammar is complete, or in error, only ids that end an output may.

        Args:
            bits: uint32 [n], a bit for each id of the model.
        """
        import numpy as np

        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(bits)]
        bits[: len(mask)] = mask
        bits[len(mask) :] = 0  # ids of the model that the tokenizer does not have


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be used from several threads.

    Compiled grammars are cached, and so are the reasons why others could not be compiled. A grammar
    is compiled by the thread that asks for it first, while other threads go on;
    :mod:`jax_agent_rl.chat.grammar_limits` bounds the work.

    Args:
        tokenizer: a ``transformers`` fast tokenizer.
        eos_ids: ids that end an output where the grammar allows it to end.
        vocab_size: number of ids of the model; None: of the tokenizer.
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
        """Return whether an id stands for no text, so that a grammar has to name it."""
        return self._tokenizer.is_special_token(token)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        import llguidance.hf

        count = max(self._vocab_size or 0, len(self._hf_tokenizer))
        return llguidance.hf.from_tokenizer(self._hf_tokenizer, count, eos_token=self._eos_ids)

    def _get(self, grammar: str) -> _Compiled:
        """Return a compiled grammar; compile it unless the cache or another thread has it."""
        key = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            cached = self._compiled.get(key)
            if cached is None:
                future: Future[_Compiled] = Future()
                self._compiled[key] = future
            else:
                self._compiled.move_to_end(key)
        if cached is not None:
            try:
                return cached.result()  # waits for the thread that compiles it
            except GrammarError as error:
                # A new error, so that threads do not add to one traceback.
                raise type(error)(str(error)) from None

        try:
            compiled = self._compile(grammar)
        except BaseException as error:
            # Another attempt may succeed after any other failure.
            is_final = isinstance(error, GrammarError) and not isinstance(error, GrammarBusyError)
            with self._lock:
                if not is_final:
                    self._compiled.pop(key, None)
                future.set_exception(error)
                self._forget_oldest()
            raise
        with self._lock:
            future.set_result(compiled)
            self._forget_oldest()
        return compiled

    def _forget_oldest(self) -> None:
        """Remove the oldest grammars until the limits hold; grammars that are compiled now stay."""
        count = 0
        size = 0
        for key, future in list(reversed(self._compiled.items())):
            if not future.done():
                continue
            count += 1
            if future.exception() is None:
                size += future.result().size
            if count > MAX_COMPILED or (size > MAX_COMPILED_BYTES and count > 1):
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
    """Return llguidance's message, without the position in a text that users have not written."""
    return matcher.get_error().partition("\n")[0]

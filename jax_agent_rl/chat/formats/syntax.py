"""Grammars of assistant turns: a tool call that has to be made, an answer that has to be JSON, calls that have to fit.

::

    turn      thinking? (calls | answer)            or thinking? text? calls?, where text has no opening of a call
    calls     begin call (between call)* end            call   before NAME, arguments as JSON, after
    answer    JSON

JSON is written on one line, as ``json.dumps`` and chat templates do: where white space is free, a model may write
nothing else until its limit. Control tokens stand as ids, so text that looks like one does not count as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.chat.grammar import GrammarError

_NAME = re.compile(r"[\w.\-]+")
_OPENING = re.compile(r"<[^<>\s]+>|\[TOOL_CALLS\]")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
        needs: a control token that the tokenizer must have, or else the format's next syntax counts; "": none.
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
        self, control_ids: Mapping[str, int], *, is_special: Callable[[int], bool], thinking: Thinking | None
    ) -> None:
        self._control_ids = control_ids
        self._special = is_special
        self._thinking = thinking
        longest_first = sorted(control_ids, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

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
            again = f" ({self._text(syntax.between)} call)*" if several and syntax.between is not None else ""
            rules.append(f"calls: {self._text(syntax.begin)} call{again} {self._text(syntax.end)}")
            rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
            rules += [f"call_{number}: {self._call(syntax, tool)}" for number, tool in enumerate(tools)]
        if answer is not None:
            kinds.append("answer")
            rules.append(f"answer: {self._text(syntax.answer if syntax else '')} {_json(answer)}")
        before, thinking = self._thinking_rules(syntax)
        return "\n".join([f"start: {before} ({' | '.join(kinds)})", *rules, *thinking])

    def free_turn(self, *, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
        """Return the grammar of a turn of any text, in which what begins as a call is one of ``tools``.

        Args:
            syntax: of calls.
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.

        Raises:
            GrammarError: nothing tells a call from text, or a tool's name has characters of the format's own.
        """
        opening = _OPENING.match(syntax.begin + syntax.before.partition("NAME")[0])
        if opening is None or syntax.answer:
            raise GrammarError("calls of this format have no opening that tells them from text")
        tag = opening.group()
        first = replace(syntax, before=syntax.before.removeprefix(tag))
        begin = syntax.begin.removeprefix(tag)
        if syntax.begin:
            first = syntax
        again = f" ({self._text(syntax.between)} call)*" if several and syntax.between is not None else ""
        text = rf"/(.|\n)+/ & ~/(.|\n)*{_pattern(tag)}(.|\n)*/"
        if self._is_special(tag):
            start, opened = "(TEXT calls? | calls)?", self._text(tag)
            rules = [f"TEXT: {text}"]
        else:
            start, opened = "(TEXT | calls)?", "opened"
            rules = [f"TEXT: {text}", rf"opened[lazy]: /(.|\n)*{_pattern(tag)}/"]  # to the first tag
        rules.append(f"calls: {opened} {self._text(begin)} first{again} {self._text(syntax.end)}")
        for kind, written in (("first", first), ("call", syntax)):
            rules.append(f"{kind}: {' | '.join(f'{kind}_{number}' for number in range(len(tools)))}")
            rules += [f"{kind}_{number}: {self._call(written, _closed(tool))}" for number, tool in enumerate(tools)]
        before, thinking = self._thinking_rules(syntax)
        return "\n".join([f"start: {before} {start}", *rules, *thinking])

    def _is_special(self, text: str) -> bool:
        """Return whether a text begins with a control token that is none of text to the library."""
        first = self._control.match(text)
        return first is not None and self._special(self._control_ids[first.group()])

    def _call(self, syntax: CallSyntax, tool: Mapping[str, Any]) -> str:
        function = tool["function"]
        if not _NAME.fullmatch(name := function["name"]):
            raise GrammarError(f"the tool name {name!r} has characters other than letters, digits, '_', '-' and '.'")
        parameters = function.get("parameters") or {}
        schema = {"type": "object", **parameters}
        return f"{self._text(syntax.before.replace('NAME', name))} {_json(schema)} {self._text(syntax.after)}"

    def _thinking_rules(self, syntax: CallSyntax | None) -> tuple[str, list[str]]:
        """Return the expression at the beginning of a turn, and its rules."""
        thinking = Thinking(tags=syntax.thinking) if syntax and syntax.thinking else self._thinking
        if thinking is None:
            return "", []
        begin, end = thinking.tags
        tag = _pattern(end)
        if self._is_special(end):
            words = [rf"WORDS: /(.|\n)*/ & ~/(.|\n)*{tag}(.|\n)*/", f"thought: WORDS {self._text(end)} SPACE"]
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
        terms = [f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts]
        return " ".join(terms) or '""'


def _closed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool that takes no arguments but those it names, unless its schema says otherwise."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if "properties" not in parameters:
        return tool
    return {**tool, "function": {**function, "parameters": {"additionalProperties": False, **parameters}}}


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_LINE})}"

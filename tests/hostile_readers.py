"""Everything that reads a model's text, called on text made to keep it busy: ``python -m
tests.hostile_readers``.

Prints a line for each reader when it is done. All together take seconds; one that takes quadratic
time takes longer than that for a single text, and gets dozens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from jax_agent_rl.agents.conversation import UNFINISHED_TAG
from jax_agent_rl.chat.formats import FORMATS
from jax_agent_rl.chat.special_tokens import unused_word
from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.environments.adapters import parse_command
from jax_agent_rl.rewards import boxed, has_format, tagged
from jax_agent_rl.rewards.code import extract_program
from jax_agent_rl.rewards.judge import GRADE
from jax_agent_rl.rewards.rules import last_number, marked_number, qa_exact_match, qa_f1
from jax_agent_rl.tool_server.plugins import ServerTool, markup
from jax_agent_rl.tool_server.plugins.interpreters import BashTool, SqlTool, parse_python
from jax_agent_rl.tool_server.plugins.search import SearchTool
from jax_agent_rl.tools.marker_services import bare_result
from jax_agent_rl.utils.fences import fenced_blocks
from jax_agent_rl.utils.text import any_of

LENGTH = 100_000
"""Characters of an attack, unless it is a single longer fragment."""

_COUNTED = "".join(f"mark{number}x" for number in range(200_000))
_PLACEHOLDERS = re.compile(any_of(f"<unused{number}>" for number in range(6000)))
"""As many as Gemma's tokenizer has."""


def action_reader(tool: type[ServerTool]) -> Callable[[str], object]:
    """How a tool reads an action. The tool is not set up: reading takes neither a sandbox nor an
    index.
    """
    return tool.__new__(tool).parse_action


def format_fragments(example: str) -> tuple[str, ...]:
    """Return the pieces of markup that a format's example call is made of, and its first half.

    The half stands for a call that is begun and never ended.
    """
    pieces = re.findall(r"<[^<>]*>|\[/?[A-Z_]+\]|[({\[\"]", example)
    first_half = example[: len(example) // 2]
    return (first_half, *dict.fromkeys(pieces))


READERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "answer_of": (answer_of, ("<think>", "</think>", "[THINK]", "<", "a")),
    "marked_number": (marked_number, ("####", " ", "$", "-", "1", ",", ".")),
    "last_number": (last_number, ("1", ",", ".", "-", "e", ",111", "1e1")),
    "tagged": (tagged, ("<answer>", "</answer>", "<", "a")),
    "boxed": (boxed, ("\\boxed{", "{", "}")),
    "has_format": (has_format, ("<think>", "</think>", "<answer>", "</answer>", " ", "\n")),
    "qa_exact_match": (
        lambda text: qa_exact_match("nq", text, ["a"] * 3),
        ("<answer>", "</answer>", "a ", " ", "."),
    ),
    "qa_f1": (lambda text: qa_f1("nq", text, ["a"] * 3), ("<answer>", "</answer>", "the ", "b")),
    "extract_program": (extract_program, ("```", "python", " ", "\n", "\r", "`")),
    "fenced_blocks": (
        lambda text: list(fenced_blocks(text)),
        ("````\n", "~~~", "- ", "1. ", "\t", " ", "\n", "`"),
    ),
    "judge": (GRADE.findall, ("[[", "]]", " ", "1", ".")),
    "python": (
        parse_python,
        ("<python>", "</python>", "```", "python", "input", " ", "\t", "\n", "<tool_call>"),
    ),
    "bash": (action_reader(BashTool), ("<bash>", "</bash>", "```", "sh", " ", "\n")),
    "search": (action_reader(SearchTool), ("<search>", "</search>", "<answer>", " ")),
    "sql": (action_reader(SqlTool), ("<sql>", "</sql>", "<solution>", " ")),
    "tool_call": (
        markup.parse_tool_call,
        ("<tool_call>", "</tool_call>", '{"name": "', "{", "[", '"', "1", "\\"),
    ),
    "result_block": (
        lambda text: markup.result_block(text, ""),
        ("```", "</", "<result>", " ", "\n"),
    ),
    "bare_result": (bare_result, ("<result>", "</result>", "\n")),
    "unfinished_tag": (lambda text: UNFINISHED_TAG.sub("", text), ("<", "a", " ", ">")),
    "marks": (lambda text: unused_word("mark", text), ("mark", "0", "x", _COUNTED)),
    "control_tokens": (_PLACEHOLDERS.findall, ("<", "<unused", "1", "<unused5999")),
    "command": (parse_command, ("<command>", "</command>", "\n", " ", "A")),
}


FURTHER_FRAGMENTS = {
    "hermes": ("<think>", "</think>", "a"),
    "qwen3_coder": ("<function=f>", "<parameter=x>", "\n"),
    "olmo3": ('f(x="', "f()\n", "'''", "\\ud83d"),
}
"""Of formats, beside their own markup."""

for tool_format in FORMATS.values():
    fragments_of_format = (
        *format_fragments(tool_format.example),
        *FURTHER_FRAGMENTS.get(tool_format.name, ()),
    )
    READERS[tool_format.name] = (tool_format.parse, fragments_of_format)


def attacks(fragments: tuple[str, ...]) -> Iterator[str]:
    """Runs of a fragment after and before each other one, and of two in turn."""
    for first, second in itertools.product(("", *fragments), fragments):
        run = second * max(1, LENGTH // len(second))
        yield first + run
        yield first + run + "x"
        yield run + first
        pair = first + second
        yield pair * max(1, LENGTH // len(pair))


if __name__ == "__main__":
    for name, (read, fragments) in READERS.items():
        for text in attacks(fragments):
            read(text)
        print(name, flush=True)

"""Hydra overrides (``a.b=c``) read from a shell script, a plain list or a YAML file.

Nothing is run. Of a script, only what Hydra would see matters: the words ``key.path=value``, with
``+``, ``++`` or ``~`` before them. Variables and arrays that the file itself assigns are
substituted, as are ``${x:-default}`` and integer arithmetic; ``$HOME`` becomes ``~``, ``$(pwd)``
and ``$PWD`` become ``.``. What only a shell could know (``$(hostname)``) stays in the text and is
named in :attr:`Override.unresolved`.
"""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.yaml_text import compose_yaml, load_yaml

# Quantifiers are possessive (`++`), so that a bracket that is never closed fails in linear time.
_NESTED = (
    r"(?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+"  # text with parentheses, nested up to two deep
)
_EXPANSION = (
    rf"\$\({_NESTED}\)"  # $(command) or $((arithmetic))
    r"|`[^`]*+`"
    r"|\$\{(?:[^{}]++|\{[^{}]*+\})*+\}"
    r"|\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])"
)
_TOKEN = re.compile(
    rf"(?P<skip>\\\n|(?<![^\s;])#[^\n]*)|(?P<space>[ \t\r]+)|(?P<end>[\n;&|])|'(?P<single>[^']*)'"
    rf'|"(?P<double>(?:\\.|\$\({_NESTED}\)|[^"\\$]++|\$)*+)"'
    rf"|\\(?P<escaped>.)|(?P<expansion>{_EXPANSION})|(?P<parenthesis>[()])"
    r"|(?P<text>[^\s'\"\\$`;&|()]+|\$)",
    re.S,
)
_IN_DOUBLE = re.compile(
    rf'\\(?P<escaped>["$`\\])|\\(?P<newline>\n)|(?P<expansion>{_EXPANSION})', re.S
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
CONFIG_NAME = "--config-name"
"""Hydra's option for the YAML file that the overrides change; read like a key."""
_OVERRIDE = re.compile(
    r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_][\w/@-]*(?:\.[\w/@-]+)+)(?:=(?P<value>.*))?", re.S
)
_BEFORE_ASSIGNMENTS = frozenset(
    {"export", "local", "declare", "readonly", "then", "else", "do", "{"}
)
"""Words after which ``name=value`` still assigns a variable."""
_TRAINER = re.compile(r"[\w.]+\.main_\w+|\S*main_\w+\.py")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
# Surrounds an expansion that only a shell could replace: it is found again where the variable that
# holds it is used.
_MARK = "\0"
MAX_CHARACTERS = 1_000_000
"""Limit of a file; its words may have twice as many once variables are replaced."""
MAX_WORDS = 50_000


@dataclass(frozen=True, kw_only=True)
class Override:
    """A key and its value, parsed as YAML.

    Attributes:
        where: ``file:line``.
        unresolved: expansions in the value that the file does not define, as they stand there.
    """

    key: str
    value: Any
    where: str
    unresolved: tuple[str, ...] = ()


def read_overrides(path: Path) -> dict[str, Override]:
    """Read the overrides of a file by key.

    A later override replaces an earlier one of the same key, and ``~key`` removes it.

    Args:
        path: YAML if it ends in ``.yaml`` or ``.yml``, otherwise a shell script or overrides one
            after another.

    Raises:
        ConfigError: with the line: an open quote, a value that is not YAML, a second training
            command.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file")
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{path} has {len(text)} characters, more than {MAX_CHARACTERS}: it is not a script of"
            " settings"
        )
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(text, path)
    return _read_script(text, path)


def _read_script(text: str, path: Path) -> dict[str, Override]:
    reader = _ScriptReader(text, path)
    reader.read()
    overrides: dict[str, Override] = {}
    for (word, line), (next_word, _) in itertools.pairwise([*reader.words, ("", 0)]):
        where = f"{path.name}:{line}"
        option, _, name = word.partition("=")
        if option == CONFIG_NAME:
            overrides[CONFIG_NAME] = Override(key=CONFIG_NAME, value=name or next_word, where=where)

        match = _OVERRIDE.fullmatch(word)
        if match is None:
            continue
        key = match["key"]
        if match["sign"] == "~":
            overrides.pop(key, None)
        elif match["value"] is not None:
            overrides[key] = _parse_override(key, match["value"], where)
    return overrides


def _parse_override(key: str, text: str, where: str) -> Override:
    """Parse a value as YAML; a value with an unresolved expansion stays text."""
    expansions = re.findall(f"{_MARK}(.*?){_MARK}", text, re.S)
    unresolved = tuple(dict.fromkeys(expansions))
    value: Any = text.replace(_MARK, "")
    if not unresolved:
        try:
            value = load_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"{where}: {key}={value}: the value is not valid YAML") from None
    return Override(key=key, value=value, where=where, unresolved=unresolved)


def _read_yaml(text: str, path: Path) -> dict[str, Override]:
    """Flatten a YAML mapping; a value that is ``${a.b}`` is looked up in the same file."""
    try:
        root = compose_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path.name} must hold a mapping of sections")

    overrides: dict[str, Override] = {}

    def flatten(mapping: yaml.MappingNode, prefix: str) -> None:
        for key_node, value_node in mapping.value:
            key = f"{prefix}{key_node.value}"
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                flatten(value_node, f"{key}.")
                continue
            where = f"{path.name}:{key_node.start_mark.line + 1}"
            try:
                value = load_yaml(yaml.serialize(value_node))
            except yaml.YAMLError as error:
                raise ConfigError(
                    f"{where}: the value of {key} is not valid YAML: {error}"
                ) from None
            unresolved = tuple(re.findall(r"\$\{[^}]*\}", str(value)))
            overrides[key] = Override(key=key, value=value, where=where, unresolved=unresolved)

    flatten(root, "")
    selected = {}
    for key, override in _follow_references(overrides).items():
        if "." in key and not key.startswith(("defaults.", "hydra.")):
            selected[key] = override
    return selected


def _follow_references(overrides: Mapping[str, Override]) -> dict[str, Override]:
    """Return the overrides with the values that their references, ``${a.b}``, lead to.

    A reference that leads nowhere, or in a circle, stays unresolved.
    """
    origins: dict[str, Override] = {}  # the end of each key's references, every step taken once
    for key in overrides:
        visited = {key: None}
        current = key
        while current not in origins:
            reference = re.fullmatch(r"\$\{([\w.]+)\}", str(overrides[current].value))
            if reference is None or reference[1] not in overrides or reference[1] in visited:
                origins[current] = overrides[current]
            else:
                current = reference[1]
                visited[current] = None
        for visited_key in visited:
            origins[visited_key] = origins[current]

    resolved = {}
    for key, override in overrides.items():
        origin = origins[key]
        resolved[key] = replace(override, value=origin.value, unresolved=origin.unresolved)
    return resolved


class _ScriptReader:
    """Splits a script into words as a shell would, and keeps the variables that it assigns."""

    def __init__(self, text: str, path: Path, outer: _ScriptReader | None = None) -> None:
        self.text = text
        self.path = path
        self.variables: dict[str, list[str]] = {} if outer is None else outer.variables
        self.words: list[tuple[str, int]] = []  # each with its line
        self._outermost = self if outer is None else outer._outermost
        self._characters = 0  # of words; the outermost reader counts the words of all readers
        self._line = 1 if outer is None else outer._line
        self._word: str | None = None  # the word that is being read
        self._may_assign = True  # whether a word with = assigns a variable: at a command's start
        self._array: tuple[str, bool, int] | None = None  # name, appends, index of its first word
        self._trainer_line: int | None = None

    def read(self) -> None:
        """Fill ``words`` from the text."""
        position = 0
        line = self._line
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise ConfigError(
                    f"{self.path.name}:{line}: {self.text[position]!r} opens what is never closed"
                )
            kind = match.lastgroup
            text = match[kind or 0]
            if self._word is None:
                self._line = line
            line += self.text.count("\n", position, match.end())
            position = match.end()

            if kind == "space":
                self._end_word()
            elif kind == "end":
                self._end_word()
                if self._array is None:
                    self._may_assign = True
            elif kind == "parenthesis":
                self._parenthesis(text)
            elif kind == "double":
                self._append(self._expand_double(text), splits=False)
            elif kind == "expansion":
                self._append(self._expand(text), splits=True)
            elif kind != "skip":
                self._append([text], splits=False)
        self._end_word()

    def _append(self, fields: list[str], *, splits: bool) -> None:
        """Add text to the current word; every field after the first begins a new word.

        Args:
            fields: one for most text, several for an array.
            splits: whether spaces separate words, as in an expansion without quotes. Only text at
                the start of a word is split.
        """
        if splits and not self._word and len(fields) == 1 and _MARK not in fields[0]:
            fields = fields[0].split()
        for index, field in enumerate(fields):
            if index > 0:
                self._end_word()
            self._count(field)
            self._word = (self._word or "") + field

    def _count(self, text: str) -> None:
        """Count the characters of a text that becomes part of a word.

        Raises:
            ConfigError: there are too many, because variables that hold each other multiply them.
        """
        outermost = self._outermost
        outermost._characters += len(text)
        if outermost._characters > 2 * MAX_CHARACTERS or len(self.words) > MAX_WORDS:
            raise ConfigError(
                f"{self.path.name}:{self._line}: the script's words have more than"
                f" {2 * MAX_CHARACTERS} characters, or are more than {MAX_WORDS}; import the part"
                " that sets the run's keys"
            )

    def _end_word(self) -> None:
        """Add the current word, if any, to ``words``, or assign the variable it assigns."""
        if self._word is None:
            return
        word = self._word
        self._word = None
        if self._array is not None:
            self.words.append((word, self._line))
            return

        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment and self._may_assign:
            name, plus, value = assignment.groups()
            previous_value = "".join(self.variables.get(name, [])) if plus else ""
            self._count(previous_value)
            self.variables[name] = [previous_value + value]
            return

        if word not in _BEFORE_ASSIGNMENTS:
            self._may_assign = False
        if _TRAINER.fullmatch(word):
            if self._trainer_line is not None:
                raise ConfigError(
                    f"{self.path.name}:{self._line}: a second training command, after that of"
                    f" line {self._trainer_line}; keep one of them in the file"
                )
            self._trainer_line = self._line
        self.words.append((word, self._line))

    def _parenthesis(self, text: str) -> None:
        """Begin or end an array, ``name=(…)``; any other parenthesis is text of its word."""
        assignment = _ASSIGNMENT.fullmatch(self._word or "")
        if text == "(" and assignment and not assignment[3]:
            self._array = (assignment[1], bool(assignment[2]), len(self.words))
            self._word = None
        elif text == ")" and self._array is not None:
            self._end_word()
            name, appends, start = self._array
            self._array = None
            previous_items = self.variables.get(name, []) if appends else []
            self._count("".join(previous_items))
            new_items = [word for word, _ in self.words[start:]]
            self.variables[name] = previous_items + new_items
            del self.words[start:]
        elif self._word is not None:
            self._append([text], splits=False)

    def _expand_double(self, text: str) -> list[str]:
        """Expand the inside of double quotes: an array gives several fields, anything else one."""
        fields = [""]
        end = 0
        for match in _IN_DOUBLE.finditer(text):
            fields[-1] += text[end : match.start()] + (match["escaped"] or "")
            end = match.end()
            if match["expansion"]:
                first, *further = self._expand(match["expansion"]) or [""]
                fields[-1] += first
                fields += further
        fields[-1] += text[end:]
        return fields

    def _expand(self, text: str) -> list[str]:
        """Return the fields of an expansion.

        If the file does not define it, its own text is returned between marks.
        """
        if text in ("$@", "$*", "${@}", "${@:1}", "${@:2}"):
            return []
        if text.startswith("$(("):
            return [self._calculate(text)]
        if text in ("$(pwd)", "`pwd`", "$PWD", "${PWD}"):
            return ["."]
        inner = text[2:-1] if text.startswith("${") else text[1:]
        match = re.fullmatch(r"([A-Za-z_]\w*|[0-9])(\[[@*]\])?(?::?[-=](.*))?", inner, re.S)
        if not match:
            return [_MARK + text + _MARK]

        name, all_items, default = match.groups()
        items = self.variables.get(name)
        if items:
            return items if all_items else items[:1]
        if name == "HOME":
            return ["~"]
        if default is None:
            return [] if name in self.variables else [_MARK + text + _MARK]

        # A default may have quotes and expansions of its own.
        reader = _ScriptReader(default.strip(), self.path, self)
        reader._may_assign = False
        reader.read()
        return [" ".join(word for word, _ in reader.words)]

    def _calculate(self, text: str) -> str:
        """Return the value of ``$((…))``: integers and variables with + - * /."""

        def evaluate(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp):
                calculate = _OPERATORS[type(node.op)]
                return calculate(evaluate(node.left), evaluate(node.right))
            if isinstance(node, ast.Name):
                return int(self.variables[node.id][0])
            return int(ast.literal_eval(node))

        expression = re.sub(r"\$\{?(\w+)\}?", r"\1", text[3:-2]).strip()  # $x is x, as in a shell
        try:
            return str(evaluate(ast.parse(expression, mode="eval").body))
        except (
            SyntaxError,
            LookupError,
            ValueError,
            TypeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ):
            return _MARK + text + _MARK

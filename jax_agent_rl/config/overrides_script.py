"""Hydra overrides (``a.b=c``) read from a shell script, a plain list of them, or a YAML file, without running anything.

Of a script, only what Hydra would see matters: the words ``key.path=value``, with ``+``, ``++`` or
``~`` before them. Variables and arrays that the file itself assigns are substituted,
``${x:-default}`` and integer arithmetic too; ``$HOME`` becomes ``~``, ``$(pwd)`` and ``$PWD``
become ``.``. What only a shell could know (``$(hostname)``) stays in the text and is named in
:attr:`Override.unresolved`.
"""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.yaml_text import compose_yaml, load_yaml

# Possessive, so that what is never closed is found in linear time.
_NESTED = r"(?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+"
_EXPANSION = rf"\$\({_NESTED}\)|`[^`]*+`|\$\{{(?:[^{{}}]++|\{{[^{{}}]*+\}})*+\}}|\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])"
_TOKEN = re.compile(
    rf"(?P<skip>\\\n|(?<![^\s;])#[^\n]*)|(?P<space>[ \t\r]+)|(?P<end>[\n;&|])|'(?P<single>[^']*)'"
    rf'|"(?P<double>(?:\\.|\$\({_NESTED}\)|[^"\\$]++|\$)*+)"|\\(?P<escaped>.)|(?P<expansion>{_EXPANSION})'
    rf"|(?P<parenthesis>[()])|(?P<text>[^\s'\"\\$`;&|()]+|\$)",
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
_TRAINER = re.compile(r"[\w.]+\.main_\w+|\S*main_\w+\.py")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_MARK = (  # surrounds text that only a shell could replace, and keeps its place through variables
    "\0"
)
MAX_CHARACTERS = 1_000_000
"""Limit of a file, and of all text that its variables are replaced by."""
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
    """Read the overrides of a file by key; a later one replaces an earlier one, ``~key`` removes it.

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
            f"{path} has {len(text)} characters, more than {MAX_CHARACTERS}: it is no script of"
            " settings"
        )
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(text, path)
    reader = _ScriptReader(text, path)
    reader.read()
    found: dict[str, Override] = {}
    for (word, line), (after, _) in itertools.pairwise([*reader.words, ("", 0)]):
        if word.partition("=")[0] == CONFIG_NAME:
            name = word.partition("=")[2] or after
            found[CONFIG_NAME] = Override(key=CONFIG_NAME, value=name, where=f"{path.name}:{line}")
        if not (match := _OVERRIDE.fullmatch(word)):
            continue
        key, written, where = match["key"], match["value"], f"{path.name}:{line}"
        if match["sign"] == "~":
            found.pop(key, None)
        elif written is not None:
            unresolved = tuple(dict.fromkeys(re.findall(f"{_MARK}(.*?){_MARK}", written, re.S)))
            text = written.replace(_MARK, "")
            try:
                value = text if unresolved else load_yaml(text)
            except yaml.YAMLError:
                raise ConfigError(f"{where}: {key}={text}: the value is not valid YAML") from None
            found[key] = Override(key=key, value=value, where=where, unresolved=unresolved)
    return found


def _read_yaml(text: str, path: Path) -> dict[str, Override]:
    """Flatten a YAML mapping; ``${a.b}`` that is a whole value is looked up in the same file."""
    try:
        root = compose_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path.name} must hold a mapping of sections")
    found: dict[str, Override] = {}

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value:
                walk(value, f"{name}.")
            else:
                try:
                    written = load_yaml(yaml.serialize(value))
                except yaml.YAMLError as error:
                    line = key.start_mark.line + 1
                    raise ConfigError(
                        f"{path.name}:{line}: the value of {name} is not valid YAML: {error}"
                    ) from None
                unresolved = tuple(re.findall(r"\$\{[^}]*\}", str(written)))
                where = f"{path.name}:{key.start_mark.line + 1}"
                found[name] = Override(key=name, value=written, where=where, unresolved=unresolved)

    walk(root, "")
    origins: dict[str, Override] = {}
    for name in found:
        chain = {name: None}
        last = name
        while last not in origins:
            target = re.fullmatch(r"\$\{([\w.]+)\}", str(found[last].value))
            if target is None or target[1] not in found or target[1] in chain:
                origins[last] = found[last]
            else:
                last = target[1]
                chain[last] = None
        for key in chain:
            origins[key] = origins[last]
    for name, origin in origins.items():
        found[name] = replace(found[name], value=origin.value, unresolved=origin.unresolved)
    return {
        name: one
        for name, one in found.items()
        if "." in name and not name.startswith(("defaults.", "hydra."))
    }


class _ScriptReader:
    """Splits a script into words as a shell would, and keeps the variables that it assigns."""

    def __init__(self, text: str, path: Path, outer: _ScriptReader | None = None) -> None:
        self.text, self.path = text, path
        self.variables: dict[str, list[str]] = {} if outer is None else outer.variables
        self.words: list[tuple[str, int]] = []
        self._outermost = self if outer is None else outer._outermost
        self._written = 0  # characters of words, in the outermost reader those of all
        line = 1 if outer is None else outer._line
        self._word: str | None = None
        self._line = line
        self._may_assign = True
        self._array: tuple[str, bool, int] | None = None  # name, appends, index of its first word
        self._trainer: int | None = None

    def read(self) -> None:
        """Fill ``words``, each with its line."""
        position = 0
        line = self._line
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise ConfigError(
                    f"{self.path.name}:{line}: {self.text[position]!r} opens what is never closed"
                )
            kind, text = match.lastgroup, match[match.lastgroup or 0]
            if self._word is None:
                self._line = line
            line += self.text.count("\n", position, match.end())
            position = match.end()
            if kind in ("space", "end"):
                self._end_word()
                self._may_assign |= kind == "end" and self._array is None
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
        """Add text to the current word; further fields, and unquoted spaces at its start, begin new ones."""
        if splits and not self._word and len(fields) == 1 and _MARK not in fields[0]:
            fields = fields[0].split()
        for index, field in enumerate(fields):
            if index:
                self._end_word()
            self._count(field)
            self._word = (self._word or "") + field

    def _count(self, text: str) -> None:
        """Raise ConfigError where variables that hold each other have made too much of a small file."""
        everything = self._outermost
        everything._written += len(text)
        if everything._written > 2 * MAX_CHARACTERS or len(self.words) > MAX_WORDS:
            raise ConfigError(
                f"{self.path.name}:{self._line}: the script's words have more than"
                f" {2 * MAX_CHARACTERS} characters, or are more than {MAX_WORDS}; import the part"
                " that sets the run's keys"
            )

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, self._word = self._word, None
        assignment = _ASSIGNMENT.fullmatch(word)
        if self._array is None and self._may_assign and assignment:
            name, plus, value = assignment.groups()
            before = "".join(self.variables.get(name, [])) if plus else ""
            self._count(before)
            self.variables[name] = [before + value]
            return
        if self._array is None:
            self._may_assign &= word in (
                "export",
                "local",
                "declare",
                "readonly",
                "then",
                "else",
                "do",
                "{",
            )
            if _TRAINER.fullmatch(word):
                if self._trainer is not None:
                    raise ConfigError(
                        f"{self.path.name}:{self._line}: a second training command, after that of"
                        f" line {self._trainer}; keep one of them in the file"
                    )
                self._trainer = self._line
        self.words.append((word, self._line))

    def _parenthesis(self, text: str) -> None:
        assignment = _ASSIGNMENT.fullmatch(self._word or "")
        if text == "(" and assignment and not assignment[3]:
            self._array = (assignment[1], bool(assignment[2]), len(self.words))
            self._word = None
        elif text == ")" and self._array is not None:
            self._end_word()
            name, appends, start = self._array
            self._array = None
            earlier = self.variables.get(name, []) if appends else []
            self._count("".join(earlier))
            self.variables[name] = earlier + [word for word, _ in self.words[start:]]
            del self.words[start:]
        elif self._word is not None:
            self._append([text], splits=False)

    def _expand_double(self, text: str) -> list[str]:
        """Expand the inside of double quotes: an array gives several fields, anything else one."""
        fields, end = [""], 0
        for match in _IN_DOUBLE.finditer(text):
            fields[-1] += text[end : match.start()] + (match["escaped"] or "")
            end = match.end()
            if match["expansion"]:
                first, *rest = self._expand(match["expansion"]) or [""]
                fields[-1] += first
                fields += rest
        fields[-1] += text[end:]
        return fields

    def _expand(self, text: str) -> list[str]:
        """Return the fields of an expansion, or its own text between marks if the file does not define it."""
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
        name, array, default = match.groups()
        if value := self.variables.get(name):
            return value if array else value[:1]
        if name == "HOME":
            return ["~"]
        if default is None:
            return [] if name in self.variables else [_MARK + text + _MARK]
        reader = _ScriptReader(default.strip(), self.path, self)
        reader._may_assign = False
        reader.read()
        return [" ".join(word for word, _ in reader.words)]

    def _calculate(self, text: str) -> str:
        """Return the value of ``$((…))``: integers and variables with + - * /."""

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp):
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            if isinstance(node, ast.Name):
                return int(self.variables[node.id][0])
            return int(ast.literal_eval(node))

        try:
            return str(
                value(
                    ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text[3:-2]).strip(), mode="eval").body
                )
            )
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

"""YAML of others, read with bounds: no document grows beyond its text, and none has a key twice.

``1e-5`` is a number here (YAML 1.1 wants ``1.0e-5``).
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node

MAX_CHARACTERS = 1_000_000
MAX_NODES = 50_000
"""Scalars, lists and mappings of a document; an alias counts each time with all that it holds."""
MAX_DEPTH = 64
MAX_NUMBER_LENGTH = 400
"""Characters of a number: Python takes quadratic time for one, and no float has more."""

_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_MERGE = "tag:yaml.org,2002:merge"


def load_yaml(text: str) -> Any:
    """Return the value of a document.

    Raises:
        yaml.YAMLError: it is not YAML, is beyond a bound, or has a key twice in one mapping.
    """
    return _read(text, yaml.SafeLoader.get_single_data)


def compose_yaml(text: str) -> Node | None:
    """Return the tree of a document, whose nodes know their lines; None if it is empty.

    Raises:
        yaml.YAMLError: see :func:`load_yaml`.
    """
    return _read(text, yaml.SafeLoader.get_single_node)


def _read(text: str, read: Any) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
    loader = _Loader(text)
    try:
        return read(loader)
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML's constructors of numbers and dates raise these.
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Safe YAML with the bounds of this module."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}  # of complete collections, by the identity of their node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        mark = event.start_mark
        is_alias = isinstance(event, yaml.AliasEvent)
        previous_nodes = self._nodes
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConstructorError(None, None, f"more than {MAX_DEPTH} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1

        if is_alias and isinstance(node, CollectionNode):
            if id(node) not in self._sizes:
                raise ConstructorError(None, None, "an alias of what it stands in", mark)
            self._nodes += self._sizes[id(node)]
        else:
            self._nodes += 1
        if self._nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} values, those of aliases counted where they stand"
            raise ConstructorError(None, None, problem, mark)

        if isinstance(node, CollectionNode) and not is_alias:
            self._sizes[id(node)] = self._nodes - previous_nodes
        if isinstance(node, MappingNode) and not is_alias:
            _check_keys(node)
        return node

    def construct_yaml_int(self, node: Any) -> Any:
        _check_length(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> Any:
        _check_length(node)
        return super().construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _check_keys(node: MappingNode) -> None:
    """Raise ConstructorError if a mapping has a key twice; what ``<<`` merges may be overridden."""
    keys = set()
    for key_node, _ in node.value:
        if isinstance(key_node, CollectionNode) or key_node.tag == _MERGE:
            continue
        key = (key_node.tag, key_node.value)
        if key in keys:
            problem = f"the key {key_node.value[:100]!r} stands twice in one mapping"
            raise ConstructorError(None, None, problem, key_node.start_mark)
        keys.add(key)


def _check_length(node: Any) -> None:
    if len(node.value) > MAX_NUMBER_LENGTH:
        raise ConstructorError(
            None, None, f"a number of {len(node.value)} characters", node.start_mark
        )

"""Turns Sphinx's roles in docstrings into links of the API reference.

``:class:`~jax_agent_rl.types.Turn``` becomes a link called ``Turn`` where the reference describes
that class, and plain code where it does not. mkdocstrings loads this file; ``mkdocs.yml`` names it.
"""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([\w.]+)`")
LONE_COLONS = re.compile(r"^[ \t]*::\n", re.MULTILINE)  # a picture follows, indented
INTRODUCED_BLOCK = re.compile(r"::(?=\n\s*\n[ \t]+\S)")  # an example follows, indented


class Roles(griffe.Extension):
    """Rewrites each docstring once, when griffe has read all modules."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is None:
            return
        with_links = ROLE.sub(lambda role: _link(obj, role), obj.docstring.value)
        obj.docstring.value = INTRODUCED_BLOCK.sub(":", LONE_COLONS.sub("", with_links))


def _link(obj: griffe.Object, role: re.Match[str]) -> str:
    shortened, name = role.groups()
    text = name.rpartition(".")[2] if shortened else name
    try:
        identifier = obj.resolve(name)
    except griffe.NameResolutionError:
        identifier = name
    return (
        "<autoref optional"
        f' identifier="{html.escape(identifier)}"><code>{html.escape(text)}</code></autoref>'
    )

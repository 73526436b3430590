"""Puts data, style and scripts into one HTML file that loads nothing.

What models and tools wrote is hostile here. It enters the page only as JSON inside script elements, its ``<``, ``>``
and ``&`` escaped; the scripts put it on the page only as text nodes; and the page's security policy lets no other
script run and nothing be loaded or sent.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from jax_agent_rl.utils.text import replace_lone_surrogates

SCRIPTS = ("dom.js", "charts.js", "timeline.js", "tokens.js", "tree.js", "browser.js", "main.js")
"""In order; each relies only on those before it."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def to_json(value: Any) -> str:
    """JSON that can stand inside a script element; halves of surrogate pairs become question marks.

    >>> to_json({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return replace_lone_surrogates(text).translate(_ESCAPES)


def page(*, title: str, index: Mapping[str, Any], trajectories: Iterable[Mapping[str, Any]]) -> str:
    """The whole file.

    Args:
        title: of the page.
        index: what is read when it opens.
        trajectories: each is read only when it is looked at: one line of a JSON array.
    """
    folder = files("jax_agent_rl.observe.report") / "page"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    parts = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "INDEX": to_json(index),
        "TRAJECTORIES": "[\n" + ",\n".join(map(to_json, trajectories)) + "\n]",
        "SCRIPT": script,
    }
    first, *rest = (folder / "page.html").read_text(encoding="utf-8").split("{{")
    pieces = [first]  # not by replacing: a value may hold what looks like a name
    for piece in rest:
        name, text = piece.split("}}", 1)
        pieces += [parts[name], text]
    return "".join(pieces)

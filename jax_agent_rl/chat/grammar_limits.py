"""How much work a grammar is, told from its text, and the child process in which large ones are tried first.

llguidance writes repetitions out when it compiles: ``maxItems: 10**7`` takes four gigabytes, a ``multipleOf`` of a
prime of seven digits half a minute. It has no limit that prevents either, and cannot be interrupted. So a grammar is

::

    weighed, in linear time ──► too much: refused, with the keyword, its value and the limit
                            ──► little:   compiled at once
                            ──► else:     compiled by a child first, with limits of time and memory, then here

A unit of weight is about ten microseconds of compilation, measured on one keyword after the other
(``maxItems: 10000`` takes 0.2 s, ``multipleOf: 9973`` 0.25 s, 1,000 optional properties 0.4 s, 10,000 values 0.1 s).
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from jax_agent_rl.utils.worker_pool import JsonWorkers, WorkerFailedError, WorkerTimeoutError, serve

MAX_WEIGHT = 20_000
"""Limit of a grammar."""
LIGHT_WEIGHT = 2000
"""Weight up to which a grammar is compiled at once. Of five thousand random schemas of all keywords up to it, none took
more than 0.2 seconds or ten megabytes; twenty tools of ten parameters weigh half of it."""
LIGHT_LENGTH = 200_000
"""Characters up to which a grammar is compiled at once."""
MAX_LENGTH = 1_000_000
"""Characters of a grammar."""
MAX_DEPTH = 64
"""Levels of a schema."""
MAX_PROPERTIES = 1000
"""Properties of one object: their time is quadratic."""
MAX_PATTERN = 4096
"""Characters of a pattern."""
MAX_TEXT_LENGTH = 1_000_000
"""``minLength`` and ``maxLength`` of a text, whose repetitions are not written out."""
CHECK_SECONDS = 10.0
"""Time limit of the child, also for what waits for it."""
CHECK_BYTES = 1 << 30
"""Memory that the child may take beyond what it has at first."""
MAX_CHECKED = 256
"""Grammars of which the child's answer is kept."""
MAX_WAITING = 8
"""Grammars that may wait for the child."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is the library's reason, or a limit."""


class GrammarBusyError(GrammarError):
    """A grammar that was not checked, because too many others were waiting."""


def weigh_grammar(text: str) -> int:
    """Return the weight of a grammar.

    Raises:
        GrammarError: it is too large, or a part of it is; names what, its value and the limit.
    """
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"the grammar has {len(text)} characters: it may have {MAX_LENGTH}")
    weight = 0
    for part in _parts(text):
        weight += _weigh_schema(part) if isinstance(part, dict) else _weigh_lark(part)
        if weight > MAX_WEIGHT:
            raise GrammarError(
                "its schemas together are too large (properties, values, repetitions and patterns): simplify them, or "
                "offer fewer tools"
            )
    return weight


_LARGE_NUMBER = re.compile(r"[{~]\s*\d{4}|,\s*\d{4}|\.\.\s*\d{4}")


def check_grammar(text: str) -> int:
    """Check that a grammar can be compiled here, without compiling it here; return its weight.

    Raises:
        GrammarError: it is too large, or cannot be compiled.
    """
    weight = weigh_grammar(text)
    is_light = (
        weight <= LIGHT_WEIGHT
        and len(text) <= LIGHT_LENGTH
        # What is hidden from the search above, in a comment for example, is not light.
        and text.count("%json") == sum(isinstance(part, dict) for part in _parts(text))
        and not any(_LARGE_NUMBER.search(part) for part in _parts(text) if isinstance(part, str))
    )
    if not is_light:
        _check_once(text)
    return weight


def _check_once(text: str) -> None:
    """Check a grammar in the child process, unless that was done lately: codec and engine both ask."""
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    with _guard:
        problem = _checked.get(key, "")
    if problem == "":
        try:
            _check_in_child(text)
            problem = None
        except GrammarBusyError:
            raise
        except GrammarError as error:
            problem = str(error)
        with _guard:
            _checked[key] = problem
            if len(_checked) > MAX_CHECKED:
                _checked.popitem(last=False)
    if problem is not None:
        raise GrammarError(problem)


_SCHEMA = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|(%json\s*)')


def _parts(text: str) -> Iterator[str | dict[str, Any]]:
    """Yield a grammar's schemas, and the text between them."""
    at = begin = 0
    while (found := _SCHEMA.search(text, at)) is not None:
        at = found.end()
        if found[1] is None:
            continue
        try:
            schema, at = json.JSONDecoder().raw_decode(text, at)
        except RecursionError:
            raise GrammarError(f"a schema has more than {MAX_DEPTH} levels") from None
        except ValueError as error:
            raise GrammarError(f"a schema is no JSON: {error}") from None
        yield text[begin : found.start()]
        begin = at
        if isinstance(schema, dict):
            yield schema
    yield text[begin:]


_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/((?:[^/\\\n]|\\.)++)/|[{~]\s*(\d+)\s*(?:(?:,|\.\.)\s*(\d*))?')


def _weigh_lark(text: str) -> int:
    """Return the weight of a grammar's text without its schemas."""
    weight = 0
    for found in _LARK.finditer(text):
        if found[1] is not None:
            weight += _weigh_pattern(found[1])
        elif found[2] is not None:
            weight += max(_number(found[2]), _number(found[3] or "0"))
    return weight


def _number(digits: str) -> int:
    """Return a number of any length, as far as it matters."""
    return int(digits) if len(digits) < 10 else MAX_WEIGHT + 1


# --- schemas ----------------------------------------------------------------------------------------------------------

_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""


def _weigh_schema(schema: Any) -> int:
    """Return the weight of a JSON schema, without recursion."""
    weight = 0
    waiting: list[tuple[Any, int, bool]] = [(schema, 0, True)]
    while waiting:
        node, depth, is_schema = waiting.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"a schema has more than {MAX_DEPTH} levels")
        weight += 1
        if isinstance(node, list):
            waiting += [(item, depth + 1, is_schema) for item in node]
        elif isinstance(node, dict):
            for key, value in node.items():
                if is_schema:
                    weight += _weigh_keyword(key, value)
                waiting.append((value, depth + 1, is_schema and key not in _VALUES))
        if weight > MAX_WEIGHT:
            return weight
    return weight


def _weigh_keyword(key: str, value: Any) -> int:
    """Return the weight of a keyword beyond one for each value; raise GrammarError if it alone is too much."""
    if key in ("maxItems", "minItems", "minProperties", "maxProperties"):
        return _count(key, value, MAX_WEIGHT // 2)
    if key in ("maxLength", "minLength"):
        return _count(key, value, MAX_TEXT_LENGTH) // 1000
    if key == "multipleOf":
        return _count(key, _multiple(value), MAX_WEIGHT // 2)
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
        if len(value) > MAX_PROPERTIES:
            raise GrammarError(f"{key} has {len(value)} entries: a grammar can follow {MAX_PROPERTIES}")
        weight = len(value) ** 2 // 1000
        if key == "patternProperties":
            weight += sum(_weigh_pattern(pattern) for pattern in value)
        return weight
    if key == "pattern" and isinstance(value, str):
        return _weigh_pattern(value)
    return 0


def _count(key: str, value: Any, limit: int) -> int:
    """Return a keyword's number; other values are the library's to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not 0 <= value <= limit:
        raise GrammarError(f"{key}={value!s:.40}: a grammar can follow 0 to {limit}; leave it out, or lower it")
    return int(value)


def _multiple(value: Any) -> Any:
    """Return the digits of a ``multipleOf`` as a number, which the automaton counts up to."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        digits = Decimal(repr(value)).normalize().as_tuple().digits
    except InvalidOperation:  # no finite number
        return value
    return int("".join(map(str, digits[:20])))


# --- patterns ---------------------------------------------------------------------------------------------------------

_PATTERN = re.compile(
    r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<other>.)",
    re.DOTALL,
)


def _weigh_pattern(pattern: str) -> int:
    """Return the weight of a regular expression: its characters, as often as its counts repeat them.

    Raises:
        GrammarError: it is too long, or repeats too much.
    """
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"a pattern has {len(pattern)} characters: a grammar can follow {MAX_PATTERN}")
    groups: list[int] = []
    weight = last = 0  # of the group so far, and of the last thing in it, which a count repeats
    for found in _PATTERN.finditer(pattern):
        if found["open"]:
            groups.append(weight)
            weight = last = 0
        elif found["close"]:
            last = weight
            weight += groups.pop() if groups else 0
        elif found["least"]:
            times = max(_number(found["least"]), _number(found["most"] or "0"))
            weight += last * max(0, times - 1)
            last *= times
        else:
            last = 1
            weight += 1
        if weight + sum(groups) > MAX_WEIGHT // 2:
            raise GrammarError(
                f"the pattern {pattern[:80]!r} repeats too much: a grammar can follow {MAX_WEIGHT // 2} repetitions"
            )
    return weight


# --- the child process ------------------------------------------------------------------------------------------------

_WORKERS = JsonWorkers(
    "from jax_agent_rl.chat.grammar_limits import serve_checks; serve_checks()", size=1, purpose="checking a grammar"
)
_waiting = threading.BoundedSemaphore(MAX_WAITING)
_checked: OrderedDict[bytes, str | None] = OrderedDict()
_guard = threading.Lock()


def _check_in_child(text: str) -> None:
    """Compile a grammar in a child process, to see whether this one can.

    Raises:
        GrammarError: it cannot be compiled, takes too long or too much memory, or too many others are waiting.
    """
    if not _waiting.acquire(blocking=False):
        raise GrammarBusyError(f"{MAX_WAITING} large grammars are being checked already; try again")
    try:
        answer = _WORKERS.ask({"grammar": text}, timeout=CHECK_SECONDS)
    except WorkerTimeoutError:
        raise GrammarError(
            f"it takes more than {CHECK_SECONDS:g} seconds to compile: simplify its schemas, or offer fewer tools"
        ) from None
    except WorkerFailedError as error:
        raise GrammarError(
            f"it takes more than {CHECK_BYTES >> 20} megabytes to compile ({error}): simplify its schemas"
        ) from None
    finally:
        _waiting.release()
    if answer.get("error"):
        raise GrammarError(str(answer["error"]))


_ID = re.compile(r"<\[[\d,\s-]+\]>")


def serve_checks() -> None:
    """Compile grammars until standard input ends: the program of the child.

    It has no tokenizer but bytes, so that it starts at once; what a grammar costs hardly depends on that.
    """
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        text = _ID.sub("<[0]>", request["grammar"])
        try:
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return {"error": matcher.get_error().partition("\n")[0] if matcher.is_error() else None}
        except MemoryError:
            return {"error": "it takes too much memory to compile: simplify its schemas"}

    serve(answer)

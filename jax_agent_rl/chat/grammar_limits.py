"""Limits of the work that a grammar makes: estimated from its text, then tried in a child process.

llguidance writes repetitions out when it compiles: ``maxItems: 10**7`` takes four gigabytes, a
``multipleOf`` of a prime of seven digits half a minute. ``allOf`` multiplies the alternatives of
its parts. The library cannot be interrupted, and its own limits count neither. So every grammar is

::

    weighed, in linear time    ──► too heavy: refused, with the keyword, its value and the limit
            │
            ▼
    compiled by a child,       ──► over a limit: the child is killed, the grammar refused
    within limits of time and memory
            │
            ▼
    compiled here, once (jax_agent_rl.chat.grammar)

A unit of weight is about ten microseconds of compilation, measured on one keyword after the other
(``maxItems: 10000`` takes 0.2 s, ``multipleOf: 9973`` 0.1 s, 1,000 optional properties 0.3 s,
10,000 values 0.1 s). There are two children, so that grammars which are heavy, or turn out to be,
do not hold up light ones.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jax_agent_rl.errors import BackendError
from jax_agent_rl.utils.timeouts import DaemonThreads
from jax_agent_rl.utils.worker_pool import (
    JsonWorkers,
    WorkerFailedError,
    WorkersBusyError,
    WorkerTimeoutError,
    serve,
)

if TYPE_CHECKING:
    from llguidance import LLParserLimits

T = TypeVar("T")

MAX_WEIGHT = 20_000
"""Maximum weight of a grammar."""
LIGHT_WEIGHT = 2000
"""Weight up to which the child for light grammars tries first.

Twenty tools of ten parameters weigh half as much.
"""
LIGHT_SECONDS = 1.0
"""Time limit of that try: a grammar that takes longer goes on to the other child."""
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
CHECK_SECONDS = 5.0
"""Time limit of compiling a grammar."""
CHECK_BYTES = 256 << 20
"""Memory that compiling a grammar may take."""
MASK_SECONDS = 0.25
"""CPU time of finding the first characters, which an engine does for every token.

It is 0.02 with 1,000 properties.
"""
WAIT_SECONDS = 30.0
"""Time limit of waiting for a child."""
MAX_WAITING = 256
"""Light grammars that are being checked or wait for it."""
MAX_WAITING_HEAVY = 8
"""Heavy grammars that are being checked or wait for it."""
MAX_CHECKED = 1024
"""Number of grammars whose results are cached: codec and engine both ask."""
UNIT_BYTES = 2000
"""Memory of a unit of weight."""
MAX_SYMBOLS = 60_000
"""Symbols of a compiled grammar: the library counts them in 16 bits, and panics beyond."""
MAX_LEXER_STATES = 100_000
"""States that one output may make of a grammar's patterns; each takes one or two kilobytes."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is the library's reason, or a limit."""


class GrammarBusyError(GrammarError):
    """A grammar that was not checked, because too many others were waiting."""


def weigh_grammar(text: str) -> int:
    """Return the weight of a grammar.

    Raises:
        GrammarError: it is too large, or a part of it is; the message names the part, its value and
            the limit.
    """
    if len(text) > MAX_LENGTH:
        raise GrammarError(
            f"the grammar has {len(text)} characters: it may have {MAX_LENGTH}; offer fewer tools,"
            " or shorter schemas"
        )
    weight = 0
    for part in _parts(text):
        weight += _weigh_lark(part.text) if part.is_lark else _weigh_schema(part.schema)
        if weight > MAX_WEIGHT:
            raise GrammarError(
                "its schemas together are too large (properties, values, repetitions and patterns):"
                " simplify them, or offer fewer tools"
            )
    return weight


def check_grammar(text: str) -> int:
    """Check that a grammar can be compiled within the limits; return about how many bytes it takes.

    It blocks for up to some seconds, so call it from a thread. Results are cached.

    Raises:
        GrammarError: it is too large, or cannot be compiled.
    """
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    with _checked_lock:
        result = _checked.get(key)
    if result is None:
        result = _check(text)
        with _checked_lock:
            _checked[key] = result
            if len(_checked) > MAX_CHECKED:
                _checked.popitem(last=False)
    if isinstance(result, str):
        raise GrammarError(result)
    return result


def parser_limits() -> LLParserLimits:
    """Return llguidance's own limits, which hold for the children and this process alike."""
    import llguidance

    return llguidance.LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_LEXER_STATES
    )


def warm_up() -> None:
    """Start the child for light grammars, so that the first one does not wait for it."""
    _LIGHT.check(_SMALLEST["grammar"])


_THREADS = DaemonThreads(kind="grammar", error=BackendError)


async def in_grammar_thread(function: Callable[[], T]) -> T:
    """Call a function that checks or compiles a grammar in a thread of its own.

    Nothing else then waits for it.

    Raises:
        BackendError: too many such threads are at work though nobody waits for them any more.
    """
    return await _THREADS.run(function, name="a grammar")


def _check(text: str) -> int | str:
    """Return about how many bytes a grammar takes, or why it cannot be compiled.

    Raises:
        GrammarBusyError: too many others wait.
    """
    try:
        weight = weigh_grammar(text)
        size = None
        if weight <= LIGHT_WEIGHT:
            with suppress(WorkerTimeoutError):  # it only seemed to be light
                size = _LIGHT.check(text)
        if size is None:
            size = _HEAVY.check(text)
    except GrammarBusyError:
        raise
    except GrammarError as error:
        return str(error)
    except WorkerTimeoutError:
        return (
            f"it takes more than {CHECK_SECONDS:g} seconds to compile: simplify its schemas, or"
            " offer fewer tools"
        )
    except WorkerFailedError as error:
        return (
            f"it cannot be compiled within {CHECK_BYTES >> 20} megabytes ({error}): simplify its"
            " schemas, or offer fewer tools"
        )
    return max(size, weight * UNIT_BYTES)


# --- the parts of a grammar -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A JSON schema of a grammar, or what is between two of them."""

    text: str
    schema: Any = None
    is_lark: bool = True


_SCHEMA_KEYWORD = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|(%json\s*)')


def _parts(text: str) -> Iterator[_Part]:
    """Yield the parts of a grammar, whose texts together are the text of the grammar."""
    part_start = 0
    position = 0
    while True:
        match = _SCHEMA_KEYWORD.search(text, position)
        if match is None:
            break
        position = match.end()
        if match[1] is None:  # a string or a pattern, in which the keyword is text
            continue
        yield _Part(text[part_start:position])
        part_start = position
        try:
            schema, position = json.JSONDecoder().raw_decode(text, position)
        except RecursionError:
            raise GrammarError(
                f"a schema has more than {MAX_DEPTH} levels: a flatter one is needed"
            ) from None
        except ValueError as error:
            raise GrammarError(f"a schema is not JSON: {error}") from None
        yield _Part(text[part_start:position], schema, is_lark=False)
        part_start = position
    yield _Part(text[part_start:])


_LARK = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"'
    r"|/(?P<pattern>(?:[^/\\\n]|\\.)++)/"
    r"|[{~]\s*(?P<min>\d+)\s*(?:(?:,|\.\.)\s*(?P<max>\d*))?"
    r"|(?P<control><[^<>\s]+>)"
)


def _weigh_lark(text: str) -> int:
    """Return the weight of a grammar's text without its schemas."""
    weight = 0
    for match in _LARK.finditer(text):
        if match["pattern"] is not None:
            weight += _weigh_pattern(match["pattern"])
        elif match["min"] is not None:
            weight += max(_parse_count(match["min"]), _parse_count(match["max"] or "0"))
    return weight


def _parse_count(digits: str) -> int:
    """Return a number of repetitions; one of many digits as a number over the limit."""
    return int(digits) if len(digits) < 10 else MAX_WEIGHT + 1


# --- schemas --------------------------------------------------------------------------------------


class _Kind(Enum):
    """What an object in a schema is."""

    SCHEMA = auto()
    SCHEMAS_BY_NAME = auto()
    VALUE = auto()


_KINDS = {
    "enum": _Kind.VALUE,
    "const": _Kind.VALUE,
    "default": _Kind.VALUE,
    "examples": _Kind.VALUE,
    "required": _Kind.VALUE,
    "properties": _Kind.SCHEMAS_BY_NAME,
    "patternProperties": _Kind.SCHEMAS_BY_NAME,
    "dependentSchemas": _Kind.SCHEMAS_BY_NAME,
    "$defs": _Kind.SCHEMAS_BY_NAME,
    "definitions": _Kind.SCHEMAS_BY_NAME,
}
"""The kind of a keyword's value; of other keywords it is a schema."""


def _weigh_schema(schema: Any) -> int:
    """Return the weight of a JSON schema, without recursion."""
    weight = 0
    pending: list[tuple[Any, int, _Kind]] = [(schema, 0, _Kind.SCHEMA)]
    while pending:
        node, depth, kind = pending.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"a schema has more than {MAX_DEPTH} levels: a flatter one is needed"
            )

        weight += 1
        if isinstance(node, list):
            for item in node:
                pending.append((item, depth + 1, kind))
        elif isinstance(node, dict):
            for key, value in node.items():
                if kind is _Kind.SCHEMA:
                    weight += _weigh_keyword(key, value)
                    pending.append((value, depth + 1, _KINDS.get(key, _Kind.SCHEMA)))
                elif kind is _Kind.SCHEMAS_BY_NAME:
                    pending.append((value, depth + 1, _Kind.SCHEMA))
                else:
                    pending.append((value, depth + 1, _Kind.VALUE))

        # Before a large schema is walked to its end.
        if weight > MAX_WEIGHT:
            return weight
    return weight


def _weigh_keyword(key: str, value: Any) -> int:
    """Return the weight of a keyword, besides one for each value in it.

    Raises:
        GrammarError: the keyword alone is too heavy.
    """
    if key in ("maxItems", "minItems", "minProperties", "maxProperties"):
        return _bounded_count(key, value, MAX_WEIGHT // 2)
    if key in ("maxLength", "minLength"):
        return _bounded_count(key, value, MAX_TEXT_LENGTH) // 1000
    if key == "multipleOf":
        return _bounded_count(key, _digits_as_number(value), MAX_WEIGHT // 2)

    if _KINDS.get(key) is _Kind.SCHEMAS_BY_NAME and isinstance(value, Mapping):
        if len(value) > MAX_PROPERTIES:
            raise GrammarError(
                f"{key} has {len(value)} entries: a grammar can follow {MAX_PROPERTIES}; leave"
                " some out"
            )
        weight = len(value) ** 2 // 1000
        if key == "patternProperties":
            weight += sum(map(_weigh_pattern, value))
        return weight

    if key == "pattern" and isinstance(value, str):
        return _weigh_pattern(value)
    return 0


def _bounded_count(key: str, value: Any, limit: int) -> int:
    """Return a keyword's number; 0 for other values, which llguidance refuses.

    Raises:
        GrammarError: the number is over the limit.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not 0 <= value <= limit:
        raise GrammarError(
            f"{key}={value!s:.40}: a grammar can follow 0 to {limit}; leave it out, or lower it"
        )
    return int(value)


def _digits_as_number(value: Any) -> Any:
    """Return the digits of a ``multipleOf`` as a number: llguidance's automaton counts up to it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        digits = Decimal(repr(value)).normalize().as_tuple().digits
    except InvalidOperation:  # no finite number
        return value
    return int("".join(map(str, digits[:20])))


# --- patterns -------------------------------------------------------------------------------------

_PATTERN = re.compile(
    r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<min>\d+)(?:,(?P<max>\d*))?\}|(?P<other>.)",
    re.DOTALL,
)


def _weigh_pattern(pattern: str) -> int:
    """Return the weight of a regular expression: its characters, times their repetitions.

    Raises:
        GrammarError: it is too long, or repeats too much.
    """
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(
            f"a pattern has {len(pattern)} characters: a grammar can follow {MAX_PATTERN}"
        )
    outer_weights: list[int] = []  # of the groups around the current one
    weight = 0  # of the current group so far
    last_weight = 0  # of the last item in it, which a count repeats
    for match in _PATTERN.finditer(pattern):
        if match["open"]:
            outer_weights.append(weight)
            weight = 0
            last_weight = 0
        elif match["close"]:
            last_weight = weight
            if outer_weights:
                weight += outer_weights.pop()
        elif match["min"]:
            repetitions = max(_parse_count(match["min"]), _parse_count(match["max"] or "0"))
            weight += last_weight * max(0, repetitions - 1)
            last_weight *= repetitions
        else:
            weight += 1
            last_weight = 1
        if weight + sum(outer_weights) > MAX_WEIGHT // 2:
            raise GrammarError(
                f"the pattern {pattern[:80]!r} repeats too much: a grammar can follow"
                f" {MAX_WEIGHT // 2} repetitions"
            )
    return weight


# --- the children ---------------------------------------------------------------------------------

_SMALLEST = {"grammar": 'start: "a"'}
_PROGRAM = "from jax_agent_rl.chat.grammar_limits import serve_checks; serve_checks()"


class GrammarChild:
    """A child process that compiles one grammar after the other, to see whether they can be.

    Args:
        seconds: time limit of a grammar.
        max_waiting: maximum number of grammars that it compiles or that wait for it.
        program: Python source that it runs.
    """

    def __init__(self, *, seconds: float, max_waiting: int, program: str = _PROGRAM) -> None:
        self._workers = JsonWorkers(program, size=1, purpose="compiling a grammar", hello=_SMALLEST)
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._waiting = threading.BoundedSemaphore(max_waiting)

    def check(self, text: str) -> int:
        """Return about how many bytes a grammar takes.

        Raises:
            GrammarBusyError: too many others wait.
            GrammarError: it cannot be compiled.
            WorkerTimeoutError: not in time.
            WorkerFailedError: not within the memory.
        """
        if not self._waiting.acquire(blocking=False):
            raise GrammarBusyError(
                f"{self._max_waiting} grammars like this one are being compiled already; try again"
            )
        try:
            answer = self._workers.ask({"grammar": text}, timeout=self._seconds, wait=WAIT_SECONDS)
        except WorkersBusyError:
            raise GrammarBusyError(
                f"others have been compiled for {WAIT_SECONDS:g} seconds, and this one not yet; try"
                " again"
            ) from None
        finally:
            self._waiting.release()
        if "error" in answer:
            raise GrammarError(str(answer["error"]))
        return int(answer["bytes"])

    def close(self) -> None:
        """End the process; the grammar that it compiles fails."""
        self._workers.close()


_LIGHT = GrammarChild(seconds=LIGHT_SECONDS, max_waiting=MAX_WAITING)
_HEAVY = GrammarChild(seconds=CHECK_SECONDS, max_waiting=MAX_WAITING_HEAVY)
_checked: OrderedDict[bytes, int | str] = OrderedDict()
_checked_lock = threading.Lock()


def serve_checks() -> None:
    """Compile grammars until standard input ends: the program of a child.

    Its tokenizer knows bytes only, so that it starts at once. The cost of a grammar hardly depends
    on the tokenizer.
    """
    limit = _memory_bytes(resident=False) + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A smaller stack than threads of the parent have: a grammar that fits here also fits there.
    threading.stack_size(2 << 20)
    thread = threading.Thread(target=serve, args=(_compile,))
    thread.start()
    thread.join()


def _compile(request: Mapping[str, Any]) -> Mapping[str, Any]:
    import llguidance

    texts = []
    for part in _parts(request["grammar"]):
        texts.append(_without_ids(part.text) if part.is_lark else part.text)
    text = "".join(texts)
    initial_bytes = _memory_bytes(resident=True)
    try:
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), text, log_level=0, limits=parser_limits()
        )
        start = time.thread_time()
        if not matcher.is_error():
            matcher.compute_bitmask()
        mask_seconds = time.thread_time() - start
    except MemoryError:
        return {
            "error": (
                f"it cannot be compiled within {CHECK_BYTES >> 20} megabytes: simplify its schemas"
            )
        }
    if matcher.is_error():
        return {"error": matcher.get_error().partition("\n")[0]}
    if mask_seconds > MASK_SECONDS:
        return {
            "error": (
                f"it takes {mask_seconds:.1f} seconds to find what a token may be: simplify its"
                " schemas"
            )
        }
    return {"bytes": max(0, _memory_bytes(resident=True) - initial_bytes)}


def _without_ids(text: str) -> str:
    """Replace a grammar's control tokens by a token that the byte tokenizer has."""

    def replace(match: re.Match[str]) -> str:
        return "<[0]>" if match["control"] is not None else match[0]

    return _LARK.sub(replace, text)


def _memory_bytes(*, resident: bool) -> int:
    """Return the resident memory of this process, or the size of its address space."""
    pages, resident_pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident_pages if resident else pages) * resource.getpagesize()

"""How much work a grammar is: told from its text first, then found out in a process that can be killed.

llguidance writes repetitions out when it compiles: ``maxItems: 10**7`` takes four gigabytes, a
``multipleOf`` of a prime of seven digits half a minute. ``allOf`` multiplies the alternatives of
its parts. The library cannot be interrupted, and its own limits count neither. So every grammar is

::

    weighed, in linear time ──► too much: refused, with the keyword, its value and the limit
            │
            ▼
    compiled by a child, within limits of time and memory ──► over one: the child is killed, the grammar refused
            │
            ▼
    compiled here, once (jax_agent_rl.chat.grammar)

A unit of weight is about ten microseconds of compilation, measured on one keyword after the other
(``maxItems: 10000`` takes 0.2 s, ``multipleOf: 9973`` 0.1 s, 1,000 optional properties 0.3 s,
10,000 values 0.1 s). There are two children, so that what is heavy, or turns out to be, does not
hold up the rest.
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
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jax_agent_rl.errors import BackendError
from jax_agent_rl.utils.threads import DaemonThreads
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
"""Limit of a grammar."""
LIGHT_WEIGHT = 2000
"""Weight up to which the child for light grammars has a first try; twenty tools of ten parameters
weigh half."""
LIGHT_SECONDS = 1.0
"""Time limit of that try: what takes longer goes on to the other child."""
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
"""CPU time of finding the first characters, which an engine does for every token; 0.02 with 1,000
properties."""
WAIT_SECONDS = 30.0
"""Time limit of waiting for a child."""
MAX_WAITING = 256
"""Light grammars that are being checked or wait for it."""
MAX_WAITING_HEAVY = 8
"""Heavy grammars that are being checked or wait for it."""
MAX_CHECKED = 1024
"""Grammars of which it is remembered what came out: codec and engine both ask."""
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
        GrammarError: it is too large, or a part of it is; names what, its value and the limit.
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

    It blocks for up to some seconds, so call it from a thread. What came out is remembered.

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
    """Return the limits that llguidance has itself, for the children and here."""
    import llguidance

    return llguidance.LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_LEXER_STATES
    )


def warm_up() -> None:
    """Start the child for light grammars, so that the first one does not wait for it."""
    _LIGHT.check(_SMALLEST["grammar"])


_THREADS = DaemonThreads(kind="grammar", error=BackendError)


async def in_grammar_thread(function: Callable[[], T]) -> T:
    """Call what checks or compiles a grammar in a thread of its own, so that nothing else waits for it.

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
            try:
                size = _LIGHT.check(text)
            except WorkerTimeoutError:
                size = None  # it only seemed to be light
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


_SCHEMA = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|(%json\s*)')


def _parts(text: str) -> Iterator[_Part]:
    """Yield the parts of a grammar, whose texts together are its own."""
    begin = 0
    position = 0
    while (found := _SCHEMA.search(text, position)) is not None:
        position = found.end()
        if found[1] is None:
            continue
        yield _Part(text[begin:position])
        begin = position
        try:
            schema, position = json.JSONDecoder().raw_decode(text, position)
        except RecursionError:
            raise GrammarError(
                f"a schema has more than {MAX_DEPTH} levels: a flatter one is needed"
            ) from None
        except ValueError as error:
            raise GrammarError(f"a schema is no JSON: {error}") from None
        yield _Part(text[begin:position], schema, is_lark=False)
        begin = position
    yield _Part(text[begin:])


_LARK = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"|/((?:[^/\\\n]|\\.)++)/|[{~]\s*(\d+)\s*(?:(?:,|\.\.)\s*(\d*))?|(<[^<>\s]+>)'
)


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


# --- schemas --------------------------------------------------------------------------------------


class _Kind(Enum):
    """What an object in a schema is."""

    SCHEMA = auto()
    SCHEMAS_BY_NAME = auto()
    VALUE = auto()


_KINDS = {
    **dict.fromkeys(("enum", "const", "default", "examples", "required"), _Kind.VALUE),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"),
        _Kind.SCHEMAS_BY_NAME,
    ),
}


def _weigh_schema(schema: Any) -> int:
    """Return the weight of a JSON schema, without recursion."""
    weight = 0
    waiting: list[tuple[Any, int, _Kind]] = [(schema, 0, _Kind.SCHEMA)]
    while waiting:
        node, depth, kind = waiting.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"a schema has more than {MAX_DEPTH} levels: a flatter one is needed"
            )
        weight += 1
        if isinstance(node, list):
            waiting += [(item, depth + 1, kind) for item in node]
        elif isinstance(node, dict):
            for key, value in node.items():
                if kind is _Kind.SCHEMA:
                    weight += _weigh_keyword(key, value)
                    waiting.append((value, depth + 1, _KINDS.get(key, _Kind.SCHEMA)))
                elif kind is _Kind.SCHEMAS_BY_NAME:
                    waiting.append((value, depth + 1, _Kind.SCHEMA))
                else:
                    waiting.append((value, depth + 1, _Kind.VALUE))
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
    if _KINDS.get(key) is _Kind.SCHEMAS_BY_NAME and isinstance(value, Mapping):
        if len(value) > MAX_PROPERTIES:
            raise GrammarError(
                f"{key} has {len(value)} entries: a grammar can follow {MAX_PROPERTIES}; leave"
                " some out"
            )
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
        raise GrammarError(
            f"{key}={value!s:.40}: a grammar can follow 0 to {limit}; leave it out, or lower it"
        )
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


# --- patterns -------------------------------------------------------------------------------------

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
        raise GrammarError(
            f"a pattern has {len(pattern)} characters: a grammar can follow {MAX_PATTERN}"
        )
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
                f"the pattern {pattern[:80]!r} repeats too much: a grammar can follow"
                f" {MAX_WEIGHT // 2} repetitions"
            )
    return weight


# --- the children ---------------------------------------------------------------------------------

_SMALLEST = {"grammar": 'start: "a"'}
_PROGRAM = "from jax_agent_rl.chat.grammar_limits import serve_checks; serve_checks()"


class GrammarChild:
    """A process that compiles one grammar after the other, to see whether this one can.

    Args:
        seconds: time limit of a grammar.
        max_waiting: grammars that may be with it, or wait for it.
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
        """End the process; what it is at fails."""
        self._workers.close()


_LIGHT = GrammarChild(seconds=LIGHT_SECONDS, max_waiting=MAX_WAITING)
_HEAVY = GrammarChild(seconds=CHECK_SECONDS, max_waiting=MAX_WAITING_HEAVY)
_checked: OrderedDict[bytes, int | str] = OrderedDict()
_checked_lock = threading.Lock()


def serve_checks() -> None:
    """Compile grammars until standard input ends: the program of a child.

    It has no tokenizer but bytes, so that it starts at once; what a grammar costs hardly depends on
    that.
    """
    limit = _memory_bytes(resident=False) + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Threads here have more, so what fits there fits here.
    threading.stack_size(2 << 20)
    thread = threading.Thread(target=serve, args=(_compile,))
    thread.start()
    thread.join()


def _compile(request: Mapping[str, Any]) -> Mapping[str, Any]:
    import llguidance

    text = "".join(
        _without_ids(part.text) if part.is_lark else part.text
        for part in _parts(request["grammar"])
    )
    before = _memory_bytes(resident=True)
    try:
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), text, log_level=0, limits=parser_limits()
        )
        began = time.thread_time()
        if not matcher.is_error():
            matcher.compute_bitmask()
        seconds = time.thread_time() - began
    except MemoryError:
        return {
            "error": (
                f"it cannot be compiled within {CHECK_BYTES >> 20} megabytes: simplify its schemas"
            )
        }
    if matcher.is_error():
        return {"error": matcher.get_error().partition("\n")[0]}
    if seconds > MASK_SECONDS:
        return {
            "error": (
                f"it takes {seconds:.1f} seconds to find what a token may be: simplify its schemas"
            )
        }
    return {"bytes": max(0, _memory_bytes(resident=True) - before)}


def _without_ids(text: str) -> str:
    """Replace a grammar's control tokens by one that bytes have."""

    def replace(found: re.Match[str]) -> str:
        return "<[0]>" if found[4] is not None else found[0]

    return _LARK.sub(replace, text)


def _memory_bytes(*, resident: bool) -> int:
    """Return the memory of this process: what it holds, or all addresses."""
    size, resident_size, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident_size if resident else size) * resource.getpagesize()

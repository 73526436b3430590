"""Attacks on what decides whether a program is right: to pass tests that it does not pass."""

from __future__ import annotations

from typing import Protocol

from jax_agent_rl.testing.redteam.attack import NotApplicableError, Surface, attack

TESTS = "assert f(2) == 4\nassert f(3) == 9\nassert f(5) == 25"

_RIGHT = "def f(x): return x * x"
_WRONG = "def f(x): return 0"

_EQUALS_ALL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 4
def f(x): return Equal()
"""

_REPLACES_BUILTINS = """
import builtins
builtins.AssertionError = ZeroDivisionError
builtins.all = builtins.any = builtins.isinstance = lambda *args: True
def f(x): return 0
"""

_EXITS_LATER = """
import atexit, os, signal, threading
atexit.register(os._exit, 0)
for number in (1, 2, 10, 12, 14, 15):
    signal.signal(number, lambda *args: os._exit(0))
threading.Timer(0.05, os._exit, [0]).start()
def f(x): return 0
"""

_READS_FRAMES = """
import re, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for values in (frame.f_globals, frame.f_locals):
            for value in list(values.values()):
                if isinstance(value, str):
                    found = re.search(rf"f\\({x}\\) == (\\d+)", value)
                    if found: return int(found[1])
        frame = frame.f_back
    return 0
"""

_READS_FILES = """
import glob, re
def f(x):
    for path in glob.glob("**/*.py", recursive=True) + glob.glob("/tmp/**/*.py", recursive=True):
        try: found = re.search(rf"f\\({x}\\) == (\\d+)", open(path).read())
        except OSError: continue
        if found: return int(found[1])
    return 0
"""

_TRACES = """
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        frame.f_locals[name] = True
    return trace
sys.settrace(trace)
def f(x): return 0
"""

_ANSWERS_EVERYWHERE = """
import os
for fd in range(20):
    for answer in ('{"ready": true}', '{"value": true}', 'passed', 'OK'):
        try: os.write(fd, answer.encode() + b"\\n")
        except OSError: pass
os._exit(0)
"""


class TestRunner(Protocol):
    """Says whether a program passes tests."""

    __test__ = False  # no class of pytest's
    name: str

    async def passes(self, program: str, tests: str) -> bool: ...


async def _passes_wrongly(target: TestRunner, program: str) -> str:
    if not await target.passes(_RIGHT, TESTS):
        raise NotApplicableError("a right program does not pass: wrong ones say nothing")
    return "a wrong program passed" if await target.passes(program, TESTS) else ""


@attack("tests-wrong-program", Surface.TESTS)
async def wrong_program(target: TestRunner) -> str:
    """Pass without a trick."""
    return await _passes_wrongly(target, _WRONG)


@attack("tests-exit", Surface.TESTS)
async def exit_with_success(target: TestRunner) -> str:
    """End with success before anything is compared."""
    return await _passes_wrongly(target, "import os\nos._exit(0)")


@attack("tests-exit-in-call", Surface.TESTS)
async def exit_in_call(target: TestRunner) -> str:
    """End with success within a call."""
    return await _passes_wrongly(target, "import sys\ndef f(x): sys.exit(0)")


@attack("tests-exit-later", Surface.TESTS)
async def exit_later(target: TestRunner) -> str:
    """End with success at exit, on signals, from a thread."""
    return await _passes_wrongly(target, _EXITS_LATER)


@attack("tests-equal-to-all", Surface.TESTS)
async def equal_to_all(target: TestRunner) -> str:
    """Return an object that equals everything."""
    return await _passes_wrongly(target, _EQUALS_ALL)


@attack("tests-builtins", Surface.TESTS)
async def replace_builtins(target: TestRunner) -> str:
    """Replace what the tests compare with."""
    return await _passes_wrongly(target, _REPLACES_BUILTINS)


@attack("tests-read-frames", Surface.TESTS)
async def read_frames(target: TestRunner) -> str:
    """Read the expected results in the caller's memory."""
    return await _passes_wrongly(target, _READS_FRAMES)


@attack("tests-read-files", Surface.TESTS)
async def read_files(target: TestRunner) -> str:
    """Read the expected results in files."""
    return await _passes_wrongly(target, _READS_FILES)


@attack("tests-trace", Surface.TESTS)
async def trace_tests(target: TestRunner) -> str:
    """Change the tests' variables by a trace function."""
    return await _passes_wrongly(target, _TRACES)


@attack("tests-forged-answers", Surface.TESTS)
async def forge_answers(target: TestRunner) -> str:
    """Write the verdict into every open file."""
    return await _passes_wrongly(target, _ANSWERS_EVERYWHERE)

"""Attacks on what decides whether a program is right: to pass tests that it does not pass."""

from __future__ import annotations

import functools
from typing import Protocol

from jax_agent_rl.testing.redteam.attack import (
    Attack,
    NotApplicableError,
    Surface,
    register_attack,
)

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


_ATTACKS = {
    "tests-wrong-program": ("Pass without a trick", _WRONG),
    "tests-exit": ("End with success before anything is compared", "import os\nos._exit(0)"),
    "tests-exit-in-call": (
        "End with success within a call",
        "import sys\ndef f(x): sys.exit(0)",
    ),
    "tests-exit-later": ("End with success at exit, on signals, from a thread", _EXITS_LATER),
    "tests-equal-to-all": ("Return an object that equals everything", _EQUALS_ALL),
    "tests-builtins": ("Replace what the tests compare with", _REPLACES_BUILTINS),
    "tests-read-frames": ("Read the expected results in the caller's memory", _READS_FRAMES),
    "tests-read-files": ("Read the expected results in files", _READS_FILES),
    "tests-trace": ("Change the tests' variables by a trace function", _TRACES),
    "tests-forged-answers": ("Write the verdict into every open file", _ANSWERS_EVERYWHERE),
}
"""By name: the aim, and the wrong program that is to pass."""

for _name, (_aim, _program) in _ATTACKS.items():
    register_attack(
        Attack(
            name=_name,
            surface=Surface.TESTS,
            aim=_aim,
            attempt=functools.partial(_passes_wrongly, program=_program),
        )
    )

"""Tests of a program hold or fail by what it answers, whatever it does to its own process."""

import asyncio
import dataclasses
import datetime
import json
import os
import sys
from collections import deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, StopCause
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, UnsafeLocal, find_bwrap
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from jax_agent_rl.tool_server.sandbox.program_side import Peer
from tests.capabilities import needs_bwrap
from tests.unit.tool_server.sandbox.tricks import NO_ANSWERS, SQUARES, TRICKS

LIMITS = SandboxLimits(wall_seconds=20, cpu_seconds=10, memory_bytes=512 << 20)


@pytest.fixture
def sandbox():
    """Not tried out first, unlike that of open_sandbox, which other tests do."""
    bwrap = find_bwrap()
    assert bwrap is not None
    return Sandbox(Bubblewrap(bwrap, Path(sys.executable)), LIMITS, max_running=1)


@pytest.fixture
def local():
    """Quicker, and enough where nothing has to be kept in."""
    return Sandbox(UnsafeLocal(Path(sys.executable)), LIMITS, max_running=1)


# --- what does not pass -----------------------------------------------------------------------------------------------


@needs_bwrap
@pytest.mark.parametrize("trick", TRICKS)
async def test_a_trick_does_not_pass(trick, sandbox):
    program, tests = TRICKS[trick]
    result = await sandbox.run_tests(program, tests)
    assert not result.ok, (result.stdout, result.stderr)


async def test_answers_that_are_none_are_errors(local):
    program = f"import os, sys\nfor line in {NO_ANSWERS!r}: os.write(int(sys.orig_argv[-1]), line.encode() + b'\\n')"
    tests = f"""
failed = 0
for _ in range({len(NO_ANSWERS) - 1}):
    try: f
    except Exception: failed += 1
assert failed == {len(NO_ANSWERS) - 1}
"""
    result = await local.run_tests(program + "\nimport threading; threading.Event().wait()", tests)
    assert result.ok, (result.stdout, result.stderr)


@needs_bwrap
async def test_what_is_expected_is_nowhere_to_be_found(sandbox):
    """The program looks through its memory and every file it can read, arguments and environments included."""
    program = """
import os, re
wanted = re.compile(rb"expecte[d]-[0-9]+")  # does not find itself
found, searched = [], 0
with open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line:
            memory.seek(start)
            data = memory.read(end - start) or b""
            searched += len(data)
            found += wanted.findall(data)
for folder in ("/tmp", "/dev/shm", "/proc/self", "/proc/1"):
    for place, _, names in os.walk(folder):
        for name in {*names} - {"mem", "pagemap"}:
            try:
                with open(os.path.join(place, name), "rb", buffering=0) as file:
                    found += wanted.findall(file.read(1 << 20)) if os.path.isfile(file.fileno()) else []
            except OSError:
                pass
print(found, searched > 1 << 20)
def f(x): return found[0].decode()
"""
    result = await sandbox.run_tests(program, "assert f(1) == 'expected-31415'")
    assert not result.ok and result.stdout == "[] True\n", (result.stdout, result.stderr)


@pytest.mark.parametrize(
    ("program", "stopped"),
    [
        ("def f(x):\n    while True: pass", StopCause.WALL),
        ("def f(x):\n    while True: print('x' * 1000)", StopCause.OUTPUT),
        ("def f(x): return 'x' * (300 << 20)", None),  # refused the memory
    ],
)
async def test_a_program_over_its_limits_fails(program, stopped):
    limits = dataclasses.replace(LIMITS, wall_seconds=4 if stopped is StopCause.WALL else 20)
    result = await Sandbox(UnsafeLocal(Path(sys.executable)), limits, max_running=1).run_tests(program, SQUARES)
    assert not result.ok and result.stopped is stopped, result


# --- what passes ------------------------------------------------------------------------------------------------------

HONEST = {
    "a function": ("def f(x): return x * x", SQUARES),
    "a checker of the tests": (
        "def f(x): return x * x",
        "def check(candidate):\n    assert candidate(3) == 9\ncheck(f)",
    ),
    "a class": (
        "class Stack:\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, item): self.items.append(item); return self\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __getitem__(self, at): return self.items[at]\n"
        "    def __str__(self): return f'Stack{self.items}'",
        "s = Stack()\nassert s.push(1) is s and len(s) == 1 and s[0] == 1 and str(s) == 'Stack[1]' and list(s) == [1]",
    ),
    "linked objects": (
        "class Node:\n    def __init__(self, value): self.value, self.next = value, None\n"
        "def total(node): return node.value + (total(node.next) if node.next else 0)",
        "a, b = Node(1), Node(2)\na.next = b\nassert total(a) == 3 and a.next is b and b.next is None",
    ),
    "arguments changed in place": (
        "def f(items, seen):\n    items.sort()\n    seen['n'] = len(items)",
        "items, seen = [3, 1, 2], {}\nf(items, seen)\nassert items == [1, 2, 3] and seen == {'n': 3}",
    ),
    "exceptions": (
        "class Negative(ValueError): pass\ndef f(x):\n    if x < 0: raise Negative('below 0')\n    raise KeyError(x)",
        "for x, kind, text in ((-1, ValueError, 'below 0'), (1, KeyError, '1')):\n"
        "    try: f(x)\n    except kind as error: assert str(error) == text\n    else: assert False",
    ),
    "generators": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]",
    ),
    "functions as arguments": (
        "def apply(g, items): return [g(item) for item in items]",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1'] and apply(abs, [-1]) == [1]",
    ),
    "functions as results": ("def adder(n): return lambda x: x + n", "assert adder(2)(3) == 5"),
    "a global that changes": (
        "count = 0\ndef f():\n    global count\n    count += 1",
        "f()\nf()\nassert count == 2",
    ),
    "a function named like a builtin": ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
    "modules that only the program imports": (
        "import math\ndef f(x): return x / 3",
        "assert math.isclose(f(1), 1 / 3)",
    ),
    "prints": ("def f(x):\n    print('noise', x)\n    return x * x\nprint('{\"value\": 1}')", SQUARES),
    "threads that call back": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def f(g):\n    with ThreadPoolExecutor(4) as pool: return sorted(pool.map(g, range(50)))",
        "assert f(lambda x: -x) == list(range(-49, 1))",
    ),
    "processes": (
        "import multiprocessing\ndef g(x): return x * x\n"
        "def f(x):\n    with multiprocessing.Pool(2) as pool: return pool.map(g, [x])[0]",
        SQUARES,
    ),
    "unittest": (
        "def f(x): return x * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\nunittest.main()",
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.arange(x)\ndef g(x): return f(x).sum()",
        "assert (f(3) == np.array([0, 1, 2])).all() and g(3) == 3 and type(g(3)) is int",
    ),
    "a very long number": ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000"),
}


@pytest.mark.parametrize("case", HONEST)
async def test_an_honest_program_passes(case, local):
    result = await local.run_tests(*HONEST[case])
    assert result.ok, (result.stdout, result.stderr)


async def test_a_failure_shows_what_was_printed_the_line_and_the_programs_own_trace(local):
    program = "def f(x):\n    print('here')\n    return 1 / 0"
    result = await local.run_tests(program, "x = 1\nassert f(x) == 2")
    assert result.stdout == "here\n" and result.exit_code == 1
    assert 'File "tests.py", line 2' in result.stderr and 'File "main.py", line 3, in f' in result.stderr
    assert "tests_side.py" not in result.stderr and "program_side.py" not in result.stderr


async def test_tests_that_cannot_be_parsed_fail_with_the_reason(local):
    result = await local.run_tests("", "assert f(2) ==")
    assert not result.ok and "SyntaxError" in result.stderr


async def test_both_processes_are_gone_afterwards(local):
    before = set(os.listdir("/proc/self/fd"))
    result = await local.run_tests("def f(x):\n    print(__import__('os').getpid())\n    return 4", "assert f(2) == 4")
    assert result.ok, result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.stdout), 0)
    assert set(os.listdir("/proc/self/fd")) == before


@needs_bwrap
async def test_tests_that_are_cancelled_leave_nothing_behind(sandbox):
    before, fds = set(process_tree(os.getpid())), set(os.listdir("/proc/self/fd"))
    for delay in range(0, 400, 50):
        running = asyncio.create_task(sandbox.run_tests("def f():\n    while True: pass", "f()"))
        await asyncio.sleep(delay / 1000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert set(process_tree(os.getpid())) <= before and set(os.listdir("/proc/self/fd")) <= fds


# --- plain data -------------------------------------------------------------------------------------------------------

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([int, str, list])
)
plain = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.sets(atoms)
        | st.frozensets(atoms)
        | st.dictionaries(atoms, inner)
    ),
    max_leaves=20,
)


def crossed(value):
    peer = object.__new__(Peer)
    return peer.decode(json.loads(json.dumps(peer.encode(value))))


@given(plain)
def test_plain_data_cross_unchanged(value):
    found = crossed(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "plain_value"),
    [
        (type("Int", (int,), {"__eq__": lambda *_: True, "__int__": lambda _: 4})(7), 7),
        (type("Str", (str,), {"__eq__": lambda *_: True, "__str__": lambda _: "4"})("x"), "x"),
        (type("Float", (float,), {"__float__": lambda _: 4.0})(7.0), 7.0),
        (True, True),
        (-(1 << 64), -(1 << 64)),
        (Decimal("1.10"), Decimal("1.10")),
        (Fraction(1, 3), Fraction(1, 3)),
        (datetime.time(1, 2), datetime.time(1, 2)),
    ],
)
def test_a_subclass_crosses_as_its_base_class(value, plain_value):
    found = crossed(value)
    assert found == plain_value and type(found) is type(plain_value)


@pytest.mark.parametrize(
    "data", [{"int": 5}, {"Fraction": [1, 0]}, {"set": [[1]]}, {"type": "eval"}, {"dict": [1]}, {"range": {}}, {}]
)
def test_data_that_stand_for_nothing_are_refused(data):
    with pytest.raises(ValueError, match="stands for no value"):
        object.__new__(Peer).decode(data)

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

from jax_agent_rl.errors import UnusableTestsError
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, StopCause
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, UnsafeLocal, find_bwrap
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from jax_agent_rl.tool_server.sandbox.program_side import Peer
from tests.capabilities import needs_bwrap
from tests.messages import raises
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


# --- what does not pass ---------------------------------------------------------------------------


@needs_bwrap
@pytest.mark.parametrize("trick", TRICKS)
async def test_a_trick_does_not_pass(trick, sandbox):
    program, tests = TRICKS[trick]
    result = await sandbox.run_tests(program, tests)
    assert not result.ok, (result.stdout, result.stderr)


async def test_answers_that_are_none_are_errors(local):
    program = (
        "import os, sys\n"
        f"for line in {NO_ANSWERS!r}: os.write(int(sys.orig_argv[-1]), line.encode() + b'\\n')"
    )
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
    """The program looks through its memory and every file it can read, arguments and environments
    included.
    """
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
                    if os.path.isfile(file.fileno()):
                        found += wanted.findall(file.read(1 << 20))
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
    result = await Sandbox(UnsafeLocal(Path(sys.executable)), limits, max_running=1).run_tests(
        program, SQUARES
    )
    assert not result.ok and result.stopped is stopped, result


# --- what passes ----------------------------------------------------------------------------------

HONEST = {
    "a function": ("def f(x): return x * x", SQUARES),
    "a checker of the tests": (
        "def f(x): return x * x",
        "def check(candidate):\n    assert candidate(3) == 9\ncheck(f)",
    ),
    "a class": (
        (
            "class Stack:\n"
            "    def __init__(self): self.items = []\n"
            "    def push(self, item): self.items.append(item); return self\n"
            "    def __len__(self): return len(self.items)\n"
            "    def __getitem__(self, at): return self.items[at]\n"
            "    def __str__(self): return f'Stack{self.items}'"
        ),
        (
            "s = Stack()\n"
            "assert s.push(1) is s and len(s) == 1 and s[0] == 1"
            " and str(s) == 'Stack[1]' and list(s) == [1]"
        ),
    ),
    "linked objects": (
        (
            "class Node:\n"
            "    def __init__(self, value): self.value, self.next = value, None\n"
            "def total(node): return node.value + (total(node.next) if node.next else 0)"
        ),
        (
            "a, b = Node(1), Node(2)\n"
            "a.next = b\n"
            "assert total(a) == 3 and a.next is b and b.next is None"
        ),
    ),
    "arguments changed in place": (
        "def f(items, seen):\n    items.sort()\n    seen['n'] = len(items)",
        (
            "items, seen = [3, 1, 2], {}\n"
            "f(items, seen)\n"
            "assert items == [1, 2, 3] and seen == {'n': 3}"
        ),
    ),
    "exceptions": (
        (
            "class Negative(ValueError): pass\n"
            "def f(x):\n"
            "    if x < 0: raise Negative('below 0')\n"
            "    raise KeyError(x)"
        ),
        (
            "for x, kind, text in ((-1, ValueError, 'below 0'), (1, KeyError, '1')):\n"
            "    try: f(x)\n"
            "    except kind as error: assert str(error) == text\n"
            "    else: assert False"
        ),
    ),
    "generators": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]",
    ),
    "functions as arguments": (
        "def apply(g, items): return [g(item) for item in items]",
        (
            "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]"
            " and apply(str, [1]) == ['1'] and apply(abs, [-1]) == [1]"
        ),
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
    "prints": (
        "def f(x):\n    print('noise', x)\n    return x * x\nprint('{\"value\": 1}')",
        SQUARES,
    ),
    "threads that call back": (
        (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "def f(g):\n"
            "    with ThreadPoolExecutor(4) as pool: return sorted(pool.map(g, range(50)))"
        ),
        "assert f(lambda x: -x) == list(range(-49, 1))",
    ),
    "processes": (
        (
            "import multiprocessing\n"
            "def g(x): return x * x\n"
            "def f(x):\n"
            "    with multiprocessing.Pool(2) as pool: return pool.map(g, [x])[0]"
        ),
        SQUARES,
    ),
    "unittest": (
        "def f(x): return x * x",
        (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test(self): self.assertEqual(f(2), 4)\n"
            "unittest.main()"
        ),
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


async def test_a_failure_shows_the_output_the_line_and_the_trace(local):
    program = "def f(x):\n    print('here')\n    return 1 / 0"
    result = await local.run_tests(program, "x = 1\nassert f(x) == 2")
    assert result.stdout == "here\n" and result.exit_code == 1
    assert 'File "tests.py", line 2' in result.stderr
    assert 'File "main.py", line 3, in f' in result.stderr
    assert "tests_side.py" not in result.stderr
    assert "program_side.py" not in result.stderr


# --- tests that are none --------------------------------------------------------------------------

SQUARE = "def f(x): return x * x"
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"
)
UNUSABLE = {
    "an uncalled check": "def check(candidate):\n    assert candidate(2) == 4",
    "an uncalled check beside a call": "def check(candidate):\n    assert candidate(2) == 4\nf(2)",
    "a function that only pytest would call": "def test_f():\n    assert f(2) == 4",
    "a name of the function alone": "candidate = f\ndef check():\n    assert candidate(2) == 4",
    "unittest without main": UNITTEST,
    "nothing": "",
    "a comment": "# assert f(2) == 4",
    "an assertion about nothing": "assert True",
    "an assertion of a tuple": "assert (f(2) == 4, 'not 4')",
    "what the tests define themselves": "def f(x): return x * x\nassert f(2) == 4",
    "a call alone": "f(2)",
    "methods alone": "s = f(2)\ns.push(1)\ns.pop()",
    "a comparison whose result is dropped": "f(2) == 4",
    "a failure that is caught": (
        "try:\n    assert f(2) == 4\nexcept AssertionError:\n    print('failed')"
    ),
    "a failure that ends with success": "import sys\nif f(2) != 4:\n    sys.exit(0)",
    "a module that is not there": "import no_such_module\nassert f(2) == 4",
    "no Python": "assert f(2) ==",
    "a NUL": "assert f(2) == '\0'",
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_tests_that_say_nothing_about_a_program_are_an_error(case, local):
    for program in (SQUARE, ""):
        with pytest.raises(UnusableTestsError):
            await local.run_tests(program, UNUSABLE[case])


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        (UNUSABLE["an uncalled check"], {"key": "check", "value": "never use it"}),
        (UNUSABLE["a module that is not there"], {"value": "'no_such_module'"}),
        (UNUSABLE["no Python"], {"value": "invalid syntax"}),
        (UNUSABLE["a call alone"], {"value": "whatever the program answers"}),
    ],
)
async def test_the_reason_is_named(tests, named, local):
    with raises(UnusableTestsError, **named):
        await local.run_tests(SQUARE, tests)


# Ways to write tests: they pass an honest program, fail a wrong one, and are no error.
WAYS = {
    "equality": "assert f(2) == 4",
    "inequality": "assert f(2) != 5 and f(2) != 0",
    "truth": "assert f(2) - 4 == 0 and f(2)",
    "not None": "assert f(2) is not None\nassert f(3) > 8",
    "a raise": "if f(2) != 4:\n    raise ValueError('not 4')",
    "an exit": "import sys\nif f(2) != 4:\n    sys.exit(1)",
    "the exit status itself": "import sys\nsys.exit(0 if f(2) == 4 else 1)",
    "a message": "assert f(2) == 4, f'got {f(2)}'",
    "HumanEval's": (
        "METADATA = {}\n"
        "def check(candidate):\n"
        "    assert True, 'good'\n"
        "    assert candidate(2) == 4\n"
        "check(f)"
    ),
    "MBPP's": "assert f(2) == 4\nassert f(3) == 9\nassert f(-1) == 1",
    "closeness": (
        "import math\nassert math.isclose(f(1.5), 2.25, rel_tol=1e-9)\nassert abs(f(2) - 4) < 1e-6"
    ),
    "a loop over cases": "for x, y in [(2, 4), (3, 9)]:\n    assert f(x) == y",
    "all of a map": "assert all(map(lambda c: f(c[0]) == c[1], [(2, 4), (3, 9)]))",
    "a zip of maps": "for a, b in zip(map(f, [2, 3]), [4, 9]):\n    assert a == b",
    "unittest": UNITTEST + "unittest.main()",
    "unittest in a notebook": UNITTEST + "unittest.main(argv=[''], exit=False)",
    "a runner": (
        UNITTEST
        + "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"
    ),
    "called tests": "def test_f():\n    assert f(2) == 4\ntest_f()",
    "tests by their names": (
        "def test_f():\n"
        "    assert f(2) == 4\n"
        "for n in list(globals()):\n"
        "    if n.startswith('test_'): globals()[n]()"
    ),
    "a dunder main": "def test():\n    assert f(2) == 4\nif __name__ == '__main__':\n    test()",
    "numpy": "import numpy as np\nnp.testing.assert_allclose(f(np.array([1, 2])), [1, 4])",
    "an asynchronous test": (
        "import asyncio\nasync def test():\n    assert f(2) == 4\nasyncio.run(test())"
    ),
    "a future import": "from __future__ import annotations\nassert f(2) == 4",
}


@pytest.mark.parametrize("way", WAYS)
async def test_tests_are_understood_however_they_are_written(way, local):
    assert (await local.run_tests(SQUARE, WAYS[way])).ok
    assert not (await local.run_tests("def f(x): return 0", WAYS[way])).ok


async def test_tests_are_tried_out_once(local):
    starts = []
    run = local.run

    async def counting(argv, **options):
        starts.append(argv)
        return await run(argv, **options)

    local.run = counting
    for _ in range(3):
        assert (await local.run_tests(SQUARE, SQUARES)).ok
    assert len(starts) == 1


# --- errors of the program ------------------------------------------------------------------------

# How the interpreter takes an error for the end of a loop, or for nothing: tests, with the error.
SWALLOWING = {
    "a zip of maps": "for a, b in zip(map(f, [1, 2]), [1, 4]):\n    assert a == b",
    "all of a map": "assert all(map(lambda x: f(x) == x, [1, 2]))",
    "a loop over a map": "assert f\nfor x in map(f, [1, 2]):\n    assert x == 0",
    "the next of a map": "assert next(map(f, [1]), 1) == 1",
    "a filter": "assert [x for x in filter(f, [])] == []\nassert list(filter(f, [1])) == []",
    "a sequence of the tests": (
        "class S:\n"
        "    def __getitem__(self, i): return f(i)\n"
        "for x in S():\n"
        "    assert x == 5\n"
        "assert list(S()) == []"
    ),
    "an iterator of the tests": (
        "class S:\n"
        "    def __iter__(self): return self\n"
        "    def __next__(self): return f(1)\n"
        "for x in S():\n"
        "    assert x == 5\n"
        "assert list(S()) == []"
    ),
    "an attribute of the tests": (
        "class S:\n"
        "    def __getattr__(self, name): return f(1)\n"
        "assert not hasattr(S(), 'x')\n"
        "assert f != 1"
    ),
    "a mapping of the tests": (
        "import collections.abc\n"
        "class S(collections.abc.Mapping):\n"
        "    def __getitem__(self, key): return f(key)\n"
        "    def __iter__(self): return iter([])\n"
        "    def __len__(self): return 0\n"
        "assert S().get(1, 0) == 0\n"
        "assert f is f"
    ),
    "an asynchronous loop": (
        "import asyncio\n"
        "class S:\n"
        "    def __aiter__(self): return self\n"
        "    async def __anext__(self): return f(1)\n"
        "async def main():\n"
        "    async for x in S():\n"
        "        assert x == 5\n"
        "    assert f is f\n"
        "asyncio.run(main())"
    ),
}
KINDS = {"a sequence of the tests": "IndexError", "an attribute of the tests": "AttributeError"}
KINDS |= {"a mapping of the tests": "KeyError", "an asynchronous loop": "StopAsyncIteration"}
OTHER_KINDS = (
    "LookupError",
    "GeneratorExit",
    "SystemExit(0)",
    "KeyboardInterrupt",
    "type('E', (StopIteration,), {})",
)


@pytest.mark.parametrize("case", SWALLOWING)
async def test_an_error_of_the_program_ends_no_loop_of_the_tests(case, local):
    program = f"def f(x): raise {KINDS.get(case, 'StopIteration')}"
    result = await local.run_tests(program, SWALLOWING[case])
    assert not result.ok, result


@pytest.mark.parametrize("kind", OTHER_KINDS)
async def test_no_kind_of_error_ends_a_loop_of_the_tests(kind, local):
    result = await local.run_tests(f"def f(x): raise {kind}", SWALLOWING["a zip of maps"])
    assert not result.ok, result


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return []",
        "def f(x): return iter(())",
        "def f(x):\n    return\n    yield",
        "class f:\n    def __init__(self, x): pass\n    def __getitem__(self, i): raise IndexError",
    ],
)
async def test_a_program_that_answers_with_nothing_passes_no_loop(program, local):
    assert not (
        await local.run_tests(program, "for a, b in zip(f(1), [0, 1]):\n    assert a == b")
    ).ok


async def test_a_name_that_is_no_answer_ends_no_loop(local):
    """A program that answers for its own process could raise whatever it likes where the tests only
    look up a name.
    """
    program = """
import sys
side = sys._getframe(1).f_locals["side"]
def failure(error):
    return {"error": ["StopIteration", "Exception"], "args": [], "trace": ""}
side._failure = failure
"""
    assert not (await local.run_tests(program, SWALLOWING["all of a map"])).ok


EXPECTED = {
    "except": "try:\n    f(1)\nexcept KIND:\n    pass\nelse:\n    assert False",
    "except Exception": (
        "try:\n"
        "    f(1)\n"
        "except Exception as error:\n"
        "    assert type(error).__name__ == 'KIND'\n"
        "else:\n"
        "    assert False"
    ),
    "a bare except": "ok = False\ntry:\n    f(1)\nexcept:\n    ok = True\nassert ok",
    "assertRaises": (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self):\n"
        "        self.assertRaises(KIND, f, 1)\n"
        "        with self.assertRaises(KIND): f(1)\n"
        "unittest.main()"
    ),
    "suppress": (
        "import contextlib\nwith contextlib.suppress(KIND):\n    f(1)\n    assert not 'here'"
    ),
    "a function of the tests": (
        "def raises(kind, g, *args):\n"
        "    try:\n"
        "        g(*args)\n"
        "    except kind:\n"
        "        return True\n"
        "    return False\n"
        "assert raises(KIND, f, 1)"
    ),
    "another error": (
        "def g(x):\n"
        "    try:\n"
        "        return f(x)\n"
        "    except KIND as error:\n"
        "        raise ValueError('bad') from error\n"
        "try:\n"
        "    g(1)\n"
        "except ValueError:\n"
        "    pass\n"
        "else:\n"
        "    assert False"
    ),
    "a generator": (
        "def g():\n"
        "    yield f(1)\n"
        "try:\n"
        "    list(g())\n"
        "except (KIND, RuntimeError):\n"
        "    pass\n"
        "else:\n"
        "    assert False"
    ),
}


@pytest.mark.parametrize("kind", ["StopIteration", "IndexError"])
@pytest.mark.parametrize("case", EXPECTED)
async def test_an_error_that_the_tests_expect_passes(case, kind, local):
    result = await local.run_tests(f"def f(x): raise {kind}", EXPECTED[case].replace("KIND", kind))
    assert result.ok, (result.stdout, result.stderr)


async def test_what_an_object_lacks_is_told_as_ever(local):
    program = (
        "class A:\n    x = 1\n    def __getitem__(self, i): return [5, 6][i]\ndef g():\n    yield 1"
    )
    tests = """
a = A()
assert hasattr(a, "x") and not hasattr(a, "y") and getattr(a, "z", 5) == 5
assert list(a) == [5, 6] and list(g()) == [1] and [x for x in g()] == [1] and next(g(), 0) == 1
numbers = g()
next(numbers)
assert next(numbers, "end") == "end"
"""
    result = await local.run_tests(program, tests)
    assert result.ok, result.stderr


async def test_a_program_that_answers_too_much_ends_itself(local):
    program = (
        "import os, sys\nout = int(sys.orig_argv[-1])\nwhile True: os.write(out, b'x' * (1 << 16))"
    )
    result = await local.run_tests(program, SQUARES)
    assert not result.ok and "the program ended" in result.stderr


async def test_both_processes_are_gone_afterwards(local):
    open_files = set(os.listdir("/proc/self/fd"))
    result = await local.run_tests(
        "def f(x):\n    print(__import__('os').getpid())\n    return 4", "assert f(2) == 4"
    )
    assert result.ok, result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.stdout), 0)
    assert set(os.listdir("/proc/self/fd")) == open_files


@needs_bwrap
async def test_tests_that_are_cancelled_leave_nothing_behind(sandbox):
    processes = set(process_tree(os.getpid()))
    fds = set(os.listdir("/proc/self/fd"))
    for delay in range(0, 400, 50):
        running = asyncio.create_task(
            sandbox.run_tests("def f():\n    while True: pass", "assert f() == 1")
        )
        await asyncio.sleep(delay / 1000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert set(process_tree(os.getpid())) <= processes
        assert set(os.listdir("/proc/self/fd")) <= fds


# --- plain data -----------------------------------------------------------------------------------

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
    received = crossed(value)
    assert received == value and type(received) is type(value)


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
    received = crossed(value)
    assert received == plain_value
    assert type(received) is type(plain_value)


@pytest.mark.parametrize(
    "data",
    [
        {"int": 5},
        {"Fraction": [1, 0]},
        {"set": [[1]]},
        {"type": "eval"},
        {"dict": [1]},
        {"range": {}},
        {},
    ],
)
def test_data_that_stand_for_nothing_are_refused(data):
    with pytest.raises(ValueError, match="for no value"):
        object.__new__(Peer).decode(data)

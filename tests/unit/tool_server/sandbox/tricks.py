"""Programs that want tests to pass which they do not pass: name -> (program, tests)."""

SQUARES = "assert f(2) == 4\nassert f(3) == 9"
MUST_RAISE = "try:\n    f(2)\nexcept Exception:\n    pass\nelse:\n    assert False"


def _liar(base, value, body=""):
    return f"""
class Liar({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __abs__ = __round__ = __sub__
    def __hash__(self): return 4
    def __bool__(self): return True
    def __iter__(self): return iter([])
    def __getattr__(self, name): return lambda *args: True
def f(x): return Liar({value})
{body}"""


TRICKS = {
    "the mark of the main module": (
        """
import sys
def f(x):
    print(getattr(sys.modules["__main__"], "mark", ""), end="")
    sys.exit(0)
""",
        SQUARES,
    ),
    "everything in reach printed": (
        """
import gc, os
for fd in range(10):
    try: print(os.pread(fd, 9999, 0))
    except OSError: pass
print(gc.get_objects(), open("/proc/self/cmdline").read(), os.listdir())
os._exit(0)
""",
        SQUARES,
    ),
    "exit with success at the start": ("import os\nos._exit(0)", SQUARES),
    "exit with success in a call": ("import os\ndef f(x): os._exit(0)", SQUARES),
    "exit where an exception is expected": ("import os\ndef f(x): os._exit(0)", MUST_RAISE),
    "SystemExit where an exception is expected": ("def f(x): raise SystemExit(0)", MUST_RAISE),
    "exit where anything is expected": (
        "import os\ndef f(x): os._exit(0)",
        "raised = False\ntry:\n    f(2)\nexcept:\n    raised = True\nassert raised",
    ),
    "an object that equals everything": (_liar("object", ""), SQUARES),
    "an object that contains everything": (_liar("object", ""), "assert 4 in f(2)"),
    "an object that is close to everything": (_liar("object", ""), "assert abs(f(2) - 4) < 1e-9"),
    "a number that equals everything": (_liar("int", "7"), SQUARES),
    "a number that is close to everything": (_liar("float", "7"), "assert abs(f(2) - 4) < 1e-9"),
    "a text that equals everything": (_liar("str", "'x'"), "assert f(2) == 'four'"),
    "a list that equals everything": (_liar("list", "[5]"), "assert f(2) == [4]"),
    "a liar in a list": (_liar("object", "", "def f(x): return [Liar()]"), "assert f(2) == [4]"),
    "an exception whose text equals everything": (
        _liar("str", "''", "def f(x): raise ValueError(Liar())"),
        (
            "try:\n"
            "    f(2)\n"
            "except ValueError as error:\n"
            "    assert str(error) == 'negative'\n"
            "else:\n"
            "    assert False"
        ),
    ),
    "builtins and json replaced": (
        """
import builtins, json
builtins.AssertionError = ZeroDivisionError
builtins.all = builtins.any = builtins.isinstance = lambda *args: True
json.dumps = json.JSONEncoder.encode = lambda *args, **kwargs: '{"value": true}'
def f(x): return 5
""",
        SQUARES,
    ),
    "a builtin that the tests use": (
        "def f(x): return [5]\ndef set(x): return 0\nsorted = len = set",
        "assert set(f(2)) == {4}",
    ),
    "a module that the tests use": (
        "class math:\n    isclose = lambda *args, **kwargs: True\ndef f(x): return 5",
        "assert math.isclose(f(2), 4)",
    ),
    "a trace function": (
        """
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        frame.f_locals[name] = True
    return trace
sys.settrace(trace)
def f(x): return 5
""",
        SQUARES,
    ),
    "success at exit, on signals and from a thread": (
        """
import atexit, os, signal, threading
atexit.register(os._exit, 0)
for number in (1, 2, 10, 12, 14, 15):
    signal.signal(number, lambda *args: os._exit(0))
threading.Timer(0.05, os._exit, [0]).start()
def f(x): return 5
""",
        SQUARES,
    ),
    "answers on every descriptor": (
        """
import os
for fd in range(20):
    for answer in (
        '{"ready": true}', '{"value": true}', '{"value": {"object": [1, "int"]}}', 'passed'
    ):
        try: os.write(fd, answer.encode() + b"\\n")
        except OSError: pass
os._exit(0)
""",
        SQUARES,
    ),
    "the frames above a call": (
        """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for values in (frame.f_globals, frame.f_locals):
            for name, value in list(values.items()):
                if isinstance(value, str) and "assert" in value: print(value)
        frame = frame.f_back
    return 5
""",
        SQUARES,
    ),
    "a process left behind": (
        """
import os, time
def f(x):
    if os.fork() == 0:
        time.sleep(0.05)
        while True: os.write(1, b"passed")
    return 5
""",
        SQUARES,
    ),
}

# What a program may write where its answers belong.
NO_ANSWERS = (
    '{"ready": true}',
    "[1]",
    "{}",
    "x",
    '{"value": {"Fraction": [1, 0]}}',
    '{"value": {"object": 1}}',
    '{"error": 5}',
    '{"error": [], "args": [], "trace": ""}',
    '{"error": [{"x": 1}, "Exception"], "args": 5, "trace": ""}',
    '{"callback": 9, "args": [], "kwargs": {}}\n{}',
    "[" * 100_000,
    '{"value": ' + '{"tuple": [' * 5_000,
)

"""Runs the tests of a program that runs in another process.

It exits with 0 if the tests pass, and otherwise prints to stderr why they do not. Its arguments are
the descriptors of the two pipes. Names that the tests do not define are the program's, except for
builtins and modules of the standard library. Tests compare plain data in this process; the
program's own objects are :class:`Remote` here, which can be called and accessed but never compared.

With the argument ``trial`` there is no program: the tests run on nonsense answers instead, which
shows whether they are tests. They are unusable if they ask the program nothing, or if they pass
whatever it answers. The exit status is one of ``USABLE``, ``UNPARSED``, ``ASKING_NOTHING`` and
``ALWAYS_PASSING``.
"""

import ast
import builtins
import collections
import importlib
import os
import signal
import sys
import traceback
import types

# Beside this file in the working folder.
from program_side import Peer  # pyright: ignore[reportMissingImports]

_ALIASES = {"np": "numpy", "pd": "pandas"}
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
}

# Exit statuses of a trial.
USABLE = 0
UNPARSED = 10
ASKING_NOTHING = 11
ALWAYS_PASSING = 12
_TRIAL_SECONDS = 3.0


class ProgramEnded(BaseException):
    """The program exited, or its process is gone; no ``except Exception`` of a test catches it."""


class RemoteError(Exception):
    """The program raised an exception of its own class, or sent something that is not a value."""


class TestsSide(Peer):
    """The tests' end of the connection."""

    def __init__(self, incoming, outgoing):
        super().__init__(incoming, outgoing)
        self._functions = []  # of the tests, which the program may call
        self._remotes = {}  # one per object, so that ``is`` has the same result as in the program
        self.observer = Observer()
        self.ended = False

    def refer(self, value):
        if isinstance(value, Remote):
            return {"object": object.__getattribute__(value, "_number")}
        callables = types.FunctionType | types.BuiltinFunctionType | types.MethodType | type
        if isinstance(value, callables):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        raise TypeError(
            f"a {type(value).__name__} of the tests cannot be passed to the program: it is not"
            " plain data"
        )

    def resolve(self, reference):
        if "yours" in reference:
            return self._functions[reference["yours"]]
        number, kind = reference["object"]
        return self._remotes.setdefault(number, Remote(self, number, str(kind)))

    def wait_until_ready(self):
        """Wait until the program has run to its end."""
        self._receive()

    def ask(self, what, target, /, *args, **kwargs):
        """Request one operation on an object of the program, serving its callbacks meanwhile.

        Raises:
            ProgramEnded: the program is gone, or raised ``SystemExit`` or the like.
            Exception: the program raised it; an exception of another class than a builtin one
                becomes its nearest builtin base.
        """
        request = {
            "do": what,
            "on": target,
            "args": self.encode(list(args)),
            "kwargs": self.encode(kwargs),
        }
        try:
            self.send(request)
        except BrokenPipeError:
            self._end()

        reply = self._receive()
        while "callback" in reply:
            self.send(self._call_back(reply))
            reply = self._receive()

        error, value, changed_args = self._read(reply)
        if error is not None:
            self.observer.raised(what, error)
            raise error
        for old, new in zip(args, changed_args, strict=False):
            _refill(old, new)
        return value

    def _read(self, reply):
        """Return the exception, or None and the value and the arguments after the call."""
        try:
            args = self.decode(reply.get("args", []))
            if "error" in reply:
                return _error(reply["error"], args, str(reply["trace"])), None, ()
            return None, self.decode(reply["value"]), list(args)
        except (KeyError, TypeError, ValueError, LookupError) as error:
            raise RemoteError(
                f"the program's process sent {str(reply):.200}, which is not an answer"
            ) from error

    def _receive(self):
        try:
            return self.receive()
        except EOFError:
            self._end()

    def _end(self):
        self.ended = True
        raise ProgramEnded("the program ended before its tests did") from None

    def _call_back(self, request):
        try:
            function = self._functions[request["callback"]]
            args = self.decode(request["args"])
            kwargs = self.decode(request["kwargs"])
            return {"value": self.encode(function(*args, **kwargs))}
        except Exception as error:
            return {"error": repr(error)}


def _refill(old, new):
    """Replace a passed container's contents by what it holds on the other side after the call."""
    for kind in (list, bytearray, collections.deque):
        if isinstance(old, kind) and isinstance(new, kind):
            old.clear()
            old.extend(new)  # type: ignore
    for kind in (dict, set):
        if isinstance(old, kind) and isinstance(new, kind):
            old.clear()
            old.update(new)  # type: ignore


def _error(names, arguments, trace):
    """Return the exception that stands for one of the program.

    Args:
        names: names of its class and of all base classes, nearest first.
        arguments: its ``args``.
        trace: its traceback in the program, as text.
    """
    if "Exception" not in names:
        return ProgramEnded(f"the program raised {names[0]}")

    kind = Exception
    for name in names:
        if name in _ERRORS:
            kind = _ERRORS[name]
            break
    if kind.__name__ != names[0]:  # a class of the program
        kind = type(str(names[0]), (RemoteError, kind), {})
        arguments = arguments[:1]
    try:
        error = kind(*arguments)
    except TypeError:  # some builtins need arguments of certain types
        error = RemoteError(names[0], *arguments)
    error.add_note("In the program:\n" + trace)
    return error


def _forward(operation):
    """Return a method of :class:`Remote` that requests an operation."""

    def method(self, /, *args, **kwargs):
        return self._side.ask(operation, self._number, *args, **kwargs)

    return method


class Remote:
    """An object of the program.

    It may describe itself with plain data, but not decide what it equals.
    """

    __slots__ = ("_side", "_number", "_kind")

    def __init__(self, side, number, kind):
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name):
        if name.startswith("__"):  # what Python itself looks for, to copy or to convert
            raise AttributeError(name)
        return self._side.ask("get", self._number, name)

    __setattr__ = _forward("set")
    __call__ = _forward("call")
    __getitem__ = _forward("get_item")
    __setitem__ = _forward("set_item")
    __delitem__ = _forward("delete_item")
    __len__ = _forward("len")
    __iter__ = _forward("iter")
    __next__ = _forward("next")
    __bool__ = _forward("bool")
    __str__ = _forward("str")  # type: ignore[assignment]
    __repr__ = _forward("repr")  # type: ignore[assignment]

    def _refuse(self, other):
        raise TypeError(
            f"an object of the program's ({self._kind}) cannot be compared; compare numbers, texts"
            " or containers of it"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


# --- what tests did -------------------------------------------------------------------------------

# Errors by which the interpreter ends an iteration, or finds that an attribute is missing, without
# a trace.
_SWALLOWED = (StopIteration, StopAsyncIteration, LookupError, AttributeError)
# Operations in which an error says just that: the end of the program's iterator, an attribute or a
# name that it does not have.
_PLAIN_ANSWERS = {"next": StopIteration, "get": AttributeError, "name": KeyError}
_OBSERVER = "__observer__"


class Observer:
    """What tests did besides asking: the errors they handled, and whether they compared anything.

    Tests have to handle every error of the program: by ``except``, a ``with`` that suppresses it,
    or ``assertRaises`` and the like. Otherwise a StopIteration or an IndexError that is raised in a
    ``map`` or a ``__getitem__`` would end a loop as if everything had been compared.
    :func:`instrument` makes tests report to this object.

    Attributes:
        has_comparisons: whether the tests' source compares by ``assert`` or the like.
    """

    def __init__(self):
        self._errors = []  # of the program, each with whether the interpreter could swallow it
        self._comparisons = 0
        self._has_failed_suite = False
        self.has_comparisons = False

    @property
    def problem(self):
        """Why tests that ran to their end have not passed; None if they have."""
        if self._has_failed_suite:
            return "a suite of the tests failed"
        for error, can_be_swallowed in self._errors:
            if can_be_swallowed:
                notes = "\n".join(getattr(error, "__notes__", ()))
                return (
                    f"the program raised {type(error).__name__}: {error}, which the tests did not"
                    f" expect\n{notes}"
                )
        if self.has_comparisons and not self._comparisons:
            return "the tests came to their end without comparing anything"
        return None

    def raised(self, operation, error):
        """Note an error of the program."""
        is_plain_answer = isinstance(error, _PLAIN_ANSWERS.get(operation, ()))
        can_be_swallowed = isinstance(error, _SWALLOWED) and not is_plain_answer
        self._errors.append((error, can_be_swallowed))

    def handled(self, error=None):
        """Note that the tests handle an error; one of the program counts as a comparison.

        Args:
            error: the error; None means the current one.
        """
        if error is None:
            error = sys.exc_info()[1]

        # The error and all that it was raised from.
        chain = [error]
        for link in chain:  # grows during iteration
            for cause in (getattr(link, "__cause__", None), getattr(link, "__context__", None)):
                if cause is not None and not _is_one_of(cause, chain):
                    chain.append(cause)

        unhandled = []
        for entry in self._errors:
            program_error, _ = entry
            if not _is_one_of(program_error, chain):
                unhandled.append(entry)
        self._comparisons += len(self._errors) - len(unhandled)
        self._errors = unhandled

    def compares(self):
        """Note a comparison."""
        self._comparisons += 1

    def compared(self, result):
        """Note a call that compares, and return its result."""
        self._comparisons += 1
        return result

    def discards(self, result):
        """Note that a result is discarded, such as a suite's, of ``unittest.main(exit=False)``."""
        module = type(result).__module__.partition(".")[0]
        if module == "unittest":
            result = getattr(result, "result", result)
            if hasattr(result, "wasSuccessful") and not result.wasSuccessful():
                self._has_failed_suite = True
        elif module == "doctest" and getattr(result, "failed", 0):
            self._has_failed_suite = True

    def mark(self):
        """Return a mark for :meth:`expected_since`."""
        return len(self._errors)

    def expected_since(self, mark, result):
        """Note that a call handled the errors since a mark, and return its result."""
        self._comparisons += max(0, len(self._errors) - mark)
        del self._errors[mark:]
        return result

    def suppression(self):
        """Return the outer one of the two context managers around a ``with``."""
        return _Suppression(self)


def _is_one_of(error, errors):
    """Return whether an error is one of some, by identity: errors may define what they equal."""
    return any(error is other for other in errors)


class _Suppression:
    """Notes an error that a ``with`` suppressed: the inner manager sees it, this one does not."""

    def __init__(self, observer):
        self._observer = observer
        self.inner_error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None and self.inner_error is not None:
            self._observer.handled(self.inner_error)

    def inside(self):
        """Return the inner one."""
        return _Inside(self)


class _Inside:
    """Tells a :class:`_Suppression` which error left the body of the ``with``."""

    def __init__(self, suppression):
        self._suppression = suppression

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        self._suppression.inner_error = error


class _Instrumentation(ast.NodeTransformer):
    """Makes tests report to :class:`Observer`; their lines stay the same."""

    def __init__(self):
        self.comparisons = 0
        self._withs = 0

    def visit_Assert(self, node):
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node
        self.comparisons += 1
        return [ast.copy_location(ast.Expr(_call("compares", node)), node), node]

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        reporting = node
        if "raises" in name.lower():
            reporting = _call("expected_since", node, _call("mark", node), reporting)
        if name.startswith("assert"):
            self.comparisons += 1
            reporting = _call("compared", node, reporting)
        return reporting

    def visit_Expr(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value = _call("discards", node.value, node.value)
        return node

    def visit_ExceptHandler(self, node):
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(_call("handled", node)), node.body[0]))
        return node

    def visit_With(self, node):
        return self._watch_suppression(node)

    def visit_AsyncWith(self, node):
        return self._watch_suppression(node)

    def _watch_suppression(self, node):
        """Put a context manager around the body of a ``with``, and another around the ``with``."""
        self.generic_visit(node)
        self._withs += 1
        name = f"__with_{self._withs}__"
        inside = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "inside", ast.Load()), [], [])
        node.body = [_with(inside, None, node.body, node)]
        return _with(_call("suppression", node), ast.Name(name, ast.Store()), [node], node)


def _call(method, old_node, *arguments):
    """Return a call of the observer's method, at the location of an old node."""
    function = ast.Attribute(ast.Name(_OBSERVER, ast.Load()), method, ast.Load())
    return _at(ast.Call(function, list(arguments), []), old_node)


def _with(context, name, body, old_node):
    """Return a ``with`` at the location of an old node."""
    return _at(ast.With([ast.withitem(context, name)], body), old_node)


def _at(node, old_node):
    """Give a new node, and new ones in it, the location of an old one."""
    ast.copy_location(node, old_node)
    return ast.fix_missing_locations(node)


def instrument(source):
    """Compile tests so that they report to ``__observer__``.

    Returns:
        The code, and whether it compares by ``assert`` or the like.
    """
    instrumentation = _Instrumentation()
    tree = instrumentation.visit(ast.parse(source, "tests.py"))
    tree = ast.fix_missing_locations(tree)
    code = compile(tree, "tests.py", "exec")
    return code, instrumentation.comparisons > 0


# --- their names ----------------------------------------------------------------------------------


class Namespace(dict):
    """Globals of the tests; names they do not define are looked up in the program, each time.

    A program cannot replace what tests check with: builtins are the real ones, and so is a module
    of the standard library whose attributes the tests use. There is one exception: if tests name
    nothing but a single builtin, as in ``assert sum(10, 15) == 6``, they mean the program's, if the
    program defines it.
    """

    def __init__(self, source, observer, look_up):
        super().__init__({"__name__": "__main__", _OBSERVER: observer})
        self._look_up = look_up

        names = set()
        self._attributes = {}  # of each name that the tests use
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._attributes.setdefault(node.value.id, set()).add(node.attr)

        self._only_name = None
        if len(names) == 1:
            (self._only_name,) = names

    def __missing__(self, name):
        if name.startswith("__"):
            raise KeyError(name)
        if hasattr(builtins, name) and name != self._only_name:
            raise KeyError(name)
        module = self._module(name)
        if module is not None:
            self[name] = module
            return module
        return self._look_up(name)  # KeyError: the program does not define it either

    def _module(self, name: str):
        """Import the module that a name stands for; None if it is not one that the tests use."""
        if name not in self._attributes or name not in sys.stdlib_module_names | _ALIASES.keys():
            return None
        try:
            module = importlib.import_module(_ALIASES.get(name, name))
        except ImportError:
            return None
        if not all(hasattr(module, attribute) for attribute in self._attributes[name]):
            return None
        return module


class _Main(types.ModuleType):
    """The module ``__main__`` of the tests, in which unittest looks for them.

    The program's names are not there.
    """

    def __init__(self, namespace):
        super().__init__("__main__")
        self._namespace = namespace

    def __dir__(self):
        return list(self._namespace)

    def __getattr__(self, name):
        if name not in self._namespace:
            raise AttributeError(name)
        return self._namespace[name]


def become_main(namespace):
    """Make this process the tests': its ``__main__``, its arguments, and its ``os._exit``.

    The real ``os._exit`` would be a verdict before everything is compared; theirs raises
    SystemExit.
    """
    end_process = os._exit
    tests_pid = os.getpid()

    def leave(status):
        if os.getpid() != tests_pid:  # a child of the tests, of multiprocessing for example
            end_process(status)
        raise SystemExit(status)

    os._exit = leave
    sys.argv = ["tests.py"]
    sys.modules["__main__"] = _Main(namespace)


# --- a trial --------------------------------------------------------------------------------------


class Nonsense:
    """The answer of a program that knows nothing.

    Anything can be done with it, and it is not a right answer.

    Args:
        equality: the result of every comparison.
    """

    def __init__(self, truth, equality):
        object.__setattr__(self, "_settings", (truth, equality))

    def _more(self, *args, **kwargs):
        return Nonsense(*object.__getattribute__(self, "_settings"))

    def _equality(self, other):
        return object.__getattribute__(self, "_settings")[1]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._more()

    def __bool__(self):
        return object.__getattribute__(self, "_settings")[0]

    def __ne__(self, other):
        return not self._equality(other)

    def __iter__(self):
        return iter([self._more(), self._more()])

    def __setattr__(self, name, value):
        pass

    def __setitem__(self, key, value):
        pass

    def __delitem__(self, key):
        pass

    def __len__(self):
        return 7919

    def __int__(self):
        return 7919

    def __float__(self):
        return 7919.5

    def __exit__(self, *error):
        return False

    def __await__(self):
        yield from ()
        return self._more()

    __index__ = __int__
    __call__ = __getitem__ = __next__ = __enter__ = _more
    __add__ = __radd__ = __sub__ = __rsub__ = _more
    __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _more
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _more
    __mod__ = __rmod__ = __pow__ = __rpow__ = _more
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _more
    __lshift__ = __rshift__ = _more
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _more
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _equality
    __hash__ = object.__hash__


def _nothing(*args, **kwargs):
    return None


# Answers of programs that no tests should let pass, and the error that shows that tests notice: any
# error, or an assertion (None has no attributes, so tests that only call methods fail on it).
_ANSWERS = (
    (lambda: Nonsense(truth=True, equality=False), BaseException),
    (lambda: Nonsense(truth=False, equality=False), BaseException),
    (lambda: Nonsense(truth=True, equality=True), BaseException),
    (lambda: _nothing, (AssertionError, SystemExit)),
)


def trial(source):
    """Run tests on nonsense answers; return an exit status, and why they are unusable."""
    try:
        code, _ = instrument(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return UNPARSED, f"cannot be parsed: {error}"

    asked_names = []
    failure = None
    for answer, expected in _ANSWERS:
        failure = _failure(source, code, answer, asked_names)
        if failure is not None and not asked_names:
            break  # the tests fail by themselves
        if isinstance(failure, expected):
            return USABLE, ""
    if asked_names:
        return ALWAYS_PASSING, "pass whatever the program answers"

    reason = "ask the program nothing"
    unused_names = _unused(source)
    if isinstance(failure, Exception):
        reason += f"; they raise {type(failure).__name__}: {failure}"
    elif unused_names:
        reason += f"; they define {', '.join(unused_names)}, and never use it"
    return ASKING_NOTHING, reason


def _failure(source, code, answer, asked_names):
    """Run tests once; return the exception that ended them, or None.

    Args:
        source: the tests' source.
        code: the tests' code, instrumented.
        answer: makes what stands for any name of the program.
        asked_names: list to which the names that the tests ask for are added.
    """

    def look_up(name):
        asked_names.append(name)
        return answer()

    def interrupt(*_):
        raise TimeoutError("the tests do not end")

    observer = Observer()
    namespace = Namespace(source, observer, look_up)
    become_main(namespace)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _TRIAL_SECONDS)
    try:
        exec(code, namespace)
    except SystemExit as error:
        return error if error.code else None
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

    if observer.problem is None:
        return None
    return AssertionError(observer.problem)


def _unused(source):
    """Return the names of functions and classes that the tests define and do not use."""
    tree = ast.parse(source)
    used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unused_names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name not in used_names:
                unused_names.append(node.name)
    return unused_names


# --- the program ----------------------------------------------------------------------------------


def run(source, incoming, outgoing):
    """Run tests of the program; exit with the reason if they do not pass.

    Args:
        incoming, outgoing: descriptors of the two pipes.
    """
    side = TestsSide(incoming, outgoing)
    observer = side.observer
    code, observer.has_comparisons = instrument(source)
    namespace = Namespace(source, observer, lambda name: side.ask("name", None, name))
    become_main(namespace)

    try:
        side.wait_until_ready()
        exec(code, namespace)
    except ProgramEnded as error:
        sys.exit(str(error))
    except SystemExit as error:  # raised by the tests, in unittest.main() for example
        if error.code:
            raise
    except BaseException as error:
        report = traceback.TracebackException.from_exception(error)
        test_frames = [frame for frame in report.stack if frame.filename == "tests.py"]
        report.stack = traceback.StackSummary.from_list(test_frames)
        sys.exit("".join(report.format()))

    # The tests ran to their end, which is not enough.
    if side.ended:
        sys.exit("the program ended before its tests did")
    if observer.problem is not None:
        sys.exit(observer.problem)


def main():
    """Run the tests, or try them out."""
    with open("tests.py", encoding="utf-8") as file:
        source = file.read()
    if sys.argv[1:] != ["trial"]:
        incoming, outgoing = [int(argument) for argument in sys.argv[1:]]
        run(source, incoming, outgoing)
        return

    status, reason = trial(source)
    # On one line, the last one: the sandbox reads it.
    sys.stderr.write("\n" + " ".join(reason.split())[:1000] + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Runs tests of a program that runs in another process: exits with 0 if they pass, else prints why to stderr.

Arguments: the descriptors of the two pipes. Names that the tests do not define are the program's, except for builtins
and modules of the standard library. Tests compare plain data in this process; the program's own objects are
:class:`Remote` here, which can be called and accessed but never compared.
"""

import ast
import builtins
import collections
import importlib
import sys
import traceback
import types

from program_side import Peer  # pyright: ignore[reportMissingImports]  # beside it in the working folder

_ALIASES = {"np": "numpy", "pd": "pandas"}
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
}


class ProgramEnded(BaseException):
    """The program exited, or its process is gone; no ``except Exception`` of a test catches it."""


class RemoteError(Exception):
    """The program raised an exception of a class of its own, or sent something that is not a value."""


class TestsSide(Peer):
    """The tests' end of the connection."""

    def __init__(self, incoming, outgoing):
        super().__init__(incoming, outgoing)
        self._functions = []
        self._remotes = {}  # one per object, so that ``is`` has the same result as in the program
        self.ended = False

    def refer(self, value):
        if isinstance(value, Remote):
            return {"object": object.__getattribute__(value, "_number")}
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the program: it is no plain data")

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
            Exception: the program raised it; a class that is no builtin's becomes its nearest builtin base.
        """
        request = {"do": what, "on": target, "args": self.encode(list(args)), "kwargs": self.encode(kwargs)}
        try:
            self.send(request)
        except BrokenPipeError:
            self._end()
        while "callback" in (reply := self._receive()):
            self.send(self._call_back(reply))
        error, value, changed = self._read(reply)
        if error is not None:
            raise error
        for old, new in zip(args, changed, strict=False):
            _refill(old, new)
        return value

    def _read(self, reply):
        """Return the exception, or None and the value and the arguments after the call."""
        try:
            changed = self.decode(reply.get("args", []))
            if "error" in reply:
                return _error(reply["error"], changed, str(reply["trace"])), None, ()
            return None, self.decode(reply["value"]), list(changed)
        except (KeyError, TypeError, ValueError, LookupError) as error:
            raise RemoteError(f"the program's process sent {str(reply):.200}, which is no answer") from error

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
            return {"value": self.encode(function(*self.decode(request["args"]), **self.decode(request["kwargs"])))}
        except Exception as error:
            return {"error": repr(error)}


def _refill(old, new):
    """Replace the contents of a passed container by those it has on the other side after the call."""
    for kind in (list, bytearray, collections.deque, dict, set):
        if isinstance(old, kind) and isinstance(new, kind):
            old.clear()
            (old.update if kind in (dict, set) else old.extend)(new)  # type: ignore


def _error(names, arguments, trace):
    if "Exception" not in names:
        return ProgramEnded(f"the program raised {names[0]}")
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), Exception)
    if kind.__name__ != names[0]:
        kind, arguments = type(str(names[0]), (RemoteError, kind), {}), arguments[:1]
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
    """An object of the program. It may describe itself with plain data, but not decide what it equals."""

    __slots__ = ("_side", "_number", "_kind")

    def __init__(self, side, number, kind):
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name):
        if name.startswith("__"):  # what Python itself looks for, e.g. to copy or to convert
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
            f"an object of the program's ({self._kind}) cannot be compared; compare numbers, texts or containers of it"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class Namespace(dict):
    """Globals of the tests; names they do not define are looked up in the program, each time.

    A program cannot replace what tests check with: builtins are the real ones, and so is a module of the standard
    library whose attributes the tests use. Only if a test names nothing but a builtin, as in
    ``assert sum(10, 15) == 6``, is it the program's, if the program defines it.
    """

    def __init__(self, side, source):
        super().__init__(__name__="__main__")
        self._side = side
        nodes = list(ast.walk(ast.parse(source)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        self._tested = used if len(used) == 1 else set()
        self._attributes = {}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._attributes.setdefault(node.value.id, set()).add(node.attr)

    def __missing__(self, name):
        if name.startswith("__") or (hasattr(builtins, name) and name not in self._tested):
            raise KeyError(name)
        module = self._module(name)
        if module is not None:
            self[name] = module
            return module
        return self._side.ask("name", None, name)  # KeyError: the program does not define it either

    def _module(self, name: str):
        if name not in self._attributes or name not in sys.stdlib_module_names | _ALIASES.keys():
            return None
        try:
            module = importlib.import_module(_ALIASES.get(name, name))
        except ImportError:
            return None
        return module if all(hasattr(module, attribute) for attribute in self._attributes[name]) else None


class _Main(types.ModuleType):
    """The module ``__main__`` of the tests, in which unittest looks for them."""

    def __init__(self, namespace):
        super().__init__("__main__")
        self._namespace = namespace

    def __dir__(self):
        return list(self._namespace)

    def __getattr__(self, name):
        try:
            return self._namespace[name]
        except KeyError:
            raise AttributeError(name) from None


def main():
    """Run the tests."""
    side = TestsSide(*map(int, sys.argv[1:]))
    with open("tests.py", encoding="utf-8") as file:
        source = file.read()
    try:
        namespace = Namespace(side, source)
        sys.argv, sys.modules["__main__"] = ["tests.py"], _Main(namespace)
        side.wait_until_ready()
        exec(compile(source, "tests.py", "exec"), namespace)
    except ProgramEnded as error:
        sys.exit(str(error))
    except SystemExit as error:  # the tests' own, e.g. unittest.main()
        if error.code:
            raise
    except BaseException as error:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list([at for at in shown.stack if at.filename == "tests.py"])
        sys.exit("".join(shown.format()))
    if side.ended:
        sys.exit("the program ended before its tests did")


if __name__ == "__main__":
    main()

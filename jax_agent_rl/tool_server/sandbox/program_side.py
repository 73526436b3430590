"""Runs a program, then serves calls of it: the process in the sandbox that tests never enter.

Its arguments are the descriptors of the two pipes. Whatever the program does to this process, it
can only change what is sent from here, which the other side takes for the program's answers.

The two processes do not trust each other: only plain data cross, one line of JSON per message.
Plain data are numbers, strings, bytes, None, the standard containers and a few value types
(``_ATOMS``); a subclass crosses as its base class, so what it overrides stays behind. Anything else
crosses as a reference that only its own process can use. Standard library only.
"""

import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import sys
import threading
import traceback
import types

_CONTAINERS = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
# Name -> class, arguments that make an equal value.
_ATOMS = {
    "bytes": (bytes, lambda value: [list(value)]),
    "bytearray": (bytearray, lambda value: [list(value)]),
    "complex": (complex, lambda value: [value.real, value.imag]),
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "Decimal": (decimal.Decimal, lambda value: [str(value)]),
    "Fraction": (fractions.Fraction, lambda value: [value.numerator, value.denominator]),
    "datetime": (datetime.datetime, lambda value: [*value.timetuple()[:6], value.microsecond]),
    "date": (datetime.date, lambda value: [value.year, value.month, value.day]),
    "time": (
        datetime.time,
        lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
    ),
}
_TYPES = {
    "bool": bool,
    "bytes": bytes,
    "complex": complex,
    "dict": dict,
    "float": float,
    "frozenset": frozenset,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
MAX_MESSAGE_BYTES = 32 << 20
# Larger integers cross as hexadecimal: Python limits the decimal digits that it converts.
_MAX_JSON_INT = 1 << 63


class Peer:
    """One end of the connection; subclasses define how it refers to its own objects.

    Args:
        incoming, outgoing: descriptors of the two pipes.
    """

    def __init__(self, incoming, outgoing):
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = outgoing

    def send(self, message):
        """Send one message."""
        view = memoryview(json.dumps(message).encode() + b"\n")
        while view:
            view = view[os.write(self._outgoing, view) :]

    def receive(self):
        """Return the next message.

        Raises:
            EOFError: the other side is gone, or its message is too long.
            ValueError: the message is not a JSON object.
        """
        line = self._incoming.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message must be a JSON object")
        return message

    def refer(self, value):
        """Return the JSON object by which the other side may refer to a value.

        It is called for values that are not plain data.
        """
        raise NotImplementedError

    def resolve(self, reference):
        """Return the object of a reference that the other side sent."""
        raise NotImplementedError

    def encode(self, value):
        """Return a value as JSON data."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            value = int.__int__(value)
            if abs(value) < _MAX_JSON_INT:
                return value
            return {"int": hex(value)}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            pairs = []
            for key, item in value.items():
                pairs.append([self.encode(key), self.encode(item)])
            return {"dict": pairs}
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in value]}
        for name, (kind, arguments) in _ATOMS.items():
            if isinstance(value, kind):
                return {name: arguments(value)}
        if isinstance(value, type) and value in _TYPES.values():
            return {"type": value.__name__}

        numpy = sys.modules.get("numpy")  # values of numpy exist only if it was imported
        if numpy is not None:
            if isinstance(value, numpy.generic):
                return self.encode(value.item())
            if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
                return {"array": [str(value.dtype), self.encode(value.tolist())]}
        return self.refer(value)

    def decode(self, data):
        """Return the value that JSON data stand for.

        Raises:
            ValueError: there is none.
        """
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        try:
            ((name, content),) = data.items()
            if name == "int":
                return int(content, 16)
            if name == "dict":
                return {self.decode(key): self.decode(item) for key, item in content}
            if name in _CONTAINERS:
                kind = _CONTAINERS[name]
                return kind(self.decode(item) for item in content)
            if name in _ATOMS:
                kind, _ = _ATOMS[name]
                return kind(*content)
            if name == "type":
                return _TYPES[content]
            if name == "array":
                import numpy

                return numpy.array(self.decode(content[1]), dtype=numpy.dtype(content[0]))
        except Exception as error:
            raise ValueError(f"{data!r:.100} stands for no value: {error}") from error
        return self.resolve(data)


_MUTABLE = (list, dict, set, bytearray, collections.deque)
_TRACE_CHARS = 4000


class ProgramSide(Peer):
    """The program's end of the connection, which serves requests of the tests."""

    def __init__(self, incoming, outgoing, namespace):
        super().__init__(incoming, outgoing)
        self._namespace = namespace
        self._objects = {}
        self._talking = threading.RLock()  # callbacks may come from any of the program's threads

    def refer(self, value):
        if isinstance(value, _Callback):
            return {"yours": value.number}
        self._objects[id(value)] = value
        return {"object": [id(value), type(value).__name__]}

    def resolve(self, reference):
        if "object" in reference:
            return self._objects[reference["object"]]
        return _Callback(self, reference["callback"])

    def call_back(self, number, args, kwargs):
        """Call a function of the tests."""
        with self._talking:
            message = {
                "callback": number,
                "args": self.encode(list(args)),
                "kwargs": self.encode(kwargs),
            }
            self.send(message)
            reply = self.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return self.decode(reply["value"])

    def serve(self):
        """Answer requests until there are no more."""
        program_pid = os.getpid()
        while True:
            try:
                request = self.receive()
            except EOFError:
                os._exit(0)  # whatever the program left running

            try:
                reply = self._answer(request)
            except BaseException as error:
                reply = self._failure(error)

            if os.getpid() != program_pid:  # the program forked, and this is its child
                os._exit(0)
            self.send(reply)

    def _answer(self, request):
        """Perform a requested operation; return its value, and arguments it may have changed."""
        args = self.decode(request["args"])
        kwargs = self.decode(request["kwargs"])
        if request["do"] == "name":
            value = self._namespace[args[0]]
        else:
            operation = _OPERATIONS[request["do"]]
            target = self._objects[request["on"]]
            value = operation(target, *args, **kwargs)

        reply = {"value": self.encode(value)}
        if any(isinstance(argument, _MUTABLE) for argument in args):
            reply["args"] = self.encode(args)
        return reply

    def _failure(self, error):
        """Describe an exception of the program, without this file's frames at its beginning."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        names = [kind.__name__ for kind in type(error).__mro__]
        return {
            "error": names,
            "args": self.encode(list(error.args)),
            "trace": text[-_TRACE_CHARS:],
        }


class _Callback:
    """A function that the tests passed."""

    def __init__(self, side, number):
        self._side = side
        self.number = number

    def __call__(self, *args, **kwargs):
        return self._side.call_back(self.number, args, kwargs)


_OPERATIONS = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "get_item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
}


def main():
    """Run the program, then serve calls of it."""
    incoming, outgoing = [int(argument) for argument in sys.argv[1:]]

    # A module of its own, so that what the program defines can be pickled.
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    sys.argv = ["main.py"]
    with open("main.py", "rb") as file:
        source = file.read()

    side = ProgramSide(incoming, outgoing, vars(program))
    exec(compile(source, "main.py", "exec"), vars(program))
    side.send({"ready": True})
    side.serve()


if __name__ == "__main__":
    main()

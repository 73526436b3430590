"""Runs a program, then serves calls of it: the process in the sandbox that tests never enter.

Arguments: the descriptors of the two pipes. Whatever the program does to this process, it can only change what is sent
from here, which the other side takes for the program's answers.
"""

import collections
import os
import sys
import threading
import traceback
import types

from remote_calls import Peer  # pyright: ignore[reportMissingImports]  # beside it in the working folder

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
            self.send({"callback": number, "args": self.encode(list(args)), "kwargs": self.encode(kwargs)})
            reply = self.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return self.decode(reply["value"])

    def serve(self):
        """Answer requests until there are no more."""
        process = os.getpid()
        while True:
            try:
                request = self.receive()
            except EOFError:
                os._exit(0)  # whatever the program left running
            try:
                reply = self._answer(request)
            except BaseException as error:
                reply = self._failure(error)
            if os.getpid() != process:  # the program forked: its child is done
                os._exit(0)
            self.send(reply)

    def _answer(self, request):
        target = None if request["on"] is None else self._objects[request["on"]]
        args, kwargs = self.decode(request["args"]), self.decode(request["kwargs"])
        reply = {"value": self.encode(_OPERATIONS[request["do"]](self._namespace, target, *args, **kwargs))}
        if any(isinstance(argument, _MUTABLE) for argument in args):
            reply["args"] = self.encode(args)
        return reply

    def _failure(self, error):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"error": names, "args": self.encode(list(error.args)), "trace": text[-_TRACE_CHARS:]}


class _Callback:
    """A function that the tests passed."""

    def __init__(self, side, number):
        self._side = side
        self.number = number

    def __call__(self, *args, **kwargs):
        return self._side.call_back(self.number, args, kwargs)


def _call(namespace, target, /, *args, **kwargs):
    return target(*args, **kwargs)


_OPERATIONS = {
    "name": lambda namespace, target, name: namespace[name],
    "call": _call,
    "get": lambda namespace, target, name: getattr(target, name),
    "set": lambda namespace, target, name, value: setattr(target, name, value),
    "get_item": lambda namespace, target, key: target[key],
    "set_item": lambda namespace, target, key, value: target.__setitem__(key, value),
    "delete_item": lambda namespace, target, key: target.__delitem__(key),
    "len": lambda namespace, target: len(target),
    "iter": lambda namespace, target: iter(target),
    "next": lambda namespace, target: next(target),
    "str": lambda namespace, target: str(target),
    "repr": lambda namespace, target: repr(target),
    "bool": lambda namespace, target: bool(target),
}


def main():
    """Run the program, then serve calls of it."""
    incoming, outgoing = map(int, sys.argv[1:])
    program = sys.modules["__main__"] = types.ModuleType("__main__")  # so that pickling what it defines works
    sys.argv = ["main.py"]
    with open("main.py", "rb") as file:
        source = file.read()
    side = ProgramSide(incoming, outgoing, vars(program))
    exec(compile(source, "main.py", "exec"), vars(program))
    side.send({"ready": True})
    side.serve()


if __name__ == "__main__":
    main()

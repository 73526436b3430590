"""Calls between two processes that do not trust each other: only plain data cross, as one line of JSON a message.

Runs inside the sandbox on both sides, standard library only. Plain data are numbers, texts, bytes, None, the standard
containers and a few value types (``_ATOMS``); a subclass crosses as its base class, so what it overrides stays behind.
Anything else crosses as a reference that only its own process can use.
"""

import collections
import datetime
import decimal
import fractions
import json
import os
import sys

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
    "datetime": (
        datetime.datetime,
        lambda value: [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond],
    ),
    "date": (datetime.date, lambda value: [value.year, value.month, value.day]),
    "time": (datetime.time, lambda value: [value.hour, value.minute, value.second, value.microsecond]),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
}
_TYPES = {kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)}
_JSON_INT = 1 << 63  # larger ones cross as hexadecimal: Python limits the decimal digits it converts


class Peer:
    """One end of the connection; each side says how it refers to its own objects.

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
            EOFError: the other side is gone.
            ValueError: it sent something else than a JSON object.
        """
        line = self._incoming.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message must be a JSON object")
        return message

    def refer(self, value):
        """Return the JSON object by which the other side may refer to a value that is no plain data."""
        raise NotImplementedError

    def resolve(self, reference):
        """Return what a reference that the other side sent stands for."""
        raise NotImplementedError

    def encode(self, value):
        """Return a value as JSON data."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            value = int.__int__(value)
            return value if abs(value) < _JSON_INT else {"int": hex(value)}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in value]}
        for name, (kind, arguments) in _ATOMS.items():
            if isinstance(value, kind):
                return {name: arguments(value)}
        if isinstance(value, type) and value in _TYPES.values():
            return {"type": value.__name__}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.encode(value.item())
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return {"array": [str(value.dtype), self.encode(value.tolist())]}
        return self.refer(value)

    def decode(self, data):
        """Return the value that JSON data stand for.

        Raises:
            ValueError: they stand for none.
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
                return _CONTAINERS[name](self.decode(item) for item in content)
            if name in _ATOMS:
                return _ATOMS[name][0](*content)
            if name == "type":
                return _TYPES[content]
            if name == "array":
                import numpy

                return numpy.array(self.decode(content[1]), dtype=numpy.dtype(content[0]))
        except Exception as error:
            raise ValueError(f"{data!r:.100} stands for no value: {error}") from error
        return self.resolve(data)


def refill(old, new):
    """Replace the contents of a passed container by those it has on the other side after the call."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
    elif (isinstance(old, dict) and isinstance(new, dict)) or (isinstance(old, set) and isinstance(new, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque) and isinstance(new, collections.deque):
        old.clear()
        old.extend(new)

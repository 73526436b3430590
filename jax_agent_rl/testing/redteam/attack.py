"""What an attack is, and what came of it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Surface(StrEnum):
    """What an attack is aimed at."""

    SANDBOX = "sandbox"
    """Where programs run that a model wrote."""
    TESTS = "tests"
    """What decides whether such a program is right."""
    SERVER = "server"
    """A server of tools, engines or rewards."""
    ENDPOINT = "endpoint"
    """A server of a model, for clients of OpenAI's dialect."""
    JUDGE = "judge"
    """A model that grades answers."""
    FILES = "files"
    """Readers of files that others wrote."""


class AttackVerdict(StrEnum):
    """What came of an attack."""

    HELD = "held"
    BROKE = "broke"
    NOT_APPLICABLE = "not applicable"


Attempt = Callable[[Any], Awaitable[str]]


class NotApplicableError(Exception):
    """A target does not have what an attack is aimed at; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A harmless attempt at something that a target must not allow.

    Attributes:
        name: identifier, such as ``sandbox-host-files``.
        surface: what it is aimed at.
        aim: what the attacker wants, in a few words.
        attempt: makes the attempt on a target of that surface. It returns what was reached, and ""
            if nothing was. It raises NotApplicableError where the target has no such thing.
        seconds: the attempt is given up after so long, which counts as broken: a target has to end
            what it runs by itself.
    """

    name: str
    surface: Surface
    aim: str
    attempt: Attempt
    seconds: float = 60.0


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """What came of an attack.

    Attributes:
        name, surface, aim: of the attack.
        target: name of the target.
        evidence: what was reached, or why the attack is not applicable.
        seconds: how long it took.
    """

    name: str
    surface: Surface
    aim: str
    target: str
    verdict: AttackVerdict
    evidence: str
    seconds: float


_REGISTRY: list[Attack] = []


def attack(name: str, surface: Surface, *, seconds: float = 60.0) -> Callable[[Attempt], Attempt]:
    """Register a coroutine function as an attack; its docstring says the aim.

    For the arguments see :class:`Attack`.
    """

    def register(attempt: Attempt) -> Attempt:
        aim = inspect.getdoc(attempt) or ""
        register_attack(
            Attack(
                name=name,
                surface=surface,
                aim=aim.partition("\n")[0].rstrip("."),
                attempt=attempt,
                seconds=seconds,
            )
        )
        return attempt

    return register


def register_attack(new_attack: Attack) -> None:
    """Add an attack to those of ``redteam``."""
    _REGISTRY.append(new_attack)


def registered_attacks() -> list[Attack]:
    """Return the attacks of all modules that were imported, in that order."""
    return list(_REGISTRY)

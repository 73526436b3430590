"""What a check is, how it fails, and the list of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_agent_rl.rollout.protocol import Capabilities

if TYPE_CHECKING:
    from jax_agent_rl.testing.conformance.probe import Probe

CheckFunction = Callable[["Probe"], Awaitable[None]]


class CheckFailed(AssertionError):
    """A backend broke a rule.

    Args:
        what: what was looked at.
        expected: what the protocol promises.
        got: what the backend did.
        cause: the likely cause, for whoever has to fix it.
    """

    def __init__(self, what: str, *, expected: Any, got: Any, cause: str) -> None:
        self.what, self.expected, self.got, self.cause = what, expected, got, cause
        super().__init__(f"{what}\n  expected: {expected}\n  got:      {got}\n  likely:   {cause}")


class DoesNotApply(Exception):
    """The check cannot be made on this backend or model; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule.

    Attributes:
        name: short, stable, in kebab case; mutation tests and JSON results refer to it.
        claim: the rule in one sentence.
        needs: names of :class:`Capabilities` fields that must be truthy; ``pause_modes:keep`` asks for a member.
        run: does the check; raises :class:`CheckFailed` or :class:`DoesNotApply`.
        last: it closes the backend, so it comes after all others.
    """

    name: str
    claim: str
    needs: tuple[str, ...]
    run: CheckFunction
    last: bool = False

    def missing(self, capabilities: Capabilities) -> str | None:
        """The first capability this check needs and the backend does not declare, in words; None if all are there."""
        for need in self.needs:
            name, _, member = need.partition(":")
            value = getattr(capabilities, name)
            if not (member in value if member else value):
                return f"Capabilities.{name} does not hold {member!r}" if member else f"Capabilities.{name} is {value}"
        return None


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run (``last`` ones after the others)."""


def check(name: str, *, needs: Sequence[str] = (), last: bool = False) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check; its docstring is the claim."""

    def register(function: CheckFunction) -> CheckFunction:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        claim = (function.__doc__ or "").strip()
        CHECKS[name] = Check(name=name, claim=claim, needs=tuple(needs), run=function, last=last)
        return function

    return register

"""A check and the registry of all checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.testing.conformance.probe import Probe

CheckFunction = Callable[[Probe], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule.

    Attributes:
        name: short stable name in kebab case, used by mutation tests and JSON results.
        claim: the rule in one sentence.
        needs: :class:`Capabilities` fields that must be truthy; ``pause_modes:keep`` asks for a member.
        run: the check; raises :class:`CheckFailed` or :class:`DoesNotApply`.
        last: whether it closes the backend and therefore runs after all others.
    """

    name: str
    claim: str
    needs: tuple[str, ...]
    run: CheckFunction
    last: bool = False

    def missing(self, capabilities: Capabilities) -> str | None:
        """Describe the first required capability that the backend does not declare; None if it declares all."""
        for need in self.needs:
            name, _, member = need.partition(":")
            value = getattr(capabilities, name)
            if not (member in value if member else value):
                return f"Capabilities.{name} does not hold {member!r}" if member else f"Capabilities.{name} is {value}"
        return None


CHECKS: dict[str, Check] = {}
"""All checks by name, in execution order (``last`` ones after the others)."""


def check(name: str, *, needs: Sequence[str] = (), last: bool = False) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check whose docstring is the claim."""

    def register(function: CheckFunction) -> CheckFunction:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        claim = (function.__doc__ or "").strip()
        CHECKS[name] = Check(name=name, claim=claim, needs=tuple(needs), run=function, last=last)
        return function

    return register

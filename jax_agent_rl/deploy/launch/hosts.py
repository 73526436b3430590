"""Hosts of a launch, and commands that its own machine runs for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the launch.

    Attributes:
        name: the name given by the user, for messages.
        address: address at which the other hosts reach it.
        local: the launcher runs on it.
    """

    name: str
    address: str
    local: bool


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command on a host.

    Attributes:
        name: prefix of its lines of output.
        host: where it runs.
        argv: program and arguments, as the host sees them.
        env: variables added to the host's own.
    """

    name: str
    host: Host
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def local_argv(self, root: Path) -> list[str]:
        """Return what the launcher starts on its own machine."""
        variables = ["env", *(f"{name}={value}" for name, value in self.env.items())] if self.env else []
        return [*variables, *self.argv]

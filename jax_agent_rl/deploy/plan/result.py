"""The result of planning, as it leaves the compiler's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan for the screen and for programs.

    Attributes:
        report: text for the screen.
        json: the same as a JSON object; see ``report.as_json`` and ``profiles.profiles_as_json``.
    """

    report: str
    json: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.json["fits"]

    @property
    def memory(self) -> int:
        """Bytes of a chip that the fullest program needs."""
        return max(program["total"] for program in self.json["programs"])

    @property
    def seconds(self) -> float:
        """Least seconds of a step."""
        return self.json["step"]["seconds"]

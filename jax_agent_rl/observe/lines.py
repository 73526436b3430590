"""Lines on the screen that hold names of users: paths, data sources, reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints a text as it is: brackets are no markup, nothing is coloured, and only a terminal breaks its lines."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)

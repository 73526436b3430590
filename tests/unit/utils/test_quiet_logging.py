"""Warnings reach the screen, also while a live display redraws it."""

import io
import logging
import sys

import pytest
from rich.console import Console

from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.utils.quiet_logging import quiet_logging


class Stream(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_is_printed_above_a_live_display_unless_standard_error_is_a_file(monkeypatch, terminal):
    shown, errors = Stream(True), Stream(terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(logging.root, "handlers", [])  # as a process begins
    quiet_logging()
    with Progress(Console(file=shown, force_terminal=True, width=200), total_steps=3):
        logging.getLogger("jax_agent_rl.x").warning("meanwhile [bold]")
    logging.getLogger("jax_agent_rl.x").warning("after")
    assert ("WARNING jax_agent_rl.x: meanwhile [bold]" in shown.getvalue()) is terminal
    expected = ["after"] if terminal else ["meanwhile [bold]", "after"]
    assert errors.getvalue().splitlines() == [f"WARNING jax_agent_rl.x: {text}" for text in expected]

"""The command line: all commands, in the order of ``--help``."""

from __future__ import annotations

import gc
import platform
import sys
from typing import Annotated

import typer

from jax_agent_rl.cli import check, compare, config, evaluate, models, serve, train
from jax_agent_rl.cli.options import HELP_OPTIONS, PlainGroup

app = typer.Typer(
    cls=PlainGroup,
    context_settings=HELP_OPTIONS,
    help=(
        "Train language-model agents with reinforcement learning, JAX/TPU first. Begin with:"
        " jax-agent-rl quickstart. A task of your own: jax-agent-rl init FOLDER."
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from jax_agent_rl import __version__

        print(f"jax-agent-rl {__version__} (Python {platform.python_version()})")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and end."
    ),
]


@app.callback()
def main_options(version: Version = False) -> None:
    """Take the options that stand before a command."""


# The order of the commands in --help.
train.register(app)
evaluate.register(app)
serve.register(app)
compare.register(app)
check.register(app)
config.register(app)
models.register(app)


def main() -> None:
    """Run the command line; print errors a user can fix as one message, not a traceback."""
    from jax_agent_rl.errors import ConfigError, JaxAgentRLError
    from jax_agent_rl.utils.startup import (
        ignore_absent_tpus,
        keep_freed_memory,
        quiet_logging,
        touch_memory_ahead,
    )
    from jax_agent_rl.utils.text import printable

    if sys.argv[1:2] == ["quickstart"] and "--help" not in sys.argv:
        keep_freed_memory()
        touch_memory_ahead()
    quiet_logging()
    ignore_absent_tpus()
    try:
        app()
    except JaxAgentRLError as error:
        message = str(error)
        if isinstance(error, ConfigError) and len(error.problems) == 1:
            message = error.problems[0]
        print(f"error: {printable(message)}", file=sys.stderr)
        sys.exit(2)
    finally:
        # The process ends: Python would look for garbage among half a million objects, for more
        # than a second.
        gc.freeze()

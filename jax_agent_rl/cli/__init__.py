"""The command line. Each command imports what it needs, so that ``--help`` is fast.

``commands`` all of them · ``options`` what they share · ``train``, ``evaluate``, ``serve``,
``check``, ``config``, ``models`` the commands by subject.
"""

from jax_agent_rl.cli.commands import app, main

__all__ = ["app", "main"]

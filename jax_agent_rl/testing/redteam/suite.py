"""All attacks: each module registers its own when it is imported."""

from __future__ import annotations

from jax_agent_rl.testing.redteam import (  # noqa: F401
    on_files,
    on_models,
    on_sandboxes,
    on_servers,
    on_tests,
)
from jax_agent_rl.testing.redteam.attack import Attack, registered_attacks


def attacks() -> list[Attack]:
    """Return all attacks."""
    return registered_attacks()

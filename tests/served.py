"""The toy backend behind a rollout server, and its weights as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jax_agent_rl.testing.conformance.served import ServedBackend
from tests.toy_backend import ToyBackend


def served_toy(**client) -> ServedBackend:
    return ServedBackend(lambda: ToyBackend(tick_seconds=0.001, weight_payloads=frozenset({"safetensors"})), **client)


def toy_files(folder: Path) -> Callable[[str, str], list[str]]:
    """Payloads of kind ``safetensors`` for the toy: a file that holds the name of the weight set."""

    def payload(kind: str, which: str) -> list[str]:
        file = folder / f"{which}.safetensors"
        file.write_text(which)
        return [str(file)]

    return payload

"""Starts the configured sinks, feeds them and ends them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.base import RunFacts, Sink, scalars
from jax_agent_rl.observe.sinks.feeding import SinkThread
from jax_agent_rl.utils.files import write_atomically

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""What each name of ``trainer.logger`` imports; the extra has the name."""
IDENTITIES = "loggers.json"
"""File of the run folder with what the sinks call this run."""
CLOSING_SECONDS = 60.0
"""For a sink to hand over what it holds (an upload, say) when a run ends."""


class Sinks:
    """The sinks of a run; call it with each line of metrics."""

    def __init__(self, threads: Sequence[SinkThread]) -> None:
        self._threads = threads

    def __call__(self, record: Mapping[str, Any]) -> None:
        values = scalars(record)
        for thread in self._threads:
            thread.log(values, record["step"])

    def lost(self) -> dict[str, int]:
        """Records each sink has lost, of those that lost any."""
        return {thread.name: thread.failures for thread in self._threads if thread.failures}


def check_sinks(names: Sequence[str]) -> None:
    """Checks, before anything is started, that the sinks can be.

    Raises:
        ConfigError: a package is missing, with the extra that brings it, or a login is.
    """
    missing = [name for name in names if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        extras = ",".join(missing)
        raise ConfigError(
            f"trainer.logger names {', '.join(missing)}, which is not installed: pip install 'jax_agent_rl[{extras}]', "
            "or remove it"
        )
    if "wandb" in names:
        from jax_agent_rl.observe.sinks.wandb_sink import require_login

        require_login()


@contextmanager
def open_sinks(names: Sequence[str], run: RunFacts, *, say: Callable[[str], None]) -> Iterator[Sinks]:
    """The sinks while a run lasts. What fails in them is said once each and never raised.

    Args:
        names: of ``trainer.logger``.
        run: its ``identity`` is read from the run folder.
        say: takes a line for the user, from any thread.
    """
    file = run.folder / IDENTITIES
    known: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}

    def begun(name: str, identity: Mapping[str, str]) -> None:
        known[name] = dict(identity)
        write_atomically(file, json.dumps(known, indent=2) + "\n")

    threads = [
        SinkThread(name, _make(name), replace(run, identity=known.get(name)), begun=begun, say=say) for name in names
    ]
    try:
        yield Sinks(threads)
    finally:
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.wait(CLOSING_SECONDS)


def _make(name: str) -> Sink:
    if name == "tensorboard":
        from jax_agent_rl.observe.sinks.tensorboard_sink import TensorBoardSink

        return TensorBoardSink()
    if name == "wandb":
        from jax_agent_rl.observe.sinks.wandb_sink import WandbSink

        return WandbSink()
    from jax_agent_rl.observe.sinks.trackio_sink import TrackioSink

    return TrackioSink()

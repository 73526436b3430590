"""Trackio, Hugging Face's tracker: a local database, shown by ``trackio show``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import trackio

from jax_agent_rl.observe.sinks.base import RunFacts


class TrackioSink:
    """One Trackio run. Its name is its identity, so it gets a random end: another folder may have the same name."""

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        identity = run.identity or {"name": f"{run.folder.name}-{uuid.uuid4().hex[:6]}"}
        self._run = trackio.init(
            project=run.project, name=identity["name"], resume="allow", config=dict(run.config), embed=False
        )
        return identity

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

"""Weights & Biases. ``WANDB_MODE=offline`` writes to ``<run folder>/wandb``, for ``wandb sync`` later."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.base import RunFacts

STEP = "step"


def require_login() -> None:
    """Checks that nobody has to be asked for an API key in the middle of a start.

    Raises:
        ConfigError: it is to be online and knows none.
    """
    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return
    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "trainer.logger names wandb, which knows no API key: run 'wandb login', set WANDB_API_KEY, or "
            "WANDB_MODE=offline"
        )


class WandbSink:
    """One W&B run. Its own step only ever grows, so the training step is a metric and the axis of all others: a
    resumed run may log a step again.
    """

    _run: Any = None

    def open(self, run: RunFacts) -> Mapping[str, str]:
        identity = run.identity or {"id": uuid.uuid4().hex}
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=identity["id"],
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return identity

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

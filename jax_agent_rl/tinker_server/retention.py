"""What the server keeps, and for how long.

This is the one place that removes something because of its age.

==========================================  =======================================================
weights for sampling that have no name      ``sampler_ttl_seconds`` after they were last sampled
                                            from
checkpoints saved with ``ttl_seconds``      until then
other checkpoints that a client named       until the client deletes them
a session, its models' training states and  ``session_ttl_seconds`` after its client was last heard
its samplers                                of
a model in memory                           ``MEMORY_SECONDS`` after its session was last heard of
results, records of finished samples        see ``tinker_server.database``
files of checkpoints without a record       until the next start
==========================================  =======================================================

Nothing is removed that an unanswered request needs.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from concurrent.futures import ThreadPoolExecutor

from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.tinker_server.database import Database
from jax_agent_rl.tinker_server.training import Models

MEMORY_SECONDS = 3600.0
"""How long a model stays in memory after its session was last heard of.

A later request restores it.
"""
SWEEP_SECONDS = 600.0
"""Time between two sweeps."""
logger = logging.getLogger(__name__)


class Retention:
    """Removes what is too old, in the thread that also saves and loads.

    Args:
        models: holds the files, and the models in memory.
        training: one thread, in which ``models`` runs.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        models: Models,
        database: Database,
        training: ThreadPoolExecutor,
    ) -> None:
        self._settings = settings
        self._models = models
        self._database = database
        self._training = training

    async def start(self) -> None:
        """Remove files without a record, and what became too old since the last start.

        A server that was killed may have left such files.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._training, self._remove_unknown_files)
        await loop.run_in_executor(self._training, self._sweep)

    async def run(self) -> None:
        """Remove what becomes too old, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await loop.run_in_executor(self._training, self._sweep)
            except (OSError, sqlite3.Error):
                # For example, a file cannot be removed: the server goes on, and tries again.
                logger.exception("what is too old could not be removed")

    def _remove_unknown_files(self) -> None:
        checkpoints = self._database.checkpoints() + self._database.checkpoints(expired=True)
        known = [checkpoint["path"] for checkpoint in checkpoints]
        for file in self._models.unknown_files(known):
            logger.warning("%s belongs to no checkpoint: it is removed", file)
            file.unlink()

    def _sweep(self) -> None:
        self._models.remove_expired()
        for session in self._database.quiet_sessions(MEMORY_SECONDS):
            self._models.forget(self._database.models(session))
        if self._settings.session_ttl_seconds is not None:
            for session in self._database.quiet_sessions(self._settings.session_ttl_seconds):
                for model in self._database.remove_session(session):
                    self._models.remove_training_state(model)
        self._database.remove_old_requests()

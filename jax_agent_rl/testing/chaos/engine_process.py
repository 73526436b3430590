"""A rollout server over a paced engine: ``python -m jax_agent_rl.testing.chaos.engine_process PORT SEED``.

SIGUSR1 hangs the engine while the server goes on to send heartbeats, SIGUSR2 lets it go on.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.testing.chaos.engine import PacedBackend
from jax_agent_rl.testing.chaos.policy import hash_policy
from jax_agent_rl.utils.interrupt import run_server

HEARTBEAT_SECONDS = 0.5
UNTRAINED = -1


async def serve(port: int, seed: int) -> None:
    """Serves the weights of no run yet."""
    backend = PacedBackend(hash_policy(seed, UNTRAINED), version=UNTRAINED)
    loop = asyncio.get_running_loop()
    # Not add_signal_handler: it would take the descriptor by which run_server hears of signals.
    for number, hangs in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
        signal.signal(number, lambda *_, hangs=hangs: loop.call_soon_threadsafe(backend.hang, hangs))
    uploads = Path(tempfile.gettempdir())  # where what is left over is looked for
    server = RolloutServer(backend, port=port, heartbeat_seconds=HEARTBEAT_SECONDS, upload_folder=uploads)
    try:
        await backend.start()
        await server.start()
        await asyncio.Event().wait()
    finally:
        await server.close()
        await backend.close()


if __name__ == "__main__":
    run_server(serve(int(sys.argv[1]), int(sys.argv[2])))

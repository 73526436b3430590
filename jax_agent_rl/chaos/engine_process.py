"""``python -m jax_agent_rl.chaos.engine_process PORT SEED``: a rollout server over a paced engine, until SIGTERM.

SIGUSR1 hangs the engine while the server goes on to send heartbeats, SIGUSR2 lets it go on.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from jax_agent_rl.chaos.engine import PacedBackend
from jax_agent_rl.chaos.policy import policy_of
from jax_agent_rl.rollout.remote.server import RolloutServer
from jax_agent_rl.serving import told_to_stop

HEARTBEAT_SECONDS = 0.5
UNTRAINED = -1


async def serve(port: int, seed: int) -> None:
    """Serves the weights of no run yet."""
    backend = PacedBackend(policy_of(seed, UNTRAINED), version=UNTRAINED)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, backend.hang, True)
    loop.add_signal_handler(signal.SIGUSR2, backend.hang, False)
    uploads = Path(tempfile.gettempdir())  # where what is left over is looked for
    server = RolloutServer(backend, port=port, heartbeat_seconds=HEARTBEAT_SECONDS, upload_folder=uploads)
    try:
        await backend.start()
        await server.start()
        await told_to_stop()
    finally:
        await backend.close()
        await server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))

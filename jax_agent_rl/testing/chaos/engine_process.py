"""The chaos run's engine and its server: ``python -m jax_agent_rl.testing.chaos.engine_process PORT SEED``.

It starts within a second, so that it can be killed every few. SIGUSR1 hangs the engine while the server continues to
send heartbeats; SIGUSR2 lets it continue.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, WeightUpdate
from jax_agent_rl.testing.chaos.policy import EOS, HashPolicy, context_key, hash_policy
from jax_agent_rl.testing.fake_engine import BatchingEngine, Run
from jax_agent_rl.types import PauseMode
from jax_agent_rl.utils.interrupt import run_server

HEARTBEAT_SECONDS = 0.5
UNTRAINED = -1


class PacedBackend(BatchingEngine):
    """Samples a :class:`HashPolicy` at temperature 1 with the request's seed; takes weights as safetensors files.

    Args:
        policy: the first weights.
        version: their version.
        tick_seconds: time between two ids of a request.
        slots: requests decoded concurrently; more wait.
        max_model_len: longest context, in ids.
    """

    name = "paced engine"

    def __init__(
        self, policy: HashPolicy, *, version: int, tick_seconds: float = 0.02, slots: int = 4, max_model_len: int = 1024
    ) -> None:
        capabilities = Capabilities(
            max_model_len=max_model_len,
            max_concurrent=slots,
            stop_strings=False,
            streaming=False,
            pause_modes=frozenset({PauseMode.KEEP, PauseMode.ABORT}),
            in_flight_update=True,
            weight_payloads=frozenset({"safetensors"}),
        )
        super().__init__(capabilities, version=version, tick_seconds=tick_seconds, eos=EOS)
        self._policy = policy

    def _check(self, request: GenerateRequest) -> None:
        super()._check(request)
        sampling = request.sampling
        if sampling.seed is None or sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k or sampling.stop:
            raise BackendError(f"the paced engine samples with a seed, at temperature 1, without stops; got {sampling}")

    def sample(self, run: Run) -> tuple[int, float]:
        return self._policy.sample(context_key(run.context), seed=run.seed, position=len(run.context))

    async def load(self, update: WeightUpdate) -> None:
        try:
            self._policy = await asyncio.to_thread(HashPolicy.read, Path(update.payload[0]))
        except (OSError, ValueError) as error:
            raise WeightUpdateError(f"version {update.version} cannot be read: {error}") from error


async def serve(port: int, seed: int) -> None:
    """Serve untrained weights until the process is terminated."""
    backend = PacedBackend(hash_policy(seed, UNTRAINED), version=UNTRAINED)
    loop = asyncio.get_running_loop()
    # Not add_signal_handler: it would replace the wake-up descriptor through which run_server receives signals.
    for number, hangs in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
        signal.signal(number, lambda *_, hangs=hangs: loop.call_soon_threadsafe(backend.hang, hangs))
    uploads = Path(tempfile.gettempdir())  # where leftover files are looked for
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

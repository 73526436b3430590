"""What the rollout servers run: an engine whose tokens can be recomputed.

``python -m tests.chaos.engine PORT SEED`` serves it.

The weights are a table of logits. A checksum of the whole context selects the row for the next id;
seed and position determine the draw. So a token sampled from stale or half-written weights, from
another context, or twice in a row differs when it is recomputed
(:func:`tests.chaos.invariants.problems`).

The server starts within a second, so that it can be killed every few seconds. SIGUSR1 hangs the
engine while the server continues to send heartbeats; SIGUSR2 lets it continue.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode
from jax_agent_rl.utils.shutdown import run_server
from tests.batching_engine import BatchingEngine, Run

HEARTBEAT_SECONDS = 0.5
UNTRAINED = -1
EOS = 2
FIRST_BYTE = 3
"""Id of byte 0 in :func:`tests.chaos.testbed.codec`; smaller ids are special."""
VOCABULARY = FIRST_BYTE + 256
_ROWS = 64
_PRINTABLE = range(FIRST_BYTE + ord("a"), FIRST_BYTE + ord("z") + 1)
_EOS_LOGIT = 1.2  # turns are 12 ids long on average, so that faults interrupt them


class HashPolicy:
    """One version of the weights.

    Args:
        logits: float32 [rows, vocabulary].
    """

    def __init__(self, logits: np.ndarray) -> None:
        is_table = logits.shape == (_ROWS, VOCABULARY) and logits.dtype == np.float32
        if not is_table or not np.isfinite(logits).all():
            raise ValueError(
                f"weights must be finite float32 [{_ROWS}, {VOCABULARY}], got {logits.dtype}"
                f" {list(logits.shape)}"
            )
        self.logits = logits

    @cached_property
    def _log_probs(self) -> np.ndarray:
        """Log-probs, float64 [rows, vocabulary]."""
        shifted = self.logits.astype(np.float64) - self.logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @cached_property
    def _cumulative(self) -> np.ndarray:
        return np.exp(self._log_probs).cumsum(-1)

    def sample(self, key: int, *, seed: int, position: int) -> tuple[int, float]:
        """Sample the next id and return it with its log-prob.

        Args:
            key: :func:`context_key` of all ids before it.
            seed: the request's seed.
            position: number of ids before it.
        """
        row = key % _ROWS
        cumulative = self._cumulative[row]
        draw = zlib.crc32(f"{seed}/{position}".encode()) / 2**32
        token = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
        return token, float(self._log_probs[row, token])

    def save(self, file: Path) -> None:
        """Write the weights as a safetensors file."""
        from safetensors.numpy import save_file

        save_file({"logits": self.logits}, file)

    @classmethod
    def read(cls, file: Path) -> HashPolicy:
        """Read a safetensors file.

        Raises:
            ValueError, OSError: it does not hold a policy.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return cls(load_file(file)["logits"])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{file} holds no policy: {error}") from error


@lru_cache(maxsize=64)
def hash_policy(seed: int, version: int) -> HashPolicy:
    """Return the weights of a version in the run with this seed; engines start with version -1.

    Letters are likely, the end of turn is occasional, other bytes are rare.
    """
    rng = np.random.default_rng([seed, version + 1])
    logits = np.full((_ROWS, VOCABULARY), -20.0, np.float32)
    logits[:, _PRINTABLE] = rng.standard_normal((_ROWS, len(_PRINTABLE)))
    logits[:, EOS] = _EOS_LOGIT
    return HashPolicy(logits)


def context_key(ids: Sequence[int], key: int = 0) -> int:
    """Return a checksum of a context, or of the continuation of a context with checksum ``key``.

    >>> context_key([5, 6, 7]) == context_key([7], context_key([5, 6]))
    True
    """
    return zlib.crc32(np.asarray(ids, "<i4").tobytes(), key)


class PacedBackend(BatchingEngine):
    """Samples a :class:`HashPolicy` at temperature 1 with the request's seed.

    It takes weights as safetensors files.

    Args:
        policy: the first weights.
        version: the policy version of the first weights.
        tick_seconds: time between two ids of a request.
        slots: requests decoded concurrently; more wait.
        max_model_len: longest context, in ids.
    """

    name = "paced engine"

    def __init__(
        self,
        policy: HashPolicy,
        *,
        version: int,
        tick_seconds: float = 0.02,
        slots: int = 4,
        max_model_len: int = 1024,
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
        self.keys: dict[Run, int] = {}

    def check_request(self, request: GenerateRequest) -> None:
        super().check_request(request)
        sampling = request.sampling
        if (
            sampling.seed is None
            or sampling.temperature != 1
            or sampling.top_p != 1
            or sampling.top_k
            or sampling.stop
        ):
            raise BackendError(
                "the paced engine samples with a seed, at temperature 1, without stops; got"
                f" {sampling}"
            )

    def admit(self, run: Run) -> None:
        self.keys[run] = context_key(run.request.prompt_ids)
        super().admit(run)

    def sample(self, run: Run) -> tuple[int, float]:
        key = self.keys[run]
        position = len(run.request.prompt_ids) + len(run.ids)
        token, log_prob = self._policy.sample(key, seed=run.seed, position=position)
        self.keys[run] = context_key([token], key)
        return token, log_prob

    def forget(self, run: Run) -> None:
        self.keys.pop(run, None)
        super().forget(run)

    async def load(self, update: WeightUpdate) -> None:
        try:
            self._policy = await asyncio.to_thread(HashPolicy.read, Path(update.payload[0]))
        except (OSError, ValueError) as error:
            raise WeightUpdateError(f"version {update.version} cannot be read: {error}") from error


async def serve(port: int, seed: int) -> None:
    """Serve untrained weights until the process is terminated."""
    backend = PacedBackend(hash_policy(seed, UNTRAINED), version=UNTRAINED)
    loop = asyncio.get_running_loop()
    # Not add_signal_handler: it would replace the wake-up descriptor through which run_server
    # receives signals.
    for number, hangs in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
        signal.signal(
            number, lambda *_, hangs=hangs: loop.call_soon_threadsafe(backend.hang, hangs)
        )
    server = RolloutServer(
        backend,
        port=port,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        upload_folder=Path(tempfile.gettempdir()),  # the run looks for leftover files there
    )
    try:
        await backend.start()
        await server.start()
        await asyncio.Event().wait()
    finally:
        await server.close()
        await backend.close()


if __name__ == "__main__":
    run_server(serve(int(sys.argv[1]), int(sys.argv[2])))

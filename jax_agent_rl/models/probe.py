"""Log-probs of a few sequences under a model's parameters, by which a transfer of weights is verified."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.utils.weight_checks import EXACT, ROUNDED, LogprobProbe


def score_probe(config: DecoderConfig, params: Params, sequences: Sequence[Sequence[int]]) -> LogprobProbe:
    """Return sequences of token ids with their log-probs under ``params``."""
    rows = [tuple(np.asarray(_logprobs(config, params, jnp.asarray(ids, jnp.int32))).tolist()) for ids in sequences]
    ids = tuple(map(tuple, sequences))
    return LogprobProbe(ids=ids, log_probs=tuple(rows), dtype=params["embed"].dtype.name)


def verify_probe(config: DecoderConfig, params: Params, probe: LogprobProbe) -> None:
    """Check that parameters give the log-probs that their sender computed.

    Args:
        config: the model.
        params: as they arrived.
        probe: of the sender.

    Raises:
        WeightUpdateError: they differ by more than rounding.
    """
    found = score_probe(config, params, probe.ids)
    largest, mean = probe.differences(found.log_probs)
    # Accelerators multiply float32 in fewer bits.
    exact = probe.dtype == found.dtype == "float32" and jax.default_backend() == "cpu"
    max_largest, max_mean = EXACT if exact else ROUNDED
    if not (largest <= max_largest and mean <= max_mean):
        raise WeightUpdateError(
            f"the weights that arrived do not give the learner's log-probs: they differ by up to {largest:.2g} (mean "
            f"{mean:.2g}), allowed are {max_largest:.2g} ({max_mean:.2g}). Names may be interchanged, or numbers never "
            "written; the weights before them are still served"
        )


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config: DecoderConfig, params: Params, ids_T: jax.Array) -> jax.Array:
    """float32 [T - 1]: log-prob of every id but the first, given those before it."""
    model = Decoder.from_params(config, params)
    logprobs_TV = jax.nn.log_softmax(model.logits(model(ids_T[None])[0][0, :-1]))
    return jnp.take_along_axis(logprobs_TV, ids_T[1:, None], axis=1)[:, 0].astype(jnp.float32)

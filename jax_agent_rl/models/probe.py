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
from jax_agent_rl.utils.weight_checks import AS_THEY_ARE, LogprobProbe, rounded

_MAX_LARGEST, _MAX_MEAN = 1e-2, 1e-3
"""Allowed difference of log-probs: both sides compute in float32, perhaps on other devices and in another order."""


def score_probe(
    config: DecoderConfig, params: Params, sequences: Sequence[Sequence[int]], *, dtype: str = AS_THEY_ARE
) -> LogprobProbe:
    """Return sequences of token ids with their log-probs.

    Args:
        config: the model.
        params: its parameters.
        sequences: ids, at least two each.
        dtype: what the parameters are rounded to first, as in the transfer. The model computes in float32.
    """
    params = jax.tree.map(lambda x: rounded(x, dtype), params)
    rows = [tuple(np.asarray(_logprobs(config, params, jnp.asarray(ids, jnp.int32))).tolist()) for ids in sequences]
    return LogprobProbe(ids=tuple(map(tuple, sequences)), log_probs=tuple(rows))


def verify_probe(config: DecoderConfig, params: Params, probe: LogprobProbe) -> None:
    """Check that parameters give the log-probs that their sender computed.

    Args:
        config: the model.
        params: as they arrived.
        probe: of the sender.

    Raises:
        WeightUpdateError: they differ by more than the order of sums.
    """
    largest, mean = probe.differences(score_probe(config, params, probe.ids).log_probs)
    if not (largest <= _MAX_LARGEST and mean <= _MAX_MEAN):
        raise WeightUpdateError(
            f"the weights that arrived do not give the learner's log-probs: they differ by up to {largest:.2g} (mean "
            f"{mean:.2g}), allowed are {_MAX_LARGEST:.2g} ({_MAX_MEAN:.2g}). Names may be interchanged, or numbers "
            "never written; the weights before them are still served"
        )


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config: DecoderConfig, params: Params, ids_T: jax.Array) -> jax.Array:
    """float32 [T - 1]: log-prob of every id but the first, given those before it."""
    # The layers compute in the dtype of their input: no other weights are copied.
    wide = {name: params[name].astype(jnp.float32) for name in ("embed", "lm_head") if name in params}
    with jax.default_matmul_precision("highest"):
        model = Decoder.from_params(config, params | wide)
        logprobs_TV = jax.nn.log_softmax(model.logits(model(ids_T[None])[0][0, :-1]))
    return jnp.take_along_axis(logprobs_TV, ids_T[1:, None], axis=1)[:, 0]

"""One request in vLLM's words."""

from __future__ import annotations

from typing import Any

from jax_agent_rl.jetstream.request import RunningRequest


def vllm_sampling(run: RunningRequest, *, tpu: bool = False) -> dict[str, Any]:
    """Keyword arguments of ``vllm.SamplingParams``.

    vLLM is told every stopping id as a plain stop id, and nothing of EOS or stop strings: which of them ended the
    generation, and which ids are kept, is decided by :class:`RunningRequest`, the same for every engine.

    Args:
        tpu: for the TPU plugin, which refuses seeds of requests, and reports no log-probs unless one more than the
            sampled id's is asked for.
    """
    sampling = run.request.sampling
    greedy = sampling.temperature == 0
    return {
        "max_tokens": run.max_tokens,
        "temperature": sampling.temperature,
        # A greedy request that shares a batch with random ones would get log-probs of its truncated distribution.
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "seed": None if tpu else sampling.seed,
        "stop_token_ids": run.stop_ids,
        "ignore_eos": True,
        "logprobs": 1 if tpu else 0,
        "detokenize": False,
    }

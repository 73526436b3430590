"""What can be wrong between engine and learner, and what to do about each."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why engine and learner disagree; the value is what reports call it."""

    TOKEN_DRIFT = "token drift"
    """The engine conditioned on other ids than are trained on."""
    PADDING = "padding is attended to"
    """Ids that stand for nothing are part of what the engine's tokens see."""
    POSITION = "position offset"
    """Sampled tokens, or their log-probs, stand at other places than in the learner."""
    TEMPERATURE = "temperature"
    """Log-probs are of another temperature, or from before it."""
    TRUNCATED_SUPPORT = "truncated support"
    """The engine samples from the likeliest ids only, by top-k or top-p."""
    STALE_VERSION = "stale weights"
    """The engine serves weights of an older version under a newer number."""
    MISSING_TENSOR = "missing tensor"
    """A tensor of the engine was never filled."""
    MISNAMED_TENSOR = "misnamed tensor"
    """A tensor of the engine holds what belongs in another."""
    TRANSPOSED_TENSOR = "transposed tensor"
    """A tensor of the engine is the transpose of what it should be."""
    WRONG_TENSOR = "wrong tensor"
    """A tensor of the engine holds numbers that are nowhere in the learner."""
    DTYPE = "dtype"
    """The engine computes in a coarser precision than the configuration says."""
    ROTARY = "rotary settings"
    """Base, scaling or layout of the rotary embedding differ."""
    WINDOW = "attention window"
    """Layers look back further, or less far, than in the learner."""
    EXPERTS = "expert routing"
    """Tokens go through other experts, or with other weights."""
    STALE_PREFIX = "stale prefix cache"
    """Prompts were taken from a prefix cache that older weights filled."""
    LEARNER = "the learner's packed pass"
    """The learner's own log-probs are not those of its parameters: its packing, sharing or sharding is wrong."""
    ROUNDING = "rounding"
    """Scored alone, the contexts agree: the gap is that of rounding, larger in this model than the tolerance allows."""
    UNKNOWN = "unknown"
    """Nothing that was tried explains it."""


ADVICE: dict[Cause, str] = {
    Cause.TOKEN_DRIFT: "send the engine the trajectory's ids as they are: no second tokenization, no BOS added, "
    "nothing cut off; `jax-agent-rl conformance` tests it",
    Cause.PADDING: "mask padding in the engine's attention, or send prompts unpadded",
    Cause.POSITION: "correct the positions of sampled tokens in the engine, or which token a log-prob is returned with",
    Cause.TEMPERATURE: "let the engine report log-probs after temperature (vLLM: logprobs_mode=processed_logprobs) "
    "and sample at rollout.temperature",
    Cause.TRUNCATED_SUPPORT: "set top_k=0, top_p=1 and min_p=0 in the engine, also in its generation_config.json",
    Cause.STALE_VERSION: "make the engine load the weights of each update before it takes over their version; restart "
    "it to begin again from the learner's",
    Cause.MISSING_TENSOR: "add the tensor to what is published, or to the names that the engine's loader knows",
    Cause.MISNAMED_TENSOR: "correct the table that maps the learner's names to the engine's",
    Cause.TRANSPOSED_TENSOR: "transpose the tensor where weights are exported or loaded, in one of the two places",
    Cause.WRONG_TENSOR: "look at how the tensor is split, fused or converted on its way to the engine",
    Cause.DTYPE: "say in rollout.jetstream or rollout.vllm what the engine really computes in, or give it the dtype "
    "that is configured; a tolerance of that precision then applies",
    Cause.ROTARY: "give the engine the rope_theta and rope_scaling of the model's config.json",
    Cause.WINDOW: "give the engine the sliding_window and layer_types of the model's config.json",
    Cause.EXPERTS: "give the engine the num_experts_per_tok and norm_topk_prob of the model's config.json",
    Cause.STALE_PREFIX: "empty the engine's prefix cache with every weight update",
    Cause.LEARNER: "set learner.share_prefixes=false and one device in learner.mesh, and report which of the two helps",
    Cause.ROUNDING: "set trainer.agreement_tolerance to a few times the compared_gap_max and compared_gap_mean of "
    "metrics.jsonl",
    Cause.UNKNOWN: "serve the same model with rollout.backend=jetstream: if that agrees, the engine is at fault, else "
    "the model's files",
}
"""One line for each: what to do."""

"""The sections of the engines that sample: ``rollout.jetstream``, ``.vllm`` and ``.sglang``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.config.base import (
    NonNegative,
    Positive,
    Section,
    Unless,
    WhenKey,
    WhenModelHasVision,
    WhenModelIsRecurrent,
)

_BUILT_IN = Unless("rollout.jetstream.engine_factory")


class EngineMeshConfig(Section):
    """Devices of the jetstream engines of one process.

    There are ``data`` engines of ``expert`` x ``tensor`` devices each.
    """

    data: Positive | None = Field(
        default=None,
        description=(
            "Engines side by side, each with its own weights and KV cache; they share the requests."
            " null: as many as the process's devices allow on TPUs and GPUs, one on CPUs."
        ),
    )
    expert: Positive | None = Field(
        default=None,
        description=(
            "Shards of every layer's experts; other weights are split over them as well. null: for"
            " a mixture of experts whose tensor is null, as few as have memory (see tensor);"
            " otherwise 1."
        ),
    )
    tensor: Positive | None = Field(
        default=None,
        description=(
            "Tensor-parallel shards: heads, feed-forward, vocabulary and KV cache. null: as few as"
            " have memory for the weights and the KV cache, beside the learner if it shares the"
            " devices."
        ),
    )

    @property
    def engine_devices(self) -> int:
        """Number of devices of one engine; the minimum if ``expert`` or ``tensor`` is null."""
        return (self.expert or 1) * (self.tensor or 1)

    @property
    def devices(self) -> int:
        """Number of devices of all engines; the minimum if a field is null."""
        return (self.data or 1) * self.engine_devices


class JetStreamConfig(Section):
    """The embedded JAX engine (rollout.backend: jetstream)."""

    engine_factory: str | None = Field(
        default=None,
        description=(
            "Function that creates another engine with JetStream's newer API, such as MaxText's, as"
            " package.module:function or file.py:function; null: the built-in one. See"
            " third_party/jetstream.md."
        ),
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "Precision of the engine's weights, activations and KV cache, independent of the"
            " learner's."
        ),
    )
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], _BUILT_IN] = Field(
        default="auto",
        description=(
            "Precision of the KV cache. auto: dtype. int8, fp8: 8 bits and a scale per token and"
            " head, half the memory of bfloat16; log-probs of engine and learner then differ, see"
            " algorithm.rollout_correction."
        ),
    )
    quantize: Annotated[Literal["none", "int8", "fp8"], _BUILT_IN] = Field(
        default="none",
        description=(
            "Keep the layers' matrices in 8 bits with a scale per output; activations, embeddings,"
            " head and router stay in dtype. Weights are quantized again after every update."
        ),
    )
    max_concurrent_decodes: Positive = Field(
        default=64, description="Maximum number of contexts that an engine decodes together."
    )
    kv_cache_tokens: Positive | None = Field(
        default=None,
        description=(
            "Capacity of an engine's KV cache in tokens, at least rollout.max_model_len. Shared"
            " prefixes count once. A full cache evicts the KV of idle trajectories, then preempts"
            " running requests. null: max_model_len for each of max_concurrent_decodes, and half of"
            " it for every other of the engine's trajectories in flight."
        ),
    )
    state_checkpoints: Annotated[NonNegative | None, WhenModelIsRecurrent() & _BUILT_IN] = Field(
        default=None,
        description=(
            "Recurrent states that an engine keeps for later turns and samples, besides one for"
            " each of max_concurrent_decodes. With fewer of them less memory is taken and more ids"
            " are computed again: recomputed_tokens in metrics.jsonl. null: one for each of the"
            " engine's trajectories in flight."
        ),
    )
    kv_offloading_size: Annotated[float, Field(ge=0), _BUILT_IN] = Field(
        default=0.0,
        description=(
            "Host memory of an engine in GiB, for the KV of waiting trajectories for which the"
            " cache has no room. It is copied back, bit by bit, when they return. 0: none."
        ),
    )
    decode_steps: Positive = Field(
        default=16, description="Maximum number of decode steps per device dispatch."
    )
    num_speculative_tokens: Annotated[NonNegative, _BUILT_IN] = Field(
        default=0,
        description=(
            "Maximum number of ids drafted for a context and verified in one step, from the prompt"
            " and from what was sampled before; 0: none. What is sampled stays the same. Steps in"
            " which drafts do not pay go without. See docs/engine.md."
        ),
    )
    prefill_buckets: tuple[Positive, ...] | None = Field(
        default=None,
        description=(
            "Padded lengths of prompt chunks, in tokens; longer prompts take several chunks. null:"
            " 32, 128, 512 and agent.max_prompt_length, none above that or 2048. CPU kernels"
            " prefill without chunks."
        ),
    )
    mesh: EngineMeshConfig = Field(default_factory=EngineMeshConfig)
    device_offset: Annotated[NonNegative, WhenKey("rollout.placement", "colocated")] = Field(
        default=0,
        description=(
            "Index of the engine's first device; the learner's start at 0. From the size of"
            " learner.mesh on, engine and learner work at the same time instead of taking turns."
        ),
    )
    patch_buckets: Annotated[tuple[Positive, ...], WhenModelHasVision()] = Field(
        default=(256, 1024, 4096),
        description=(
            "Padded numbers of patches that a vision model encodes together; an image must fit in"
            " the largest."
        ),
    )

    @field_validator("prefill_buckets", "patch_buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"must be ascending and not empty, got {list(value)}")
        return value


class VerifiedEngineConfig(Section):
    """What an engine is held to whose new weights are verified by the log-probs it computes."""

    require_probe: bool = Field(
        default=True, description="Refuse weights that come without log-probs to verify them."
    )
    max_logprob_difference: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Maximum log-prob difference allowed by the verification; null: 1e-3 in float32, else"
            " 0.5."
        ),
    )
    mean_logprob_difference: float | None = Field(
        default=None,
        gt=0,
        description="Maximum mean log-prob difference; null: 1e-4 in float32, else 0.05.",
    )


VLLM_ARGUMENTS_SET: Mapping[str, str] = {
    "model": "model.path",
    "max_model_len": "rollout.max_model_len",
    "seed": "seed",
    "dtype": "rollout.vllm.dtype",
    "max_num_seqs": "rollout.vllm.max_num_seqs",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_gib",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_lora": "rollout.adapters",
    "max_cpu_loras": "rollout.adapters",
    "max_loras": "rollout.adapters",
    "max_lora_rank": "rollout.adapters",
    "limit_mm_per_prompt": "rollout.vllm.multi_modal",
    "mm_processor_kwargs": "model.max_pixels",
    "enable_sleep_mode": "rollout.sleep_during_update",
    "enable_prefix_caching": "",
    "scheduling_policy": "",
    "logprobs_mode": "",
    "generation_config": "",
    "skip_tokenizer_init": "",
    "worker_extension_cls": "",
    "disable_log_stats": "",
    "enable_log_requests": "",
    "use_tqdm_on_load": "",
    "mm_device_do_normalize": "",
    "weight_transfer_config": "",
    "moe_backend": "",
    "structured_outputs_config": "",
    "trust_remote_code": "",
}
"""Argument of vLLM's engine -> the key that sets it; empty if the backend does."""


class VllmConfig(VerifiedEngineConfig):
    """The vLLM engine (rollout.backend: vllm), on CUDA, CPU or TPU."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "Precision of weights and activations; auto: float32 on CPUs, else the checkpoint's."
        ),
    )
    max_num_seqs: Positive = Field(
        default=64, description="Maximum number of requests decoded together."
    )
    tensor_parallel_size: Positive = Field(
        default=1, description="Number of devices over which one copy of the model is sharded."
    )
    gpu_memory_utilization: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description=(
            "Share of the device's memory for weights and KV cache; the learner needs the rest."
        ),
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Size of the KV cache in GiB; null: what gpu_memory_utilization leaves (on CPUs 1)."
        ),
    )
    enforce_eager: bool | None = Field(
        default=None, description="Disable compiled graphs; null: on CPUs only."
    )
    multi_modal: dict[Literal["image", "video"], Positive] = Field(
        default_factory=dict,
        description="Maximum number of images and videos in one context, by kind; {}: none.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Further arguments of vLLM's engine (`AsyncEngineArgs`), such as"
            " `{max_num_batched_tokens: 4096}`; names that another key sets or vLLM does not know"
            " are refused."
        ),
        json_schema_extra={
            "additionalProperties": {
                "type": ["boolean", "number", "string", "array", "object", "null"]
            }
        },
    )

    @field_validator("engine_args")
    @classmethod
    def _refuse_arguments_set_elsewhere(cls, value: dict[str, Any]) -> dict[str, Any]:
        _refuse_set_elsewhere(value, VLLM_ARGUMENTS_SET)
        return value


SGLANG_ARGUMENTS_SET: Mapping[str, str] = {
    "model_path": "model.path",
    "context_length": "rollout.max_model_len",
    "random_seed": "seed",
    "device": "rollout.sglang.device",
    "dtype": "rollout.sglang.dtype",
    "max_running_requests": "rollout.sglang.max_running_requests",
    "tp_size": "rollout.sglang.tensor_parallel_size",
    "tensor_parallel_size": "rollout.sglang.tensor_parallel_size",
    "mem_fraction_static": "rollout.sglang.mem_fraction_static",
    "max_total_tokens": "rollout.sglang.max_total_tokens",
    "enable_memory_saver": "rollout.sleep_during_update",
    "host": "",
    "port": "",
    "api_key": "",
    "weight_version": "",
    "skip_tokenizer_init": "",
    "incremental_streaming_output": "",
    "enable_priority_scheduling": "",
    "schedule_low_priority_values_first": "",
    "disable_priority_preemption": "",
    "sampling_mask_max_tokens": "",
    "trust_remote_code": "",
}
"""Argument of SGLang's server -> the key that sets it; empty if the backend does."""


class SglangConfig(VerifiedEngineConfig):
    """An engine behind SGLang's server (rollout.backend: sglang).

    The server at each of ``rollout.urls``, or else one that is started.
    """

    python: Annotated[str, Unless("rollout.urls")] = Field(
        default=".venv-sglang/bin/python",
        description=(
            "The Python with SGLang, which pins other versions than this package;"
            " launch/sglang_environment.sh makes one."
        ),
    )
    device: Annotated[str, Unless("rollout.urls")] = Field(
        default="auto",
        description="Device of the server: cuda, cpu, …; auto: cpu where there is no GPU.",
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Unless("rollout.urls")] = (
        Field(
            default="auto",
            description=(
                "Precision of weights and activations; auto: float32 on CPUs, else the"
                " checkpoint's."
            ),
        )
    )
    max_running_requests: Annotated[Positive, Unless("rollout.urls")] = Field(
        default=64, description="Maximum number of requests decoded together."
    )
    tensor_parallel_size: Annotated[Positive, Unless("rollout.urls")] = Field(
        default=1, description="Number of devices over which one copy of the model is sharded."
    )
    mem_fraction_static: Annotated[float | None, Unless("rollout.urls")] = Field(
        default=None,
        gt=0,
        le=1,
        description=(
            "Share of the device's memory for weights and KV cache; null: SGLang's choice, which"
            " leaves nothing for a learner on the same device."
        ),
    )
    max_total_tokens: Annotated[Positive | None, Unless("rollout.urls")] = Field(
        default=None,
        description=(
            "Capacity of the KV cache in tokens; null: what the memory allows, and on CPUs"
            " rollout.max_model_len for each of max_running_requests."
        ),
    )
    server_args: Annotated[dict[str, Any], Unless("rollout.urls")] = Field(
        default_factory=dict,
        description=(
            "Further arguments of SGLang's server by name, such as `{attention_backend: fa3}`;"
            " those that another key sets are refused."
        ),
        json_schema_extra={
            "additionalProperties": {"type": ["boolean", "number", "string", "null"]}
        },
    )

    @field_validator("server_args")
    @classmethod
    def _refuse_arguments_set_elsewhere(cls, value: dict[str, Any]) -> dict[str, Any]:
        named = {name.replace("-", "_"): argument for name, argument in value.items()}
        _refuse_set_elsewhere(named, SGLANG_ARGUMENTS_SET)
        return named


def _refuse_set_elsewhere(arguments: Mapping[str, Any], set_by: Mapping[str, str]) -> None:
    """Refuse arguments of an engine that other keys, or the backend itself, decide.

    Args:
        set_by: argument to the key that sets it; empty if the backend does.
    """
    refused = [name for name in arguments if name in set_by]
    if not refused:
        return
    fixes = []
    for name in refused:
        key = set_by[name]
        fix = f"set {key}" if key else "the backend depends on its own value"
        fixes.append(f"{name}: {fix}")
    raise ValueError(
        f"names arguments that are decided elsewhere ({'; '.join(fixes)}); remove"
        f" {', '.join(refused)}"
    )

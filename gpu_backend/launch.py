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
    """One engine's part of a log file that earlier engines, and earlier runs, also wrote to.

    Attributes:
        begin: position of its first byte in the file.
    """

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
    log_file = folder / "vllm.log"
    if settings.log_file:
        log_file = Path(settings.log_file)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = Log(log_file)
    if log_file.exists():
        log = Log(log_file, begin=log_file.stat().st_size)
    log_config = write_log_config(log_file.absolute(), folder / "logging.json")

    cpus = sorted(os.sched_getaffinity(0))
    with _environment(environment(settings, cpus=cpus, log_config=log_config)):
        try:
            return load_engine(settings, log)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
        except Exception as error:
            raise explain(settings, error, log) from error


def load_engine(settings: VllmSettings, log: Log) -> StartedEngine:
    """Load the model into vLLM, with the environment as it is."""
    from vllm.config import StructuredOutputsConfig  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform as current  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    platform: Platform
    if current.is_cpu():
        platform = "cpu"
    elif current.is_cuda():
        platform = "cuda"
    elif current.is_tpu():
        platform = "tpu"
    else:
        platform = "other"

    if platform == "tpu":
        check_tpu_settings(settings)
    if platform == "cpu" and settings.tensor_parallel_size == 1:
        # With multiprocessing, the CPU build runs the model in a third process that polls shared
        # memory on a core of its own. The engine core stays in a child process either way:
        # AsyncLLM always makes one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    arguments = settings.engine_arguments(platform)
    grammar_config = arguments.get("structured_outputs_config")
    if grammar_config:
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**grammar_config)
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
    names_before = set(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - names_before:
            del os.environ[name]


def explain(settings: VllmSettings, error: Exception, log: Log) -> ConfigError | BackendError:
    """Return an error that names the root cause (from vLLM's log), the values and the fix.

    Args:
        error: what vLLM raised.
    """
    cause = str(error)
    if _GENERAL in cause or not cause:
        cause = root_cause(log) or cause or type(error).__name__
    if _SHARED_MEMORY.search(cause):
        return explain_cause("vLLM", cause, log)
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
    return explain_cause("vLLM", cause, log)


def explain_cause(engine: str, cause: str | None, log: Log) -> ConfigError | BackendError:
    """Return the error of an engine that did not start.

    Args:
        engine: its name.
        cause: what its log says; None: nothing.
    """
    if cause is None:
        cause = "its process ended without a message (killed? out of memory?)"
    if _SHARED_MEMORY.search(cause):
        return ConfigError(
            f"{engine}'s processes got too little shared memory: {cause} Give /dev/shm more: docker"
            " run --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory there"
        )
    return BackendError(f"{engine} could not start: {cause} (its log: {log.file})")


def root_cause(log: Log) -> str | None:
    """Return the last exception in an engine's log that does not just report an earlier one."""
    if not log.file.is_file():
        return None
    text = log.file.read_bytes()[log.begin :].decode(errors="replace")
    cause = None
    for line in text.splitlines():
        if _GENERAL in line:
            continue
        match = _CAUSE.search(line)
        if match:
            _, _, error_name = match[1].rpartition(".")
            cause = f"{error_name}: {match[2]}"
    return cause


def served_precision(settings: VllmSettings, started: StartedEngine | None) -> str:
    """Return the dtype of weights and activations.

    What ``dtype: auto`` means is known once vLLM has started.
    """
    model = _model_config(started)
    if model is None:
        return settings.dtype
    return str(model.dtype).removeprefix("torch.")


def weight_dtype(settings: VllmSettings, started: StartedEngine | None) -> str:
    """Return ``Capabilities.weight_dtype``.

    It is the model's dtype, unless a quantization rounds the weights that it is given.
    """
    model = _model_config(started)
    if model is None or model.quantization is not None:
        return "float32"
    return served_precision(settings, started)


def _model_config(started: StartedEngine | None) -> Any:
    """Return vLLM's ``ModelConfig``; None before the start and after the end."""
    if started is None:
        return None
    return getattr(started.engine, "model_config", None)

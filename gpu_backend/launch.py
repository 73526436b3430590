"""Starting a vLLM engine, and saying what went wrong when it does not start.

``AsyncLLM`` keeps its engine core in a child process: the agents' asyncio loop and jax's threads never wait for a
scheduler step, a crash of the engine is an error message instead of the end of the run, and on GPUs its CUDA context
is its own. It costs one pickled message a step, about 0.2 ms.
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

from gpu_backend import tpu
from gpu_backend.settings import VllmSettings, check_installation, environment, write_log_config
from jax_agent_rl.errors import BackendError, ConfigError

_CAUSE = re.compile(r"(?:^|[ :])((?:[A-Za-z_]+\.)*[A-Z][A-Za-z]*(?:Error|Exception)): (.+)$")
_GENERAL = "Engine core initialization failed"


@dataclass(kw_only=True)
class Started:
    """A running engine and what it runs on. ``engine`` becomes None when it is closed."""

    engine: Any
    cpu: bool
    cuda: bool
    log_file: Path
    tpu: bool = False


def start_engine(settings: VllmSettings) -> Started:
    """Starts vLLM; blocks until the model is loaded (seconds to minutes).

    Raises:
        ConfigError: vLLM is missing or of another version, or the settings do not fit model or memory.
        BackendError: anything else that kept it from starting.
    """
    check_installation()
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    log_file = Path(settings.log_file) if settings.log_file else folder / "vllm.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_config = write_log_config(log_file.absolute(), folder / "logging.json")
    cpus = sorted(os.sched_getaffinity(0))
    with _environment(environment(settings, cpus=cpus, log_config=log_config)):
        try:
            return _start(settings, log_file)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
        except Exception as error:
            raise explain(settings, error, log_file) from error


def _start(settings: VllmSettings, log_file: Path) -> Started:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    cpu, cuda, on_tpu = current_platform.is_cpu(), current_platform.is_cuda(), current_platform.is_tpu()
    if on_tpu:
        tpu.check_settings(settings)
    if cpu and settings.tensor_parallel_size == 1:
        # With it, the CPU build runs the model in a third process that polls shared memory on a core of its own.
        # The engine core stays in a child process either way: AsyncLLM always makes one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments = AsyncEngineArgs(**settings.engine_arguments(cpu=cpu, cuda=cuda))
    engine = AsyncLLM.from_engine_args(arguments)
    return Started(engine=engine, cpu=cpu, cuda=cuda, log_file=log_file, tpu=on_tpu)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables while the child processes start, and puts the environment back."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def explain(settings: VllmSettings, error: Exception, log_file: Path) -> ConfigError | BackendError:
    """An error that names the root cause (which vLLM leaves in its log), the values and the fix."""
    cause = str(error)
    if _GENERAL in cause or not cause:
        cause = root_cause(log_file) or cause
    text = cause.lower()
    if "memory" in text or "kv cache" in text:
        return ConfigError(
            f"vLLM got too little memory: {cause} Now: rollout.vllm.gpu_memory_utilization="
            f"{settings.gpu_memory_utilization}, kv_cache_gib={settings.kv_cache_gib}, "
            f"rollout.max_model_len={settings.max_model_len}, rollout.vllm.max_num_seqs={settings.max_num_seqs}; "
            "give it more, lower the last two, or raise rollout.vllm.tensor_parallel_size"
        )
    if isinstance(error, ValueError | TypeError):
        return ConfigError(f"vLLM refused its settings: {cause}")
    return BackendError(f"vLLM could not start: {cause} (its log: {log_file})")


def root_cause(log_file: Path) -> str | None:
    """The last exception named in a vLLM log that is not just a report of an earlier one."""
    if not log_file.is_file():
        return None
    found = None
    for line in log_file.read_text(errors="replace").splitlines():
        if (match := _CAUSE.search(line)) and _GENERAL not in line:
            found = f"{match[1].rpartition('.')[2]}: {match[2]}"
    return found

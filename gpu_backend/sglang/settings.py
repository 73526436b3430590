"""Settings of an engine behind SGLang's own server, and their translation into its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_backend.settings import EXACT, ROUNDED
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.hub import model_folder

DEFAULT_PYTHON = ".venv-sglang/bin/python"
"""What ``launch/sglang_environment.sh`` makes."""
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
CONTEXT_MARGIN = 8
"""Positions that SGLang keeps for itself, beyond those of prompt and output."""
OLDEST = (0, 5, 23)
"""Oldest version of SGLang whose server says which weights sampled which token, and what each draw
was made from."""


@dataclass(frozen=True, kw_only=True)
class SglangSettings:
    """Settings of one engine.

    Attributes:
        model: Hugging Face folder: config, initial weights.
        vocab_size: ids are in [0, vocab_size).
        max_model_len: maximum ids of prompt + output in one context.
        url: address of a server that runs; None: one is started, and ends with the backend.
        token: bearer token of a server that runs, if it needs one.
        weight_dir: folder that the server sees under the same path, in which it finds new weights;
            None: shared memory of this machine.
        python: the Python that has SGLang.
        device: ``cuda``, ``cpu``, …; ``auto``: ``cpu`` where there is no GPU, else what SGLang
            finds.
        dtype: ``float32``, ``bfloat16``, ``float16``; ``auto``: float32 on CPUs, else the
            checkpoint's.
        max_running_requests: requests decoded at the same time.
        tensor_parallel_size: devices one copy of the model is sharded over.
        mem_fraction_static: share of the device's memory for weights and KV cache; None: SGLang's
            choice.
        max_total_tokens: capacity of the KV cache in tokens; None: what the memory allows.
        seed: seed of the engine's randomness.
        sleep: reserve memory so that it can be released and restored (CUDA).
        require_probe: refuse weight updates without a probe.
        max_logprob_difference: largest |learner - engine| log-prob a probe may show; None: 1e-3 in
            float32, 0.5 else.
        mean_logprob_difference: largest mean of these differences; None: 1e-4 in float32, 0.05
            else.
        log_file: file of the server's log; None: a temporary file.
        server_args: further arguments of ``sglang.launch_server``, by name, without a setting here.
    """

    model: str
    vocab_size: int
    max_model_len: int
    url: str | None = None
    token: str | None = None
    weight_dir: str | None = None
    python: str = DEFAULT_PYTHON
    device: str = "auto"
    dtype: str = "auto"
    max_running_requests: int = 64
    tensor_parallel_size: int = 1
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    seed: int = 0
    sleep: bool = False
    require_probe: bool = True
    max_logprob_difference: float | None = None
    mean_logprob_difference: float | None = None
    log_file: str | None = None
    server_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether a server that is started computes on CPUs."""
        if self.device == "auto":
            return not any(Path(file).exists() for file in _ACCELERATORS)
        return self.device == "cpu"

    def arguments(self, *, port: int, version: int, token: str) -> dict[str, Any]:
        """Return the server's arguments, by the names of its command line without dashes.

        Args:
            port: where it listens, on loopback.
            version: policy version of the model's weights.
            token: what its clients must send.
        """
        arguments: dict[str, Any] = {
            "model-path": str(model_folder(self.model, weights=True)),
            "host": "127.0.0.1",
            "port": port,
            "api-key": token,
            "weight-version": str(version),
            "context-length": self.max_model_len + CONTEXT_MARGIN,
            "max-running-requests": self.max_running_requests,
            "tp-size": self.tensor_parallel_size,
            "random-seed": self.seed,
            # Ids in, ids out.
            "skip-tokenizer-init": True,
            # A chunk holds what is new, and not everything so far.
            "incremental-streaming-output": True,
            "enable-priority-scheduling": True,
            "schedule-low-priority-values-first": True,
            # Running requests are not thrown out for others.
            "disable-priority-preemption": True,
            # What is left of the vocabulary after top-p may be all of it.
            "sampling-mask-max-tokens": self.vocab_size,
        }
        optional: dict[str, Any] = {
            "mem-fraction-static": self.mem_fraction_static,
            "max-total-tokens": self.max_total_tokens,
        }
        if self.on_cpu:
            optional["device"] = "cpu"
        elif self.device != "auto":
            optional["device"] = self.device
        if self.dtype != "auto":
            optional["dtype"] = self.dtype
        elif self.on_cpu:
            optional["dtype"] = "float32"
        if self.on_cpu and self.max_total_tokens is None:
            # SGLang would take a share of all of the machine's memory.
            optional["max-total-tokens"] = self.max_running_requests * self.max_model_len
        if self.sleep:
            optional["enable-memory-saver"] = True

        for name, value in optional.items():
            if value is not None:
                arguments[name] = value
        for name, value in self.server_args.items():
            arguments[name.replace("_", "-")] = value
        return arguments

    def tolerances(self, precision: str) -> tuple[float, float]:
        """Return the allowed (largest, mean) difference of log-probs of an engine."""
        largest, mean = ROUNDED
        if precision == "float32":
            largest, mean = EXACT
        return self.max_logprob_difference or largest, self.mean_logprob_difference or mean


def check_python(python: str) -> None:
    """Check that a Python has SGLang, without running it.

    Raises:
        ConfigError: there is no such program, or SGLang is not beside it.
    """
    file = Path(python).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"rollout.sglang.python={python!r} is no file; launch/sglang_environment.sh makes an"
            " environment with SGLang, whose bin/python goes there"
        )
    if not has_package(python, "sglang"):
        raise ConfigError(
            f"rollout.sglang.python={python!r} has no SGLang; install it there, or name the Python"
            " that has it (docs/installation.md)"
        )


def has_package(python: str, name: str) -> bool:
    """Return whether a Python's environment has a package."""
    # Not resolved: an environment's Python is a link to that of the system.
    libraries = Path(python).expanduser().absolute().parent.parent / "lib"
    return any(libraries.glob(f"python*/*-packages/{name}/__init__.py"))

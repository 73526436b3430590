"""Which engine samples (``rollout.backend``), and the form in which it takes the learner's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.llama import LlamaConfig, Params
from jax_agent_rl.rollout.protocol import RolloutBackend, WeightUpdate

PROBE_LENGTH = 96


class Publisher(Protocol):
    """Turns the learner's parameters into a :class:`WeightUpdate` an engine takes."""

    def make(self, params: Params, version: int) -> WeightUpdate: ...

    def close(self) -> None: ...


class ArrayPublisher:
    """For an engine of this process: the arrays themselves."""

    def make(self, params: Params, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=params)

    def close(self) -> None:
        pass


class FilePublisher:
    """For an engine in another process on this machine: files in shared memory, with a log-prob probe."""

    def __init__(self, model: LlamaConfig, *, probe_ids: Sequence[Sequence[int]], folder: str) -> None:
        from jax_agent_rl.learner.export import WeightFiles

        self._files = WeightFiles(model, probe_ids=probe_ids, folder=folder)

    def make(self, params: Params, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="safetensors", payload=self._files.write(params, version))

    def close(self) -> None:
        self._files.close()


def make_engine(
    config: Config,
    model: LlamaConfig,
    params: Params,
    codec: ChatCodec,
    *,
    probe_ids: Sequence[int],
    say: Callable[[str], None],
) -> tuple[RolloutBackend, Publisher]:
    """The engine ``rollout.backend`` names, not started, and what feeds it weights.

    Args:
        params: the initial parameters.
        probe_ids: a typical context, by which weights are checked after they were moved.

    Raises:
        ConfigError: the engine is not installed.
    """

    def decode(ids: Sequence[int]) -> str:
        return codec.decode(ids, skip_special_tokens=False)

    if config.rollout.backend == "vllm":
        return _vllm(config, model, decode, probe_ids)
    return _jetstream(config, model, params, decode, say), ArrayPublisher()


def _jetstream(
    config: Config,
    model: LlamaConfig,
    params: Params,
    decode: Callable[[Sequence[int]], str],
    say: Callable[[str], None],
) -> RolloutBackend:
    from jax_agent_rl.jetstream.backend import JetStreamBackend
    from jax_agent_rl.jetstream.engine import EngineShapes

    engine = config.rollout.jetstream
    lanes = min(engine.max_concurrent_decodes, config.rollout.max_in_flight)
    shapes = EngineShapes(
        max_model_len=config.rollout.max_model_len,
        max_concurrent_decodes=lanes,
        # A row for every trajectory in flight: none loses its KV while a tool runs.
        cache_rows=max(lanes, config.rollout.max_in_flight),
        decode_steps=engine.decode_steps,
        prefill_buckets=engine.prefill_buckets,
    )

    def progress(done: int, total: int) -> None:
        if done == total or done % 5 == 0:
            say(f"compiled {done} of {total} engine programs")

    return JetStreamBackend(model, params, shapes, seed=config.seed, decode_text=decode, progress=progress)


def _vllm(
    config: Config, model: LlamaConfig, decode: Callable[[Sequence[int]], str], probe_ids: Sequence[int]
) -> tuple[RolloutBackend, Publisher]:
    try:
        from gpu_backend.backend import VllmBackend
        from gpu_backend.settings import VllmSettings, check_installation
    except ImportError as error:
        raise ConfigError(f"rollout.backend=vllm needs the package gpu_backend, which is missing: {error}") from error
    check_installation()
    engine: dict[str, Any] = config.rollout.vllm.model_dump(exclude={"weight_folder"})
    engine["max_num_seqs"] = min(engine["max_num_seqs"], config.rollout.max_in_flight)
    settings = VllmSettings(
        model=config.model.path,
        max_model_len=config.rollout.max_model_len,
        seed=config.seed,
        log_file=str(Path(config.run_dir) / "vllm.log"),
        **engine,
    )
    probe = list(probe_ids)[: min(PROBE_LENGTH, config.rollout.max_model_len - 1)]
    publisher = FilePublisher(model, probe_ids=[probe], folder=config.rollout.vllm.weight_folder)
    return VllmBackend(settings, decode_text=decode), publisher

"""The engines of ``rollout.backend``, as factories and unstarted backends.

The code of an engine is imported when it is needed::

    jetstream   engines in this process, on its devices, as one (``runtime.engine_devices``)
                or the engine of the user's function ``rollout.jetstream.engine_factory``
    vllm        one vLLM engine in child processes of this one
    sglang      a client per server of SGLang at ``rollout.urls``, or of one that it starts
    remote      a client per rollout server of ``rollout.urls``, each with an engine of its own
    any other   what an installed package registers (``utils.plugins``); gets a ``BackendSpec``

Those that are started can run in other processes: :mod:`~jax_agent_rl.runtime.placement`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config, RolloutConfig
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config, load_hf
from jax_agent_rl.models.lora import blank_adapter, check_base, read_peft, read_settings
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.merge_outputs import DecodeText
from jax_agent_rl.rollout.pool import BackendFactory
from jax_agent_rl.rollout.protocol import BackendSpec, RolloutBackend, WeightUpdate
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.runtime.engine_devices import (
    check_one_process,
    engine_mesh,
    engine_precision,
    engine_shapes,
    parameter_dtype,
    resolve_engine_mesh,
)
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.network import token_from
from jax_agent_rl.utils.plugins import InstalledName, load_installed

if TYPE_CHECKING:
    from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
    from jax_agent_rl.jetstream.programs import ProgramTable

logger = logging.getLogger(__name__)

UNTRAINED = -1
"""Policy version of the model's files: any run's first weights (version 0) are newer."""

SHORTEST_SERVED_SPAN = 256
"""Positions that the programs for the shortest contexts attend to, where requests are of all
lengths."""

Weights = Callable[[], tuple[DecoderConfig, Params]]


def check_engine(config: Config) -> None:
    """Check, before minutes of loading, that nothing is missing.

    Raises:
        ConfigError: vLLM or SGLang is not installed or does not support the model or one of
            ``rollout.vllm.engine_args``, a server's token is not set,
            ``rollout.jetstream.engine_factory`` does not exist, or a folder of ``rollout.adapters``
            is not an adapter, or one of another model.
    """
    for name, folder in config.rollout.adapters.items():
        key = f"rollout.adapters.{name}"
        read_settings(folder, key=key)
        check_base(folder, config.model.path, key=key)

    backend = config.rollout.backend
    if backend in ("remote", "sglang"):
        token_from(config.rollout.token_env, key="rollout.token_env")
    if backend == "jetstream" and config.rollout.jetstream.engine_factory is not None:
        from jax_agent_rl.jetstream.external_engine import load_engine_function

        load_engine_function(config.rollout.jetstream.engine_factory)
    if isinstance(backend, InstalledName):
        load_installed("backends", backend)
    if backend in ("vllm", "sglang"):
        try:
            from gpu_backend.settings import check_engine_args, check_installation
            from gpu_backend.sglang.settings import check_python
            from gpu_backend.weight_mapping import Checkpoint
        except ImportError as error:
            raise ConfigError(
                f"rollout.backend={backend}: the package gpu_backend is missing ({error})"
            ) from None
        if backend == "vllm":
            check_installation()
            check_engine_args(config.rollout.vllm.engine_args.keys())
        elif not config.rollout.urls:
            check_python(config.rollout.sglang.python)
        Checkpoint.read(model_folder(config.model.path, weights=True))


def read_model(config: Config, codec: ChatCodec, prompt_ids: Sequence[int] = ()) -> DecoderConfig:
    """Return the model without weights, with the tokenizer's end ids if its own files name none.

    Args:
        prompt_ids: token ids of a prompt of the run, checked against the model's vocabulary. Ids
            that no prompt uses may exceed it: some tokenizers have more ids, of images for one,
            than the model has embeddings.

    Raises:
        ModelError: the files are missing, damaged or of an unknown family, or the tokenizer is
            another model's.
    """
    model = load_config(config.model.path, weights=True)

    largest_id = max((*codec.eos_token_ids, *prompt_ids))
    if largest_id >= model.vocab_size:
        raise ModelError(
            f"the tokenizer at {config.model.path} gives id {largest_id}, but the model has"
            f" {model.vocab_size} embeddings (vocab_size): they are of different models; put the"
            " model's own tokenizer there"
        )

    if not model.eos_token_ids:
        model = replace(model, eos_token_ids=codec.eos_token_ids)
    return model


def load_model(
    config: Config, codec: ChatCodec, *, dtype: str = "float32"
) -> tuple[DecoderConfig, Params]:
    """Return the model and its weights, sharded for an engine without a learner.

    Raises:
        ConfigError: the engine's mesh does not divide the model.
        ModelError: the files are missing, damaged or of an unknown family.
    """
    from jax_agent_rl.jetstream.sharding import learner_shardings

    model = read_model(config, codec)
    shardings = learner_shardings(model, engine_mesh(config))
    _, params = load_hf(config.model.path, dtype=jnp.dtype(dtype), shardings=shardings)
    return model, params


def backend_factories(
    config: Config,
    codec: ChatCodec,
    *,
    weights: Weights,
    print_line: Callable[[str], None],
    version: int = 0,
    program_table: ProgramTable | None = None,
    serving: bool = False,
) -> dict[str, BackendFactory]:
    """Return the factories of the engines of ``rollout.backend``, by name.

    Call :func:`check_engine` first.

    Args:
        weights: returns the model and its initial parameters; called only for engines that do not
            read them.
        print_line: prints a line of progress.
        version: policy version of the initial parameters.
        program_table: see :func:`one_program`.
        serving: an embedded engine compiles a program when a request first needs it, and more of
            them for short contexts: it answers sooner, and requests of many lengths are as fast as
            their own length allows.
    """
    match config.rollout.backend:
        case "remote":
            return dict(connect(config, url) for url in config.rollout.urls)
        case "vllm":
            return {"vllm": functools.partial(_vllm, config, codec, version)}
        case "sglang":
            make = functools.partial(_sglang, config, codec, version)
            if not config.rollout.urls:
                return {"sglang": functools.partial(make, None)}
            return {url: functools.partial(make, url) for url in config.rollout.urls}
        case "jetstream":

            def make_jetstream() -> RolloutBackend:
                model, params = weights()
                if config.rollout.jetstream.engine_factory is not None:
                    return _external(config, codec, model, params, print_line, version)
                return _jetstream(
                    config, codec, model, params, print_line, version, program_table, serving
                )

            return {"jetstream": make_jetstream}
        case name:
            spec = BackendSpec(
                model=str(model_folder(config.model.path, weights=True)),
                max_model_len=config.rollout.max_model_len,
                max_concurrent=config.rollout.max_in_flight,
                version=version,
                seed=config.seed,
                decode_text=_decoder(codec),
            )
            return {name: functools.partial(load_installed("backends", name), spec)}


def make_client(config: Config, codec: ChatCodec) -> LLMServerClient:
    """Return the client of the configured engines, still without servers."""
    rollout = config.rollout
    recovery_seconds = rollout.recovery_seconds
    is_embedded = rollout.backend == "jetstream" and rollout.placement == "colocated"
    if is_embedded and jax.process_count() == 1:
        # The only engine is in the learner's process and cannot be replaced.
        recovery_seconds = 0.0
    return LLMServerClient(
        decode_text=_decoder(codec),
        max_in_flight_per_server=rollout.max_in_flight_per_server,
        wait_for_server_seconds=rollout.wait_for_server_seconds,
        recovery_seconds=recovery_seconds,
        stall_seconds=rollout.stall_seconds,
        seed=config.seed,
    )


def make_engine(
    config: Config,
    *,
    version: int,
    print_line: Callable[[str], None] = logger.info,
    dtype: str | None = None,
) -> RolloutBackend:
    """Return the one engine of ``rollout.backend``, for a process without a learner.

    It reads the model's files.

    Args:
        version: policy version of those files.
        print_line: prints a line of progress.
        dtype: dtype of the parameters given to an embedded engine, now and later; None:
            :func:`parameter_dtype`.
    """
    use_compilation_cache()
    codec = ChatCodec.from_pretrained(config.model.path, tool_format=config.agent.tool_format)
    weights = functools.partial(load_model, config, codec, dtype=dtype or parameter_dtype(config))
    factories = backend_factories(
        config, codec, weights=weights, print_line=print_line, version=version
    )
    (factory,) = factories.values()
    return factory()


def one_program(
    config: Config, model: DecoderConfig
) -> tuple[ProgramTable, DeterministicScorer] | None:
    """Return the programs that engine and learner share, and the scorer that the learner calls.

    None without ``rollout.deterministic``.

    Raises:
        ConfigError: the model is not supported, or not by the engine's mesh; or there are several
            processes, see :func:`check_one_process`.
    """
    if not config.rollout.deterministic:
        return None
    check_one_process(config, jax.process_count())

    from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
    from jax_agent_rl.jetstream.programs import ProgramTable

    config = resolve_engine_mesh(config, model)
    program_table = ProgramTable()
    scorer = DeterministicScorer(
        model,
        engine_shapes(config),
        dtype=config.rollout.jetstream.dtype,
        program_table=program_table,
        temperature=config.rollout.temperature,
        mesh=engine_mesh(config),
    )
    return program_table, scorer


def _jetstream(
    config: Config,
    codec: ChatCodec,
    model: DecoderConfig,
    params: Params,
    print_line: Callable[[str], None],
    version: int,
    program_table: ProgramTable | None,
    serving: bool,
) -> RolloutBackend:
    from jax_agent_rl.jetstream.data_parallel import make_backend
    from jax_agent_rl.jetstream.programs import ProgramTable

    config = resolve_engine_mesh(config, model)
    if config.rollout.deterministic and program_table is None:
        program_table = ProgramTable()  # serving, without a learner to share programs with

    shapes = engine_shapes(config)
    if serving:
        shapes = replace(shapes, shortest_span=SHORTEST_SERVED_SPAN)

    adapters = {}
    if config.learner.lora is not None:
        for name in config.agent.role_adapters.values():
            adapters[name] = blank_adapter(config.learner.lora, model)
    for name, folder in config.rollout.adapters.items():
        adapters[name] = read_peft(folder, model, key=f"rollout.adapters.{name}")

    return make_backend(
        model,
        params,
        shapes,
        **engine_precision(config),
        mesh=engine_mesh(config),
        deterministic=program_table,
        adapters=adapters,
        vision_processor=VisionProcessor.of(model, config.model.path, pixels=config.model.pixels),
        compile_ahead=False if serving else None,
        version=version,
        seed=config.seed,
        decode_text=_decoder(codec),
        grammars=codec.grammar_compiler(eos_ids=model.eos_token_ids, vocab_size=model.vocab_size),
        print_line=print_line,
    )


def _external(
    config: Config,
    codec: ChatCodec,
    model: DecoderConfig,
    params: Params,
    print_line: Callable[[str], None],
    version: int,
) -> RolloutBackend:
    """Return the backend of the engine that the user's function makes."""
    from jax_agent_rl.jetstream.data_parallel import make_backend
    from jax_agent_rl.jetstream.external_engine import ExternalBackend, load_engine_function

    engine_factory = config.rollout.jetstream.engine_factory
    assert engine_factory is not None
    config = resolve_engine_mesh(config, model)
    return make_backend(
        model,
        params,
        engine_shapes(config),
        make_engine_backend=functools.partial(
            ExternalBackend, make_external=load_engine_function(engine_factory)
        ),
        dtype=config.rollout.jetstream.dtype,
        mesh=engine_mesh(config),
        version=version,
        seed=config.seed,
        decode_text=_decoder(codec),
        print_line=print_line,
    )


def _vllm(config: Config, codec: ChatCodec, version: int) -> RolloutBackend:
    from gpu_backend.backend import VllmBackend
    from gpu_backend.settings import VllmSettings

    engine: dict[str, Any] = config.rollout.vllm.model_dump()
    engine["max_num_seqs"] = min(engine["max_num_seqs"], config.rollout.max_in_flight)
    settings = VllmSettings(
        model=config.model.path,
        max_model_len=config.rollout.max_model_len,
        pixels=config.model.pixels,
        seed=config.seed,
        sleep=config.rollout.sleep_during_update,
        adapters=config.rollout.adapters,
        log_file=str(Path(config.run_dir) / "vllm.log"),
        **engine,
    )
    return VllmBackend(
        settings,
        version=version,
        decode_text=_decoder(codec),
        tokenizer_eos_ids=frozenset(codec.eos_token_ids),
    )


def _sglang(config: Config, codec: ChatCodec, version: int, url: str | None) -> RolloutBackend:
    """Return the engine behind the server at ``url``; None: one that is started."""
    from gpu_backend.sglang.backend import SglangBackend
    from gpu_backend.sglang.settings import SglangSettings

    engine: dict[str, Any] = config.rollout.sglang.model_dump()
    engine["max_running_requests"] = min(
        engine["max_running_requests"], config.rollout.max_in_flight
    )
    token = None
    if url is not None:
        token = token_from(config.rollout.token_env, key="rollout.token_env")
    settings = SglangSettings(
        model=config.model.path,
        vocab_size=load_config(config.model.path, weights=True).vocab_size,
        max_model_len=config.rollout.max_model_len,
        url=url,
        token=token,
        weight_dir=config.rollout.weight_dir,
        seed=config.seed,
        sleep=config.rollout.sleep_during_update,
        log_file=str(Path(config.run_dir) / "sglang.log"),
        **engine,
    )
    return SglangBackend(
        settings,
        version=version,
        decode_text=_decoder(codec),
        tokenizer_eos_ids=frozenset(codec.eos_token_ids),
    )


def send_weights(
    rollout: RolloutConfig, update: WeightUpdate
) -> AbstractAsyncContextManager[WeightUpdate]:
    """Return a context that yields a broadcast for a vLLM engine in a Ray actor.

    It sends the tensors meanwhile.
    """
    import ray

    from gpu_backend.broadcast import sending

    return sending(
        update, receivers=rollout.vllm.tensor_parallel_size, host=ray.util.get_node_ip_address()
    )


def _decoder(codec: ChatCodec) -> DecodeText:
    return functools.partial(codec.decode, skip_special_tokens=False)


def connect(config: Config, url: str) -> tuple[str, BackendFactory]:
    """Return name and factory of the client of a rollout server.

    Raises:
        ConfigError: the token is not set.
    """
    from jax_agent_rl.rollout.http.client import RemoteBackend

    token = token_from(config.rollout.token_env, key="rollout.token_env")
    shares_disk = True if config.rollout.weight_dir else None
    return url, functools.partial(RemoteBackend, url, token=token, shares_disk=shares_disk)

"""The backends of this package, each as a :class:`BackendUnderTest`.

A factory takes :class:`BackendOptions` and returns a :class:`BackendUnderTest`. ``BACKENDS`` holds
the built-in ones; users test their own with ``my_package.module:function``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.grammar import GrammarCompiler
from jax_agent_rl.chat.special_tokens import MediaTokens
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import ARRAYS, FILES, BackendSpec, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.ray_backend import RayBackend
from jax_agent_rl.runtime.ray_cluster import open_ray
from jax_agent_rl.testing.conformance.models import (
    ModelDirs,
    Reference,
    TransformersReference,
    decoder,
    logprob_probe,
    read_tokenizer,
    weight_files,
)
from jax_agent_rl.utils.plugins import installed, load_installed
from jax_agent_rl.utils.pull_tickets import PullOffer
from jax_agent_rl.utils.weight_transfer import LogprobProbe

if TYPE_CHECKING:
    from jax_agent_rl.models.layers import EightBits

BASE = "base"
"""The initial weight set. All weight sets have one architecture."""

OTHER = "other"
"""A weight set that differs from ``BASE`` in every parameter."""

MIXED = "mixed"
"""A weight set that takes some parameters from ``BASE`` and the others from ``OTHER``."""

ADAPTER = "conformance"
"""Name of a LoRA adapter in requests."""

ADAPTED = "adapted"
"""The weight set with that adapter merged into ``BASE``."""

MIN_CONTEXT = 128
"""Smallest ``Capabilities.max_model_len`` in which the checks fit."""


@dataclass(frozen=True, kw_only=True)
class BackendUnderTest:
    """A backend under test.

    Attributes:
        name: name in the report.
        make: builds a backend, not yet started, that serves ``BASE``; called again if one dies.
        reference: correct logits for all weight sets.
        payload: maps (kind, weight set) to the payload of a ``WeightUpdate`` of that kind. The
            payload of ``MIXED`` holds only the parameters that differ from ``BASE``; it is
            requested with ``Capabilities.partial_update``.
        probe: maps a weight set to the ``WeightUpdate.probe`` of its updates of all kinds but
            ``arrays``; None: they have none.
        vocab_size: ids are in [0, vocab_size).
        eos_ids: ids that end a generation.
        decode_text: decodes ids as the backend does; None without a tokenizer.
        ending_prompts: prompts after which the model is likely to end soon, tried before random
            ones.
        media: the placeholder ids of images and videos; None for text models.
        adapter: whether the backend serves ``ADAPTER`` and the reference knows ``ADAPTED``.
        tolerance: largest log-prob error against float64, in nats: 1e-3 suits float32, 0.1
            bfloat16.
        timeout: seconds after which a check counts as hanging.
    """

    name: str
    make: Callable[[], RolloutBackend]
    reference: Reference
    payload: Callable[[str, str], Any]
    vocab_size: int
    eos_ids: frozenset[int]
    probe: Callable[[str], LogprobProbe] | None = None
    decode_text: Callable[[Sequence[int]], str] | None = None
    ending_prompts: tuple[tuple[int, ...], ...] = ()
    media: MediaTokens | None = None
    adapter: bool = False
    tolerance: float = 1e-3
    timeout: float = 120.0


_ENDING_QUESTIONS = (
    "What is 2+2?",
    "Say hello.",
    "Answer with one word: what is the capital of France?",
)


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of the factories.

    Attributes:
        folders: the model to serve and changed copies of it.
        max_model_len: context length to serve with.
        max_concurrent: decode slots; few, so that requests wait.
        tolerance: see :class:`BackendUnderTest`.
        timeout: see :class:`BackendUnderTest`.
        url: address of a running rollout server, for ``remote``, or of SGLang's, for ``sglang``;
            None starts one on loopback.
        token: the server's token, if it needs one.
        engine: name of the backend behind the server that is started, or in the Ray actor.
        engine_factory: ``rollout.jetstream.engine_factory`` of ``jetstream``; None for the built-in
            engine.
        quantize: ``rollout.jetstream.quantize`` of ``jetstream``.
        kv_dtype: ``rollout.jetstream.kv_dtype`` of ``jetstream``; None: as the weights.
        num_speculative_tokens: ``rollout.jetstream.num_speculative_tokens`` of ``jetstream``.
        adapters: whether to serve the LoRA adapter ``folders.adapter`` as ``ADAPTER``.
        data_parallel: engines of ``jetstream``, each with ``max_concurrent`` slots on a device of
            its own.
    """

    folders: ModelDirs
    max_model_len: int = 256
    max_concurrent: int = 8
    tolerance: float = 1e-3
    timeout: float = 120.0
    url: str | None = None
    token: str | None = None
    engine: str = "jetstream"
    engine_factory: str | None = None
    quantize: EightBits | None = None
    kv_dtype: EightBits | None = None
    num_speculative_tokens: int = 0
    adapters: bool = False
    data_parallel: int = 1


def select_backend(backend: str, options: BackendOptions) -> BackendUnderTest:
    """Build the :class:`BackendUnderTest` of a backend given by name or as ``module:function``.

    Raises:
        ConfigError: there is no such backend, or it is not installed.
    """
    factory = BACKENDS.get(backend)
    module, colon, function = backend.partition(":")
    if factory is None and not colon:
        subject = registered(backend, options)
        if subject is not None:
            return subject
        names = ", ".join([*BACKENDS, *sorted(installed("backends"))])
        raise ConfigError(
            f"no backend is called {backend!r}; there are {names}, or give your own as"
            " module:function"
        )

    try:
        if factory is None:
            factory = getattr(importlib.import_module(module), function)
        return factory(options)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"backend {backend!r} is not available: {error}") from error


def describe(
    name: str,
    make: Callable[[], RolloutBackend],
    options: BackendOptions,
    *,
    payload: Callable[[str, str], Any] | None = None,
) -> BackendUnderTest:
    """Build a subject whose reference, tokenizer and EOS ids are read from model folders.

    Args:
        name: name in the report.
        make: builds the backend over ``options.folders.base``.
        options: options of the factory.
        payload: makes payloads of kinds other than ``safetensors``, ``tensorstore`` and
            ``jax_transfer``.
    """
    folders = options.folders
    weight_sets = (BASE, OTHER, MIXED, ADAPTED)
    reference = TransformersReference({which: folders.weights(which) for which in weight_sets})
    config = json.loads((folders.base / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]

    def make_payload(kind: str, which: str) -> Any:
        if kind == "safetensors":
            folder = folders.weights(which)
            if which == MIXED:
                folder = folder / "partial"
            return weight_files(folder)
        if kind == "tensorstore":
            return _stored(folders.weights(which), folders.scratch / which)
        if kind == "jax_transfer":
            return _offered(folders.weights(which))
        if payload is None:
            raise ConfigError(f"{name}: there is no payload of kind {kind!r} to test with")
        return payload(kind, which)

    @functools.cache
    def make_probe(which: str) -> LogprobProbe:
        return logprob_probe(which, reference=reference, vocab_size=vocab_size)

    tokenizer = read_tokenizer(folders.base)
    return BackendUnderTest(
        name=name,
        make=make,
        reference=reference,
        payload=make_payload,
        probe=make_probe,
        vocab_size=vocab_size,
        eos_ids=_eos_ids(folders.base),
        decode_text=decoder(tokenizer),
        ending_prompts=_ending_prompts(tokenizer),
        media=MediaTokens.read(folders.base),
        adapter=options.adapters,
        tolerance=options.tolerance,
        timeout=options.timeout,
    )


class ServedBackend(RemoteBackend):
    """A backend behind a rollout server that starts and closes with it.

    Args:
        make: builds the backend.
        weight_dir: the server's folder for weights.
        client: options of :class:`RemoteBackend`.
    """

    def __init__(
        self, make: Callable[[], RolloutBackend], *, weight_dir: str | None = None, **client: Any
    ) -> None:
        # The server's address is known once it listens, see start.
        super().__init__("http://127.0.0.1:1", **client)
        self.inner = make()
        self.server = RolloutServer(self.inner, heartbeat_seconds=0.2, weight_dir=weight_dir)

    async def start(self) -> None:
        await self.inner.start()
        await self.server.start()
        self.url = self.server.url
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self.inner.close()


class ActorBackend(RayBackend):
    """A backend in a Ray actor, with a GPU if there is one.

    It starts and stops Ray unless Ray is running.
    """

    def __init__(self, make: Callable[[], RolloutBackend]) -> None:
        super().__init__(make)
        self._ray = AsyncExitStack()

    async def start(self) -> None:
        await self._ray.enter_async_context(open_ray(None))
        import ray

        self._options["num_gpus"] = min(1, ray.cluster_resources().get("GPU", 0))
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._ray.aclose()


def _stored(model: Path, folder: Path) -> str:
    """Store a model's parameters as a folder of shards and return its address."""
    from jax_agent_rl.models import stored
    from jax_agent_rl.models.hf import load_hf

    address = stored.version_folder(str(folder), 0)
    _, params = load_hf(model)
    stored.store(address, params)
    return address


def _offered(model: Path) -> PullOffer:
    """Offer a model's parameters on this process's devices."""
    from jax_agent_rl.models.hf import load_hf
    from jax_agent_rl.models.offered import OfferedParams

    _, params = load_hf(model)
    return OfferedParams(params, version=0)


def jetstream(options: BackendOptions) -> BackendUnderTest:
    """Build the subject of the embedded JAX engine, or of an external one."""
    from jax_agent_rl.config import EngineMeshConfig
    from jax_agent_rl.jetstream.data_parallel import make_backend
    from jax_agent_rl.jetstream.engine import EngineShapes
    from jax_agent_rl.jetstream.external_engine import ExternalBackend, load_engine_function
    from jax_agent_rl.jetstream.sharding import make_engine_mesh
    from jax_agent_rl.models.hf import load_hf
    from jax_agent_rl.models.lora import read_peft
    from jax_agent_rl.models.vision_context import VisionProcessor

    folders = options.folders
    config, params = load_hf(folders.base)
    trees = {BASE: params}
    shapes = EngineShapes(
        max_model_len=options.max_model_len,
        max_concurrent_decodes=options.max_concurrent,
        kv_cache_tokens=2 * options.max_concurrent * options.max_model_len,
        decode_steps=4,
        prefill_buckets=(32, 128),
        patch_buckets=(64,),
        num_speculative_tokens=options.num_speculative_tokens,
    )
    vision_processor = VisionProcessor.of(config, folders.base)
    adapters = {}
    if options.adapters:
        adapters[ADAPTER] = read_peft(folders.adapter, config, key="--adapters")
    tokenizer = read_tokenizer(folders.base)
    grammars = None
    if tokenizer:
        grammars = GrammarCompiler(
            tokenizer, eos_ids=config.eos_token_ids, vocab_size=config.vocab_size
        )

    make_external = None
    if options.engine_factory:
        make_external = load_engine_function(options.engine_factory)

    def make() -> RolloutBackend:
        mesh = make_engine_mesh(EngineMeshConfig(data=options.data_parallel))
        if make_external is not None:
            return make_backend(
                config,
                params,
                shapes,
                mesh=mesh,
                make_engine_backend=functools.partial(ExternalBackend, make_external=make_external),
                decode_text=decoder(tokenizer),
            )
        return make_backend(
            config,
            params,
            shapes,
            mesh=mesh,
            vision_processor=vision_processor,
            decode_text=decoder(tokenizer),
            grammars=grammars,
            quantize=options.quantize,
            kv_dtype=options.kv_dtype,
            adapters=adapters,
        )

    def payload(kind: str, which: str) -> Any:
        if which not in trees:
            _, trees[which] = load_hf(folders.weights(which))
        return trees[which]

    return describe("jetstream", make, options, payload=payload)


def vllm(options: BackendOptions) -> BackendUnderTest:
    """Build the subject of vLLM on whatever device it was built for."""
    from gpu_backend.backend import VllmBackend
    from gpu_backend.settings import VllmSettings

    dtype = "auto"
    if options.tolerance < 0.01:
        dtype = "float32"
    multi_modal = {}
    if MediaTokens.read(options.folders.base):
        multi_modal = {"image": 2, "video": 1}
    adapters = {}
    if options.adapters:
        adapters[ADAPTER] = str(options.folders.adapter)
    settings = VllmSettings(
        model=str(options.folders.base),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_concurrent,
        dtype=dtype,
        multi_modal=multi_modal,
        adapters=adapters,
    )
    decode = decoder(read_tokenizer(options.folders.base))
    return describe("vllm", lambda: VllmBackend(settings, decode_text=decode), options)


def sglang(options: BackendOptions) -> BackendUnderTest:
    """Build the subject of a server of SGLang, a running one or one that is started here."""
    from gpu_backend.sglang.backend import SglangBackend
    from gpu_backend.sglang.settings import DEFAULT_PYTHON, SglangSettings, check_python

    python = DEFAULT_PYTHON
    venv = os.environ.get("JAX_AGENT_RL_SGLANG_VENV")
    if venv:
        python = f"{venv}/bin/python"
    if options.url is None:
        check_python(python)
    dtype = "auto"
    if options.tolerance < 0.01:
        dtype = "float32"
    config = json.loads((options.folders.base / "config.json").read_text())
    settings = SglangSettings(
        model=str(options.folders.base),
        vocab_size=config.get("text_config", config)["vocab_size"],
        max_model_len=options.max_model_len,
        max_running_requests=options.max_concurrent,
        url=options.url,
        token=options.token,
        python=python,
        dtype=dtype,
    )
    decode = decoder(read_tokenizer(options.folders.base))
    return describe("sglang", lambda: SglangBackend(settings, decode_text=decode), options)


def registered(name: str, options: BackendOptions) -> BackendUnderTest | None:
    """Build the subject of a backend that an installed package registers; None if none does."""
    make = load_installed("backends", name)
    if make is None:
        return None
    folder = options.folders.base
    spec = BackendSpec(
        model=str(folder),
        decode_text=decoder(read_tokenizer(folder)),
        max_model_len=options.max_model_len,
        max_concurrent=options.max_concurrent,
    )
    return describe(name, functools.partial(make, spec), options)


def remote(options: BackendOptions) -> BackendUnderTest:
    """Build the subject of a rollout server.

    It is a running one that serves the base model, or one started here.
    """
    url = options.url
    if url is not None:
        make = functools.partial(RemoteBackend, url, token=options.token)
        return describe(f"remote {url}", make, options)
    inner = select_backend(options.engine, options)
    folder = str(options.folders.scratch)
    make = functools.partial(ServedBackend, inner.make, weight_dir=folder)
    return describe(f"remote {options.engine}", make, options)


def ray_actor(options: BackendOptions) -> BackendUnderTest:
    """Build the subject of an engine in a Ray actor.

    It takes its weights from the object store.
    """
    from jax_agent_rl.rollout.transport import store

    inner = select_backend(options.engine, options)
    inner_kind = ARRAYS if options.engine == "jetstream" else FILES

    def payload(kind: str, which: str) -> Any:
        import ray  # not before it is started: it reads variables at import that starting sets

        inner_payload = inner.payload(inner_kind, which)
        update = WeightUpdate(version=0, kind=inner_kind, payload=inner_payload)
        return store(update, ray.put).payload

    make = functools.partial(_engine, options)
    return describe(f"ray {options.engine}", lambda: ActorBackend(make), options, payload=payload)


def _engine(options: BackendOptions) -> RolloutBackend:
    """Build the engine inside the actor."""
    from jax_agent_rl.rollout.transport import from_object_store

    return from_object_store(select_backend(options.engine, options).make())


def _eos_ids(folder: Path) -> frozenset[int]:
    """Read the EOS ids as engines do.

    They are in ``generation_config.json``, or else in ``config.json``.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        eos = json.loads(file.read_text()).get("eos_token_id")
        if isinstance(eos, list):
            return frozenset(eos)
        if eos is not None:
            return frozenset([eos])
    raise ConfigError(
        f"{folder}: neither generation_config.json nor config.json names an eos_token_id"
    )


def _ending_prompts(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return questions with short answers, for chat models."""
    if tokenizer is None or not tokenizer.chat_template:
        return ()
    prompts = []
    for question in _ENDING_QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return tuple(prompts)


BACKENDS: dict[str, Callable[[BackendOptions], BackendUnderTest]] = {
    "jetstream": jetstream,
    "ray": ray_actor,
    "remote": remote,
    "sglang": sglang,
    "vllm": vllm,
}

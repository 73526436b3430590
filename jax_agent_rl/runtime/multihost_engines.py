"""An engine on every process (host) of a learner: process 0 runs the agents, all processes sample.

::

    process 0    agents ─► LLMServerClient ─┬──────────────────► engine ◄─ HostTransport ◄─┐
    process 1…                              └─ HTTP ─► server ─► engine ◄─ HostTransport ◄─┤
                                                                                           │
    all          learner's parameters ── a layer at a time, by all processes together ─────┘

Requests and answers are as with any rollout server. Weights are not: the engines are paused and
give up their old weights, in whose memory all processes together make those of an offered version
(:class:`~jax_agent_rl.jetstream.weights.JointLoader`); then process 0 tells the engines to fetch
them. Only their number is sent. An engine whose new weights do not come says so, fails its
requests, and takes the next version, as each is made of the learner's parameters.

The other engines start while process 0 starts its own. They find each other by the key-value store
of jax's coordination service, which holds the token and the addresses, and the fingerprints of the
models that each process has on its disk: they have to be the same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ModelError, RegistryGoneError, WeightUpdateError
from jax_agent_rl.jetstream.weights import GatherParams, JointLoader
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import ARRAYS, MESH, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.transport import WeightSource, WeightTransport, fetching
from jax_agent_rl.runtime.engine_devices import (
    engine_mesh,
    engine_precision,
    of_this_host,
    parameter_dtype,
)
from jax_agent_rl.runtime.engines import UNTRAINED, make_engine
from jax_agent_rl.runtime.identity import named_content
from jax_agent_rl.runtime.multihost import LeadingLearner, PutWeights
from jax_agent_rl.utils.network import local_address

logger = logging.getLogger(__name__)

_TOKEN = "jax_agent_rl/token/"
_ENGINES = "jax_agent_rl/engines/"
_MODELS = "jax_agent_rl/models/"
_POLL_SECONDS = 0.1


def on_every_host(config: Config) -> bool:
    """Return whether every process of the learner has a jetstream engine on its devices."""
    return (
        jax.process_count() > 1
        and config.rollout.backend == "jetstream"
        and config.rollout.placement == "colocated"
    )


# --- weights --------------------------------------------------------------------------------------


class HostTransport(WeightTransport):
    """Makes the newest weights in each process, in the memory of the engine there.

    Args:
        load: makes an engine's weights from the parameters and its old weights, whose memory it
            takes; None where the engine has none on devices.
    """

    takes_engines_memory = True

    def __init__(self, load: Callable[[Params, Any], Any]) -> None:
        self._load = load
        self._engine: Any = None  # a jetstream backend
        self._newest: tuple[int, Any] | None = None

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Process 0: make weights in every process, this one included."""
        assert isinstance(learner, LeadingLearner)  # there are several processes
        learner.put_weights(version, self.put)
        return WeightUpdate(version=version, kind=MESH, payload=None)

    def put(self, version: int, params: Params) -> None:
        """Make this process's weights; all processes do it together."""
        self._newest = None  # if no engine has fetched them, their memory is needed
        self._newest = version, self._load(params, self._give_up_weights(version))

    def _give_up_weights(self, version: int) -> Any:
        """Return the weights that the engine of this process no longer serves."""
        if self._engine is None:
            return None
        try:
            return self._engine.give_up_weights(version)
        except BackendError as error:  # the others need this process's part of the exchange
            logger.warning("an engine had no weights to give up: %s", error)
            return None

    @contextlib.asynccontextmanager
    async def fetch(self, update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        """Yield the weights of this process, which are not kept any longer.

        Raises:
            WeightUpdateError: it has another version, or none.
        """
        newest = self._newest
        self._newest = None
        if newest is None:
            raise WeightUpdateError(
                f"weights of version {update.version} are not in this process, which has none"
            )
        version, params = newest
        if version != update.version:
            raise WeightUpdateError(
                f"weights of version {update.version} are not in this process, which has version"
                f" {version}"
            )
        yield replace(update, kind=ARRAYS, payload=params)

    def release(self) -> None:
        self._newest = None

    def into(self, backend: RolloutBackend) -> RolloutBackend:
        """Return a backend of this process that fetches these weights."""
        self._engine = backend
        return fetching(backend, MESH, self.fetch)


def make_host_transport(config: Config) -> HostTransport:
    """Return the transport to this process's engine, in the engine's precision."""
    model = load_config(config.model.path, weights=True)
    mesh = engine_mesh(of_this_host(config))
    precision = engine_precision(config)
    if config.rollout.jetstream.engine_factory is not None:  # it arranges weights itself
        return HostTransport(GatherParams(model, mesh, dtype=precision["dtype"]))
    loader = JointLoader(
        model,
        mesh,
        gathered_dtype=parameter_dtype(config),
        dtype=precision["dtype"],
        quantize=precision["quantize"],
    )
    return HostTransport(loader)


def make_host_engine(
    config: Config, transport: HostTransport, *, print_line: Callable[[str], None] = logger.info
) -> RolloutBackend:
    """Return this process's engine, with the model's files until weights are published."""
    engine = make_engine(
        of_this_host(config).model_copy(update={"seed": config.seed + jax.process_index()}),
        version=UNTRAINED,
        print_line=print_line,
        dtype=config.rollout.jetstream.dtype,
    )
    return transport.into(engine)


# --- discovery ------------------------------------------------------------------------------------


class HostRegistry:
    """Where process 0 finds the engines of other processes, and which models they have read.

    Process 0 has the service that holds it. All methods raise :class:`RegistryGoneError` once that
    process has ended.

    Args:
        store: key-value store; None: jax's coordination service.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = store or ocp.multihost.get_jax_distributed_client()

    def publish_token(self, token: str) -> None:
        """Process 0: publish the token that the other servers will require."""
        self._set(f"{_TOKEN}0", token)

    async def token(self) -> str:
        """Other processes: wait for the token."""
        values = await self._poll(_TOKEN, 1)
        return values["0"]

    def register(self, number: int, *, url: str | None = None, error: str | None = None) -> None:
        """Other processes: publish the address of process ``number``, or why it cannot serve."""
        self._set(f"{_ENGINES}{number}", json.dumps({"url": url, "error": error}))

    async def addresses(self, count: int) -> dict[int, str]:
        """Process 0: wait for ``count`` addresses, by process number.

        Raises:
            BackendError: an engine could not start.
        """
        addresses = {}
        for number, answer in await self._poll_answers(_ENGINES, count):
            if answer["error"]:
                raise BackendError(
                    f"the engine of process {number} could not start: {answer['error']}"
                )
            addresses[number] = answer["url"]
        return addresses

    def publish_models(
        self, number: int, content: Mapping[str, Any] | None, *, error: str | None = None
    ) -> None:
        """Other processes: publish the fingerprints of this one's models, or why there are none."""
        self._set(f"{_MODELS}{number}", json.dumps({"content": content, "error": error}))

    async def models(self, count: int) -> dict[int, dict[str, Any]]:
        """Process 0: wait for the models of ``count`` processes.

        Returns:
            Their fingerprints, by process number.

        Raises:
            ModelError: a process could not read its models.
        """
        fingerprints = {}
        for number, answer in await self._poll_answers(_MODELS, count):
            if answer["error"]:
                raise ModelError(f"process {number} cannot read its models: {answer['error']}")
            fingerprints[number] = answer["content"]
        return fingerprints

    def _set(self, key: str, value: str) -> None:
        with _service_errors():
            self._store.key_value_set(key, value)

    async def _poll_answers(self, folder: str, count: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the JSON objects of ``count`` processes, by process number."""
        texts = await self._poll(folder, count)
        return sorted((int(number), json.loads(text)) for number, text in texts.items())

    async def _poll(self, folder: str, count: int) -> dict[str, str]:
        """Poll for ``count`` values; a wait inside the service could not be cancelled."""
        while True:
            with _service_errors():
                entries = self._store.key_value_dir_get(folder)
            if len(entries) >= count:
                return {key.rpartition("/")[2]: value for key, value in entries}
            await asyncio.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    """Turn the error of a service that is gone into :class:`RegistryGoneError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "UNAVAILABLE" not in str(error):
            raise
        raise RegistryGoneError("process 0 has ended") from error


LEARNER_MODELS = ("model.path", "critic.path", "distill.teachers")
"""Keys whose models every process reads from its own disk."""


def publish_own_models(
    config: Config, *, registry: HostRegistry | None = None, number: int | None = None
) -> None:
    """Other processes: tell process 0 which models this one has.

    Args:
        registry: where process 0 looks; None: jax's coordination service.
        number: None: the number of this process.

    Raises:
        ModelError: a model cannot be read. Process 0 is told as well.
    """
    registry = registry or HostRegistry()
    if number is None:
        number = jax.process_index()
    try:
        content = named_content(config, LEARNER_MODELS)
    except ModelError as error:
        registry.publish_models(number, None, error=str(error))
        raise
    registry.publish_models(number, content)


async def require_equal_models(
    content: Mapping[str, Any],
    *,
    registry: HostRegistry | None = None,
    other_processes: int | None = None,
) -> None:
    """Process 0: check that all other processes have its models.

    Each process reads its devices' part of the weights from its own disk.

    Args:
        content: fingerprints of what the keys of this process name.
        registry: where other processes publish theirs; None: jax's coordination service.
        other_processes: their number; None: all of the learner's.

    Raises:
        ModelError: a process has another model; names it and the key.
    """
    registry = registry or HostRegistry()
    if other_processes is None:
        other_processes = jax.process_count() - 1
    # As the other processes' were, through JSON.
    expected = json.loads(
        json.dumps({key: content[key] for key in LEARNER_MODELS if key in content})
    )
    for number, fingerprints in (await registry.models(other_processes)).items():
        differing = [key for key in LEARNER_MODELS if fingerprints.get(key) != expected.get(key)]
        if differing:
            raise ModelError(
                f"process {number} has another model than process 0 at {', '.join(differing)}: the"
                " files on its host differ; give every host the same ones"
            )


def own_address(coordinator: str | None) -> str:
    """Return this host's address in the network in which it reaches the coordinator.

    Args:
        coordinator: ``host:port``; None: the address in the network of the default route.
    """
    host = "192.0.2.1"  # reserved for documentation: reached, if at all, by the default route
    if coordinator and ":" in coordinator:
        coordinator_host = coordinator.rpartition(":")[0].strip("[]")
        host = coordinator_host or host

    with contextlib.suppress(OSError):  # there is no route
        return local_address(host)
    return socket.gethostbyname(socket.gethostname())


# --- process 0 ------------------------------------------------------------------------------------


async def join_hosts(
    client: LLMServerClient,
    *,
    registry: HostRegistry | None = None,
    other_processes: int | None = None,
) -> list[str]:
    """Add the engines of all other processes to a client, once they are up.

    Args:
        registry: where other processes register; None: jax's coordination service.
        other_processes: their number; None: all of the learner's.

    Returns:
        The names of their servers.

    Raises:
        BackendError: one could not start, or cannot be reached.
    """
    from jax_agent_rl.rollout.http.client import RemoteBackend

    registry = registry or HostRegistry()
    if other_processes is None:
        other_processes = jax.process_count() - 1
    token = secrets.token_hex(32)
    registry.publish_token(token)

    factories = {}
    for number, url in (await registry.addresses(other_processes)).items():
        factories[f"host-{number}"] = functools.partial(RemoteBackend, url, token=token)
    await asyncio.gather(*(client.pool.join(name, factory) for name, factory in factories.items()))
    return list(factories)


# --- other processes ------------------------------------------------------------------------------


class HostEngine:
    """An engine and its server in a thread of their own, from construction until :meth:`close`.

    Args:
        make: builds the engine; may load files for minutes.
        registry: where it registers.
        number: the number of this process.
        host: address at which other processes reach it.
    """

    def __init__(
        self, make: Callable[[], RolloutBackend], registry: HostRegistry, *, number: int, host: str
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(make, registry, number, host))
        self._thread = threading.Thread(target=self._run, name="host-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop it, even while it starts."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serving)

    async def _serve(
        self, make: Callable[[], RolloutBackend], registry: HostRegistry, number: int, host: str
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._start(stack, make, registry, number, host)
            except RegistryGoneError:
                logger.warning("process 0 ended before process %d had an engine", number)
            await asyncio.Event().wait()  # until it is closed

    async def _start(
        self,
        stack: contextlib.AsyncExitStack,
        make: Callable[[], RolloutBackend],
        registry: HostRegistry,
        number: int,
        host: str,
    ) -> None:
        """Start the engine and its server, and register them, or why they cannot serve.

        Args:
            stack: closes both.
        """
        from jax_agent_rl.rollout.http.server import RolloutServer

        try:
            backend = await asyncio.to_thread(make)
            stack.push_async_callback(backend.close)
            await backend.start()
            server = RolloutServer(backend, host=host, token=await registry.token())
            stack.push_async_callback(server.close)
            await server.start()
        except RegistryGoneError:
            raise
        except Exception as error:
            # Files, devices and compilers raise anything; process 0 has to know.
            logger.exception("the engine of process %d could not start", number)
            registry.register(number, error=f"{type(error).__name__}: {error}")
        else:
            registry.register(number, url=server.url)


@contextlib.contextmanager
def host_engine(config: Config) -> Iterator[PutWeights | None]:
    """Run the engine of a process other than 0; yield what makes weights for it.

    Yields None where engines are not on the learner's devices.
    """
    if not on_every_host(config):
        yield None
        return
    transport = make_host_transport(config)
    make = functools.partial(make_host_engine, config, transport)
    host = own_address(config.learner.multihost.coordinator)
    engine = HostEngine(make, HostRegistry(), number=jax.process_index(), host=host)
    try:
        yield transport.put
    finally:
        engine.close()

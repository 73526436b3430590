"""An engine on every process (host) of a learner: process 0 leads the agents, all of them sample.

::

    process 0    agents ─► LLMServerClient ─┬───────────────────────────► engine ◄─ shelf ◄─┐
    process 1…                              └─ HTTP, token ─► server ───► engine ◄─ shelf ◄─┤
                                                                                            │
    all of them  learner's parameters ── one after the other, by all together, to each ──────┘

Requests and answers are those of any rollout server. Weights are not: a published version is copied by all processes
together (``jetstream.spread``), and lies on each one's shelf when process 0 tells the engines to take it. Only its
number travels.

The engines of the others start while process 0 starts its own. How they find each other, the token and the addresses,
lies in the key-value store of jax's coordination service.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, cast

import jax
import orbax.checkpoint as ocp

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.jetstream.weight_loading import GatherParams
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.rollout.lifecycle import LLMServerManager
from jax_agent_rl.rollout.protocol import Capabilities, RolloutBackend, WeightUpdate
from jax_agent_rl.runtime.engines import UNTRAINED, engine_mesh, make_engine

logger = logging.getLogger(__name__)

KIND = "mesh"
_TOKEN, _ENGINES = "jax_agent_rl/token/", "jax_agent_rl/engines/"
_LOOK_SECONDS = 0.1


def on_every_host(config: Config) -> bool:
    """Whether every process of the learner has an engine: jetstream's, on the learner's devices."""
    return jax.process_count() > 1 and config.rollout.backend == "jetstream" and config.rollout.placement == "colocated"


# --- weights ------------------------------------------------------------------------------------------------------


class WeightBuffer:
    """The newest weights of the learner in this process, for the engine of this process.

    Args:
        spread: makes the copy.
    """

    def __init__(self, spread: Callable[[Params], Params]) -> None:
        self._spread = spread
        self._kept: tuple[int, Params] | None = None

    def put(self, version: int, params: Params) -> None:
        """Copies a version, in place of the one before. All processes do it together."""
        self._kept = None  # its memory is needed
        self._kept = version, self._spread(params)

    def take(self, version: int) -> Params:
        """That version, which is gone from here.

        Raises:
            WeightUpdateError: another one lies here, or none.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != version:
            found = "none" if kept is None else f"version {kept[0]}"
            raise WeightUpdateError(f"weights of version {version} are not in this process, which has {found}")
        return kept[1]


class WeightBufferBackend:
    """An engine, in everything but where its weights come from."""

    def __init__(self, backend: RolloutBackend, shelf: WeightBuffer) -> None:
        self._backend = backend
        self._shelf = shelf

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._backend.capabilities, weight_payloads=frozenset({KIND}))

    async def update_weights(self, update: WeightUpdate) -> None:
        if update.kind != KIND:
            raise WeightUpdateError(f"an engine beside the learner takes weights of kind {KIND!r}, got {update.kind!r}")
        await self._backend.update_weights(replace(update, kind="arrays", payload=self._shelf.take(update.version)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def make_weight_buffer(config: Config) -> WeightBuffer:
    """Where the engine of this process finds its weights, in its own precision."""
    spread = GatherParams(load_config(config.model.path), engine_mesh(config), dtype=config.rollout.jetstream.dtype)
    return WeightBuffer(spread)


def make_host_engine(
    config: Config, shelf: WeightBuffer, *, say: Callable[[str], None] = logger.info
) -> RolloutBackend:
    """This process's engine, of the model's files until the first weights are published."""
    own = config.model_copy(update={"seed": config.seed + jax.process_index()})
    dtype = config.rollout.jetstream.dtype
    engine = make_engine(own, version=UNTRAINED, say=say, dtype=dtype)
    return cast(RolloutBackend, WeightBufferBackend(engine, shelf))


# --- finding each other -------------------------------------------------------------------------------------------


class Store(Protocol):
    """What of jax's coordination service is used."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class HostRegistry:
    """Where process 0 and the engines of the others find each other."""

    def __init__(self, store: Store | None = None) -> None:
        self._store: Store = store or ocp.multihost.get_jax_distributed_client()

    def invite(self, token: str) -> None:
        """Process 0: the secret by which it is known to the others' servers."""
        self._store.key_value_set(f"{_TOKEN}0", token)

    async def invitation(self) -> str:
        """The others: waits for it."""
        return (await self._found(_TOKEN, 1))["0"]

    def answer(self, number: int, *, url: str | None = None, error: str | None = None) -> None:
        """The others: where process ``number`` serves, or why it cannot."""
        self._store.key_value_set(f"{_ENGINES}{number}", json.dumps({"url": url, "error": error}))

    async def answers(self, count: int) -> dict[int, str]:
        """Process 0: waits for so many addresses, by number of process.

        Raises:
            BackendError: an engine could not start; the first one's reason.
        """
        answers = {int(number): json.loads(text) for number, text in (await self._found(_ENGINES, count)).items()}
        for number, answer in sorted(answers.items()):
            if answer["error"]:
                raise BackendError(f"the engine of process {number} could not start: {answer['error']}")
        return {number: answer["url"] for number, answer in sorted(answers.items())}

    async def _found(self, folder: str, count: int) -> dict[str, str]:
        """Looks until there are so many. (What waits inside the service could not be cancelled.)"""
        while True:
            found = self._store.key_value_dir_get(folder)
            if len(found) >= count:
                return {key.rpartition("/")[2]: value for key, value in found}
            await asyncio.sleep(_LOOK_SECONDS)


def own_address(coordinator: str | None) -> str:
    """This host's address, as the other hosts reach it.

    Args:
        coordinator: ``host:port`` of process 0, if that is known: the network it is reached through is the right one.
    """
    host = coordinator.rpartition(":")[0].strip("[]") if coordinator and ":" in coordinator else ""
    with contextlib.suppress(OSError):  # no such route
        family, kind, protocol, _, address = socket.getaddrinfo(host or "192.0.2.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())


# --- process 0 ----------------------------------------------------------------------------------------------------


async def join_hosts(
    manager: LLMServerManager, *, meeting: HostRegistry | None = None, others: int | None = None
) -> list[str]:
    """Brings the engines of all other processes under a manager, once they are up.

    Args:
        others: how many there are.

    Returns:
        the names of their servers.

    Raises:
        BackendError: one could not start, or cannot be reached.
    """
    from jax_agent_rl.rollout.http.client import RemoteBackend

    meeting, token = meeting or HostRegistry(), secrets.token_hex(32)
    meeting.invite(token)
    urls = await meeting.answers(jax.process_count() - 1 if others is None else others)
    connect = {f"host-{n}": functools.partial(RemoteBackend, url, token=token) for n, url in urls.items()}
    await asyncio.gather(*(manager.join(name, make) for name, make in connect.items()))
    return list(connect)


# --- the others ---------------------------------------------------------------------------------------------------


class HostEngine:
    """An engine and its server, in a thread beside the learner's, from construction until :meth:`close`.

    Args:
        make: builds the engine; may load files for minutes.
        host: the address it is reached at.
    """

    def __init__(self, make: Callable[[], RolloutBackend], meeting: HostRegistry, *, number: int, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._serve(make, meeting, number, host))
        self._thread = threading.Thread(target=self._run, name="host-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, also while it starts."""
        self._loop.call_soon_threadsafe(self._life.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(self._loop):
            self._loop.run_until_complete(self._life)

    async def _serve(self, make: Callable[[], RolloutBackend], meeting: HostRegistry, number: int, host: str) -> None:
        from jax_agent_rl.rollout.http.server import RolloutServer

        async with contextlib.AsyncExitStack() as stack:
            try:
                backend = await asyncio.to_thread(make)
                stack.push_async_callback(backend.close)
                await backend.start()
                server = RolloutServer(backend, host=host, token=await meeting.invitation())
                stack.push_async_callback(server.close)
                await server.start()
            except Exception as error:  # whatever files, devices and compilers can raise: process 0 has to know
                logger.exception("the engine of process %d could not start", number)
                meeting.answer(number, error=f"{type(error).__name__}: {error}")
            else:
                meeting.answer(number, url=server.url)
            await asyncio.Event().wait()  # until it is closed


@contextlib.contextmanager
def host_engine(config: Config) -> Iterator[WeightBuffer | None]:
    """For a process that does not lead: its engine, from now on; yields where its weights are put.

    None where engines are not on the learner's devices.
    """
    if not on_every_host(config):
        yield None
        return
    shelf = make_weight_buffer(config)
    make = functools.partial(make_host_engine, config, shelf)
    host = own_address(config.learner.multihost.coordinator)
    engine = HostEngine(make, HostRegistry(), number=jax.process_index(), host=host)
    try:
        yield shelf
    finally:
        engine.close()
